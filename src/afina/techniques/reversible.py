"""Reversible blocks: backward computes a block's input back from its output, so that memory hardly grows with depth.

| form | forward | for |
|---|---|---|
| bdia | x[k+1] = g (x[k-1] - s) + Q[(1 - g) x[k] + (1 + g) h_k(x[k])], g = ±2^-m | pretrained weights |
| additive | y1 = x1 + Q[F_k(x2)], y2 = x2 + Q[G_k(y1)]; (y1 + y2) / 2 in the end | models trained from scratch |

A plain block says x + h(x), and nobody can tell x from that. BDIA mixes in a little of the state before, from which
that state then comes back, bit for bit, if the m binary digits that multiplying by g loses are kept beside: m bits a
number and block, where recomputation (`train.recompute`) keeps 16 or 32. The sign of g is drawn anew for each step (or
row) and block. With g = 0 this is the plain model, and so the model is evaluated, merged and asked: the mixing is
there in training alone. What it costs at the start is measured when a run begins, and said. In the first blocks large
states form, so they are left as they are.

Additive coupling keeps no bits at all. But it is another function, in which pretrained weights say nothing of use: it
acts in evaluation and generation too, the model's config says so, and it is put on again when such a model is loaded.

A block is run twice, as in recomputation. Dropout is drawn the same, and that states come back is checked.

Legend: x[k] the state in front of block k, h_k what the block adds, F_k and G_k what its attention and its feed-forward
add, Q rounding to a multiple of 2^-l, s the lowest m digits of x[k-1] in units of that.

Source: BDIA: "On Exact Bit-level Reversible Transformers Without Changing Architectures", ICML 2025, PMLR 267, which
has m = 1; more bits, which pretrained weights need, are ours. Additive: Gomez et al. 2017, arXiv 1707.04585, section
3.1; Kitaev et al. 2020, "Reformer", arXiv 2001.04451, section 3. The mathematics is in `ops/reversible.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationError
from torch import nn

from afina import seams
from afina.errors import ModelError, TechniqueError, counted
from afina.ops.reversible import Grid
from afina.techniques.reversible_halves import Halves, halves_of
from afina.techniques.reversible_pass import Pass, ReversibleDelta, Shape
from afina.tree import Delta, Edit, Seams, Technique
from afina.types import Batch

Form = Literal["bdia", "additive"]
STREAMS = {"fp64": torch.float64, "fp32": torch.float32}
GRIDS = {"fp64": 16, "fp32": 9}
PLAIN = 3
"""First blocks that stay plain under BDIA, or half of a model of fewer than six."""

MARK = "afina_reversible"
"""The key in a model's config under which a model that was trained in additive coupling says so."""


