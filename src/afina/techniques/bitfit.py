"""BitFit: biases alone are trained; a map that has none gets one, which starts at zero.

    y = W x + b,    b <- b + db

Biases that the model has (of maps and norms) train where they are. Models such as Llama have none: there each chosen
map gets a child that adds one, so the model starts as the base, bit for bit, and undo takes it away again.

Legend: W (out × in) frozen weight, b (out) bias, x input.

Source: Ben Zaken, Ravfogel and Goldberg 2021, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based
Masked Language-models", arXiv 2106.10199, section 3: all biases of the encoder, those of its norms too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.techniques.maps import OnMaps
from afina.tree import Delta, Edit, Side, match, matches

NORMS = "norms"


class BitFit(OnMaps):
    """Trains biases: those that are there, and zero ones on maps that have none.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something.
    """

    key: ClassVar[str] = "bitfit"

    target: tuple[str, ...] = Field(
        default=("all-linear", NORMS),
        min_length=1,
        description="patterns of linears and norms, or a preset: all-linear, attention (q and v), norms (those that "
        "have biases)",
    )

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: when a pattern matches nothing, or nothing is left to train.
        """
        sites = {site.name: site for site in seams.map_sites(model)}
        with Edit(model, [self]).whole() as edit:
            for name in self.places(model):
                bias = getattr(model.get_submodule(name), "bias", None)
                if bias is None:
                    edit.attach(name, self, BitFitDelta(sites[name]))
                elif not bias.requires_grad:  # else another technique trains it
                    edit.train_in_place(f"{name}.bias", self, undoable=undoable)
            self.train_whole(edit, undoable=undoable)
        return edit

    def places(self, model: nn.Module) -> list[str]:
        """Names of the modules whose biases train, whether they have one yet or not.

        Raises:
            TechniqueError: a pattern matches nothing, or nothing is left.
        """
        sites = [site for site in seams.map_sites(model) if site.kind != "embedding"]
        norms = biased_norms(model)
        if self.target != (NORMS,):
            seams.require_stack(model, f"{self.key}.target")
        chosen: set[str] = set()
        for pattern in self.target:
            if pattern == NORMS:
                chosen |= set(norms)
            elif pattern in ("all-linear", "attention"):
                chosen |= set(self._targets(sites, pattern))
            else:
                names = [*(site.name for site in sites), *norms]
                chosen |= set(match(names, [pattern], setting=f"{self.key}.target"))
        chosen -= set(match(chosen, self.exclude, setting=f"{self.key}.exclude"))
        whole = tuple(f"{name}." for name in self._whole(model))
        layers = seams.chosen_layers(model, self.layers, setting=f"{self.key}.layers")
        found = [
            name
            for name in _modules(model)
            if name in chosen
            and not f"{name}.".startswith(whole)
            and self._in_layers(model, name, layers)
        ]
        if not found:
            raise TechniqueError(
                f"{self.key}: nothing is left to train",
                got=f"target {self.target}, exclude {self.exclude}, layers {self.layers}",
                cure="widen target or layers, or exclude less",
            )
        return found

    def _in_layers(self, model: nn.Module, name: str, layers: set[int]) -> bool:
        """Whether the module lies in these blocks; outside of all blocks, where it was named itself."""
        block = next((b for b in seams.blocks(model) if name.startswith(f"{b.name}.")), None)
        if block is not None:
            return block.index in layers
        return self.layers is None or any(matches(name, pattern) for pattern in self.target)


def biased_norms(model: nn.Module) -> list[str]:
    """Names of the modules, maps apart, that have a bias of one dimension: the norms."""
    maps = {site.name for site in seams.map_sites(model)}
    found: list[str] = []
    for name, module in _modules(model).items():
        own = dict(module.named_parameters(recurse=False))
        attached = any(isinstance(parent, Delta) for parent in (module, _parent(model, name)))
        if name not in maps and not attached and {"weight", "bias"} <= own.keys():
            found += [name] if own["bias"].dim() == 1 else []
    return found


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    whole: Any = model
    return dict(whole.named_modules())


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


# --- module ----------------------------------------------------------------------------------------------------


class BitFitDelta(Delta):
    """The bias of a map that has none, in fp32 whatever the base's dtype (fp64 beside an fp64 base)."""

    follows: ClassVar[Mapping[str, Side]] = {"bias": "out"}
    foldable: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    constant: ClassVar[bool] = True

    def __init__(self, site: seams.MapSite) -> None:
        super().__init__()
        self.transposed = site.kind != "linear"
        weight = site.module.get_parameter("weight")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.bias = nn.Parameter(torch.zeros(site.out_features, dtype=dtype, device=weight.device))

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """y + b, rounded once."""
        return (y + self.bias).to(y.dtype)

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """y + strength · b, rounded once."""
        return (y + self.bias * self.strength).to(y.dtype)

    def reset(self, seed: int) -> None:
        """Zero."""
        nn.init.zeros_(self.bias)

    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """The weight as it is."""
        return weight_OI

    def fold_bias(self, bias_O: Tensor | None) -> Tensor | None:
        """b, added to what others made of the map's bias."""
        own = self.bias.detach()
        return own.clone() if bias_O is None else bias_O.add_(own)
