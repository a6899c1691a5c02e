"""Whole runs whose tensors are shared out: folder and figures are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.config import ParallelSettings
from afina.parallel.processes import Processes
from afina.techniques.adalora import AdaLoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.trainable_tokens import TrainableTokens
from afina.train.metrics import read_metrics
from afina.tree import Technique
from tests.parallel.pool import Pool
from tests.train.kit import ragged_rows
from tests.train.kit import run as one_run

pytestmark = pytest.mark.dist

Choice = tuple[int, list[Technique], dict[str, Any]]

CHOICES: dict[str, Choice] = {
    "lora": (3, [LoRA(rank=2)], {}),
    "full": (3, [Full()], {}),
    "a head and tokens": (
        3,
        [LoRA(rank=2, modules_to_save=("lm_head",)), TrainableTokens(tokens=(3, 9))],
        {},
    ),
    "blocks again in backward": (3, [Full()], {"recompute": True}),
    "micro-batches found by trial": (3, [LoRA(rank=2)], {"micro_rows": "auto"}),
    "fewer rows than processes": (3, [LoRA(rank=2)], {"rows_per_step": 1, "micro_rows": 1}),
    "full, gradients shared out": (2, [Full()], {}),
    "ranks that are cut": (1, [AdaLoRA(init_rank=4, target_rank=2, tinit=1, tfinal=1)], {}),
}


def trained(out: Path, choice: Choice, several: bool) -> None:
    """Five steps, scored and saved on the way."""
    zero, techniques, rest = choice
    settings = ParallelSettings.model_validate({"zero": zero})
    options = {"mesh": Processes(settings)} if several else {}
    # Plain SGD: AdamW makes much of the last bits of a gradient that is nearly zero.
    how = {"optimizer": "sgd", "lr": 0.5, "steps": 5, "eval_every": 2, "save_every": 2, **rest}
    one_run(out, techniques, options=options, val=ragged_rows(5, seed=9), **how)


def all_trained(out: Path, names: list[str]) -> None:
    for name in names:
        trained(out / name, CHOICES[name], True)


@pytest.mark.parametrize("part", range(2))
def test_a_run_is_that_of_one_process(pool: Pool, tmp_path: Path, part: int) -> None:
    names = list(CHOICES)[part::2]
    pool.run(2, all_trained, tmp_path / "two", names)
    for name in names:
        trained(tmp_path / "alone" / name, CHOICES[name], False)
        same(tmp_path / "alone" / name, tmp_path / "two" / name)


def same(alone: Path, two: Path) -> None:
    """Asserts that figures and what was trained are equal."""
    for name in ("loss", "val_loss", "gradient_norm"):
        ones, others = ([line.get(name) for line in read_metrics(out)] for out in (alone, two))
        assert others == [None if v is None else pytest.approx(v, abs=1e-9) for v in ones]
    ones, others = (weights(out) for out in (alone, two))
    assert others.keys() == ones.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(tensor, ones[name], rtol=0, atol=1e-9)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """What the run left."""
    found: dict[str, torch.Tensor] = {}
    for folder in ("adapter", "model"):
        for file in (out / folder).glob("*.safetensors"):
            found |= load_file(file)
    return found
