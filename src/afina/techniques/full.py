"""Full fine-tuning: the model's own weights train, all of them or those of some blocks.

    W <- W + dW,    dW as large as W

Legend: W any weight of the base.

Source: the ordinary practice that the other techniques are measured against; training only the last blocks is
Lee et al. 2019, "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning", arXiv 1911.03090.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from torch import nn

from afina import seams
from afina.errors import TechniqueError
from afina.tree import Edit, Technique, match, matches


class Full(Technique):
    """The base's own weights, trained where they are."""

    key: ClassVar[str] = "full"

    layers: tuple[int, ...] | str | None = Field(
        default=None,
        description="block numbers, as a list or '0-5,28,-1'; None is the whole model, embeddings and head too",
    )
    target: tuple[str, ...] = Field(
        default=(), description="patterns of modules to train; none is all"
    )
    exclude: tuple[str, ...] = Field(default=(), description="patterns of modules to leave frozen")

    @model_validator(mode="after")
    def _check(self) -> Full:
        seams.parse_layers(self.layers)
        return self

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: when a pattern matches nothing or nothing is left to train.
        """
        with Edit(model, [self]).whole() as edit:
            for name in self.tensors(model):
                edit.train_in_place(name, self, undoable=undoable)
        return edit

    def tensors(self, model: nn.Module) -> list[str]:
        """Names of the base tensors that train."""
        names = [name for name, p in model.named_parameters() if p.is_floating_point()]
        holders = seams.holders(model)
        match(holders, self.target, setting="full.target")
        match(holders, self.exclude, setting="full.exclude")
        if self.layers is not None:
            wanted = seams.chosen_layers(model, self.layers, setting="full.layers")
            inside = [f"{b.name}." for b in seams.blocks(model) if b.index in wanted]
            names = [n for n in names if any(n.startswith(prefix) for prefix in inside)]
        if self.target:
            names = [n for n in names if _inside(n, self.target)]
        names = [n for n in names if not _inside(n, self.exclude)]
        if not names:
            raise TechniqueError(
                "full: nothing is left to train",
                got=f"layers {self.layers}, target {self.target}, exclude {self.exclude}",
                cure="widen layers or target, or exclude less",
            )
        return names


# --- targets ---------------------------------------------------------------------------------------------------


def _inside(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the tensor lies in a module that fits a pattern."""
    pieces = name.split(".")
    modules = [".".join(pieces[:i]) for i in range(1, len(pieces))]
    return any(matches(module, pattern) for module in modules for pattern in patterns)
