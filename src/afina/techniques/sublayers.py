"""The sublayers of a model's blocks: what each adds to the residual stream, and what it is computed from.

Found by structure, as the sites of `seams` are. An attention is what owns a query projection; what is left of a
block, maps or fused experts, is its feed-forward. A sublayer that is one module (Llama's `mlp`, a mixture of experts)
is taken whole. Where its last map shares a module with the norm behind the sum (BERT), or where there is no module of
it (OPT), that last map is taken. Where a norm of its own lies between a sublayer and the sum (Gemma 2, OLMo 2), that
norm is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from afina import seams

Role = Literal["attention", "cross-attention", "feed-forward"]

_INWARD = re.compile(r"(q|k|v|kv|qkv|query|key|value|in|c_attn|q_attn|Wqkv|Wq|Wk|Wv)(_.*)?")
"""The last names of maps that lead into attention."""

_OF_A_SCORE = re.compile(r"(q|k|query|key)_?(layer)?norm", re.IGNORECASE)
"""Norms of queries and keys, which are none of the sublayer's output."""

_BEFORE_THE_SUM = {
    "attention": ("post_attention_layernorm", "post_self_attn_layernorm", "post_attention_norm"),
    "feed-forward": ("post_feedforward_layernorm", "post_mlp_layernorm", "post_ffw_norm"),
}
"""Norms of a sublayer's output. The first name is, in models without any of the second row, that of the norm in front
of the feed-forward."""


@dataclass(frozen=True)
class Sublayer:
    """One summand of a block's residual stream.

    Attributes:
        name, module: its output, the first of several, is what is added.
        role: cross-attention is every attention of a block behind the first.
        block: index of the block in its stack.
        reader: what the sublayer is computed from is the first thing that this module is given; `module` itself where
            the sublayer is one module.
        width: of the stream.
    """

    name: str
    module: nn.Module
    role: Role
    block: int
    reader: nn.Module
    width: int


def sublayers(model: nn.Module) -> list[Sublayer]:
    """Every sublayer of every block that is found, in the order of the model.

    A block of another kind of mixing (a state space, a convolution) has no attention here.
    """
    maps = [site for site in seams.map_sites(model) if site.kind != "embedding"]
    experts = seams.expert_modules(model)
    owners = [*seams.attention_modules(model), *_compressed(maps)]
    found: list[Sublayer] = []
    for block in seams.blocks(model):
        found += _Block(
            model,
            block,
            [site for site in maps if _inside(site.name, block.name)],
            [name for name in owners if _inside(name, block.name)],
            [name for name in experts if _inside(name, block.name)],
        ).sublayers()
    return found


class _Block:
    """The maps of one block, and what they make up."""

    def __init__(
        self,
        model: nn.Module,
        block: seams.Block,
        maps: list[seams.MapSite],
        owners: list[str],
        experts: list[str],
    ) -> None:
        self.model, self.block, self.maps, self.experts = model, block, maps, experts
        self.owners = [o for o in owners if not any(_inside(o, other) for other in owners)]

    def sublayers(self) -> list[Sublayer]:
        """Its attentions, then its feed-forward."""
        found: list[Sublayer] = []
        units: list[str] = []
        for owner in self.owners:
            width = next(m.in_features for m in self.maps if _inside(m.name, owner))
            unit, last = self._attention(owner, width)
            units.append(unit)
            if last is not None:
                role: Role = "attention" if len(units) == 1 else "cross-attention"
                first = next(m for m in self.maps if _inside(m.name, unit))
                found.append(self._made(role, unit, first, last, width))
        rest = [m for m in self.maps if not any(_inside(m.name, unit) for unit in units)]
        return [*found, *self._feed_forward(rest, found)]

    def _attention(self, owner: str, width: int) -> tuple[str, seams.MapSite | None]:
        """The smallest module that holds an attention and its last map, and that map."""
        unit = owner
        while unit != self.block.name:
            ends = [
                m
                for m in self.maps
                if _inside(m.name, unit)
                and m.out_features == width
                and not _INWARD.fullmatch(m.name.rpartition(".")[2])
            ]
            if ends:
                return unit, ends[-1]
            unit = unit.rpartition(".")[0]
        return owner, None

    def _feed_forward(self, rest: list[seams.MapSite], before: list[Sublayer]) -> list[Sublayer]:
        experts = [name for name in self.experts if not any(name == s.name for s in before)]
        if experts:
            # The router and shared experts are beside them, in the child of the block that adds them all up.
            unit = ".".join(experts[0].split(".")[: self.block.name.count(".") + 2])
            width = before[0].width if before else _hidden_size(self.model)
            return [] if width is None else [self._made("feed-forward", unit, None, None, width)]
        if not rest:
            return []
        width = before[0].width if before else rest[-1].out_features
        firsts = [m for m in rest if m.in_features == width]
        ends = [m for m in rest if m.out_features == width]
        if not firsts or not ends:
            return []
        unit = _common(m.name for m in rest)
        return [self._made("feed-forward", unit, firsts[0], ends[-1], width)]

    def _made(
        self,
        role: Role,
        unit: str,
        first: seams.MapSite | None,
        last: seams.MapSite | None,
        width: int,
    ) -> Sublayer:
        reader, name = self.model.get_submodule(unit), unit
        whole = _inside(unit, self.block.name) and not _closes(reader, width)
        if not whole and first is not None and last is not None:
            reader, name = first.module, last.name
        norm = self._own_norm(role)
        name = norm or name
        module = self.model.get_submodule(name)
        return Sublayer(name, module, role, self.block.index, reader, width)

    def _own_norm(self, role: Role) -> str | None:
        """The norm between this sublayer and the sum."""
        children = {name for name, _ in self.block.module.named_children()}
        if role == "cross-attention" or not children & set(_BEFORE_THE_SUM["feed-forward"]):
            return None
        names = [name for name in _BEFORE_THE_SUM[role] if name in children]
        return f"{self.block.name}.{names[0]}" if names else None


def _compressed(maps: list[seams.MapSite]) -> list[str]:
    """Attentions whose queries are made in two steps (DeepSeek)."""
    return [m.name.rpartition(".")[0] for m in maps if m.name.endswith(".q_a_proj")]


def _inside(name: str, module: str) -> bool:
    """Whether `name` is of something in `module`."""
    return name.startswith(f"{module}.")


def _common(names: Iterable[str]) -> str:
    """The smallest module that holds all of these."""
    shared: list[str] = []
    for level in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _closes(module: nn.Module, width: int) -> bool:
    """Whether a module holds a norm of the stream, behind the sum or in front of its last map."""
    every = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
    return any(
        "norm" in type(child).__name__.lower()
        and any(p.dim() == 1 and p.shape[0] == width for p in child.parameters(recurse=False))
        and not _OF_A_SCORE.fullmatch(name.rpartition(".")[2])
        for name, child in every
    )


def _hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    return None if config is None else getattr(config.get_text_config(), "hidden_size", None)
