"""What every technique is: a frozen value that says how to change a model, and the child that acts in it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.problems import Frozen
from afina.tree.pieces import Share
from afina.tree.timing import Seams

if TYPE_CHECKING:
    from afina.tree.edit import Edit

Side = Literal["in", "out", "none"]

Reads = Literal["nothing", "place", "input", "model"]
"""Values of the base: of the module that a child acts on, of the input embedding, or of a pass through all of it."""


class Removable(Protocol):
    """What makes a child act, until it is removed: torch's handle of a hook, for one."""

    def remove(self) -> None:
        """The child acts no more."""


class Delta(nn.Module, ABC):
    """What a technique adds to one module, as a child of it; most often a map (a linear, a `Conv1D`, an embedding).

    It acts through hooks on that module, which hand it the module itself: so a deep copy of a model acts by its own
    children, and a child holds no reference to its base.

    Attributes:
        follows: for each parameter (and each buffer that lies as one), the side of the base it lies along; `parallel/`
            places it by that alone.
        in_parts: where processes share its map out, each can do a part: along what enters the map or along what leaves
            it, and parts of the map's output are changed so that they still add up.
        constant: what it adds does not depend on what enters, so that of parts that add up one alone adds it.
        foldable: the change can be folded into weight and bias of a map.
        only_in_training: it acts in training alone, so that there is nothing of it to fold, and no adapter has it;
            checkpoints do.
        acts_on_input: `inward` changes what the module is given.
        by_row: what it does in training differs from row to row, so rows that begin alike are computed apart.
        additive: it adds to the output, whatever the weight is and whatever others add.
        alone: why there can be one of its kind at a place, in words; empty where several act together.
        scalable: it can act more or less, and not only be on or off.
        enabled: False makes the module act as the base did (see `Edit.disabled`).
        strength: how many times its change counts (see `Edit.scale`).
        transposed: the base's weight is stored as (in, out), as that of a `Conv1D` or an embedding is.
        front: how many places it puts in front of every row; see `front_of`.
        heads: of attention, on each of which it acts by itself; 0 for most.
        share: the part that it does, where processes share its work out.
    """

    follows: ClassVar[Mapping[str, Side]] = {}
    in_parts: ClassVar[bool] = False
    constant: ClassVar[bool] = False
    foldable: ClassVar[bool] = False
    acts_on_input: ClassVar[bool] = False
    by_row: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    alone: ClassVar[str] = ""
    scalable: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.strength = 1.0
        self.only_in_training = False
        self.transposed = False
        self.front = 0
        self.heads = 0
        self.share: Share | None = None

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The changed output, given the base's input `x` and output `y`, and the base itself."""

    def inward(self, x: Tensor, base: nn.Module) -> Tensor:
        """The changed input, where `acts_on_input`; what acts later on this module sees it changed."""
        return x

    @property
    def acts(self) -> bool:
        """Whether it changes anything just now, in this process."""
        return self.enabled and self.strength != 0 and not self._aside

    @property
    def _aside(self) -> bool:
        """Whether another process adds what this would."""
        share = self.share
        return self.constant and share is not None and share.of == "in" and share.part > 0

    def shared_out(self, share: Share) -> None:
        """From now on it does this part of its work."""
        self.share = share

    def listens(self) -> Sequence[nn.Module]:
        """The modules, beside the one it is a child of, that it has hooks on."""
        return ()

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The output `y` and `strength` times the change of it, where that is not once."""
        before = y.clone()  # a change may be written into the output itself
        return before + self.strength * (self(x, y, base) - before)

    def scaled_inward(self, x: Tensor, base: nn.Module) -> Tensor:
        """The input and `strength` times the change of it, where that is not once."""
        return x + self.strength * (self.inward(x, base) - x)

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Gives the parameters their starting values; equal seeds give equal values on any machine."""

    def hooks(self, module: nn.Module, key: str) -> Sequence[Removable]:
        """Makes the child `key` of `module`, which this is, act. For one that acts otherwise than at a map."""
        found: list[Removable] = [module.register_forward_hook(_After(key))]
        if self.acts_on_input:
            found.append(module.register_forward_pre_hook(_Before(key)))
        return found

    @property
    def is_low_rank(self) -> bool:
        """Whether all that it does just now to a linear is to add s B A x, and to set `lengths`.

        Asked also where its tensors are shared out among processes, so it looks at none of them.
        """
        return False

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        """A (r, in), B (out, r) and s, where it `is_low_rank`."""
        raise TypeError(f"{type(self).__name__} is no low-rank change")

    def lengths(self, base: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Lengths m (out,) that it gives the rows of the sum of W and s B A, and those n that they have; None: none.

        Args:
            base: the linear, of a weight in bf16 that the kernels in C++ multiply.
        """
        return None

    def weights(self) -> Mapping[str, Delta]:
        """The module's own tensors that are folded into, each with the child that changes it."""
        return {"weight": self}

    def weight_delta(self) -> Tensor:
        """What is added to the base's weight, as (out, in), in fp32 or wider, in memory of its own.

        Raises:
            TechniqueError: where the change is none that is added.
        """
        raise TechniqueError(f"{type(self).__name__} cannot be folded into a weight")

    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """The weight (out, in) of the plain map that does what the base and this do together.

        Args:
            weight_OI: in fp32 or wider, however the base stores it; it may be written into.

        Raises:
            TechniqueError: where the mathematics does not allow it.
        """
        change_OI = self.weight_delta()
        if change_OI.shape != weight_OI.shape:
            raise TechniqueError(
                "the change has another shape than the weight",
                got=tuple(change_OI.shape),
                wanted=tuple(weight_OI.shape),
            )
        return change_OI.to(weight_OI.dtype).add_(weight_OI)

    def fold_bias(self, bias_O: Tensor | None) -> Tensor | None:
        """Its bias (out,), in fp32 or wider; None where it has none."""
        return bias_O

    @torch.no_grad()
    def scaled_weight(self, weight_OI: Tensor) -> Tensor:
        """`fold_weight` with `strength` times the change."""
        if self.strength == 1:
            return self.fold_weight(weight_OI)
        before = weight_OI.clone()
        return before.add_(self.fold_weight(weight_OI).sub_(before), alpha=self.strength)

    @torch.no_grad()
    def scaled_bias(self, bias_O: Tensor | None) -> Tensor | None:
        """`fold_bias` with `strength` times the change."""
        if self.strength == 1:
            return self.fold_bias(bias_O)
        before = None if bias_O is None else bias_O.clone()
        after = self.fold_bias(bias_O)
        if after is None or before is None:
            return None if after is None else after * self.strength
        return before.add_(after - before, alpha=self.strength)

    def counts(self, strength: float) -> None:
        """From now on its change counts `strength` times."""
        self.strength = strength

    def refused_beside(self, others: Sequence[Delta]) -> str:
        """Why it cannot act beside others of its kind that are at its place already, in words; empty where it can."""
        return self.alone if others else ""

    def origin(self) -> Delta:
        """The child whose change this repeats at the other end of a tied weight; itself for most."""
        return self

    def silent_at_start(self) -> frozenset[str]:
        """Parameters whose gradient is exactly zero at the first step, by construction."""
        return frozenset()

    def silent_at_times(self) -> frozenset[str]:
        """Parameters whose gradient is zero in a step whose rows have nothing for them."""
        return frozenset()


class _After:
    """Calls the child of that name. Looks it up in the module it is given, so that a deep copy uses its own child."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        delta = getattr(module, self.key)
        if not delta.acts:
            return output
        acting = delta if delta.strength == 1 else delta.scaled
        return acting(args[0], output, module)


def acts_after(hook: object, module: nn.Module) -> Delta | None:
    """The child of a module whose hook this is; None for the hook of somebody else."""
    return getattr(module, hook.key) if isinstance(hook, _After) else None


class _Before:
    """The same for what the module is given."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        delta = getattr(module, self.key)
        if not delta.acts:
            return args
        inward = delta.inward if delta.strength == 1 else delta.scaled_inward
        return (inward(args[0], module), *args[1:])


class Technique(Frozen, ABC):
    """A frozen value that says how to change a model; the same object is settings, documentation and YAML."""

    key: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Lists a technique's own settings before those it shares with others, in help and documentation."""
        fields = cls.__pydantic_fields__
        own = {name: fields.pop(name) for name in list(fields) if name in cls.__annotations__}
        shared = dict(fields)
        fields.clear()
        fields.update({**own, **shared})

    @abstractmethod
    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """Changes the structure only: works on the meta device, sets no values.

        Args:
            model: a Transformers model whose parameters the caller has frozen.
            undoable: keep a copy of each base tensor that is trained in place, so that undo can restore it.
        """

    def told(self, tokenizer: Any) -> Technique:
        """The same value with what only a tokenizer knows filled in; most ask for nothing."""
        return self

    def columns(self) -> tuple[str, ...]:
        """Columns of the user's training rows that this reads, beside what rows are made from; none for most."""
        return ()

    def init(self, edit: Edit, *, seed: int) -> None:
        """Gives the attached parameters their starting values, once the base's weights are there."""
        for name, delta in edit.deltas.items():
            delta.reset(seed_of(seed, name))

    def start_reads(self, model: nn.Module) -> Reads:
        """What of the base `init` reads."""
        return "nothing"

    def lr_scale(self, name: str) -> float:
        """Learning rate of the trainable tensor `name`, as a multiple of the run's."""
        return 1.0

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """What this does in the training loop; nothing for most.

        Args:
            edit: of the model, with the children of other techniques too; see `Edit.deltas_of`.
            total_steps: of the whole run.
        """
        return Seams()

    def opening(self, edit: Edit, loss: Callable[[], float]) -> list[str]:
        """What this makes of the model as a run begins, measured, in lines; nothing for most.

        Args:
            edit: of the model.
            loss: measures the mean loss of the first rows, in evaluation mode and without gradients, in nats.
        """
        return []

    def outcome(self, edit: Edit) -> list[str]:
        """What training made of this beside the values, in lines for its end; nothing for most."""
        return []


def front_of(model: nn.Module) -> int:
    """How many places what acts in a model puts in front of every row, before the row's own first token.

    Where rows lie packed, whoever packs them leaves the places free: place i of a row holds the id -(1 + i).
    """
    return sum(m.front for m in model.modules() if isinstance(m, Delta) and m.acts)


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
