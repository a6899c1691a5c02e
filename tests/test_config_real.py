"""Every setting there is: misspelt, of a wrong type, and followed through all layers into the saved file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import typer

from afina.cli import eval as eval_verb
from afina.cli import main
from afina.cli import train as train_verb
from afina.config import Resolved, dump, load_config
from afina.config.document import read_text, write
from afina.config.layers import FLAG_NAMES
from afina.config.load import values_of
from afina.config.settings import EvalSettings, ParallelSettings, TrainSettings
from afina.config.shape import Shape
from afina.data.settings import DataSettings
from afina.errors import ConfigError
from afina.table import TECHNIQUES

GROUPS = {
    "data": DataSettings,
    "train": TrainSettings,
    "eval": EvalSettings,
    "parallel": ParallelSettings,
}
LEAVES = [path for path in Shape(GROUPS, TECHNIQUES).leaves() if path[0] in (*GROUPS, "techniques")]
HEAD = "model: m\ndata:\n  source: d.jsonl\n"
SOME = {path: path[-1] for path in LEAVES if path != ("data", "source")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *sets: str, **flags: Any) -> Resolved[DataSettings]:
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load_config(
        techniques=TECHNIQUES,
        data_settings=DataSettings,
        yaml_path="run.yaml",
        sets=sets,
        flags=flags,
        default_techniques=("lora",),
    )


def yaml(path: tuple[str, ...], value: Any) -> tuple[str, int]:
    """A run.yaml with one setting, and the line that it stands on."""
    if path[0] == "data":
        lines = [*HEAD.splitlines(), f"  {path[1]}: {write(value)}"]
    elif path[0] == "techniques":
        rest = f"      {path[2]}: {write(value)}"
        lines = [*HEAD.splitlines(), "techniques:", f"  - {path[1]}:", rest]
    else:
        lines = HEAD.splitlines()
        lines += [f"{'  ' * depth}{name}:" for depth, name in enumerate(path)]
        lines[-1] += f" {write(value)}"
    return "\n".join(lines) + "\n", len(lines)


def said(text: str, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *sets)
    return str(caught.value)


@pytest.mark.parametrize("path", SOME, ids=".".join)
def test_a_letter_too_many_is_named_with_its_line_and_the_right_name(path: tuple[str, ...]) -> None:
    right = ".".join(path)
    wrong = (*path[:-1], path[-1] + "e")
    text, line = yaml(wrong, 1)
    assert said(text).startswith(f"run.yaml:{line}: unknown setting '{'.'.join(wrong)}'")
    assert "cure:   did you mean" in said(text)
    assert right in said(text)
    assert said(HEAD, f"{'.'.join(wrong)}=1").startswith(f"--set: unknown setting '{right}e'")


@pytest.mark.parametrize("path", SOME, ids=".".join)
def test_a_wrong_type_is_named_with_its_line_and_what_was_wanted(path: tuple[str, ...]) -> None:
    right = ".".join(path)
    kind: Any = Shape(GROUPS, TECHNIQUES).group(path[:-1])
    tables = "dict" in str(kind.model_fields[path[-1]].annotation)
    value: Any = 7 if tables else {"x": {"y": [1]}}
    text, line = yaml(path, value)
    found = said(text)
    assert found.startswith(f"run.yaml:{line}: {right} cannot have this value"), found
    assert "\n  got:    " in found
    assert "\n  wanted: " in found
    assert "Input should" not in found
    assert "valid" not in found


def test_precedence_and_origin_of_every_setting() -> None:
    """Default < file < flag < --set, whichever of them give a value; the saved file says which did."""
    plain = load(HEAD + "techniques: [lora, full]\n")
    before = {p: v for p, v in values_of(plain.config, plain.keys).items() if p in SOME}
    # A value that may stand there and is not the default: the one way to tell who gave it.
    fresh = {
        ("train", "lr"): (0.1, 0.2, 0.3), ("train", "seed"): (1, 2, 3), ("train", "clip"): (2, 3, 4),
        ("train", "schedule"): ("cosine", "constant", "cosine"), ("train", "keep_last"): (5, None, 7),
        ("train", "betas"): ([0.1, 0.2], [0.3, 0.4], [0.5, 0.6]), ("train", "device"): ("a", "b", "c"),
        ("data", "max_rows"): (3, 4, 5), ("data", "columns"): ({"a": "b"}, {"c": "d"}, {"e": "f"}),
        ("data", "packing"): (False, True, False), ("eval", "choices"): (["a"], ["b"], ["c", "d"]),
        ("eval", "answers", "top_k"): (3, 4, 5), ("eval", "answers", "system"): ("x: y", "# no", "null"),
        ("techniques", "lora", "rank"): (3, 4, 5), ("techniques", "lora", "target"): (["a"], ["b"], ["c"]),
        ("techniques", "lora", "layers"): ("0-3", [1, 2], None), ("techniques", "full", "layers"): ("1", "2", "3"),
    }  # fmt: skip
    rng = random.Random(0)
    for _ in range(12):
        layers = {path: [rng.random() < 0.5 for _ in range(3)] for path in fresh}
        text = HEAD
        for group in ("train", "eval", "parallel"):
            text += f"{group}:\n" + _nested(group, layers, fresh)
        text = text.replace(
            "source: d.jsonl\n", "source: d.jsonl\n" + _nested("data", layers, fresh)
        )
        text += "techniques:\n  - lora:\n" + _of("lora", layers, fresh)
        text += "  - full:\n" + _of("full", layers, fresh)
        flags = {
            ".".join(p): fresh[p][1] for p in fresh if layers[p][1] and fresh[p][1] is not None
        }
        sets = [f"{'.'.join(p)}={write(fresh[p][2])}" for p in fresh if layers[p][2]]
        made = load(text, *sets, **flags)
        lines = text.splitlines()
        for path, value in values_of(made.config, made.keys).items():
            if path not in fresh:
                continue
            origin, (file, flag, set_) = made.origins[".".join(path)], layers[path]
            if set_:
                assert (origin, value) == ("--set", fresh[path][2])
            elif flag and fresh[path][1] is not None:
                assert origin == "--" + path[-1].replace("_", "-")
                assert value == fresh[path][1]
            elif file:
                name, line = origin.split(":")
                assert name == "run.yaml"
                assert lines[int(line) - 1].strip().startswith(f"{path[-1]}:")
                assert value == fresh[path][0]
            else:
                assert (origin, value) == ("default", before[path])
        _saved_says_the_same(made)


def _nested(group: str, layers: Any, fresh: Any) -> str:
    flat = [p for p in fresh if p[0] == group and len(p) == 2 and layers[p][0]]
    deep = [p for p in fresh if p[0] == group and len(p) == 3 and layers[p][0]]
    lines = [f"  {p[1]}: {write(fresh[p][0])}" for p in flat]
    lines += (["  answers:"] if deep else []) + [f"    {p[2]}: {write(fresh[p][0])}" for p in deep]
    return "".join(line + "\n" for line in lines)


def _of(key: str, layers: Any, fresh: Any) -> str:
    own = [p for p in fresh if p[:2] == ("techniques", key) and layers[p][0]]
    return "".join(f"      {p[2]}: {write(fresh[p][0])}\n" for p in own)


def _saved_says_the_same(made: Resolved[DataSettings]) -> None:
    """Every line with a value has its origin behind it, and the file makes the same configuration again."""
    text = dump(made)
    groups = {
        "data:",
        "train:",
        "eval:",
        "parallel:",
        "techniques:",
        "answers:",
        "- lora:",
        "- full:",
    }
    told: list[str] = []
    for line in text.splitlines():
        bare, mark, origin = line.rpartition("  # ")
        if not mark:
            assert line.strip() in groups, line
        else:
            told.append(origin)
            assert bare.strip()
    assert sorted(told) == sorted(made.origins.values())
    assert read_text(text, "config.yaml").value["model"] == made.config.model
    Path("config.yaml").write_text(text, encoding="utf-8")
    again = load_config(techniques=TECHNIQUES, data_settings=DataSettings, yaml_path="config.yaml")
    assert again.config == made.config


@pytest.mark.parametrize("verb", [train_verb, eval_verb], ids=["train", "eval"])
def test_an_origin_names_an_option_that_there_is(verb: Any) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(verb.command)
    command: Any = typer.main.get_command(app)
    names = {option for p in command.params for option in p.opts} | {
        p.name.upper() for p in command.params
    }
    paths = train_verb.FLAGS.values() if verb is train_verb else ["eval.max_rows", "eval.fields"]
    for path in paths:
        last = path.rsplit(".", 1)[-1].replace("_", "-")
        assert FLAG_NAMES.get(path, f"--{last}") in names, path


# --- the command line ---------------------------------------------------------------------------------------------


def test_what_is_printed_can_be_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("train: {lr: 1e-3, seed: 3}\n", encoding="utf-8")
    words = ["m", "d.jsonl", "-c", "mine.yaml", "--seed", "4", "--set", "train.clip=null"]
    assert main(["train", *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "model: m # MODEL", "source: d.jsonl # DATA", "lr: 0.001 # mine.yaml:1", "seed: 4 # --seed",
        "clip: null # --set", "eps: 1e-08 # default", "rank: 16 # default",
    ):  # fmt: skip
        bare = [" ".join(text.split()) for text in printed.splitlines()]
        assert line in bare, line
    Path("printed.yaml").write_text(printed, encoding="utf-8")
    assert main(["train", "-c", "printed.yaml", "--print-config"]) == 0
    again = capsys.readouterr().out
    values = [
        [line.partition("  # ")[0].rstrip() for line in t.splitlines()] for t in (printed, again)
    ]
    assert values[0] == values[1]
    other = [t for t in again.splitlines() if "  # " in t and "  # printed.yaml:" not in t]
    # Of two ways to say one thing the file gives one, and the other is nobody's.
    names = {name for pair in TrainSettings.ONE_OF for name in pair}
    assert {text.split(":")[0].strip() for text in other} < names
    assert all(" null " in text and text.endswith("# default") for text in other)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("train:\n  learning_rate: 1\n", [], "mine.yaml:2: unknown setting 'train.learning_rate'"),
        ("quantizaton: 4bit\n", [], "mine.yaml:1: unknown setting 'quantizaton'"),
        ("train: {steps: many}\n", [], 'mine.yaml:1: train.steps cannot have this value\n  got:    "many"'),
        ("", ["--steps", "0"], "--steps: train.steps cannot have this value"),
        ("", ["--set", "data.val_fraction=2"], "wanted: less than 1"),
        ("", ["--technique", "lroa"], "--technique: unknown setting 'techniques.lroa'"),
        ("", ["--set", "techniques.lora.rank_patern={q: 1}"], "did you mean techniques.lora.rank_pattern"),
    ],
)  # fmt: skip
def test_a_slip_ends_with_its_place_and_status_2(
    text: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(text, encoding="utf-8")
    status = main(["train", "m", "d.jsonl", "-c", "mine.yaml", *words, "--print-config"])
    captured = capsys.readouterr()
    assert status == ConfigError.exit_code
    assert said in captured.err
    assert captured.out == ""
