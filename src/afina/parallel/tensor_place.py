"""Where each tensor of a model lies when processes share its matrices out: a function of names and shapes alone.

| at a map cut along | what lies along that side (`Delta.follows`) | everything else of an adapter |
|---|---|---|
| out (columns) | cut: B, magnitudes, biases | whole: A |
| in (rows) | cut: A | whole: B, magnitudes, biases |

What is whole beside a part of a map has a part of its gradient in each process, for what it makes goes into parts that
are added up: these are summed over the processes once a step. What lies outside of shared maps has the whole gradient
in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from afina import seams
from afina.errors import ConfigError, TechniqueError
from afina.parallel.tensor_plan import WAY_OUT, Way
from afina.tree import Delta
from afina.tree.pieces import Box, Piece, Share, whole_box

CUT: Mapping[Way, tuple[str, int]] = {
    "columns": ("out", 0),
    "columns_joined": ("out", 0),
    "rows": ("in", 1),
    "rows_split": ("in", 1),
    "vocabulary": ("in", 0),
    "head": ("out", 0),
}
"""The side of a map that is cut, and the dimension of its weight that lies along it."""


@dataclass(frozen=True)
class Which:
    """One of the processes that share each matrix.

    Attributes:
        part: it, from 0.
        count: how many there are.
    """

    part: int
    count: int

    def span(self, whole: int) -> tuple[int, int]:
        """Where its part of so many begins and ends; they can be shared out evenly."""
        each = whole // self.count
        return self.part * each, (self.part + 1) * each

    def cut(self, shape: tuple[int, ...], dim: int) -> Box:
        """Its part of a tensor that is cut in one dimension."""
        box = list(whole_box(shape))
        box[dim] = self.span(shape[dim])
        return tuple(box)


@dataclass
class Placed:
    """Where the tensors of a model lie for one process.

    Attributes:
        pieces: of every parameter, by its first name.
        buffers: of those buffers of adapters that are cut.
        partial: names of parameters whose gradients each process has a part of, to be summed.
        shares: what children do a part of, by name.
    """

    pieces: dict[str, Piece] = field(default_factory=dict[str, Piece])
    buffers: dict[str, Piece] = field(default_factory=dict[str, Piece])
    partial: set[str] = field(default_factory=set[str])
    shares: dict[str, Share] = field(default_factory=dict[str, Share])


def placed(model: nn.Module, ways: Mapping[str, Way], which: Which) -> Placed:
    """Where each tensor of a model lies.

    Args:
        model: whole, on any device.
        ways: of its modules; see `tensor_plan.ways_of`.
        which: the process.

    Raises:
        ConfigError: something acts at a map that is shared out and cannot do a part of its work.
    """
    found = Placed()
    children = dict(_children(model))
    inside = tuple(f"{name}." for name in children)
    for name, parameter in model.named_parameters():
        if not name.startswith(inside):
            _place_base(found, model, ways, which, (name, parameter))
    for name, delta in children.items():
        _place_child(found, model, ways, which, (name, delta))
    return found


def _children(model: nn.Module) -> Iterator[tuple[str, Delta]]:
    """What techniques attached, without what is part of another child."""
    within: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Delta) and not name.startswith(tuple(within)):
            within.append(f"{name}.")
            yield name, module


def _place_base(
    found: Placed,
    model: nn.Module,
    ways: Mapping[str, Way],
    which: Which,
    named: tuple[str, Tensor],
) -> None:
    """A tensor of the model itself."""
    name, parameter = named
    owner, _, own = name.rpartition(".")
    shape, way = tuple(parameter.shape), ways.get(owner)
    experts = next((n for n, w in ways.items() if w == "experts" and name.startswith(f"{n}.")), "")
    box: Box | None = None
    if way is not None and way in CUT:
        side, dim = CUT[way]
        if own == "weight" or side == "out":
            box = which.cut(shape, dim)
    elif way == "experts" and len(shape) > 1 and shape[0] == _experts(model, owner):
        box = which.cut(shape, 0)
    _put(found, which, name, shape, box)
    if box is None and (way in CUT or way == "inside" or experts):
        found.partial.add(name)


def _put(found: Placed, which: Which, name: str, shape: tuple[int, ...], box: Box | None) -> None:
    """Notes a parameter's part; what all processes have whole counts once."""
    counted = box is not None or which.part == 0
    found.pieces[name] = Piece(shape, whole_box(shape) if box is None else box, counted)


