"""The same window under any plan: loss, gradients by name, norm, and what the optimiser made of it.

Rows are ragged and have unequal numbers of trained tokens, so that a wrong denominator shows; B is not zero, so that A
has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from afina.config import ParallelSettings, TrainSettings
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.head import head_of
from afina.optim.optimisers import Optimiser
from afina.parallel.processes import Processes
from afina.parallel.runtime import Mesh, OneProcess
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.ahead import made
from afina.train.loop import backward, loop
from afina.train.passes import Passes
from afina.train.work import Work
from afina.tree import Edit, Seams, Technique
from afina.tree.pieces import piece_of
from afina.types import Row
from tests.tiny import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_qwen2
from tests.train.kit import ragged_rows

TECHNIQUES: dict[str, Technique] = {"lora": LoRA(rank=3), "full": Full()}
FAMILIES = {"llama": tiny_llama, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2, "qwen2": tiny_qwen2}


@dataclass
class Found:
    """What a process found.

    Attributes:
        loss: of the window.
        gradients: whole, by name, those that this process can tell.
        norm: of the whole gradient.
        values: of what trains, after the optimiser's steps.
        losses: of each step.
        shapes: of what this process moves, by name.
    """

    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    norm: float = 0.0
    values: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    losses: list[float] = field(default_factory=list[float])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        technique: a key of `TECHNIQUES`.
        rows_each: of a micro-batch of one process.
        rows: of the window.
        steps: of the optimiser.
        optimizer: by name.
        model: changes to the tiny model's config.
        train: further settings.
        family: a key of `FAMILIES`.
        packed: rows lie end to end; otherwise one a line, padded.
        recompute: blocks run again in backward.
    """

    technique: str = "lora"
    rows_each: int | None = None
    rows: int = 7
    steps: int = 2
    optimizer: str = "sgd"
    model: tuple[tuple[str, Any], ...] = ()
    train: tuple[tuple[str, Any], ...] = ()
    family: str = "llama"
    packed: bool = True
    recompute: bool = False


def edited(case: Case) -> Edit:
    """The tiny model with B that is not zero, in fp64; the same in every process."""
    model = FAMILIES[case.family](**dict(case.model))
    edit = apply(model, [TECHNIQUES[case.technique]], seed=5)
    with torch.no_grad():
        for number, (name, tensor) in enumerate(edit.trainable().items()):
            if name.endswith(".b"):
                draw = torch.Generator().manual_seed(number)
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) * 0.1)
    return edit


def windows(case: Case) -> list[list[Row]]:
    """Of each step; the last rows of the first have no label."""
    rows = ragged_rows(case.rows * case.steps, untrained=(case.rows - 1,))
    return [rows[i : i + case.rows] for i in range(0, len(rows), case.rows)]


def work_of(case: Case, mesh: Mesh, edit: Edit) -> Work:
    """What the loop takes."""
    settings = TrainSettings(
        steps=case.steps, lr=0.1, clip=1.0, optimizer=case.optimizer, **dict(case.train)
    )
    mesh.begin()
    mesh.hold(edit.model, edit.trainable())
    edit.renew()
    with mesh.opened():
        head = mesh.at_end(lambda: head_of(edit.model))
    passes = Passes(edit.model, case.packed, False, 257, head, mesh.within)
    return Work(
        edit.model,
        edit,
        Optimiser(mesh.own(edit.trainable()), edit.lr_scales(), case.optimizer, {"lr": 0.1}),
        settings,
        lambda rows: passes.cut(rows, rows_each=case.rows_each, tokens_each=None),
        passes,
        mesh,
        Seams(),
        case.steps,
        0,
    )


def run(
    case: Case,
    settings: ParallelSettings | None,
    *,
    more: bool = False,
    make: Callable[[ParallelSettings], Mesh] = Processes,
) -> Found:
    """The window of `case` in this process: alone, or as one of those that its environment tells of.

    Args:
        case: what trains, and how.
        settings: None for one process alone.
        more: the processes stay together, for another case.
        make: the mesh of several processes.
    """
    mesh: Mesh = OneProcess() if settings is None else make(settings)
    edit = edited(case)
    work, steps = work_of(case, mesh, edit), windows(case)
    found = Found()
    blocks = Blocks(edit.model, case.recompute)
    with packing(edit.model, case.packed), blocks.running():
        found.loss = backward(work, made(work, mesh.share(steps[0])), 0).loss
        mesh.reduce(edit.trainable())
        own = mesh.own(edit.trainable())
        found.norm = float(mesh.norm(own))
        found.gradients = whole(own)
        found.shapes = {name: tuple(p.shape) for name, p in own.items()}
        work.optimiser.clear_gradients()
        for parameter in edit.trainable().values():
            parameter.grad = None
        for step in loop(work, iter(steps)):
            found.losses.append(step.loss)
        found.values = values(mesh, edit)
    if not more:
        mesh.end()
    return found


def values(mesh: Mesh, edit: Edit) -> dict[str, torch.Tensor]:
    """What trains, as this process has it for a pass; where it has no more than pieces, each in its place."""
    tensors = edit.trainable()
    if mesh.plan.zero < 3:
        cut = mesh.plan.tensor > 1
        return {n: placed(p, p.detach()) if cut else p.detach().clone() for n, p in tensors.items()}
    return {n: placed(p, p.detach()) for n, p in mesh.own(tensors).items()}


def whole(own: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of what a process moves, each in its place in a tensor of nan of the whole's shape."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in own.items():
        if parameter.grad is not None:
            found[name] = placed(parameter, parameter.grad)
    return found


def placed(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value of a parameter's piece in its place in a tensor of nan of the whole's shape."""
    piece = piece_of(parameter)
    found = torch.full(piece.shape, float("nan"), dtype=value.dtype)
    piece.of(found).copy_(value)
    return found


def joined(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What several processes know of the same tensors, put together; where two know one place, they agree.

    Raises:
        AssertionError: they do not, or nobody knows a place.
    """
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            before = found.setdefault(name, tensor.clone())
            both = ~before.isnan() & ~tensor.isnan()
            assert torch.allclose(before[both], tensor[both], rtol=0, atol=1e-9), name
            found[name] = torch.where(before.isnan(), tensor, before)
    for name, tensor in found.items():
        assert not tensor.isnan().any(), f"nobody knows all of {name}"
    return found
