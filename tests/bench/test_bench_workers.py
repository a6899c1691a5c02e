"""The workers for real, on a tiny model: each in its own process, as the bench runs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kit import pieces
from bench.kit.jobs import Job
from bench.kit.meter import read_notes
from bench.kit.quality import Quality
from bench.kit.rows import Rows, write_rows
from bench.kit.side import SideBySide
from bench.kit.training import parse
from bench.kit.variants import heap_variants, quality_variants, variants
from tests.tiny import byte_tokenizer, row, tiny_llama

pytestmark = pytest.mark.slow

WORDS = ("one", "seventeen", "four", "twelve hundred", "six", "nine", "eleven", "three")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny_llama(dtype=torch.float32, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows() -> Rows:
    made = [row(byte_tokenizer(), f"say {word}", f'{{"say": "{word}"}}') for word in WORDS]
    train = [
        (list(r.tokens), [t if y else -100 for t, y in zip(r.tokens, r.trained, strict=True)])
        for r in made
    ]
    asked = [
        {"ids": list(r.tokens[: r.prompt_tokens]), "reference": f'{{"say": "{word}"}}'}
        for r, word in zip(made[:2], WORDS, strict=False)
    ]
    return Rows("tiny", train, asked)


def side(work: Path, model: Path, rows: Rows, *arguments: str) -> SideBySide:
    made = SideBySide(
        parse("", ["--work", str(work), "--seed", "0", "--threads", "1", *arguments]),
        rows,
        str(model),
        fast_bf16=False,
    )
    write_rows(made.rows_file, rows)
    return made


def losses(at: SideBySide, job: Job, kind: str) -> list[float]:
    folder = at.train(replace(job, batch=4, steps=3, lr=1e-2), kind)
    assert folder is not None, at.failures
    return [note["loss"] for note in read_notes(folder)]


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LOCK", tmp_path / "lock")


def test_both_tools_begin_at_the_same_loss_and_answers_are_scored(
    tmp_path: Path, model: Path, rows: Rows
) -> None:
    at = side(tmp_path, model, rows)
    found: dict[str, list[float]] = {}
    for variant in quality_variants(fast_bf16=False, batch=4):
        job = replace(at.job(variant, 0, 3, 0, 4), save=True)
        found[variant.tool] = losses(at, job, "quality")
        trained = next(at.work.glob(f"tiny-quality-{variant.tool}-*"))
        answers = Quality(at).answers(variant, trained, 0)
        assert answers is not None
        assert len(answers) == 2
    assert found["afina"][0] == pytest.approx(found["peer"][0], rel=1e-5)
    assert found["afina"][2] < found["afina"][0]
    assert found["peer"][2] < found["peer"][0]


def test_long_rows_go_through_an_eager_peer_in_halves(tmp_path: Path, model: Path) -> None:
    """Of rows as long as this, 16 do not fit: afina finds its own way, and sdpa holds no pairs."""
    row = ([1] * 570, [1] * 570)
    at = side(tmp_path, model, Rows("long", [row], []))
    usual, ours, expert = variants(fast_bf16=True)
    knobs = [at.job(each, 0, 3, 1, 16).knobs for each in (usual, ours, expert)]
    assert [each.get("micro") for each in knobs] == [16, None, 8]
    assert at.micro(16, eager=True) == 8
    assert at.micro(4, eager=True) == 4


def test_micro_batches_do_not_change_what_the_peer_computes(
    tmp_path: Path, model: Path, rows: Rows
) -> None:
    at, usual = side(tmp_path, model, rows), variants(fast_bf16=False)[0]

    def split(micro: int) -> list[float]:
        knobs: dict[str, Any] = {**usual.knobs, "micro": micro}
        return losses(at, at.job(replace(usual, knobs=knobs), 0, 3, 1, 4), f"micro{micro}")

    whole = split(4)
    assert split(1) == pytest.approx(whole, rel=1e-4)
    assert whole[2] != pytest.approx(whole[0], rel=1e-2)


def test_a_heap_that_keeps_its_memory_changes_no_number(
    tmp_path: Path, model: Path, rows: Rows
) -> None:
    at = side(tmp_path, model, rows)
    as_it_is, kept = heap_variants(fast_bf16=False, method="full")
    assert (kept.setting, kept.knobs["keep_heap"]) == ("kept heap", True)
    assert as_it_is.knobs == {"dtype": "float32", "method": "full"}
    found = [losses(at, at.job(each, 0, 3, 0, 4), "heap") for each in (as_it_is, kept)]
    assert found[0] == found[1]
