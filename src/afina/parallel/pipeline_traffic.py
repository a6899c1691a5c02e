"""What the processes of a pipeline tell each other in one step: every message, its kind and its size.

    forward     at each border between two stages, for each micro-batch: the states, from one process to the next
    backward    their gradients back, where something that trains acts before the border
    together    before: whether all have the same micro-batches; after: the shares of the loss
    once        all_reduce of the gradients of what several stages hold (a tied embedding, a prefix), over those

A border of states has B · T · D numbers: the lines and tokens of the widest micro-batch of a step, and the model's
width. A process of several stages (interleaved) has a border before and behind each of them. Where a schedule needs
more micro-batches than there are, the empty ones that are added are told like others.

Where micro-batches have another shape than those of the step before, torch's stages ask each other whether
shapes are known: a number over each border, and one back. The norm is one of all processes (`traffic.told`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from afina import seams
from afina.parallel.bubbles import micro_batches
from afina.parallel.copies import BUCKET_BYTES
from afina.parallel.pipeline_cut import flows_into
from afina.parallel.portion import Portion
from afina.parallel.traffic import NUMBER, Message, summed

ASKED = 4
"""Bytes of the number by which stages ask whether shapes are known."""

SHAPE = 4
"""Numbers that must be the same in all stages: how many micro-batches, and the shape of their states."""


def pipeline_traffic(
    portion: Portion,
    tokens: int,
    rounds: int = 1,
    *,
    anew: bool = False,
    most_bytes: int = BUCKET_BYTES,
) -> list[Message]:
    """The messages of one process with those of other stages, in one step after the first two.

    Args:
        portion: what the process holds.
        tokens: of each micro-batch, padding with them: those of the widest of the step.
        rounds: micro-batches of a step.
        anew: their shape is another than in the step before.
        most_bytes: of a bucket.
    """
    plan = portion.plan
    if plan.pipeline == 1:
        return []
    count = micro_batches(plan.schedule, plan.pipeline, rounds)
    agreed = Message("all_reduce", 2 * SHAPE * NUMBER, "whether all have the same", plan.pipeline)
    told = Message("all_reduce", count * NUMBER, "shares of the loss", plan.pipeline)
    found = [agreed, *_borders(portion, tokens, count), told]
    if anew:
        found += _asked(portion)
    several: dict[tuple[int, ...], list[str]] = {}
    for name in portion.trains:
        if len(portion.holders[name]) > 1:
            several.setdefault(portion.holders[name], []).append(name)
    for places, names in several.items():
        mine = portion.pieces(names)
        of = "gradients of several stages"
        found += summed(mine, len(names), len(places), of, most_bytes)
    return found


def _borders(portion: Portion, tokens: int, count: int) -> Iterator[Message]:
    """States and their gradients."""
    model: Any = portion.model
    width = int(model.config.get_text_config().hidden_size)
    embedding = cast("Any", model.get_submodule(seams.input_embedding(model)))
    size = tokens * width * embedding.weight.element_size()
    for stage in portion.stages:
        if stage:
            yield Message("receive", size, f"states for stage {stage}", 2, count)
            if _flows(portion, stage):
                yield Message("send", size, f"gradients of stage {stage}", 2, count)
        if stage < len(portion.bounds) - 1:
            yield Message("send", size, f"states of stage {stage}", 2, count)
            if _flows(portion, stage + 1):
                yield Message("receive", size, f"gradients for stage {stage}", 2, count)


def _flows(portion: Portion, stage: int) -> bool:
    """Whether gradients flow back into the stage before."""
    return flows_into(portion.model, portion.bounds[stage][0], portion.tensors)


def _asked(portion: Portion) -> Iterator[Message]:
    borders = sum((stage > 0) + (stage < len(portion.bounds) - 1) for stage in portion.stages)
    yield Message("send", ASKED, "whether shapes are known", 2, borders)
    yield Message("receive", ASKED, "whether shapes are known", 2, borders)
