"""IA3: keys, values and the feed-forward's inner activations are rescaled, each feature by a factor that is learnt.

    key and value:        y = l ∘ (W x + b)
    feed-forward's last:  y = W (l ∘ x) + b

Each l starts at one, so the model starts as the base, bit for bit. Both are changes of W and b and can be merged: rows
times l and b times l, or columns times l.

Where a model keeps query, key and value as one map (GPT-2's `c_attn`), all of its outputs are rescaled, as PEFT does;
where the experts of a mixture are fused tensors, their inner activations are not reached.

Legend: W (out × in) frozen weight, b bias, x input, l (out or in) factors, ∘ feature by feature.

Source: Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning",
arXiv 2205.05638, section 3.3, whose places are the defaults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError, counted
from afina.techniques.maps import OnMaps
from afina.tree import Delta, Edit, Side, match

# Names under which models keep the key and value projections, alone or fused with the query.
KEY_VALUE = (
    "k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "key_proj", "value_proj", "c_attn", "query_key_value",
    "qkv_proj", "Wqkv", "k", "v",
)  # fmt: skip


class IA3(OnMaps):
    """Learnt factors on the outputs of keys and values, and on the inputs of each feed-forward's last linear.

    Each pattern is a module's name, its last part (`k_proj`), or a glob; it must match something.
    """

    key: ClassVar[str] = "ia3"

    target: tuple[str, ...] = Field(
        default=("key-value",),
        description="patterns of maps whose outputs are rescaled, or a preset: key-value, all-linear, attention",
    )
    feedforward: tuple[str, ...] = Field(
        default=("last-linear",),
        description="patterns of maps whose inputs are rescaled, or the preset last-linear: each feed-forward's last",
    )

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: when a pattern matches nothing, or nothing is left to rescale.
        """
        inward = self._inward(model)
        with Edit(model, [self]).whole() as edit:
            for site in self.sites(model):
                made = IA3In(site) if site.name in inward else IA3Out(site)
                edit.attach(site.name, self, made)
            self.train_whole(edit, undoable=undoable)
        experts = seams.expert_modules(model)
        if experts and "last-linear" in self.feedforward:
            edit.warnings.append(
                f"{counted(len(experts), 'group')} of fused experts ({experts[0]}, …) are not rescaled: they are "
                "tensors and not linears"
            )
        return edit

    def chosen(self, model: nn.Module, sites: list[seams.MapSite]) -> set[str]:
        """See `OnMaps.chosen`: the maps of both kinds."""
        return super().chosen(model, sites) | self._inward(model)

    def _targets(self, sites: list[seams.MapSite], pattern: str) -> list[str]:
        sites = [site for site in sites if site.kind != "embedding"]
        if pattern != "key-value":
            return super()._targets(sites, pattern)
        inside = [s.name for s in sites if s.block is not None]
        found = [name for name in inside if _tail(name) in KEY_VALUE]
        if not found:
            raise TechniqueError(
                "the preset 'key-value' found no key or value projection",
                got=", ".join(sorted({_tail(name) for name in inside})),
                cure="name the modules in ia3.target",
            )
        return found

    def _inward(self, model: nn.Module) -> set[str]:
        """Names of the maps whose inputs are rescaled."""
        sites = [site for site in seams.map_sites(model) if site.kind != "embedding"]
        patterns = [pattern for pattern in self.feedforward if pattern != "last-linear"]
        found = set(match([s.name for s in sites], patterns, setting="ia3.feedforward"))
        if "last-linear" in self.feedforward:
            seams.require_stack(model, "ia3.feedforward: last-linear")
            found |= set(last_linears(model))
        return found


def last_linears(model: nn.Module) -> list[str]:
    """Names of the last linear of each block's feed-forward: what leads back from its inner width.

    It is the last linear of the block that belongs to no attention and leads to the width that the block's maps read;
    in a list of experts, that of each. A block whose feed-forward is fused tensors has none.
    """
    attention = seams.attention_modules(model)
    last: dict[tuple[str, str], str] = {}
    sites = [site for site in seams.map_sites(model) if site.kind != "embedding"]
    for block in seams.blocks(model):
        start = f"{block.name}."
        inside = [site for site in sites if site.name.startswith(start)]
        width = Counter(site.in_features for site in inside).most_common(1)[0][0]
        for site in (s for s in inside if s.out_features == width):
            pieces = site.name.removeprefix(start).split(".")
            beside = any(site.name.startswith(f"{name}.") for name in attention)
            if beside or any("att" in piece.lower() for piece in pieces[:-1]):
                continue
            expert = next(
                (piece for piece in pieces if piece.isdigit() and "experts" in pieces), ""
            )
            last[block.name, expert] = site.name
    return list(last.values())


def _tail(name: str) -> str:
    return name.rpartition(".")[2]


# --- module ----------------------------------------------------------------------------------------------------


class IA3Out(Delta):
    """The factors l of a map's outputs, as (out, 1), in fp32 whatever the base's dtype (fp64 beside an fp64 base)."""

    follows: ClassVar[Mapping[str, Side]] = {"l": "out"}
    foldable: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True

    def __init__(self, site: seams.MapSite) -> None:
        super().__init__()
        self.transposed = site.kind != "linear"
        self.l = _ones(site, site.out_features, 1)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """l ∘ y, rounded once."""
        return (y * self.l.flatten()).to(y.dtype)

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """(1 + strength · (l - 1)) ∘ y, rounded once."""
        return (y * torch.lerp(torch.ones_like(self.l), self.l, self.strength).flatten()).to(
            y.dtype
        )

    def reset(self, seed: int) -> None:
        """All one."""
        nn.init.ones_(self.l)

    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """Each row times its factor."""
        return weight_OI.mul_(self.l.detach())

    def fold_bias(self, bias_O: Tensor | None) -> Tensor | None:
        """The bias times l."""
        return None if bias_O is None else bias_O.mul_(self.l.detach().flatten())


class IA3In(Delta):
    """The factors l of a map's inputs, as (1, in)."""

    follows: ClassVar[Mapping[str, Side]] = {"l": "in"}
    foldable: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    acts_on_input: ClassVar[bool] = True

    def __init__(self, site: seams.MapSite) -> None:
        super().__init__()
        self.transposed = site.kind != "linear"
        self.l = _ones(site, 1, site.in_features)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The output as it is."""
        return y

    def inward(self, x: Tensor, base: nn.Module) -> Tensor:
        """l ∘ x, rounded once."""
        return (x * self.l.flatten()).to(x.dtype)

    def scaled_inward(self, x: Tensor, base: nn.Module) -> Tensor:
        """(1 + strength · (l - 1)) ∘ x, rounded once."""
        return (x * torch.lerp(torch.ones_like(self.l), self.l, self.strength).flatten()).to(
            x.dtype
        )

    def reset(self, seed: int) -> None:
        """All one."""
        nn.init.ones_(self.l)

    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """Each column times its factor."""
        return weight_OI.mul_(self.l.detach())


def _ones(site: seams.MapSite, rows: int, columns: int) -> nn.Parameter:
    weight = site.module.get_parameter("weight")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return nn.Parameter(torch.ones(rows, columns, dtype=dtype, device=weight.device))
