"""What a merge says: in numbers that fit their words, with cures that a merge has, for both surfaces."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import afina
from afina import cli
from afina.adapters import files, merge_files, merge_record, merge_texts
from afina.adapters.layout import WEIGHTS
from afina.adapters.merge import MergeSettings
from afina.errors import AdapterError, ConfigError, ModelError
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

FIRST = MergeSettings(verify=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the working directory, as "runs/calls-001"."""
    small = tiny_llama(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    base = save_model(tmp_path / "base", small, byte_tokenizer())
    monkeypatch.chdir(tmp_path)
    return save_run(Path("runs/calls-001"), base)


def test_an_adapter_that_does_not_fit_is_not_merged_in_part(run: Path) -> None:
    """`--allow-partial` is of the verbs that put an adapter onto a model in memory."""
    file = run / "adapter" / WEIGHTS
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="the file lacks it") as caught:
        afina.merge(run, "out", settings=FIRST)
    base = str(Path("base").absolute())
    wanted = (
        f"name the base that it was trained beside, {base!r}: --base MODEL (in Python base='MODEL')"
    )
    assert caught.value.cure == wanted
    model, _ = afina.load("base", dtype="fp32", device="cpu")
    with pytest.raises(AdapterError, match=r"--allow-partial \(in Python allow_partial=True\)"):
        files.load(model, run / "adapter")


@pytest.mark.parametrize(
    ("out", "dtype", "wanted"),
    [
        ("out", "fp8", "fp32, bf16, fp16 or fp64"),
        ("out", "auto", "fp32, bf16, fp16 or fp64"),
        ("out.gguf", "fp8", "fp32, bf16, fp16 or q8_0"),
        ("out.gguf", "fp64", "fp32, bf16, fp16 or q8_0"),
    ],
)
def test_the_formats_that_it_can_write_are_named(
    run: Path, out: str, dtype: str, wanted: str
) -> None:
    settings = MergeSettings(dtype=dtype, verify=False)
    with pytest.raises(ConfigError) as caught:
        afina.merge(run, out, settings=settings)
    assert caught.value.wanted == wanted
    assert dtype == "fp64" or caught.value.cure == "leave it out to keep the base's"


def test_a_small_disk_is_said_in_its_own_units(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(run)
    monkeypatch.setattr(merge_files.shutil, "disk_usage", lambda _: real._replace(free=1000))
    with pytest.raises(ModelError) as caught:
        afina.merge(run, Path("deep/out").absolute(), settings=FIRST)
    assert caught.value.got == f"1,000 bytes free in {Path('deep').absolute()}"
    assert str(caught.value.wanted).endswith(" KiB")


@pytest.mark.parametrize("verb", ["generate", "eval", "chat", "merge"])
def test_a_slip_in_a_runs_name_is_answered_with_the_run(
    run: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    words = {
        "generate": ["rows.jsonl", "-o", "answers.jsonl"],
        "eval": ["rows.jsonl"],
        "chat": [],
        "merge": ["-o", "out"],
    }[verb]
    for slip in ("runs/cals-001", "rnus/calls-001"):
        assert cli.main([verb, slip, *words]) == (6 if verb == "merge" else 4)
        said = capsys.readouterr().err
        assert f"did you mean {Path('runs/calls-001')}?" in said
        assert "no such folder or file here" in said or "no run, checkpoint or adapter" in said
    if verb == "merge":
        assert cli.main(["merge", "runs/cals-001", "-o", "out.gguf"]) == 4
        assert f"did you mean {Path('runs/calls-001')}?" in capsys.readouterr().err
    assert cli.main([verb, "runs/other", *words]) in (4, 6)  # nothing of a like name
    assert "did you mean" not in capsys.readouterr().err


def test_one_thing_is_one_thing(tmp_path: Path) -> None:
    one: dict[str, Any] = {"rounding": {"w": 0.5}, "dtype": "BF16", "whole": ["e"]}
    assert merge_record.lines(one)[0] == "1 weight folded in fp32 and rounded once to BF16"
    assert merge_record.lines(one)[-1] == "1 tensor came whole with the adapter"
    two = {"rounding": {"w": 0.5, "v": 0.25}, "dtype": "BF16", "whole": ["e", "f"]}
    assert merge_record.lines(two)[0].startswith("2 weights folded")
    assert merge_record.lines(two)[-1].startswith("2 tensors came")
    biases = {"rounding": {"w": 0.5, "v.bias": 0.25}, "dtype": "BF16"}
    assert merge_record.lines(biases)[0].startswith("1 weight and 1 bias folded")
    biases = {"rounding": {"w.bias": 0.5, "v.bias": 0.25}, "dtype": "BF16"}
    assert merge_record.lines(biases)[0].startswith("2 biases folded")
    tokenizer = byte_tokenizer()
    for prompts, said in ((["a"], "1 given prompt"), (["a", "b"], "2 given prompts")):
        assert merge_texts.texts_of(None, tokenizer, None, prompts)[1] == said
