"""Settings: their values and limits, the layers that give them, and the errors that put a user right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, model_validator

from afina.config import (
    EvalSettings,
    GenerateSettings,
    Resolved,
    Settings,
    TrainSettings,
    as_given,
    build,
    dump,
    load_config,
)
from afina.config.document import read_text, scalar, write
from afina.errors import ConfigError, TechniqueError


class Low(Settings):
    """A technique with every kind of setting."""

    rank: int = Field(default=16, ge=1)
    alpha: float = 32.0
    target: tuple[str, ...] = ("all-linear",)
    rank_pattern: dict[str, int] = Field(default={})
    layers: tuple[int, ...] | str | None = None

    @model_validator(mode="after")
    def _check(self) -> Low:
        if self.rank == 13:
            raise TechniqueError("rank 13 fits nothing", got=13, wanted="another", cure="rank 14")
        return self


class Prune(Settings):
    """A technique with a setting that must be given."""

    keep: float = Field(gt=0, le=1)


class Data(Settings):
    """How data is read, in this test."""

    packing: bool = True
    columns: dict[str, str] = Field(default={})
    max_tokens: int | None = None


TABLE: dict[str, type[BaseModel]] = {"low": Low, "prune": Prune}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, so that files have short names in errors."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str | None = None, *sets: str, **flags: Any) -> Resolved[Data]:
    """The configuration of run.yaml with this text, flags (a__b for a.b) and --set; model m, data d unless given."""
    name = None
    if text is not None:
        name = "run.yaml"
        Path(name).write_text(text, encoding="utf-8")
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(
        techniques=TABLE, data_settings=Data, yaml_path=name, sets=sets, flags=dotted
    )


def complaint(text: str | None = None, *sets: str, **flags: Any) -> str:
    """What load says is wrong."""
    with pytest.raises(ConfigError) as caught:
        load(text, *sets, **flags)
    return str(caught.value)


MINIMAL = "model: m\ndata: d.jsonl\n"


# --- the values ------------------------------------------------------------------------------------------------


def test_defaults_of_training() -> None:
    made = TrainSettings()
    assert (made.steps, made.epochs) == (None, 1.0)
    assert (made.rows_per_step, made.tokens_per_step) == (16, None)
    assert (made.micro_rows, made.micro_tokens) == ("auto", None)
    assert (made.warmup_steps, made.warmup_ratio) == (None, 0.03)
    assert (made.lr, made.schedule, made.weight_decay, made.clip) == (5e-4, "linear", 0.0, 1.0)


@pytest.mark.parametrize(
    ("given_", "other"),
    [
        ({"steps": 7}, "epochs"),
        ({"tokens_per_step": 512}, "rows_per_step"),
        ({"micro_tokens": 64}, "micro_rows"),
        ({"warmup_steps": 0}, "warmup_ratio"),
    ],
)
def test_one_way_of_saying_it_leaves_the_other_empty(given_: dict[str, int], other: str) -> None:
    made = TrainSettings.model_validate(given_)
    assert getattr(made, other) is None
    assert {name: getattr(made, name) for name in given_} == given_


def test_tokens_per_step_searches_for_micro_tokens() -> None:
    made = TrainSettings(tokens_per_step=512)
    assert (made.micro_rows, made.micro_tokens) == (None, "auto")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"steps": 1, "epochs": 1}, "steps and epochs say the same thing twice"),
        ({"rows_per_step": 4, "micro_rows": 8}, r"micro_rows \(8\).*at most rows_per_step \(4\)"),
        ({"tokens_per_step": 4, "micro_tokens": 8}, r"at most tokens_per_step \(4\)"),
        ({"lr": 0}, "greater than 0"),
        ({"lr": float("nan")}, "finite"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"schedule": "cosin"}, "'linear', 'cosine' or 'constant'"),
        ({"step": 1}, "Extra inputs"),
    ],
)
def test_training_refuses(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        TrainSettings.model_validate(values)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        GenerateSettings().seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_greedy_is_the_default() -> None:
    made = EvalSettings().answers
    assert (made.temperature, made.top_p, made.top_k, made.system, made.stop) == (0, 1, 0, None, ())


# --- the layers ------------------------------------------------------------------------------------------------


def test_each_layer_overrules_the_ones_before(here: Path) -> None:
    text = "model: m\ndata: d\ntrain:\n  lr: 1e-3\n  seed: 1\n  clip: 2\n  keep_last: 3\n"
    made = load(text, "train.lr=3e-3", train__lr=2e-3, train__seed=2, train__clip=None)
    train, origins = made.config.train, made.origins
    assert (train.lr, train.seed, train.clip, train.keep_last) == (3e-3, 2, 2.0, 3)
    assert origins["train.lr"] == "--set"
    assert origins["train.seed"] == "--seed"
    assert origins["train.clip"] == "run.yaml:6"
    assert origins["train.eps"] == "default"
    assert origins["data.source"] == "run.yaml:2"


def test_what_stands_alone_on_the_command_line_is_named_so(here: Path) -> None:
    made = load(model="m", data__source="d.jsonl", val=Path("v.jsonl"))
    assert (made.config.model, made.config.source, made.config.val) == ("m", "d.jsonl", "v.jsonl")
    assert [made.origins[name] for name in ("model", "data.source", "val")] == [
        "MODEL",
        "DATA",
        "--val",
    ]


def test_a_later_layer_may_say_it_the_other_way(here: Path) -> None:
    made = load(MINIMAL + "train: {epochs: 3, rows_per_step: 8}\n", "train.steps=10")
    assert (made.config.train.steps, made.config.train.epochs) == (10, None)
    assert made.config.train.rows_per_step == 8
    assert made.origins["train.epochs"] == "default"


def test_one_layer_may_not_say_it_twice(here: Path) -> None:
    said = complaint(MINIMAL + "train:\n  epochs: 3\n  steps: 10\n")
    assert said.splitlines() == [
        "run.yaml:4 and run.yaml:5: two settings say the same thing",
        "  got:    train.epochs and train.steps",
        "  cure:   keep one of them",
    ]


def test_techniques_are_keys_with_or_without_settings(here: Path) -> None:
    made = load(MINIMAL + "techniques:\n  - prune: {keep: 0.5}\n  - low\n")
    assert made.keys == ("prune", "low")
    assert made.config.techniques == (Prune(keep=0.5), Low())
    assert made.origins["techniques.prune.keep"] == "run.yaml:4"
    assert made.origins["techniques.low"] == "run.yaml:5"


def test_set_reaches_a_technique_by_its_key(here: Path) -> None:
    made = load(
        MINIMAL + "techniques: [low: {rank: 4, rank_pattern: {q: 2}}]\n",
        "techniques.low.rank=8",
        "techniques.low.rank_pattern.layers.0.k=3",
        "techniques.prune.keep=0.25",
    )
    assert made.config.techniques == (
        Low(rank=8, rank_pattern={"q": 2, "layers.0.k": 3}),
        Prune(keep=0.25),
    )
    assert made.origins["techniques.low.rank"] == "--set"
    assert made.origins["techniques.low.alpha"] == "default"


def test_a_list_of_techniques_replaces_the_list_before(here: Path) -> None:
    made = load(MINIMAL + "techniques: [low: {rank: 4}]\n", techniques=["low"])
    assert made.config.techniques == (Low(),)
    assert made.origins["techniques.low"] == "--technique"


def test_default_techniques_hold_until_a_list_is_given(here: Path) -> None:
    def keys(text: str, *sets: str, **flags: Any) -> tuple[str, ...]:
        Path("run.yaml").write_text(text, encoding="utf-8")
        return load_config(
            techniques=TABLE,
            data_settings=Data,
            yaml_path="run.yaml",
            sets=sets,
            flags=flags,
            default_techniques=["low"],
        ).keys

    assert keys(MINIMAL) == ("low",)
    assert keys(MINIMAL, "techniques.prune.keep=1") == ("low", "prune")
    assert keys(MINIMAL, **{"techniques.prune.keep": 1}) == ("low", "prune")
    assert keys(MINIMAL, techniques=[]) == ()
    assert keys(MINIMAL + "techniques: []\n") == ()


def test_a_configuration_made_in_code_is_written_like_any_other(here: Path) -> None:
    config = replace(
        load(MINIMAL).config, techniques=(Low(rank=4),), train=TrainSettings(lr=1e-3, steps=5)
    )
    made = as_given(config, ["low"], "Python")
    given_ = {path for path, origin in made.origins.items() if origin == "Python"}
    assert given_ == {
        "model", "revision", "val", "data.source", "techniques.low", "techniques.low.rank", "train.lr",
        "train.steps",
    }  # fmt: skip
    assert set(made.origins.values()) == {"Python", "default"}
    assert load(dump(made)).config == config


def test_data_is_a_source_or_a_group(here: Path) -> None:
    short = load("model: m\ndata: d\n", "data.packing=false")
    long = load("model: m\ndata: {source: d, packing: false}\n")
    assert short.config == long.config
    assert short.config.data == Data(packing=False)


def test_values_of_set(here: Path) -> None:
    made = load(
        MINIMAL,
        "data.columns={prompt: question}",
        "eval.answers.system=Say: no",
        "eval.answers.stop=END",
        "eval.choices=[a, 'b, c']",
        "techniques.low.layers=0-5",
    )
    assert made.config.data.columns == {"prompt": "question"}
    assert made.config.eval.answers.system == "Say: no"
    assert made.config.eval.answers.stop == ("END",)
    assert made.config.eval.choices == ("a", "b, c")
    assert made.config.techniques == (Low(layers="0-5"),)


# --- the errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trian: {}\n", "run.yaml:3: unknown setting 'trian'\n  cure:   did you mean train?"),
        ("lr: 1\n", "run.yaml:3: unknown setting 'lr'\n  cure:   did you mean train.lr?"),
        (
            "low: {rank: 1}\n",
            "run.yaml:3: unknown setting 'low'\n"
            "  cure:   did you mean techniques.low? In YAML it is listed: techniques: [low: {…}]",
        ),
        ("rank: 1\n", "run.yaml:3: unknown setting 'rank'\n  cure:   did you mean techniques.low.rank?"),
        (
            "train:\n  seed: 1\n  scheduler: cosine\n",
            "run.yaml:5: unknown setting 'train.scheduler'\n"
            "  cure:   did you mean train.schedule or train.schedule_by?",
        ),
        (
            "techniques:\n  - low:\n      rnk: 1\n",
            "run.yaml:5: unknown setting 'techniques.low.rnk'\n"
            "  cure:   did you mean techniques.low.rank?",
        ),
        (
            "techniques: [lwo]\n",
            "run.yaml:3: unknown setting 'techniques.lwo'\n  cure:   did you mean techniques.low?",
        ),
        (
            "techniques: [prune: {zzzz: 1, keep: 1}]\n",
            "run.yaml:3: unknown setting 'techniques.prune.zzzz'\n  wanted: keep",
        ),
        (
            "techniques: {low: {}}\n",
            'run.yaml:3: techniques are a list\n  got:    {"low": {}}\n'
            "  cure:   begin each with a dash: - lora: {rank: 16}",
        ),
        (
            "techniques:\n  - low\n  - low: {rank: 8}\n",
            "run.yaml:4 and run.yaml:5: low is listed twice\n"
            "  cure:   keep one of them, with all its settings",
        ),
        ("techniques: [prune]\n", "techniques.prune.keep must be given"),
        (
            "train:\n  lr: fast\n",
            'run.yaml:4: train.lr cannot have this value\n  got:    "fast"\n  wanted: a number',
        ),
        (
            "train: {micro_rows: many}\n",
            'run.yaml:3: train.micro_rows cannot have this value\n  got:    "many"\n'
            "  wanted: an integer or 'auto'",
        ),
        (
            "train: {schedule: cosin}\n",
            'run.yaml:3: train.schedule cannot have this value\n  got:    "cosin"\n'
            "  wanted: 'linear', 'cosine' or 'constant'\n  cure:   did you mean cosine?",
        ),
        (
            "data: {source: d, packing: maybe}\n",
            "run.yaml:3: 'data' is given twice\n  got:    lines 2 and 3\n  cure:   keep one of them",
        ),
        (
            "techniques: [low: {rank: true}]\n",
            "run.yaml:3: techniques.low.rank cannot have this value\n  got:    true\n  wanted: a number",
        ),
        (
            "train:\n  rows_per_step: 4\n  micro_rows: 8\n",
            "run.yaml:4 and run.yaml:5: micro_rows (8) is a part of a step, so at most rows_per_step (4)",
        ),
        (
            "techniques: [low: {rank: 13}]\n",
            "run.yaml:3: techniques.low: rank 13 fits nothing\n  got:    13\n  wanted: another\n  cure:   rank 14",
        ),
        (
            "val: 7\n",
            "run.yaml:3: val cannot have this value\n  got:    7\n  wanted: a text\n  cure:   put it in quotes",
        ),
        ("techniques: [low: {rank_pattern: {q:4}}]\n", "run.yaml:3: a colon without a space after it is a part "
         "of the word\n  got:    {q:4}\n  wanted: {q: 4}"),
        ("a: b: c\n", "run.yaml:3, column 5: not YAML: mapping values are not allowed here\n"
         "  cure:   check the indentation, and put texts that hold ': ' in quotes"),
    ],
)  # fmt: skip
def test_a_slip_in_yaml_is_named_with_its_line(here: Path, text: str, said: str) -> None:
    assert complaint(MINIMAL + text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "low.rank=1",
            "--set: unknown setting 'low.rank'\n  cure:   did you mean techniques.low.rank?",
        ),
        ("train.lrr=1", "--set: unknown setting 'train.lrr'\n  cure:   did you mean train.lr?"),
        ("steps", "--set needs a setting and a value\n  got:    steps\n  wanted: train.steps=100"),
        ("techniques.low=8", "--set: techniques.low is a group of settings\n  got:    8\n"
         "  wanted: rank, alpha, target, rank_pattern, layers"),
        ("train.lr=[1", "--set:1, column 3: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("train.betas=[0.9]", "--set: train.betas cannot have this value\n  got:    [0.9]\n  wanted: a list of 2"),
        ("train.betas=[]", "--set: train.betas cannot have this value\n  got:    []\n  wanted: a list of 2"),
        ("train.betas=[0.9, 0.9, 0.9]", "--set: train.betas cannot have this value\n"
         "  got:    [0.9, 0.9, 0.9]\n  wanted: a list of at most 2"),
        ("data.columns={prompt:question}", "--set:1: a colon without a space after it is a part of the word\n"
         "  got:    {prompt:question}\n  wanted: {prompt: question}"),
    ],
)  # fmt: skip
def test_a_slip_in_set_is_named(here: Path, text: str, said: str) -> None:
    assert complaint(MINIMAL, text) == said


def test_all_slips_are_said_at_once(here: Path) -> None:
    said = complaint("data: d\ntrain:\n  lr: -1\n  stepz: 3\nvall: x\n", "eval.answers.top_p=7")
    assert said.splitlines()[0] == "5 settings cannot be used"
    for one in (
        "run.yaml:3: train.lr cannot have this value",
        "run.yaml:4: unknown setting 'train.stepz'",
        "run.yaml:5: unknown setting 'vall'",
        "--set: eval.answers.top_p cannot have this value",
        "there is no model",
    ):
        assert one in said.splitlines()


def test_a_flag_is_named_in_its_error(here: Path) -> None:
    assert complaint(MINIMAL, train__rows_per_step=0).splitlines() == [
        "--rows-per-step: train.rows_per_step cannot have this value",
        "  got:    0",
        "  wanted: greater than or equal to 1",
    ]


def test_no_file_is_an_error(here: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(techniques=TABLE, data_settings=Data, yaml_path="none.yaml")


def test_build_names_what_python_got_wrong() -> None:
    assert build(TrainSettings, {"steps": 3}) == TrainSettings(steps=3)
    with pytest.raises(ConfigError) as caught:
        build(TrainSettings, {"stepz": 3, "lr": "fast"}, ("train",))
    assert "unknown setting 'train.stepz'" in str(caught.value)
    assert "train.lr cannot have this value" in str(caught.value)


# --- YAML ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2", -2),
        ("010", 10),
        ("0x1F", 31),
        (".inf", float("inf")),
        ("true", True),
        ("~", None),
        # Words, though YAML 1.1 has them as truth, base 60, a date.
        ("no", "no"),
        ("12:30", "12:30"),
        ("2026-12-01", "2026-12-01"),
        ("1_000", "1_000"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    got = read_text(f"k: {text}", "t").value["k"]
    assert got == value == scalar(text)
    assert type(got) is type(value)


def test_quotes_make_a_text() -> None:
    assert read_text("k: '1e-3'", "t").value == {"k": "1e-3"}


@pytest.mark.parametrize(
    "text", ["k: !!python/object/apply:os.system [ls]", "k: !own x", "k: &a [*a]", "? [a]\n: 1"]
)
def test_yaml_holds_plain_values_only(text: str) -> None:
    with pytest.raises(ConfigError):
        read_text(text, "t")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_what_is_written_reads_back(value: Any) -> None:
    line = write(value)
    assert len(line.splitlines()) <= 1 or "\n" not in line
    got = read_text(f"k: {line}  # where it came from", "t").value["k"]
    assert repr(got) == repr(value)


RATES = st.floats(min_value=1e-300, max_value=1e300)
COUNTS = st.integers(1, 10**12)
SETTINGS = {
    "model": TEXTS.filter(bool),
    "data.source": TEXTS,
    "val": TEXTS,
    "revision": TEXTS,
    "data.packing": st.booleans(),
    "data.columns": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "techniques.low.rank_pattern": st.dictionaries(TEXTS, st.integers(), max_size=3),
    "techniques.low.layers": st.lists(st.integers(), max_size=3) | TEXTS | st.none(),
    "techniques.low.alpha": st.floats(allow_nan=False),
    "techniques.prune.keep": st.floats(0, 1, exclude_min=True),
    "train.steps": COUNTS,
    "train.epochs": RATES,
    "train.lr": RATES,
    "train.micro_tokens": COUNTS | st.just("auto"),
    "train.betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    "train.optimizer": TEXTS,
    "eval.choices": st.lists(TEXTS.filter(bool), max_size=3),
    "eval.answers.stop": st.lists(TEXTS.filter(bool), max_size=3),
    "eval.answers.system": TEXTS,
}


@given(st.data())
def test_dump_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = set(data.draw(st.lists(st.sampled_from(sorted(SETTINGS)), unique=True)))
    if {"train.steps", "train.epochs"} <= names:
        names.remove("train.epochs")
    if "techniques.low.layers" in names or "techniques.low.alpha" in names:
        names.add("techniques.prune.keep")
    flags = {
        name: data.draw(SETTINGS[name], label=name)
        for name in sorted(names | {"model", "data.source"})
    }
    made = load_config(techniques=TABLE, data_settings=Data, flags=flags)
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_text(dump(made), encoding="utf-8")
    again = load_config(techniques=TABLE, data_settings=Data, yaml_path=file)
    assert again.config == made.config
    assert again.keys == made.keys


def test_dump_says_where_each_value_came_from(here: Path) -> None:
    lines = dump(
        load(MINIMAL + "techniques: [low: {rank: 4}]\n", "train.steps=10", train__seed=3)
    ).splitlines()
    shown = {tuple(line.rsplit("  # ", 1)) for line in lines if "#" in line}
    assert {(text.strip(), origin) for text, origin in shown} >= {
        ("model: m", "run.yaml:1"),
        ("source: d.jsonl", "run.yaml:2"),
        ("- low:", "run.yaml:3"),
        ("rank: 4", "run.yaml:3"),
        ("alpha: 32.0", "default"),
        ("steps: 10", "--set"),
        ("seed: 3", "--seed"),
    }
