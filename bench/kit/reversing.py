"""What `bench/reversible.py` measures of SmolLM2 in this process: losses at the start, bytes saved, whole runs."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def as_rows(pairs: Sequence[tuple[list[int], list[int]]]) -> list[Any]:
    """Rows of ids and labels."""
    from afina.types import IGNORE, Row

    return [
        Row(tuple(ids), tuple(label != IGNORE for label in labels), number)
        for number, (ids, labels) in enumerate(pairs)
    ]


def start_losses(
    model: Any, rows: Sequence[Any], settings: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Of each setting the loss with its blocks mixed as in training, and with plain ones, in nats."""
    import torch

    import afina
    from afina.techniques.reversible import pass_of

    found: dict[str, list[float]] = {}
    for values in settings:
        edit = afina.apply(model, [afina.LoRA(rank=16), afina.Reversible(**values)])
        passes = way_through(edit, shared=False)
        batch = passes.batch(rows)
        with torch.no_grad():
            with pass_of(edit).off():
                plain = float(passes.loss(batch)) / batch.trained_tokens
            with pass_of(edit).shown():
                mixed = float(passes.loss(batch)) / batch.trained_tokens
        edit.undo()
        found[told(values)] = [mixed, plain]
    return found


def told(values: Mapping[str, Any]) -> str:
    """Settings in words."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def way_through(edit: Any, *, shared: bool) -> Any:
    """How rows go through the edit's model."""
    from afina.models.head import head_of
    from afina.train.passes import Passes

    return Passes(edit.model, True, shared, 0, head_of(edit.model))


def saved_bytes(
    model: Any, rows: Sequence[Any], beside: Mapping[str, Any], train: Mapping[str, Any]
) -> int:
    """Of one forward pass in which no row shares its beginning, so that all ways see the same tokens."""
    import torch

    import afina
    from afina.models.blocks import Blocks
    from afina.table import TECHNIQUES

    listed = [TECHNIQUES[key](**values) for key, values in beside.items()]
    edit = afina.apply(model, [afina.LoRA(rank=16), *listed])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            held[place] = tensor  # so that no other takes its place
        return tensor

    model.train()
    try:
        with Blocks(model, train.get("recompute", False)).running():
            passes = way_through(edit, shared=False)
            batch = passes.batch(rows)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                loss = passes.loss(batch)
            assert loss.requires_grad
        return sum(t.untyped_storage().nbytes() for t in held.values())
    finally:
        model.eval()
        edit.undo()


def run(
    name: str, rows: Path, beside: Mapping[str, Any], *, steps: int, batch: int, test_rows: int
) -> dict[str, float]:
    """One run with LoRA and what stands beside it; its losses.

    Args:
        name: of the model.
        rows: file of the rows; the last ones are for the test.
        beside: techniques by key.
        steps, batch: of the run.
        test_rows: scored after it, by the plain model.
    """
    import afina
    from afina.table import TECHNIQUES
    from afina.train.metrics import read_metrics
    from afina.train.report import Lines
    from bench.kit.rows import read_rows

    model, tokenizer = afina.load(name, dtype="fp32", device="cpu")
    pairs = as_rows(read_rows(rows).train)
    listed = [TECHNIQUES[key](**values) for key, values in beside.items()]
    edit = afina.apply(model, [afina.LoRA(rank=16), *listed], undoable=False)
    options = afina.RunOptions(base=name, reporter=Lines(sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        found = afina.train(
            model,
            tokenizer,
            pairs[:-test_rows],
            edit,
            Path(folder) / "run",
            val=pairs[-test_rows:],
            options=options,
            steps=steps,
            rows_per_step=batch,
            lr=1e-3,
            threads=1,
            compile=False,
            save_every=None,
        )
        losses = [line["loss"] for line in read_metrics(found.folder)]
    return {
        "loss as trained, first step": losses[0],
        "loss as trained, last quarter": statistics.mean(losses[-max(1, len(losses) // 4) :]),
        "loss of test rows, plain model": found.scores["loss"],
    }
