"""Every verb: what its user did wrong ends with a sentence and a status, and never with a traceback."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from afina import cli
from tests.tiny import byte_tokenizer, save_model, tiny_llama

ROWS = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(4)]
HERE = ["--device", "cpu", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """A folder with a model, an encoder, a model without a template, and data good and bad."""
    folder = tmp_path_factory.mktemp("place")
    save_model(folder / "model", tiny_llama(), byte_tokenizer())
    save_model(folder / "plain", tiny_llama(), byte_tokenizer(chat=False))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 260, "num_attention_heads": 2}
    save_model(folder / "encoder", BertForMaskedLM(BertConfig(**sizes)), byte_tokenizer())
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    files: dict[str, str | bytes] = {
        "rows.jsonl": text,
        "-dash ação.jsonl": text,
        "bad.jsonl": text + '{"prompt": 1\n{"prompt": "x", "completion": null}\n',
        "empty.jsonl": "",
        "binary.jsonl": bytes(range(256)),
        "talk.jsonl": json.dumps(talk) + "\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


Verb = Callable[[str, str], list[str]]

VERBS: dict[str, Verb] = {
    "train": lambda model, data: ["train", model, data, "-o", "run", "--steps", "1", "--rank", "2",
                                  "--set", "train.device=cpu", "--set", "train.dtype=fp32"],
    "check": lambda model, data: ["check", model, data],
    "eval": lambda model, data: ["eval", model, data, *HERE],
    "generate": lambda model, data: ["generate", model, data, "-o", "out.jsonl", *HERE],
}  # fmt: skip
"""How each verb that reads data is called."""

INPUTS = {
    "no such file": ("model", "rws.jsonl", 3, "did you mean rows.jsonl"),
    "an empty file": ("model", "empty.jsonl", 3, "empty.jsonl: no rows"),
    "a binary file": ("model", "binary.jsonl", 3, "not UTF-8"),
    "a model for data": ("model", "plain", 3, "this folder holds a model, not data"),
    "no such model": ("./modle", "rows.jsonl", 4, "no such file or folder"),
    "a folder of nothing": (".", "rows.jsonl", 4, "model"),
    "a name with NUL": ("a\0b", "rows.jsonl", 4, "no such file or folder"),
    "a name without end": ("a" * 300 + "/b/c", "rows.jsonl", 4, "no such file or folder"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", INPUTS)
def test_wrong_input_is_a_sentence_and_a_status(
    verb: str, name: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    model, data, status, said = INPUTS[name]
    got = cli.main(VERBS[verb](model, data))
    shown = capsys.readouterr()
    if verb == "check":  # a list of points, of which one is the error
        assert got == 2
        assert "error    " in shown.out
    else:
        assert got == status
        assert "error: " in shown.err
        assert said in shown.err
        assert "cure:" in shown.err or "wanted:" in shown.err
    assert not {path.name for path in place.iterdir()} & {"run", "out.jsonl", "out.jsonl.part"}


@pytest.mark.parametrize("verb", ["train", "check", "eval"])
def test_bad_rows_stop_the_verb_or_are_skipped(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = VERBS[verb]("model", "bad.jsonl")
    if verb == "eval":
        words += ["--metrics", "loss"]
    assert cli.main(words) == (2 if verb == "check" else 3)
    shown = capsys.readouterr()
    assert "bad.jsonl: 2 of 6 rows cannot be used" in shown.err + shown.out
    assert "bad.jsonl:5: not a line of JSON" in shown.err + shown.out
    if verb == "check":
        return  # its report of skipped rows has tests of its own
    if verb == "train":
        words[words.index("run")] = str(tmp_path / "run")
    assert cli.main([*words, "--on-bad-row", "skip"]) == 0
    shown = capsys.readouterr()
    assert "4 of 6 kept; 2 dropped: cannot be used" in shown.err + shown.out
    assert "skipped  bad.jsonl:6: this row is not like the others" in (
        shown.err + shown.out
    ).replace(f"{Path.cwd()}/", "")
    if verb == "train":
        [source] = json.loads((tmp_path / "run" / "data.json").read_text())["sources"]
        assert source["dropped"] == {"cannot be used (data.on_bad_row=skip)": 2}
        assert len(source["bad"]) == 2


def test_generate_says_all_bad_prompts_and_offers_no_flag_it_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(VERBS["generate"]("model", "bad.jsonl")) == 3
    shown = capsys.readouterr().err
    assert "bad.jsonl:5: not a line of JSON" in shown
    assert "--on-bad-row" not in shown


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (VERBS["train"]("encoder", "rows.jsonl"), 4, "only causal language models and classifiers can"),
        (VERBS["eval"]("encoder", "rows.jsonl"), 4, "this model predicts no tokens"),
        (VERBS["generate"]("encoder", "rows.jsonl"), 4, "does not generate text from left to right"),
        (VERBS["generate"]("plain", "talk.jsonl"), 4, "has no chat template"),
        (VERBS["train"]("plain", "talk.jsonl"), 3, "a conversation needs a chat template"),
        (VERBS["train"]("rows.jsonl", "model"), 4, "this looks like data: the model comes first"),
        (VERBS["eval"]("rows.jsonl", "model"), 4, "this looks like data: the model comes first"),
        (["chat", "rows.jsonl"], 4, "this looks like data"),
        (["chat", "nowhere/at/all"], 4, "no such file or folder"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--rank", "0"], 2, "--rank: techniques.lora.rank"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--rank", "33"], 5, "at most 32"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--set", "techniques.lora.target=q_porj"], 5, "perhaps q_proj"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--set", "techniques.lora.rank_pattern.q_porj=4"], 5, "perhaps q_pr"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--set", "techniques.lora.layers=0-9"], 5, "no such block"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--set", "techniques.lora.dropout=1"], 2, "less than 1"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--set", "techniques.lora.alpha=0"], 2, "greater than 0"),
        ([*VERBS["train"]("model", "rows.jsonl"), "--set", "techniques.lora.rnk=4"], 2, "did you mean techniques."),
        ([*VERBS["train"]("model", "rows.jsonl"), "--on-bad-row", "skipp"], 2, "did you mean skip?"),
        ([*VERBS["eval"]("model", "rows.jsonl"), "--limit", "0"], 2, "--limit: eval.max_rows"),
        ([*VERBS["eval"]("model", "rows.jsonl"), "--set", "data.columns.prompt=nope"], 3, "no column 'nope'"),
        ([*VERBS["generate"]("model", "rows.jsonl"), "--temperature", "-1"], 2, "temperature"),
        (["models", "rm", "nope"], 4, "no such model in the cache"),
        (["models", "get", "rows.jsonl"], 4, "this looks like data"),
    ],
)  # fmt: skip
def test_mistakes_have_their_own_status(
    words: list[str],
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))
    assert cli.main(words) == status
    assert said in capsys.readouterr().err


def test_odd_names_are_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--metrics", "loss", "--json", "-", *HERE, "--", "model", "-dash ação.jsonl"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["data"] == "-dash ação.jsonl"


OVER = {
    "generate": ["generate", "model", "rows.jsonl", "--force", *HERE, "-o"],
    "eval": ["eval", "model", "rows.jsonl", "--force", *HERE, "--json"],
    "eval rows": ["eval", "model", "rows.jsonl", "--force", *HERE, "--rows-out"],
    "check": ["check", "model", "rows.jsonl", "--force", "--json"],
}
"""How each verb that writes a file is told to; the file's name comes last."""


