"""The tensors of an adapter's file under the names that this model has for their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from afina import seams
from afina.adapters.fingerprint import Read
from afina.adapters.kinds import Kind
from afina.adapters.names import STANDARD, Entry, Move, places, seen_as
from afina.errors import AdapterError, counted


@dataclass
class Placed:
    """An adapter's file and the model that it is for.

    Attributes:
        model: not changed.
        config: `adapter_config.json`.
        kind: of the technique.
        sites: where the technique can act, by name; see `Kind`.
        own: the model's parameters by name, tied ones under each of theirs.
        parts: what the technique added: place -> ending of the key -> tensor.
        whole: tensors of the base that were trained, by the model's names.
        copies: tensors of the base that were not.
        seen: how the configuration calls each module of the model.
        others: beginnings of names of blocks that the file is not about: the model may have stacks beside its own.
        notes: what was renamed.
        read: the values of the model's tensors; None takes them from the model.
    """

    model: nn.Module
    config: Mapping[str, Any]
    kind: Kind
    sites: Mapping[str, Any]
    own: Mapping[str, nn.Parameter]
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    whole: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    copies: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    seen: dict[str, str] = field(default_factory=dict[str, str])
    others: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list[str])
    read: Read | None = None

    def value(self, name: str) -> Tensor:
        """The model's tensor of that name."""
        return self.own[name].detach() if self.read is None else self.read(name)

    @property
    def saved(self) -> list[str]:
        """The modules that the configuration says were trained whole."""
        return self.config.get("modules_to_save") or []

    def fits(self, found: Iterable[Entry], name: str) -> bool:
        """Whether these tensors of one module have the shapes of the model's module `name`."""
        parts = {e.part: e.tensor for e in found if e.role == "part"}
        if parts and (name not in self.sites or self.kind.misfit(self.sites[name], parts)):
            return False
        base = [(self.own.get(f"{name}.{e.part}"), e.tensor) for e in found if e.role != "part"]
        return all(own is not None and own.shape == tensor.shape for own, tensor in base)


def place(
    model: nn.Module, config: Mapping[str, Any], kind: Kind, found: Iterable[Entry]
) -> Placed:
    """Gives every tensor of a file its place in the model, or one under its own name that the model does not have.

    Raises:
        AdapterError: when two tensors have one place, or the names fit in several ways.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    placed = Placed(model, config, kind, kind.sites(model), own)
    by_module: dict[str, list[Entry]] = {}
    for entry in found:
        by_module.setdefault(entry.module, []).append(entry)
    modules = {name for name, _ in model.named_modules()}
    where, moves = places(by_module, modules, lambda a, b: placed.fits(by_module[a], b))
    for entry in (entry for group in by_module.values() for entry in group):
        name = where[entry.module]
        if entry.role == "part":
            group, key = placed.parts.setdefault(name, {}), entry.part
        else:
            group = placed.whole if entry.role == "whole" else placed.copies
            key = f"{name}.{entry.part}"
        if key in group:
            raise AdapterError("two tensors of the file have one place", got=entry.key)
        group[key] = entry.tensor
    placed.seen.update(seen_as([*modules, *where.values()], moves))
    placed.others = _others(model, moves)
    placed.notes += [
        f"{counted(len(names), 'module')}: {move[0] + '…'!r} in the file is {move[1] + '…'!r} in this model"
        for move, names in moves.items()
        if move != STANDARD
    ]
    return placed


def _others(model: nn.Module, moves: Mapping[Move, Iterable[str]]) -> tuple[str, ...]:
    """The blocks that no move reaches which brought anything into blocks; none when nothing came into blocks."""
    blocks = tuple(f"{block.name}." for block in seams.blocks(model))
    reached = tuple(
        new for (_, new), names in moves.items() if any(n.startswith(blocks) for n in names)
    )
    return tuple(name for name in blocks if reached and not name.startswith(reached))
