"""Each point of the pre-flight with a run that fails it alone."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from afina.techniques.lora import LoRA
from tests import battery
from tests.reports.kit import POINTS, STOPS, Case

Spoil = Callable[[Case, pytest.MonkeyPatch], None]
SPOILED: dict[str, tuple[Spoil, str, str]] = {}
"""Point -> what spoils it, the status it then has, and words of what it then says."""


def spoils(point: str, status: str, said: str) -> Callable[[Spoil], Spoil]:
    def add(spoil: Spoil) -> Spoil:
        SPOILED[point] = (spoil, status, said)
        return spoil

    return add


class Reranker(LlamaForCausalLM):
    """A model of a kind that the loop does not train."""


@spoils("model", "error", "only causal language models")
def _another_kind(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.model.__class__ = Reranker


@spoils("technique", "warning", "parameters train")
def _experts_stay_frozen(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(battery, "VOCABULARY", 260)
    torch.manual_seed(0)
    case.model = battery.mixtral()
    case.model.config.max_position_embeddings = 256
    case.model.generation_config.eos_token_id = STOPS


@spoils("folder", "error", "the output folder is in use")
def _folder_in_use(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.out.mkdir()
    (case.out / "config.yaml").write_text("model: tiny\n")


@spoils("format", "error", "no such file")
def _no_data(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.data = str(case.folder / "none.jsonl")


@spoils("rows", "warning", "40 of 41 rows kept, for validation 5 of 5; 322 tokens lost")
def _one_row_too_long(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.data = [*case.data, {"prompt": "a" * 300, "completion": "b"}]


@spoils("labels", "warning", "1 row without a trained token: row:1")
def _a_row_without_labels(case: Case, patch: pytest.MonkeyPatch) -> None:
    first, *rest = case.rows()
    case.data = [replace(first, trained=(False,) * len(first.tokens)), *rest]


@spoils("stop token", "warning", "1 of 40 trained turns does not end with <|end|> or <|im_end|>")
def _a_stop_is_masked(case: Case, patch: pytest.MonkeyPatch) -> None:
    first, *rest = case.rows()
    stop = max(at for at, label in enumerate(first.trained) if label)
    trained = tuple(label and at != stop for at, label in enumerate(first.trained))
    case.data = [replace(first, trained=trained), *rest]


@spoils("template", "warning", "is not how the row begins")
def _the_template_changed_after_preparing(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.data, case.val = case.rows(), None
    case.data_settings = {"val_fraction": 0.1}
    case.tokenizer.chat_template = case.tokenizer.chat_template.replace(
        "assistant\n", "assistant\n<think>\n"
    )


@spoils("lengths", "warning", "is longer than train.micro_tokens (30)")
def _a_row_longer_than_a_micro_batch(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.settings["micro_tokens"] = 30


@spoils("duplicates", "warning", "1 row with the content of an earlier one; first: row:41 is row:3")
def _a_row_twice(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.data = [*case.data, case.data[2]]


@spoils("overlap", "warning", "1 validation row also among the training rows")
def _a_row_on_both_sides(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.val = [*case.val, case.data[0]]


@spoils("settings", "error", "train.early_stopping would do nothing")
def _patience_without_evaluations(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.settings["early_stopping"] = 2


@spoils("batch", "warning", "40 rows a step")
def _a_large_step(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.settings["rows_per_step"] = 64


@spoils("learning rate", "warning", "far below it")
def _a_small_rate(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.settings["lr"] = 1e-6


@spoils("schedule", "warning", "50 passes over 40 rows")
def _many_passes(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.settings["epochs"] = 50


@spoils("capacity", "note", "the adapter may be too small")
def _a_small_adapter(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.technique = LoRA(rank=1, target=("q_proj",), layers=(0,))


@spoils("disk", "error", "100 bytes free")
def _a_full_disk(case: Case, patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(case.folder)._replace(free=100)
    patch.setattr(shutil, "disk_usage", lambda path: usage)


@spoils("validation", "note", "no validation rows")
def _no_validation(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.val = None


def leak(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Mixes each token with the one before it in the line, as a short convolution does, whatever row that is of."""
    before = torch.roll(output, 1, dims=1)
    before[:, 0] = 0
    return output + before


@spoils("packing", "error", "packed rows see each other")
def _a_convolution_across_rows(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.model.model.layers[0].register_forward_hook(leak)


@spoils("start", "warning", "worse before it has learnt")
def _an_adapter_of_something_else(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.technique = LoRA(rank=4, target=("lm_head",))
    with torch.no_grad():
        b = case.applied().trainable()["lm_head.lora.b"]
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(0)))


@spoils("first step", "error", "trainable tensors did not learn")
def _a_linear_that_nothing_reaches(case: Case, patch: pytest.MonkeyPatch) -> None:
    case.model.model.layers[0].mlp.spare_proj = nn.Linear(32, 32, bias=False)


@spoils("pace", "warning", "more than a day")
def _a_slow_machine(case: Case, patch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=100_000.0)
    patch.setattr("afina.train.loop.time.perf_counter", lambda: next(clock))


@pytest.mark.parametrize("point", POINTS)
def test_each_point_fails_alone(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, status, said = SPOILED[point]
    case = Case(tmp_path)
    spoil(case, monkeypatch)
    checked = case.check()
    assert [finding.name for finding in checked.findings] == list(POINTS)
    others = {f.name: f.seen for f in checked.findings if f.status not in ("ok", "skipped")}
    assert list(others) == [point], others
    assert checked[point].status == status
    assert said in checked[point].seen
    assert checked[point].cure
    strict = {"note": 0, "warning": 1, "error": 2}[status]
    assert (checked.exit_code(), checked.exit_code(strict=True)) == (strict // 2 * 2, strict)
    assert checked.ok is (status == "note")


def test_with_a_sound_run_every_point_is_ok(tmp_path: Path) -> None:
    checked = Case(tmp_path).check()
    assert {f.name: f.status for f in checked.findings} == dict.fromkeys(POINTS, "ok")
    assert checked.exit_code(strict=True) == 0


def test_the_documentation_tells_every_point_once() -> None:
    page = (Path(__file__).parents[2] / "docs/checking.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| ([a-z ]+?)(?: ★)? \|", page, flags=re.MULTILINE)
    assert [name for name in told if name not in ("point", "option")] == list(POINTS)
