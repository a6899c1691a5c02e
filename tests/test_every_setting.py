"""No setting is accepted and does nothing: each has a value here that changes what comes out, and none is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from afina.config import EvalSettings, GenerateSettings
from afina.data.dataset import prepare
from afina.data.settings import DataSettings
from afina.data.split import split
from afina.errors import ConfigError
from afina.evaluate.evaluate import evaluate
from afina.models import generate as generating
from afina.models.generate import generate
from afina.table import TECHNIQUES, apply
from afina.techniques.adalora import AdaLoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.prompt import PromptTuning
from afina.tree import Edit
from tests import battery
from tests.data import kit
from tests.tiny import byte_tokenizer, tiny_llama

# --- data -------------------------------------------------------------------------------------------------------

PAIR = {"prompt": "a", "completion": "b", "text": "c"}
LONG = {"prompt": "a", "completion": "one two three four five six seven eight nine ten"}
TALK = kit.turns("a", "b", "c", "d")

DATA: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "format": ([PAIR], "text", {}),
    "columns": ([PAIR], {"prompt": "text"}, {}),
    "txt": ("paragraphs.txt", "paragraph", {}),
    "max_rows": ([PAIR, PAIR], 1, {}),
    "template": ([PAIR], "none", {}),
    "train_on": ([TALK], "last", {}),
    "max_tokens": ([PAIR, LONG], 30, {}),
    "over_long": ([PAIR, LONG], "truncate", {"max_tokens": 30}),
    "on_bad_row": ([PAIR, {"x": 1}], "skip", {}),
    "split": ("folder", "test", {}),
}
"""Setting -> rows or a file, a value that is not the default, and what must be set beside."""

OF_HUB = {"subset": "en", "revision": "v1"}


def seen(source: Any, **settings: Any) -> Any:
    try:
        made = prepare(source, kit.tokenizer_of(kit.CHATML), DataSettings(**settings))
    except Exception as error:
        return str(error)
    return [(row.tokens, row.trained) for row in made.rows]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paragraphs.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "folder").mkdir()
    for name in ("train", "test"):
        (tmp_path / "folder" / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.usefixtures("files")
def test_a_setting_of_data_changes_the_rows(name: str) -> None:
    source, value, beside = DATA[name]
    assert getattr(DataSettings(), name) != value
    assert seen(source, **beside) != seen(source, **beside, **{name: value})
    assert seen(source, **beside) == seen(source, **beside)


@pytest.mark.parametrize("name", OF_HUB)
def test_a_setting_of_the_hub_reaches_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*words: Any, **more: Any) -> Any:
        asked.append((words, more))
        return datasets.Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train"])
    seen("owner/name")
    seen("owner/name", **{name: OF_HUB[name]})
    assert asked[0] != asked[1]


def test_rows_are_held_out_by_fraction_and_seed() -> None:
    rows = prepare(
        [{"text": f"row {n}"} for n in range(50)], kit.tokenizer_of(None), DataSettings()
    ).rows

    def held(**settings: Any) -> list[int]:
        chosen = DataSettings(**settings)
        return [row.id for row in split(rows, chosen.val_fraction, chosen.seed)[1]]

    assert held() == []
    assert held(val_fraction=0.3) != held(val_fraction=0.6)
    assert held(val_fraction=0.3) != held(val_fraction=0.3, seed=1)


def test_no_setting_of_data_is_left_out() -> None:
    elsewhere = {"val_fraction", "seed"}  # above
    elsewhere |= {"packing", "share_prefixes"}  # tests/train: packed, padded and shared batches
    assert set(DATA) | set(OF_HUB) | elsewhere == set(DataSettings.model_fields)


# --- techniques -------------------------------------------------------------------------------------------------

TECHNIQUE: dict[str, dict[str, Any]] = {
    "lora": {
        "rank": 2, "alpha": 4.0, "dropout": 0.5, "rslora": True, "loraplus_ratio": 16.0, "target": ("q_proj",),
        "exclude": ("q_proj",), "layers": "0", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2.0},
        "modules_to_save": ("lm_head",), "start": "pissa",
    },
    "dora": {
        "rank": 2, "alpha": 4.0, "dropout": 0.5, "rslora": True, "loraplus_ratio": 16.0, "target": ("q_proj",),
        "exclude": ("q_proj",), "layers": "0", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2.0},
        "modules_to_save": ("lm_head",), "start": "olora",
    },
    "adalora": {
        "init_rank": 3, "target_rank": 1, "tinit": 4, "tfinal": 4, "delta_t": 3, "beta1": 0.1, "beta2": 0.1,
        "orthogonality": 0.0, "alpha": 4.0, "dropout": 0.5, "target": ("q_proj",), "exclude": ("q_proj",),
        "layers": "0", "rank_pattern": {"q_proj": 2}, "modules_to_save": ("lm_head",),
    },
    "trainable_tokens": {"tokens": (3, 4), "modules_to_save": ("lm_head",)},
    "bottleneck": {
        "kind": "parallel", "reduction_factor": 4.0, "width": 3, "non_linearity": "tanh", "scaling": "learned",
        "dropout": 0.5, "layers": "0", "exclude": "0", "modules_to_save": ("lm_head",),
    },
    "bitfit": {
        "target": ("q_proj",), "exclude": ("k_proj",), "layers": "0", "modules_to_save": ("lm_head",),
    },
    "ia3": {
        "target": ("q_proj",), "feedforward": ("o_proj",), "exclude": ("k_proj",), "layers": "0",
        "modules_to_save": ("lm_head",),
    },
    "prefix": {
        "tokens": 3, "start": "zero", "text": "cd", "text_ids": (1, 2), "projection": True, "hidden": 5,
        "modules_to_save": ("lm_head",),
    },
    "prompt": {
        "tokens": 3, "start": "random", "text": "cd", "text_ids": (1, 2), "modules_to_save": ("lm_head",),
    },
    "p_tuning": {
        "tokens": 3, "network": "lstm", "hidden": 5, "lstm_layers": 3, "dropout": 0.5,
        "modules_to_save": ("lm_head",),
    },
    "full": {"layers": "0", "target": ("q_proj",), "exclude": ("q_proj",)},
    "quantize": {
        "kind": "int8", "block": 32, "double_quant": False, "compute_dtype": "bf16", "target": ("q_proj",),
        "exclude": ("q_proj",), "loftq_rank": 4, "loftq_rounds": 3,
    },
    "layer_decay": {
        "decay": 0.5, "convention": "electra", "min_scale": 0.95, "new_modules": "layer", "scales": {"q_proj": 3.0},
    },
    "gradient_noise": {"eta": 0.3, "gamma": 1.0, "mode": "absolute"},
    "reversible": {
        "form": "additive", "bits": 4, "plain": 1, "signs": "row", "seed": 2, "stream": "fp32", "grid": 5,
    },
}  # fmt: skip


A_TEXT = {"start": "text", "text": "ab"}
ALONG: dict[tuple[str, str], dict[str, Any]] = {
    ("prefix", "text"): A_TEXT, ("prefix", "text_ids"): A_TEXT, ("prefix", "hidden"): {"projection": True},
    ("reversible", "plain"): {"form": "additive"}, ("reversible", "signs"): {"seed": 1},
    ("prompt", "text"): A_TEXT, ("prompt", "text_ids"): A_TEXT,
    ("p_tuning", "lstm_layers"): {"network": "lstm"}, ("p_tuning", "dropout"): {"network": "lstm"},
    ("quantize", "loftq_rank"): {"loftq_rank": 2, "loftq_rounds": 2}, ("quantize", "loftq_rounds"): {"loftq_rank": 2},
}  # fmt: skip
"""What must be set for a setting to have a meaning."""

SMALL: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4}, "dora": {"rank": 4}, "adalora": {"init_rank": 4, "target_rank": 2},
    "trainable_tokens": {"tokens": (3,)},
}  # fmt: skip
"""What a technique must be given, or is too large without for a tiny model."""

BESIDE: dict[str, list[Any]] = {
    "quantize": [LoRA(rank=2)],
    "layer_decay": [LoRA(rank=2), PromptTuning(tokens=2)],
    "gradient_noise": [LoRA(rank=2)],
    "reversible": [Full()],
}
"""Of what trains nothing itself, what trains beside it shows the difference."""

STEPS = 10


def letters(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    """A tokenizer of one token a letter."""
    return {"input_ids": [ord(letter) % 40 for letter in text]}


def trained(kind: type[Any], /, **settings: Any) -> Any:
    """What a technique makes of a model: names, shapes, learning rates, a first gradient, the end of a run."""
    model = battery.build("llama")
    beside = SMALL.get(kind.key, {})
    edit = apply(
        model,
        [kind(**(beside | settings)), *BESIDE.get(kind.key, [])],
        tokenizer=letters if "text" in settings else None,
    )
    torch.manual_seed(0)
    model.train()
    parts = edit.trainable()
    gradient(model)
    seams, rates = edit.seams(STEPS), edit.lr_scales()
    for change in seams.param_groups:
        rates = change(rates)
    for before in seams.before_step:
        before(3, parts)
    first = {name: float(tensor.grad.abs().sum()) for name, tensor in parts.items()}
    if kind is AdaLoRA:
        run(model, edit)
    return {
        name: (
            tuple(tensor.shape),
            rates[name],
            first[name],
            float(tensor.detach().sum()),
        )
        for name, tensor in parts.items()
    }


def gradient(model: Any) -> None:
    """That of a loss in which no token is like another."""
    model(torch.arange(6)[None]).logits.square().sum().backward()


def run(model: Any, edit: Edit) -> None:
    """What happens in time: the loop, for a technique that does something there."""
    parts = edit.trainable()
    seams = edit.seams(STEPS)
    for step in range(STEPS):
        for penalty in seams.penalty:
            penalty(step).backward()
        gradient(model)
        with torch.no_grad():
            for tensor in parts.values():
                tensor.sub_(tensor.grad, alpha=1e-5)
        for moved in seams.moved:
            moved(step, parts)
        for after in seams.after_step:
            after(step)
        model.zero_grad()


@pytest.mark.parametrize(
    ("key", "name"), [(key, name) for key in TECHNIQUE for name in TECHNIQUE[key]]
)
def test_a_setting_of_a_technique_changes_what_trains(key: str, name: str) -> None:
    along = ALONG.get((key, name), {})
    changed = {**along, name: TECHNIQUE[key][name]}
    assert trained(TECHNIQUES[key], **along) != trained(TECHNIQUES[key], **changed)


def test_no_setting_of_a_technique_is_left_out() -> None:
    # tests/techniques: it needs an encoder beside the decoder.
    elsewhere = {"bottleneck": {"cross"}}
    # tests/ops/test_reversible.py: it changes nothing but what is found to be wrong.
    elsewhere["reversible"] = {"check"}
    # tests/data/test_curriculum.py: which rows are shown, and no more.
    elsewhere["curriculum"] = set(TECHNIQUES["curriculum"].model_fields)
    # tests/techniques/test_token_pruning_settings.py: what is kept, and when.
    elsewhere["token_pruning"] = set(TECHNIQUES["token_pruning"].model_fields)
    assert {key: set(TECHNIQUE.get(key, {})) | elsewhere.get(key, set()) for key in TECHNIQUES} == {
        key: set(kind.model_fields) for key, kind in TECHNIQUES.items()
    }


# --- answers and scores -----------------------------------------------------------------------------------------

ANSWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_new_tokens": (3, {}),
    "temperature": (0.9, {}),
    "top_p": (0.2, {"temperature": 2.0}),
    "top_k": (2, {"temperature": 2.0}),
    "seed": (1, {"temperature": 2.0}),
    "system": ("be brief", {}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_setting_of_answers_changes_them(name: str) -> None:
    value, beside = ANSWERS[name]
    model, tokenizer = tiny_llama(), byte_tokenizer()
    asked = [[{"role": "user", "content": "hello"}]]

    def answers(**settings: Any) -> Any:
        chosen = GenerateSettings(**({"max_new_tokens": 8} | beside | settings))
        return [answer.tokens for answer in generate(model, tokenizer, asked, chosen)]

    assert answers() != answers(**{name: value})


def test_a_stop_text_ends_an_answer_and_batches_are_as_large_as_they_are_said(
    monkeypatch: Any,
) -> None:
    model, tokenizer, sizes = tiny_llama(), byte_tokenizer(), []
    whole = generating._Job.run
    monkeypatch.setattr(
        generating._Job,
        "run",
        lambda job, budget: sizes.append(len(job.rows)) or whole(job, budget),
    )
    few = GenerateSettings(max_new_tokens=8)
    [answer] = generate(model, tokenizer, ["hello"], few)
    stop = next(letter for letter in answer.text if letter.isascii() and letter.isprintable())
    [cut] = generate(model, tokenizer, ["hello"], few.model_copy(update={"stop": (stop,)}))
    assert cut.text == answer.text.partition(stop)[0]
    generate(model, tokenizer, ["a"] * 5, few.model_copy(update={"batch_rows": 2}))
    assert sizes == [1, 1, 2, 2, 1]


def test_no_setting_of_answers_is_left_out() -> None:
    assert {*ANSWERS, "stop", "batch_rows"} == set(GenerateSettings.model_fields)


SCORES: dict[str, Any] = {
    "generate": False,
    "max_rows": 1,
    "choices": ("{}", "no"),
    "fields": ("a",),
    "answers": GenerateSettings(max_new_tokens=1),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_setting_of_scores_changes_them(name: str) -> None:
    rows = [{"prompt": "q", "completion": '{"a": 1}'}, {"prompt": "r", "completion": "no"}]
    if name == "choices":
        rows = rows[1:]

    def scored(**settings: Any) -> Any:
        chosen = EvalSettings(**({"answers": GenerateSettings(max_new_tokens=4)} | settings))
        made = evaluate(tiny_llama(), byte_tokenizer(), rows, chosen)
        return made.summary() if name != "answers" else [row["completion"] for row in made.rows]

    assert scored() != scored(**{name: SCORES[name]})


def test_no_setting_of_scores_is_left_out() -> None:
    elsewhere = {"batch_rows"}  # tests/evaluate: the losses do not depend on it, by promise
    assert set(SCORES) | elsewhere == set(EvalSettings.model_fields)


def test_a_system_prompt_that_would_do_nothing_is_refused() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    told = GenerateSettings(max_new_tokens=1, system="be brief")
    for prompt in ("a text", [1, 2, 3]):
        with pytest.raises(ConfigError, match="a system prompt has no place before a text"):
            generate(model, tokenizer, [prompt], told)
    with pytest.raises(ConfigError, match=r"eval\.answers\.system changes nothing"):
        evaluate(model, tokenizer, [{"prompt": "a", "completion": "b"}], EvalSettings(answers=told))
