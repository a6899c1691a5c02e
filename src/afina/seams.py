"""The sites of any Transformers model: where a technique can act. Found by structure, not by lists of architectures.

| site | what is there |
|---|---|
| map | a linear, `Conv1D` or embedding |
| attention | the attention modules that go through Transformers' `AttentionInterface` |
| experts | fused three-dimensional expert weights |
| stack | the lists of blocks |
| input | the embeddings before the first block |
| head | final norm and output projection or classifier |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from afina.errors import ModelError, TechniqueError
from afina.ops.packed import dense

MapKind = Literal["linear", "conv1d", "embedding"]

# Names under which models keep the query and value projections, alone or fused with the key.
QUERY_VALUE = (
    "q_proj", "v_proj", "query", "value", "q_lin", "v_lin", "c_attn", "query_key_value",
    "qkv_proj", "Wqkv", "in_proj_qkv", "q", "v",
)  # fmt: skip


@dataclass(frozen=True)
class MapSite:
    """One linear map: `out_features` numbers from `in_features` (for an embedding: from a vocabulary).

    Attributes:
        name: full name in the model.
        module: the module itself.
        kind: how its weight lies: linear (out, in); conv1d (in, out); embedding (vocabulary, width).
        block: index in its stack, or None outside the blocks.
    """

    name: str
    module: nn.Module
    kind: MapKind
    block: int | None
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Block:
    """One repeated layer of a stack."""

    name: str
    module: nn.Module
    index: int
    stack: str


@dataclass(frozen=True)
class HeadSite:
    """What follows the last block.

    Attributes:
        name, module: the output projection; None for a bare encoder.
        tied: whether it shares the embedding's weight.
    """

    name: str | None
    module: nn.Module | None
    tied: bool


def require_model(model: Any) -> None:
    """Raises for what is no model, such as the pair that `afina.load` gives.

    Raises:
        ModelError: see above.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "this is no model",
            got=type(model).__name__,
            wanted="a model of Transformers",
            cure="take the pair apart: model, tokenizer = afina.load(NAME)"
            if isinstance(model, tuple)
            else "model, tokenizer = afina.load(NAME)",
        )


def holders(model: nn.Module) -> list[str]:
    """Names of the modules that hold parameters, themselves or further down; the model itself left out."""
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    return [name for name, module in named if name and any(True for _ in module.parameters())]


def stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of blocks: outermost `ModuleList`s of at least one module, all of one class that holds a linear map.

    Encoder-decoder models have two; a list of experts inside a block is not one.
    """
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        same = len({type(child) for child in module}) == 1
        deep = all(any(_map_kind(m) for m in child.modules() if m is not child) for child in module)
        if same and deep:
            found[name] = module
    return found


def require_stack(model: nn.Module, wanted_by: str) -> None:
    """Raises where no stack of blocks is found, and says what was found instead.

    Args:
        model: any.
        wanted_by: the setting that needs blocks.

    Raises:
        TechniqueError: there are none, or they are of several kinds.
    """
    if stacks(model):
        return
    mixed = {
        name: sorted({type(child).__name__ for child in module})
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) > 1
    }
    name, kinds = next(iter(mixed.items()), ("", []))
    raise TechniqueError(
        f"{wanted_by}: no stack of equal blocks is found in this model",
        got=f"{name} of {', '.join(kinds)}" if kinds else type(model).__name__,
        wanted="a list of blocks of one class",
        cure="name the modules themselves, in lora.target or full.target, and leave layers out",
    )


def blocks(model: nn.Module) -> list[Block]:
    """Every block of every stack, in the order of the model."""
    return [
        Block(f"{stack}.{i}", module, i, stack)
        for stack, modules in stacks(model).items()
        for i, module in enumerate(modules)
    ]


Layers = tuple[int, ...] | str | None

MOST_BLOCKS = 100_000
"""No block has a higher number: a range with a slip in it must not fill the memory."""


def parse_layers(layers: Layers) -> tuple[int, ...] | None:
    """Block numbers from a list or from text such as '0-5,28,-1'; None means all.

    Raises:
        ValueError: when the text is not of that form.
    """
    if layers is None or not isinstance(layers, str):
        return layers
    numbers: list[int] = []
    for piece in layers.split(","):
        found = re.fullmatch(r"\s*(-?\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if not found:
            raise ValueError(
                f"layers: cannot read {piece!r}; write numbers and ranges, '0-5,28,-1'"
            )
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if last < first:
            raise ValueError(f"layers: {piece!r} runs backwards")
        if last > MOST_BLOCKS:
            raise ValueError(f"layers: {piece!r} is more blocks than any model has")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def chosen_layers(model: nn.Module, layers: Layers, *, setting: str) -> set[int]:
    """The block indices that `layers` names (negative ones count from the end); all for None.

    Raises:
        TechniqueError: when the model has no such block.
    """
    depth = max((block.index + 1 for block in blocks(model)), default=0)
    wanted = parse_layers(layers)
    if wanted is None:
        return set(range(depth))
    require_stack(model, setting)
    outside = [n for n in wanted if not -depth <= n < depth]
    if outside:
        raise TechniqueError(
            f"{setting}: this model has no such block",
            got=", ".join(map(str, outside)),
            wanted=f"0 to {depth - 1}, or negative numbers from the end",
        )
    return {n % depth for n in wanted}


def map_sites(model: nn.Module) -> list[MapSite]:
    """Every linear, `Conv1D` and embedding of the model itself; what techniques attached is left out."""
    from afina.tree import Delta

    where = {block.name: block.index for block in blocks(model)}
    attached = {n for n, m in model.named_modules() if isinstance(m, Delta)}
    sites: list[MapSite] = []
    for name, module in model.named_modules():
        if any(name == a or name.startswith(f"{a}.") for a in _parents(name) & attached):
            continue
        kind = _map_kind(module)
        if kind is None:
            continue
        block = next((where[p] for p in _parents(name) if p in where), None)
        sites.append(MapSite(name, module, kind, block, *_features(module, kind)))
    return sites


def _parents(name: str) -> set[str]:
    pieces = name.split(".")
    return {".".join(pieces[: i + 1]) for i in range(len(pieces))}


def _map_kind(module: nn.Module) -> MapKind | None:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    # Transformers' Conv1D is a linear map whose weight is stored (in, out); asked by shape, not by import.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "conv1d"
    return None


def _features(module: nn.Module, kind: MapKind) -> tuple[int, int]:
    weight = module.get_parameter("weight")
    first, second = weight.shape
    return (first, second) if kind in ("conv1d", "embedding") else (second, first)


def weight_of(module: nn.Module) -> Tensor:
    """The weight that a map computes with, as it is stored, without its gradient: what to read a base's values by.

    Args:
        module: a linear, `Conv1D` or embedding; a quantised weight is computed back.

    Returns:
        A floating-point tensor: of a linear (out, in), of a `Conv1D` (in, out). To be read and not written, for it may
        be the model's own.
    """
    return dense(module.get_parameter("weight"))


def attention_modules(model: nn.Module) -> list[str]:
    """Names of the modules that hold attention: those that own a query projection, fused or not."""
    owners = {
        site.name.rsplit(".", 1)[0]
        for site in map_sites(model)
        if site.block is not None
        and site.name.rsplit(".", 1)[-1] in QUERY_VALUE
        and site.name.rsplit(".", 1)[-1] not in ("v_proj", "value", "v_lin", "v")
    }
    return [name for name, _ in model.named_modules() if name in owners]


def expert_modules(model: nn.Module) -> list[str]:
    """Names of the modules that hold fused experts: parameters with three dimensions, the first the expert."""
    return [
        name
        for name, module in model.named_modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
        and not isinstance(module, nn.Conv1d)
    ]


def input_embedding(model: nn.Module) -> str:
    """Name of the token embedding.

    Raises:
        TechniqueError: when the model has none.
    """
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter else None
    for name, module in model.named_modules():
        if module is embedding and embedding is not None:
            return name
    raise TechniqueError("this model has no token embedding", got=type(model).__name__)


def head(model: nn.Module) -> HeadSite:
    """The output projection or classifier."""
    getter = getattr(model, "get_output_embeddings", None)
    output = getter() if getter else None
    if output is None:
        # A classifier: the last linear outside the blocks, as `score` or `classifier`.
        sites = [s for s in map_sites(model) if s.block is None and s.kind == "linear"]
        if not sites or not hasattr(model, "num_labels") or not classifies(model):
            return HeadSite(None, None, tied=False)
        return HeadSite(sites[-1].name, sites[-1].module, tied=False)
    name = next(n for n, m in model.named_modules() if m is output)
    shared = model.get_submodule(input_embedding(model)).get_parameter("weight")
    return HeadSite(name, output, tied=output.get_parameter("weight") is shared)


def classifies(model: nn.Module) -> Literal["rows", "tokens"] | None:
    """What a classifier of text gives classes to; None for any other model."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "rows"
    return "tokens" if name.endswith("ForTokenClassification") else None


def task_head(model: nn.Module) -> list[str]:
    """Names of the modules that a classifier has beside its trunk: those that a checkpoint of another task lacks."""
    trunk = getattr(model, "base_model", None)
    if classifies(model) is None or trunk is model:
        return []
    return [
        name
        for name, child in model.named_children()
        if child is not trunk and next(child.parameters(), None) is not None
    ]


def first_position(model: nn.Module) -> int:
    """The number that the model itself gives to a row's first position: 0, but behind the padding's in RoBERTa's kin.

    Those keep their padding's id as the position of padding, and count from the next number on.
    """
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def supports_rows(model: nn.Module) -> bool:
    """Whether attention can be told which row a token belongs to, which packing needs.

    True where the model takes its attention from Transformers' `AttentionInterface`; a model with recurrent or
    convolutional mixing beside it would still leak across rows, so those are refused. So are models that do not count
    positions from 0 (`first_position`), whose rows would lie elsewhere than where they were trained.
    """
    if not getattr(model, "_supports_attention_backend", False):
        return False
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or first_position(model):
        return False
    mixers = ("mamba", "ssm", "conv1d", "rwkv", "recurrent", "deltanet", "linear_attn", "shortconv")
    return not any(
        any(mark in type(m).__name__.lower() for mark in mixers) and type(m).__name__ != "Conv1D"
        for m in model.modules()
    )
