"""What stands before the first block and after the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from afina.errors import TechniqueError
from afina.seams.maps import map_sites
from afina.seams.whole import classifies
from afina.tree.pieces import piece_of


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


def vocabulary(model: Any) -> int:
    """How many tokens a model has an embedding for, wherever its rows are."""
    return piece_of(model.get_input_embeddings().weight).shape[0]


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
