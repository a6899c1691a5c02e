"""Rows and works for tests of training: ragged, tiny, in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from afina.config import TrainSettings
from afina.data.settings import DataSettings
from afina.models.forward import packing
from afina.models.head import head_of
from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import OneProcess
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train.ahead import made
from afina.train.loop import backward
from afina.train.options import RunOptions
from afina.train.passes import Passes
from afina.train.report import Silent
from afina.train.result import Run
from afina.train.run import train
from afina.train.work import Work
from afina.tree import Edit, Seams, Technique
from afina.types import Row
from tests.tiny import byte_tokenizer, tiny_llama


def ragged_rows(count: int, *, seed: int = 0, untrained: Sequence[int] = ()) -> list[Row]:
    """Rows of 3 to 14 tokens, about half of them labels; those in `untrained` have no label."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for number in range(count):
        tokens = tuple(rng.randrange(256) for _ in range(rng.randrange(3, 15)))
        start = rng.randrange(1, len(tokens))
        trained = tuple(i >= start and number not in untrained for i in range(len(tokens)))
        rows.append(Row(tokens, trained, number, f"rows.jsonl:{number + 1}"))
    return rows


def edited(technique: Technique | None = None, **changes: Any) -> Edit:
    """A tiny fp64 Llama with LoRA whose B is not zero, so that every gradient counts."""
    edit = apply(tiny_llama(**changes), [technique or LoRA(rank=3)], seed=5)
    with torch.no_grad():
        for number, (name, tensor) in enumerate(edit.trainable().items()):
            if name.endswith(".b"):
                draw = torch.Generator().manual_seed(number)
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) * 0.1)
    return edit


def work_of(
    edit: Edit,
    *,
    rows_each: int | None = None,
    packed: bool = True,
    shared: bool = False,
    headed: bool = False,
    seams: Seams | None = None,
    total_steps: int = 4,
    **settings: Any,
) -> Work:
    """What the loop takes, for `edit`."""
    chosen = TrainSettings(steps=total_steps, **{"lr": 1e-2, "clip": None, **settings})
    passes = Passes(edit.model, packed, shared, 257, head_of(edit.model) if headed else None)
    return Work(
        edit.model,
        edit,
        Optimiser(edit.trainable(), edit.lr_scales(), "adamw", {"lr": 1e-2, "weight_decay": 0.0}),
        chosen,
        lambda rows: passes.cut(rows, rows_each=rows_each, tokens_each=None),
        passes,
        OneProcess(),
        seams or Seams(),
        total_steps,
        0,
    )


def gradients(
    edit: Edit, rows: Sequence[Row], *, make: Callable[..., Work] = work_of, **options: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one window."""
    work = make(edit, **options)
    with packing(edit.model, options.get("packed", True)):
        loss = backward(work, made(work, rows), 0).loss
    found = {n: t.grad.clone() for n, t in edit.trainable().items() if t.grad is not None}
    work.optimiser.clear_gradients()
    return loss, found


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def run(
    out: Path,
    technique: Any = None,
    *,
    model: Any = None,
    options: Any = None,
    share: bool = True,
    **rest: Any,
) -> Run:
    """A run over ten ragged rows, four a step, unless told otherwise; `share` joins their common beginnings.

    `technique` may be a list of them.
    """
    model = model or tiny_llama()
    several = technique if isinstance(technique, list) else [technique or LoRA(rank=2)]
    edit = apply(model, several, seed=1)
    given = {"rows_per_step": 4, "micro_rows": 2, "lr": 1e-2, **rest}
    val = given.pop("val", None)
    data = given.pop("data", ragged_rows(10))
    data_settings = DataSettings(share_prefixes=share)
    mine = {"reporter": Silent(), "base": "tiny", "data_settings": data_settings}
    options = RunOptions(**{**mine, **(options or {})})
    return train(model, byte_tokenizer(), data, edit, out, val=val, options=options, **given)


def weights(found: Run) -> dict[str, torch.Tensor]:
    return load_file(found.weights / "adapter_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


class Stop(Exception):
    """The power goes."""


def stop_after(step: int) -> Seams:
    def stop(done: int) -> None:
        if done == step:
            raise Stop

    return Seams(after_step=(stop,))
