"""What every technique is: a frozen value that says how to change a model, and the child that acts in it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.problems import Frozen

if TYPE_CHECKING:
    from afina.tree.edit import Edit

Side = Literal["in", "out", "none"]


class Delta(nn.Module, ABC):
    """What a technique adds to one map (a linear, a `Conv1D`, an embedding).

    Attributes:
        follows: for each parameter, the side of the base it lies along; `parallel/` places it by that alone.
        enabled: False makes the module act as the base did (see `Edit.disabled`).
        transposed: the base's weight is stored as (in, out), as that of a `Conv1D` or an embedding is.
    """

    follows: ClassVar[Mapping[str, Side]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.transposed = False

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The changed output, given the base's input `x` and output `y`."""

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Gives the parameters their starting values; equal seeds give equal values on any machine."""

    def weight_delta(self) -> Tensor:
        """What to add to the base's weight to fold this away, as (out, in), in fp32 or wider, in memory of its own.

        Raises:
            TechniqueError: where the mathematics does not allow it.
        """
        raise TechniqueError(f"{type(self).__name__} cannot be folded into a weight")

    def stored_delta(self) -> Tensor:
        """`weight_delta` as the base's weight is stored, its products not rounded to TF32 or bf16 on the way."""
        with exact_products():
            change = self.weight_delta()
        return change.t() if self.transposed else change

    def silent_at_start(self) -> frozenset[str]:
        """Parameters whose gradient is exactly zero at the first step, by construction."""
        return frozenset()


class Technique(Frozen, ABC):
    """A frozen value that says how to change a model; the same object is settings, documentation and YAML."""

    key: ClassVar[str]

    @abstractmethod
    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """Changes the structure only: works on the meta device, sets no values.

        Args:
            model: a Transformers model whose parameters the caller has frozen.
            undoable: keep a copy of each base tensor that is trained in place, so that undo can restore it.
        """

    def init(self, edit: Edit, *, seed: int) -> None:
        """Gives the attached parameters their starting values, once the base's weights are there."""
        for name, delta in edit.deltas.items():
            delta.reset(seed_of(seed, name))

    def lr_scale(self, name: str) -> float:
        """Learning rate of the trainable tensor `name`, as a multiple of the run's."""
        return 1.0


@contextmanager
def exact_products() -> Generator[None, None, None]:
    """Products of fp32 matrices in fp32 inside the block, even where speed was asked for before precision."""
    backends: Any = torch.backends
    places = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for the tensor `name`: the same on every machine, whatever else is attached."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
