"""What was changed in a model, as it can be asked: what trains, whose it is, and how fast it learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from afina.tree.technique import Delta, Technique


class Changes:
    """What techniques changed in a model.

    Attributes:
        model: the changed model.
        techniques: the values that changed it, in the order in which they acted.
        deltas: attached children by full name (`model.layers.0.self_attn.q_proj.lora`).
        in_place: base tensors trained where they are, by name.
        warnings: what may be a mistake, such as a part of the model that the techniques do not reach.
        notes: what a user should know about how the techniques met this model.
    """

    def __init__(self, model: nn.Module, techniques: Sequence[Technique]) -> None:
        self.model = model
        self.techniques = tuple(techniques)
        self.deltas: dict[str, Delta] = {}
        self.in_place: dict[str, nn.Parameter] = {}
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._owner: dict[str, Technique] = {}
        self._maker: dict[str, Technique] = {}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every tensor that trains, by full name, in a fixed order."""
        attached = {
            f"{name}.{inner}": parameter
            for name, delta in self.deltas.items()
            for inner, parameter in delta.named_parameters()
        }
        return {**attached, **self.in_place}

    def renew(self) -> None:
        """Looks up anew what trains in place, after other tensors were put there (see `parallel`)."""
        self.in_place = {name: self.model.get_parameter(name) for name in self.in_place}

    def aiding(self) -> dict[str, nn.Parameter]:
        """Those of the tensors that train which only help others to: no adapter has them."""
        return {
            f"{name}.{inner}": parameter
            for name, delta in self.deltas.items()
            if delta.only_in_training
            for inner, parameter in delta.named_parameters()
        }

    def deltas_of(self, technique: Technique) -> dict[str, Delta]:
        """The children that `technique` attached, by the name of the module that each acts on."""
        mine = {n: d for n, d in self.deltas.items() if self._maker[n] == technique}
        return {name.rpartition(".")[0]: delta for name, delta in mine.items()}

    def only(self, name: str) -> Self:
        """An edit of one child alone, where it is, for who gives it its starting values."""
        technique = self._maker[name]
        one = type(self)(self.model, [technique])
        one.deltas[name], one._maker[name] = self.deltas[name], technique
        return one

    def in_place_of(self, technique: Technique) -> dict[str, nn.Parameter]:
        """The base tensors that `technique` trains, by name."""
        return {n: p for n, p in self.in_place.items() if self._owner[n] == technique}

    def state(self) -> dict[str, Tensor]:
        """What the children hold beside their parameters, by full name: a run needs it to go on."""
        return {
            f"{name}.{inner}": buffer
            for name, delta in self.deltas.items()
            for inner, buffer in delta.named_buffers()
        }

    def lr_scales(self) -> dict[str, float]:
        """Learning rate of each trainable tensor as a multiple of the run's."""
        return {name: self._owner[name].lr_scale(name) for name in self.trainable()}

    def silent_at_start(self) -> frozenset[str]:
        """Names of trainable tensors whose first gradient is zero by construction."""
        return frozenset(
            f"{name}.{inner}"
            for name, delta in self.deltas.items()
            for inner in delta.silent_at_start()
        )

    def silent_at_times(self) -> frozenset[str]:
        """Names of trainable tensors that not every step reaches."""
        return frozenset(
            f"{name}.{inner}"
            for name, delta in self.deltas.items()
            for inner in delta.silent_at_times()
        )