def _experts(model: nn.Module, name: str) -> int:
    return int(getattr(model.get_submodule(name), "num_experts", 0))


def _place_child(
    found: Placed,
    model: nn.Module,
    ways: Mapping[str, Way],
    which: Which,
    named: tuple[str, Delta],
) -> None:
    """What a technique attached."""
    name, delta = named
    target = name.rpartition(".")[0]
    way = ways.get(target)
    _refuse_unfit(model, ways, name, delta)
    share = (
        _share(model, ways, target, which) if way else _share_of_heads(model, ways, delta, which)
    )
    for own, parameter in delta.named_parameters():
        shape, box = tuple(parameter.shape), None
        if share is not None:
            box = _box_of(delta, share, which, own, parameter)
            if box is None:
                found.partial.add(f"{name}.{own}")
        _put(found, which, f"{name}.{own}", shape, box)
    if share is None:
        return
    found.shares[name] = share
    for own, buffer in delta.named_buffers():
        box = _box_of(delta, share, which, own, buffer)
        if box is not None:
            found.buffers[f"{name}.{own}"] = Piece(tuple(buffer.shape), box)


def _share(model: nn.Module, ways: Mapping[str, Way], target: str, which: Which) -> Share:
    """The part of a module's work that is done here."""
    way, module = ways[target], model.get_submodule(target)
    if way == "experts":
        whole = _experts(model, target)
        return Share("experts", *which.span(whole), whole, which.part, which.count)
    side, dim = CUT[way]
    whole = module.get_parameter("weight").shape[dim]
    of = "out" if side == "out" else "in"
    return Share(of, *which.span(whole), whole, which.part, which.count)


def _share_of_heads(
    model: nn.Module, ways: Mapping[str, Way], delta: Delta, which: Which
) -> Share | None:
    """The heads of attention that are here, for what acts on each by itself; None where all are."""
    attention = tuple(f"{name}." for name in seams.attention_modules(model))
    cut = any(way == "columns" and name.startswith(attention) for name, way in ways.items())
    if not delta.heads or not cut:
        return None
    return Share("heads", *which.span(delta.heads), delta.heads, which.part, which.count)


def _box_of(delta: Delta, share: Share, which: Which, own: str, tensor: Tensor) -> Box | None:
    """This process's part of a child's tensor; None for all of it."""
    if share.of not in ("in", "out") or delta.follows.get(own) != share.of:
        return None
    dim = 0 if share.of == "out" else tensor.dim() - 1
    if tensor.shape[dim] != share.whole:
        raise TechniqueError(
            f"{type(delta).__name__}: a tensor does not lie along the side of the map that it follows",
            got=f"{own} {tuple(tensor.shape)}, {share.of} is {share.whole}",
        )
    return which.cut(tuple(tensor.shape), dim)


def _refuse_unfit(model: nn.Module, ways: Mapping[str, Way], name: str, delta: Delta) -> None:
    """Raises for a child that cannot act where processes share its module out."""
    target = name.rpartition(".")[0]
    way = ways.get(target)
    shared = {model.get_submodule(n) for n in ways}
    if way and (way == "inside" or not delta.in_parts):
        what = f"acts at {target}"
    elif any(module in shared for module in delta.listens()):
        what = "reads what a map is given"
    else:
        return
    raise ConfigError(
        f"parallel.tensor: {type(delta).__name__.removesuffix('Delta').lower()} {what}, which processes share out",
        got=name,
        wanted="what acts on parts of a map as on the whole: lora, dora, adalora, ia3, bitfit",
        cure=WAY_OUT,
    )


def marked(piece: Piece, total: object) -> Piece:
    """A piece that knows how to sum over the others; what is whole has none."""
    return piece if piece.whole else replace(piece, total=total)
