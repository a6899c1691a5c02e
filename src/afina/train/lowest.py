"""Where a run may enter its model: at the lowest block that trains, if what enters it depends on the row alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from afina import seams
from afina.errors import ConfigError, RunError, TechniqueError, sized
from afina.train.passes import drops
from afina.train.plan import Plan, total_steps
from afina.tree import Edit, Seams

SETTING = "train.cache_inputs_gib"
OFF = f"leave {SETTING} out"


@dataclass(frozen=True)
class Place:
    """Where the model is entered.

    Attributes:
        blocks: all blocks of the model, by name.
        first: index of the lowest that trains.
        needed_bytes: that the states of all rows take.
    """

    blocks: Mapping[str, nn.Module]
    first: int
    needed_bytes: int

    @property
    def name(self) -> str:
        """Of the lowest block that trains."""
        return list(self.blocks)[self.first]

    def __str__(self) -> str:
        return (
            f"what enters {self.name}, the lowest block that trains, is kept on the disk until the run is finished: "
            f"{sized(self.needed_bytes)}"
        )


def place_of(edit: Edit, plan: Plan, seams_: Seams) -> Place | None:
    """Where a run enters its model; None when the settings do not ask for it.

    Args:
        edit: of the model.
        plan: of the run.
        seams_: of the run.

    Raises:
        ConfigError: it would do nothing, or takes more than the settings grant.
        TechniqueError: what enters the lowest block that trains is not a function of the rows alone.
    """
    settings, rows = plan.settings, plan.rows
    if settings.cache_inputs_gib is None:
        return None
    model: Any = edit.model
    seams.require_stack(model, SETTING)
    if len(seams.stacks(model)) > 1:
        raise TechniqueError(
            f"{SETTING} knows models of one stack of blocks",
            got=", ".join(seams.stacks(model)),
            cure=OFF,
        )
    blocks = {block.name: block.module for block in seams.blocks(model)}
    first = _lowest(edit, list(blocks))
    _refuse_changing(model, seams_)
    if plan.chooser is not None and plan.chooser.cuts:
        raise TechniqueError(
            f"{SETTING}: rows are cut to a length that grows, so what enters a block is not the same every time",
            cure=OFF,
        )
    epoch = settings.model_copy(update={"steps": None, "epochs": 1.0})
    if plan.chooser is None and plan.total_steps <= total_steps(epoch, rows):
        raise ConfigError(
            f"{SETTING} would do nothing: the run sees each row once",
            cure=f"train for several epochs, or {OFF}",
        )
    width = model.config.get_text_config().hidden_size
    each = width * next(model.parameters()).element_size()
    needed = each * sum(len(tokens) for tokens in {row.tokens for row in rows})
    limit = int(settings.cache_inputs_gib * 2**30)
    if needed > limit:
        raise ConfigError(
            f"{SETTING}: the states of all rows take more than that",
            got=f"{sized(needed)} for {sized(limit)}",
            cure=f"grant more: {SETTING}={needed / 2**30 + 0.01:.2f}; or {OFF}",
        )
    return Place(blocks, first, needed)


def _lowest(edit: Edit, names: Sequence[str]) -> int:
    """Index of the lowest block that trains."""
    trained = [
        number
        for number, name in enumerate(names)
        if any(tensor.startswith(f"{name}.") for tensor in edit.trainable())
    ]
    if not trained or trained[0] == 0:
        raise ConfigError(
            f"{SETTING} would do nothing: "
            + ("the lowest block trains" if trained else "no block trains"),
            wanted="only upper blocks that train, as with layers='20-29' of lora or full",
            cure=OFF,
        )
    return trained[0]


def _refuse_changing(model: nn.Module, found: Seams) -> None:
    """Raises when the same row is not the same every time."""
    if drops(model):
        raise TechniqueError(
            f"{SETTING}: this model drops something in training, so what enters a block differs every time",
            cure=OFF,
        )
    if found.on_batch:
        raise TechniqueError(
            f"{SETTING}: a technique changes batches before the model sees them, so what enters a block is not "
            "a function of the row",
            cure=OFF,
        )


def refuse_too_little_room(place: Place, out: Path) -> None:
    """Raises when the disk has no room for the states.

    Args:
        place: where the model is entered.
        out: the run's folder, there or not.

    Raises:
        RunError: saying how much is free.
    """
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    if place.needed_bytes > free:
        raise RunError(
            f"the disk has too little room for the states that {SETTING} keeps",
            got=f"{sized(free)} free in {out}",
            wanted=sized(place.needed_bytes),
            cure=f"make room, name a folder on another disk, or {OFF}",
        )
