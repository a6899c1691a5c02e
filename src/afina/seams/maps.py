"""The linear maps of a model, and the modules that hold attention or fused experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from afina.seams.kinds import MapKind, features, map_kind
from afina.seams.stack import blocks
from afina.tree import Delta

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


def map_sites(model: nn.Module) -> list[MapSite]:
    """Every linear, `Conv1D` and embedding of the model itself; what techniques attached is left out."""
    where = {block.name: block.index for block in blocks(model)}
    attached = {n for n, m in model.named_modules() if isinstance(m, Delta)}
    sites: list[MapSite] = []
    for name, module in model.named_modules():
        if any(name == a or name.startswith(f"{a}.") for a in _parents(name) & attached):
            continue
        kind = map_kind(module)
        if kind is None:
            continue
        block = next((where[p] for p in _parents(name) if p in where), None)
        sites.append(MapSite(name, module, kind, block, *features(module, kind)))
    return sites


def _parents(name: str) -> set[str]:
    pieces = name.split(".")
    return {".".join(pieces[: i + 1]) for i in range(len(pieces))}


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
