"""Layer-wise decay: the lower a layer, the slower it learns, for what lies low is general and worth keeping.

    lr(tensor) = lr · max(floor, decay ^ e)

    convention   the head   the last block   block i of n   the embeddings
    timm         e = 0      1                n − i          n + 1
    electra      e = 0      2                n − i + 1      n + 2

Legend: i counted from 0, n blocks of a tensor's own stack (for the embeddings: of the deepest), floor = `min_scale`.

What a technique attaches is as deep as the module that it changes: `model.layers.7.self_attn.q_proj.lora.a` lies in
block 7. Final norms and poolers learn with the head, for they are as far from the input; so does an embedding whose
weight is the head's as well, which would otherwise make the answers at the lowest rate of all. Of an encoder and a
decoder each counts its own blocks from its own end. What the base did not have and stands in no block (a prompt, a
prefix) learns at the run's rate (`new_modules`). A tensor that is nowhere of these is refused until `scales` says what
it learns at.

The factors multiply with those of LoRA+, and every schedule keeps their ratios, for they are factors of the run's rate
at each step. Weight decay, where it is on, is by the rate and so falls with it.

Source: Clark et al. 2020, "ELECTRA", arXiv 2003.10555, and its `model/optimization.py` (whose blocks are all one factor
lower, as its head counts from n + 2); Bao et al. 2021, "BEiT", arXiv 2106.08254, and
`timm/optim/_param_groups.py::param_groups_layer_decay`, which puts the final norm with the last block. Defaults: 0.9 is
ELECTRA's for its large model, of 24 blocks; for 12 blocks ELECTRA takes 0.8 and BEiT 0.75 (0.65 to 0.9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from afina import seams
from afina.errors import TechniqueError, counted
from afina.tree import Edit, Seams, Technique, match, matches

Convention = Literal["timm", "electra"]


class LayerDecay(Technique):
    """Learning rates that fall from the head down to the embeddings, beside whatever trains."""

    key: ClassVar[str] = "layer_decay"

    decay: float = Field(
        default=0.9, gt=0, le=1, description="learning rate of a block as a share of the next one's"
    )
    convention: Convention = Field(
        default="timm",
        description="where the count begins: the last block one step below the head (timm), or two (electra)",
    )
    min_scale: float = Field(
        default=0.0, ge=0, le=1, description="least share of the run's learning rate"
    )
    new_modules: Literal["full", "layer"] = Field(
        default="full",
        description="what was put in front of the blocks, as a prompt: at the run's rate, or as the embeddings",
    )
    scales: dict[str, float] = Field(
        default={},
        description="pattern -> share of the run's rate of those modules or tensors, instead of their layer's",
    )

    @model_validator(mode="after")
    def _check(self) -> LayerDecay:
        if not all(0 < scale < math.inf for scale in self.scales.values()):
            raise ValueError("every share in scales must be above 0, and a number")
        return self

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """Changes nothing in the model; see `seams`.

        Raises:
            TechniqueError: the model has no stack of blocks, so there is nothing to count.
        """
        if not seams.stacks(model):
            raise TechniqueError(
                "layer_decay counts blocks, and no stack of equal blocks is found in this model",
                got=type(model).__name__,
                wanted="a list of blocks of one class",
                cure="leave layer_decay out",
            )
        return Edit(model, [self])

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """The factor of each tensor's learning rate, times those that it has.

        Raises:
            TechniqueError: a tensor lies nowhere, or a pattern matches nothing.
        """
        factors = self.factors(edit)

        def decayed(scales: dict[str, float]) -> dict[str, float]:
            return {name: scale * factors[name] for name, scale in scales.items()}

        return Seams(param_groups=(decayed,))

    def factors(self, edit: Edit) -> dict[str, float]:
        """The share of the run's learning rate that each trainable tensor has by its place.

        Raises:
            TechniqueError: see `seams`.
        """
        trainable = edit.trainable()
        given = _by_pattern(list(trainable), self.scales)
        places = self._places(edit, [name for name in trainable if name not in given])
        lost = [name for name, place in places.items() if place is None]
        if lost:
            raise TechniqueError(
                f"layer_decay cannot tell how deep {counted(len(lost), 'tensor')} of this model lie",
                got=", ".join(lost[:3]) + (", …" if len(lost) > 3 else ""),
                wanted="a tensor of a block, an embedding, a norm, a pooler or the head",
                cure=f"say what it learns at: layer_decay.scales={{{lost[0]}: 1.0}}",
            )
        stacks = {name: len(stack) for name, stack in seams.stacks(edit.model).items()}
        return given | {
            name: scale(below(place, stacks), self.decay, self.convention, self.min_scale)
            for name, place in places.items()
            if place is not None
        }

    def _places(self, edit: Edit, names: list[str]) -> dict[str, seams.Place | None]:
        """Where each of these tensors counts as lying."""
        depths, head = seams.Depths(edit.model), seams.head(edit.model).name
        owners = {n: n.rpartition(".")[0] for n in edit.deltas}
        # What acts at the head as well, through a weight that both ends share, is the head's.
        both = {id(d.origin()) for n, d in edit.deltas.items() if owners[n] == head}
        # What hangs on a module that holds all blocks stands in none of them: the base had nothing there.
        stacks = seams.stacks(edit.model)
        above = {n for n, owner in owners.items() if any(s.startswith(f"{owner}.") for s in stacks)}
        new: seams.Place = "behind" if self.new_modules == "full" else "before"
        found: dict[str, seams.Place | None] = {}
        for name in names:
            child = next((n for n in edit.deltas if name.startswith(f"{n}.")), None)
            if child in above:
                found[name] = new
            elif child is not None and id(edit.deltas[child]) in both:
                found[name] = "behind"
            else:
                found[name] = depths.of(name)
        return found


# --- mathematics -----------------------------------------------------------------------------------------------


def below(place: seams.Place, stacks: Mapping[str, int]) -> int:
    """How many blocks below the head something lies, itself counted; 0 for the head.

    Args:
        place: of the thing.
        stacks: the blocks of each stack, by its name.
    """
    if place == "behind":
        return 0
    if place == "before":
        return max(stacks.values()) + 1
    return stacks[place.stack] - place.index


def scale(below: int, decay: float, convention: Convention, floor: float = 0.0) -> float:
    """The share of the learning rate at so many blocks below the head.

    Args:
        below: 0 for the head, 1 for the last block, n + 1 for the embeddings.
        decay: of one block, at most 1.
        convention: electra leaves one place empty between the head and the last block.
        floor: the least.
    """
    gap = 1 if convention == "electra" and below else 0
    return max(floor, decay ** (below + gap))


def _by_pattern(names: list[str], scales: Mapping[str, float]) -> dict[str, float]:
    """What the patterns give to tensors, by their own names or those of modules that hold them; the last one wins."""
    match({one for name in names for one in _holders(name)}, scales, setting="layer_decay.scales")
    return {
        name: value
        for pattern, value in scales.items()
        for name in names
        if any(matches(one, pattern) for one in _holders(name))
    }


def _holders(name: str) -> Iterable[str]:
    pieces = name.split(".")
    return (".".join(pieces[: i + 1]) for i in range(len(pieces)))