@pytest.mark.parametrize("verb", OVER)
def test_force_does_not_replace_what_is_read(
    verb: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    for name in ("rows.jsonl", "./rows.jsonl", "model/config.json"):
        before = (place / name).read_bytes()
        assert cli.main([*OVER[verb], name]) == 2
        assert "would take the place of something that is read" in capsys.readouterr().err
        assert (place / name).read_bytes() == before


def test_answers_in_the_making_do_not_replace_the_prompts(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    prompts = place / "answers.jsonl.part"
    prompts.write_text("one\n", encoding="utf-8")
    words = ["generate", "model", prompts.name, "-o", "answers.jsonl", "--force", *HERE]
    assert cli.main(words) == 2
    assert "answers.jsonl.part" in capsys.readouterr().err
    assert prompts.read_text(encoding="utf-8") == "one\n"


@pytest.mark.parametrize("verb", ["generate", "eval", "chat"])
def test_a_model_of_no_numbers_ends_with_a_sentence(
    verb: str,
    capsys: pytest.CaptureFixture[str],
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = tiny_llama()
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    save_model(tmp_path / "broken", broken, byte_tokenizer())
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    out, model = tmp_path / "out", str(tmp_path / "broken")
    words = {
        "generate": ["generate", model, "rows.jsonl", "-o", str(out)],
        "eval": ["eval", model, "rows.jsonl", "--json", str(out)],
        "chat": ["chat", model],
    }
    assert cli.main([*words[verb], *HERE]) == 7
    shown = capsys.readouterr()
    assert "the model's outputs are not finite numbers" in shown.err
    assert "earlier checkpoint" in shown.err
    assert not out.exists()
