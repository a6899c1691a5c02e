"""What a merged model's files shall hold, tensor by tensor, decided from names and shapes alone.

No weight is read here: the base is a skeleton on the meta device, its files are known by their headers. Each tensor
that the merged model differs in gets a function that makes it when its turn to be written comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from afina.adapters.base_files import Shards, locate
from afina.adapters.merge_changes import Changes
from afina.adapters.merge_head import NewHead
from afina.adapters.merge_pieces import Pieces
from afina.adapters.merge_settings import new_biases, parted
from afina.adapters.merge_shards import DTYPES, NAMES, Stored, Wanted
from afina.errors import AdapterError, ModelError
from afina.tree import Delta
from afina.tree.fold import fold, fold_bias, tied_groups

Base = Mapping[str, Callable[[Tensor], Tensor]]
"""What the adapter's base made of a tensor of the files, by name, where it is not the tensor itself: `rounded`."""


@dataclass
class Plan:
    """The files of a merged model.

    Attributes:
        shards: the tensors of each file, in their order.
        untied: names that are one tensor in the base, and several in the merged model.
        settings: of the base's configuration that give the merged model biases which the base has not.
        rounding: of each folded weight, the share of its change that was lost; filled while the files are written.
    """

    shards: dict[str, list[Wanted]]
    untied: tuple[str, ...]
    settings: Mapping[str, bool] = field(default_factory=dict[str, bool])
    rounding: dict[str, float] = field(default_factory=dict[str, float])


def make_plan(
    skeleton: Any,
    shards: Shards,
    changes: Changes,
    dtype: torch.dtype | None = None,
    base: Base | None = None,
    head: NewHead | None = None,
) -> Plan:
    """What the merged model's files hold.

    Args:
        skeleton: the base on the meta device, with or without the adapter on it.
        shards: the headers of the base's files.
        changes: see `merge_changes.changes`.
        dtype: of every floating-point tensor; None keeps each as the base has it.
        base: what the weights were trained as, where they were quantised.
        head: of a classifier, which the base has not.

    Raises:
        AdapterError: a tied weight whose two users would need different values that the model cannot hold apart.
        ModelError: the files keep a changed tensor in another form than the model.
    """
    head = head or NewHead()
    head.refuse_missing(changes.whole)
    plan = _Planner(skeleton, head.shards(shards), changes, dtype, base or {})
    return plan.make(head.names)


