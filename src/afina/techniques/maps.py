"""What methods that change chosen maps of a model share: which maps, and which whole modules train beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from pydantic import Field, model_validator
from torch import nn

from afina import seams
from afina.errors import TechniqueError
from afina.tree import Edit, Technique, match, matches

Value = TypeVar("Value")


class Beside(Technique):
    """A method beside which whole modules of the base can be trained; a classifier's head always is."""

    modules_to_save: tuple[str, ...] = Field(
        default=(), description="patterns of whole modules trained beside, such as lm_head"
    )

    def train_whole(self, edit: Edit, *, undoable: bool) -> None:
        """Lets the modules that `modules_to_save` names train where they are."""
        for name in self.whole_modules(edit.model):
            # Of several methods in one run the first trains what they have in common.
            if not edit.model.get_parameter(name).requires_grad:
                edit.train_in_place(name, self, undoable=undoable)

    def whole_modules(self, model: nn.Module) -> list[str]:
        """Names of the base tensors that `modules_to_save` trains, each tied tensor once, under its own name."""
        wanted = {
            id(p) for module in self._whole(model) for p in model.get_submodule(module).parameters()
        }
        return [name for name, p in model.named_parameters() if id(p) in wanted]

    def _whole(self, model: nn.Module) -> list[str]:
        setting = f"{self.key}.modules_to_save"
        named = match(seams.holders(model), self.modules_to_save, setting=setting)
        return list(dict.fromkeys([*named, *seams.task_head(model)]))


class OnMaps(Beside):
    """A method on linears, `Conv1D`s and embeddings, chosen by patterns.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something.
    """

    key: ClassVar[str]

    target: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="patterns, or a preset: all-linear (all linears of the blocks), attention (q and v)",
    )
    exclude: tuple[str, ...] = Field(default=(), description="patterns of targets to leave alone")
    layers: tuple[int, ...] | str | None = Field(
        default=None, description="block numbers, as a list or '0-5,28,-1'; None is all"
    )

    @model_validator(mode="after")
    def _check_layers(self) -> OnMaps:
        seams.parse_layers(self.layers)
        return self

    def sites(self, model: nn.Module) -> list[seams.MapSite]:
        """The maps this value changes in `model`.

        Raises:
            TechniqueError: a pattern matches nothing, or nothing is left to change.
        """
        sites = seams.map_sites(model)
        presets = [preset for preset in ("all-linear", "attention") if preset in self.target]
        if presets:
            seams.require_stack(model, f"{self.key}.target: {presets[0]}")
        chosen = self.chosen(model, sites)
        chosen -= set(match(chosen, self.exclude, setting=f"{self.key}.exclude"))
        chosen -= set(self._whole(model))
        layers = seams.chosen_layers(model, self.layers, setting=f"{self.key}.layers")
        # What was named outside the blocks (an embedding, the head) is not a matter of layers.
        chosen = {s.name for s in sites if s.name in chosen and s.block in {*layers, None}}
        if not chosen:
            raise TechniqueError(
                f"{self.key}: nothing is left to change",
                got=f"target {self.target}, exclude {self.exclude}, layers {self.layers}",
                cure="widen target or layers, or exclude less",
            )
        return [site for site in sites if site.name in chosen]

    def chosen(self, model: nn.Module, sites: list[seams.MapSite]) -> set[str]:
        """Names of the maps that the settings ask for, those left out by others among them."""
        return {name for pattern in self.target for name in self._targets(sites, pattern)}

    def _targets(self, sites: list[seams.MapSite], pattern: str) -> list[str]:
        inside = [s.name for s in sites if s.block is not None and s.kind != "embedding"]
        if pattern == "all-linear":
            return inside
        if pattern == "attention":
            found = [n for n in inside if n.rsplit(".", 1)[-1] in seams.QUERY_VALUE]
            if not found:
                raise TechniqueError(
                    "the preset 'attention' found no query or value projection",
                    got=", ".join(sorted({n.rsplit(".", 1)[-1] for n in inside})),
                    cure=f"name the modules in {self.key}.target",
                )
            return found
        return match([s.name for s in sites], [pattern], setting=f"{self.key}.target")


def per_site(
    names: list[str], patterns: Mapping[str, Value], default: Value, setting: str
) -> dict[str, Value]:
    """The value of each site: that of the last pattern that fits its name, or the default.

    Raises:
        TechniqueError: a pattern matches nothing.
    """
    match(names, patterns, setting=setting)
    chosen = dict.fromkeys(names, default)
    for pattern, value in patterns.items():
        chosen.update({name: value for name in names if matches(name, pattern)})
    return chosen


def refuse_large_ranks(key: str, sites: list[seams.MapSite], ranks: Mapping[str, int]) -> None:
    """Raises for a rank above what its map can have.

    Raises:
        TechniqueError: naming the first.
    """
    large = [s for s in sites if ranks[s.name] > min(s.in_features, s.out_features)]
    if large:
        site = large[0]
        raise TechniqueError(
            f"{key}.rank exceeds the map it changes ({site.name} and {len(large) - 1} more)",
            got=ranks[site.name],
            wanted=f"at most {min(site.in_features, site.out_features)}",
            cure="lower rank, or set rank_pattern for the small modules",
        )