class Reversible(Technique):
    """Blocks whose inputs are computed back in backward instead of kept."""

    key: ClassVar[str] = "reversible"

    form: Literal["auto", "bdia", "additive"] = Field(
        default="auto",
        description="bdia (pretrained weights; plain in evaluation) or additive (from scratch; another function, in "
        "evaluation too); auto is additive for a model that was trained so, and else bdia",
    )
    bits: int = Field(
        default=6,
        ge=1,
        le=8,
        description="bdia: m side bits a number; g is ±2^-m, so more is nearer to the plain model",
    )
    plain: int | None = Field(
        default=None,
        ge=0,
        description="first blocks that are left as they are; None is 3 for bdia (half of a model of fewer than six "
        "blocks; one at least) and 0 for additive",
    )
    signs: Literal["row", "step"] = Field(
        default="step",
        description="bdia: the sign of g is drawn for each step, or for each row and step as in the paper; with row, "
        "rows cannot share their beginnings",
    )
    seed: int = Field(default=0, ge=0, description="bdia: of the signs")
    stream: Literal["fp64", "fp32"] = Field(
        default="fp64", description="type of the states between the blocks"
    )
    grid: int | None = Field(
        default=None,
        ge=0,
        le=30,
        description="l: states are multiples of 2^-l; None is 16 for fp64 and 9 for fp32, which then holds numbers "
        "below 16,384",
    )
    check: Literal["first", "always", "never"] = Field(
        default="first", description="when each state that comes back is compared with what it was"
    )

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: the model's blocks cannot be run so, or none is left to be.
        """
        said = marked(model)
        own = self if said is None else self._as_trained(said)
        form: Form = "additive" if own.form == "additive" else "bdia"
        blocks, plain = own._blocks(model, form)
        halves = halves_of(model) if form == "additive" else dict[str, Halves]()
        with Edit(model, [self]).whole() as edit:
            shared = Pass(own._shape(blocks, form), self.check)
            for place, block in enumerate(blocks):
                delta = ReversibleDelta(shared, place, block.index, halves.get(block.name))
                edit.attach(block.name, self, delta)
            if form == "additive" and said is None:
                self._mark(edit)
        edit.notes.append(self._note(form, blocks, plain))
        return edit

    def _shape(self, blocks: Sequence[seams.Block], form: Form) -> Shape:
        first = blocks[0].module
        return Shape(
            [block.name for block in blocks],
            self.bits if form == "bdia" else None,
            Grid(
                GRIDS[self.stream] if self.grid is None else self.grid,
                STREAMS[self.stream],
                next(p for p in first.parameters() if p.is_floating_point()).dtype,
            ),
            self.seed,
            self.signs == "row",
        )

    def _as_trained(self, said: Reversible) -> Reversible:
        """The value for a model that was trained in additive coupling, which has to go on as it was."""
        given = self.model_fields_set - {"check"}
        other = [name for name in sorted(given) if getattr(self, name) != getattr(said, name)]
        if self.form == "auto":
            other = [name for name in other if name != "form"]
        if other:
            raise TechniqueError(
                "reversible: the model was trained in additive coupling, and says something else in another",
                got=", ".join(f"{name}={getattr(self, name)}" for name in other),
                wanted=", ".join(f"{name}={getattr(said, name)}" for name in other),
                cure="leave these out; reversible.check alone may differ",
            )
        return said.model_copy(update={"check": self.check})

    def _blocks(self, model: nn.Module, form: Form) -> tuple[list[seams.Block], int]:
        """The blocks that run reversibly, in front of them for BDIA the one that gives the first two states."""
        seams.require_stack(model, self.key)
        found = seams.blocks(model)
        if len({block.stack for block in found}) > 1:
            raise TechniqueError(
                f"{self.key} knows models of one stack of blocks",
                got=", ".join(seams.stacks(model)),
                cure="take train.recompute=true, which knows several",
            )
        plain = self.plain
        if plain is None:
            plain = max(1, min(PLAIN, len(found) // 2)) if form == "bdia" else 0
        if form == "bdia" and plain < 1:
            raise TechniqueError(
                "reversible.plain: bdia takes its first two states from a plain block",
                got=plain,
                wanted="at least 1",
            )
        if plain >= len(found):
            raise TechniqueError(
                "reversible: no block is left to be reversible",
                got=f"{counted(len(found), 'block')}, the first {plain} of them plain",
                cure=f"set reversible.plain to less than {len(found)}",
            )
        return found[max(0, plain - (form == "bdia")) :], plain

    def _mark(self, edit: Edit) -> None:
        """Has the model's config say that this is another function; refuses where a run's folder could not say it."""
        model: Any = edit.model
        config = getattr(model, "config", None)
        if config is None:
            return
        beside = [
            name
            for name, module in model.named_modules()
            if isinstance(module, Delta) and any(True for _ in module.parameters())
        ]
        if beside:
            raise TechniqueError(
                "reversible.form=additive makes another function of the model, which an adapter's folder does not say",
                got=f"an adapter at {beside[0]}",
                wanted="full, or a base that was trained in this form and says so in its config.json",
                cure="set reversible.form=bdia, or train with full",
            )
        own = self.model_copy(update={"form": "additive"}).model_dump(mode="json")
        setattr(config, MARK, own)
        edit.on_undo(lambda: delattr(config, MARK))

    def _note(self, form: Form, blocks: Sequence[seams.Block], plain: int) -> str:
        if form == "additive":
            return (
                f"reversible: {counted(len(blocks), 'block')} in additive coupling, in evaluation and generation too. "
                "It is another function than the plain model: pretrained weights lose what they know, and have to be "
                "trained as if from scratch"
            )
        return (
            f"reversible: {counted(len(blocks) - 1, 'block')} from {blocks[1].name} on, {self.bits} side bits a "
            f"number; the first {plain} left plain. In training alone: evaluated, merged and asked, the model is plain"
        )

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """Tells the children which rows a micro-batch has, and which step it is of."""
        shared = pass_of(edit)

        def told(batch: Batch, step: int) -> Batch:
            shared.rows = batch.rows
            return batch

        if not shared.shape.bits:
            return Seams()
        if self.signs == "step":
            return Seams(at_step=(shared.at_step,))
        return Seams(at_step=(shared.at_step,), on_batch=(told,))

    def opening(self, edit: Edit, loss: Callable[[], float]) -> list[str]:
        """The loss of the first rows as they are trained, beside that of the plain model."""
        shared = pass_of(edit)
        with shared.off():
            plain = loss()
        with shared.shown():
            mixed = loss()
        told = (
            f"reversible: loss of the first rows {mixed:.4f} as trained, {plain:.4f} with plain blocks "
            f"({mixed - plain:+.4f} at the start)"
        )
        if mixed - plain <= GAP:
            return [told]
        if not shared.shape.bits:
            return [
                told,
                "warning: reversible.form=additive is for models that are trained from scratch",
            ]
        return [
            told,
            "warning: reversible changes much of what this model says; raise reversible.bits or reversible.plain, or "
            "take train.recompute=true, which changes nothing",
        ]


GAP = 0.1
"""Nats by which the loss may be higher at the start before the user is warned."""


def marked(model: nn.Module) -> Reversible | None:
    """How a model was trained in additive coupling, as its config says; None for any other model.

    Raises:
        ModelError: the config says something else under that key.
    """
    said = getattr(getattr(model, "config", None), MARK, None)
    if said is None:
        return None
    try:
        return Reversible.model_validate(said)
    except ValidationError as error:
        raise ModelError(
            f"config.json: {MARK} does not say how the model's blocks are coupled",
            got=" ".join(str(error.errors()[0]["msg"]).split()),
            cure="put back the config.json that was saved with the weights",
        ) from None


def coupled(model: nn.Module) -> bool:
    """Whether a model's blocks run reversibly already."""
    return any(isinstance(module, ReversibleDelta) for module in model.modules())


def pass_of(edit: Edit) -> Pass:
    """What the children of an edit share."""
    return next(d for d in edit.deltas.values() if isinstance(d, ReversibleDelta)).shared