class _Planner:
    def __init__(
        self,
        skeleton: Any,
        shards: Shards,
        changes: Changes,
        dtype: torch.dtype | None,
        base: Base,
    ) -> None:
        self.shards, self.changes, self.dtype, self.base = shards, changes, dtype, base
        self.names = locate(skeleton, shards)
        self.stored = {
            self.names[one.name]: one
            for file in shards.values()
            for one in file
            if one.name in self.names
        }
        self.rounding: dict[str, float] = {}
        self.group = {name: names for names in tied_groups(skeleton) for name in names}
        self.parted = parted(skeleton, self.group, changes.deltas)
        self.biases = new_biases(skeleton, changes.deltas)
        self.pieces = Pieces(skeleton, shards, changes)
        self.in_pieces: set[str] = set()

    def _refuse_unreachable(self, new: Collection[str]) -> list[str]:
        """Raises for a change of a tensor, other than a new one, that the files have neither whole nor in pieces."""
        wanted = [
            f"{name}.{own}"
            for name, deltas in self.changes.deltas.items()
            for own in {own: None for delta in deltas for own in delta.weights()}
        ]
        wanted += [name for name in self.changes.whole if name not in new]
        whole = [n for n in wanted if n in self.stored or not self.pieces.reaches(n)]
        whole += self.base
        lost = [n for n in whole if not any(m in self.stored for m in self.group.get(n, [n]))]
        if lost:
            raise ModelError(
                "the base's files keep tensors that the adapter changes in another form than the model has them",
                got=", ".join(lost[:4]),
                wanted="one tensor in the files for each of the model's, or the pieces that Transformers makes of it",
                cure="merge in memory: edit.merge(), edit.keep(), model.save_pretrained(folder)",
            )
        return wanted

    def make(self, new: Collection[str]) -> Plan:
        """The plan; `new` tensors are those that the adapter brings and the base has no place for."""
        wanted = self._refuse_unreachable(new)
        self.in_pieces = self.pieces.changed(wanted)
        files = {
            file: [self._of_base(one) for one in stored] for file, stored in self.shards.items()
        }
        # A tensor that the base has only under its tie's name lies behind that one.
        for name in (n for n in self.parted if n not in self.stored):
            tie = next(n for n in self.group[name] if n in self.stored)
            file = self.stored[tie].file.name
            files[file].append(self._changed(name, name, self.stored[tie]))
        for name, deltas in self.biases.values.items():
            weight = self.stored[name.removesuffix("bias") + "weight"]
            files[weight.file.name].append(self._new_bias(name, weight, deltas))
        last = list(files)[-1]
        files[last] += [self._new(name) for name in new]
        return Plan(files, tuple(self.parted), self.biases.settings, self.rounding)

    def _new(self, name: str) -> Wanted:
        """A tensor of the adapter's that the base has not, in the base's commonest format."""
        found = [one.dtype for file in self.shards.values() for one in file if one.dtype in DTYPES]
        dtype = max(DTYPES, key=found.count) if self.dtype is None else NAMES[self.dtype]
        value = self.changes.whole[name]
        return Wanted(name, dtype, tuple(value.shape), lambda: _cast(value, dtype, name))

    def _new_bias(self, name: str, weight: Stored, deltas: Sequence[Delta]) -> Wanted:
        """A bias that the base has not, beside its weight and in that one's format."""
        dtype = self._dtype(weight)
        size = _rows(weight, turned=bool(deltas) and deltas[0].transposed)

        def value() -> Tensor:
            if not deltas:
                return torch.zeros(size, dtype=DTYPES[dtype])
            return self._bias(name, None, deltas, DTYPES[dtype])

        key = weight.name.removesuffix("weight") + "bias"
        return Wanted(key, dtype, (size,), value)

    def _of_base(self, stored: Stored) -> Wanted:
        """What stands in the place of one of the base's tensors."""
        name = self.names.get(stored.name)
        if stored.name in self.in_pieces:
            return self._piece(stored)
        changed = name in self.changes.whole or name in self.base
        if name is not None and (changed or self._deltas(name)):
            return self._changed(stored.name, name, stored)
        dtype = self._dtype(stored)
        if dtype == stored.dtype:
            return Wanted(stored.name, dtype, stored.shape, stored)
        return Wanted(
            stored.name, dtype, stored.shape, lambda: _cast(stored.read(), dtype, stored.name)
        )

    def _piece(self, stored: Stored) -> Wanted:
        """A piece of a changed tensor."""
        dtype = self._dtype(stored)
        stored.refuse_unknown()

        def folded() -> Tensor:
            trained = self.pieces.trained(stored.name)
            if trained is not None:
                return _cast(trained, dtype, stored.name)
            made, self.rounding[stored.name] = self.pieces.folded(
                stored.name, stored.read(), DTYPES[dtype]
            )
            return made

        return Wanted(stored.name, dtype, stored.shape, folded)

    def _deltas(self, name: str) -> Sequence[Delta]:
        """The children that change the tensor of that name."""
        target, _, part = name.rpartition(".")
        found = self.changes.deltas.get(target, ())
        if part == "bias":
            return found
        return [delta.weights()[part] for delta in found if part in delta.weights()]

    def _changed(self, key: str, name: str, stored: Stored) -> Wanted:
        """The tensor `name` of the model, under `key` in the file; `stored` holds the base's values."""
        dtype, deltas = self._dtype(stored), self._deltas(name)
        stored.refuse_unknown()
        trained = self.changes.whole.get(name)

        def value() -> Tensor:
            if trained is not None:
                return trained
            return self.base[name](stored.read()) if name in self.base else stored.read()

        def folded() -> Tensor:
            if not deltas:
                return _cast(value(), dtype, name)
            if name.endswith(".bias"):
                return self._bias(name, value(), deltas, DTYPES[dtype])
            result, lost = fold(value(), deltas, name=name, dtype=DTYPES[dtype])
            if not all(delta.constant for delta in deltas):  # those change the bias alone
                self.rounding[name] = lost
            return result

        return Wanted(key, dtype, stored.shape, folded)

    def _bias(
        self, name: str, bias: Tensor | None, deltas: Sequence[Delta], dtype: torch.dtype
    ) -> Tensor:
        """A bias that children change or make, rounded once; what that lost is noted."""
        wide = torch.float32 if bias is None else torch.promote_types(bias.dtype, torch.float32)
        exact = fold_bias(bias, deltas, wide)
        assert exact is not None
        rounded = exact.to(dtype)
        lost = float((exact - rounded).norm())
        size = float((exact if bias is None else exact - bias).norm())
        if size:
            self.rounding[name] = lost / size
        return rounded

    def _dtype(self, stored: Stored) -> str:
        return (
            stored.dtype if self.dtype is None or stored.dtype not in DTYPES else NAMES[self.dtype]
        )


def _rows(weight: Stored, *, turned: bool) -> int:
    """The number of outputs of a map."""
    return weight.shape[1] if turned else weight.shape[0]


def _cast(values: Tensor, dtype: str, name: str) -> Tensor:
    """The values in another format.

    Raises:
        AdapterError: a value does not fit it.
    """
    cast = values.to(DTYPES[dtype])
    if not torch.isfinite(cast).all():
        raise AdapterError(
            f"{name} has values that {dtype} does not hold, or that are not finite",
            got=f"up to {float(values.abs().max()):g}",
            wanted=f"at most {torch.finfo(DTYPES[dtype]).max:g}",
            cure="choose another dtype, such as bf16 or fp32",
        )
    return cast
