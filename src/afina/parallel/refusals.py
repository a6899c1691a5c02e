"""What a plan cannot do with a model: one table, asked with what its config says, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from afina.errors import ConfigError
from afina.parallel.bubbles import chunks_of
from afina.parallel.plan import Plan
from afina.parallel.tensor_sizes import counts_of, sizes


@dataclass(frozen=True)
class Facts:
    """What a plan must know of a model.

    Attributes:
        family: as Transformers calls it.
        layers: blocks.
        width: numbers of a token's state.
        counts: what tensor groups must divide, in words, with how many there are.
        encoder_decoder: it has two stacks.
        tensor_plan: Transformers says how its matrices are shared out, in words that are known here.
        packed: its weights are quantised.
    """

    family: str
    layers: int
    width: int = 0
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    encoder_decoder: bool = False
    tensor_plan: bool = False
    packed: bool = False


def facts_of(config: Any, *, packed: bool = False) -> Facts:
    """The facts of a Transformers config.

    Args:
        config: of the model.
        packed: the run quantises its weights.
    """
    text = config.get_text_config()
    planned = bool(getattr(text, "base_model_tp_plan", None))
    try:
        counts = counts_of(config) if planned else {}
    except ConfigError:
        counts, planned = {}, False
    return Facts(
        str(config.model_type),
        int(getattr(text, "num_hidden_layers", 0) or 0),
        int(getattr(text, "hidden_size", 0) or 0),
        counts,
        bool(getattr(config, "is_encoder_decoder", False)),
        planned,
        packed,
    )


class Refusal(NamedTuple):
    """One thing that cannot be.

    Attributes:
        applies: (plan, facts) -> whether it is so.
        what: in one sentence.
        got: (plan, facts) -> what is asked for.
        valid: (plan, facts) -> what would do.
        cure: what to change; "" where the values say it.
    """

    applies: Callable[[Plan, Facts], bool]
    what: str
    got: Callable[[Plan, Facts], str]
    valid: Callable[[Plan, Facts], Sequence[object]]
    cure: str = ""


def chunks(plan: Plan) -> int:
    """Stages of each process of a pipeline."""
    return chunks_of(plan) if plan.pipeline > 1 else 1


def _pipelines(plan: Plan, facts: Facts) -> list[int]:
    return [n for n in range(1, facts.layers + 1) if n == 1 or n * chunks(plan) <= facts.layers]


NOTHING: Callable[[Plan, Facts], Sequence[object]] = lambda plan, facts: ()  # noqa: E731

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda plan, facts: plan.tensor > 1 and not facts.tensor_plan,
        "parallel.tensor shares matrices out as the model itself says, and this one does not say how",
        lambda plan, facts: f"tensor {plan.tensor} for {facts.family}",
        lambda plan, facts: (1,),
        "leave parallel.tensor out; parallel.zero=3 and parallel.pipeline share weights out too",
    ),
    Refusal(
        lambda plan, facts: any(count % plan.tensor for count in facts.counts.values()),
        "parallel.tensor does not divide what it shares out",
        lambda plan, facts: (
            f"tensor {plan.tensor} for {', '.join(f'{n} {words}' for words, n in facts.counts.items())}"
        ),
        lambda plan, facts: sizes(facts.counts),
    ),
    Refusal(
        lambda plan, facts: plan.pipeline > 1 and facts.encoder_decoder,
        "parallel.pipeline shares out one stack of blocks, and this model has two",
        lambda plan, facts: f"pipeline {plan.pipeline} for {facts.family}",
        lambda plan, facts: (1,),
        "leave parallel.pipeline out",
    ),
    Refusal(
        lambda plan, facts: plan.pipeline > 1 and plan.pipeline not in _pipelines(plan, facts),
        "parallel.pipeline has more stages than the model has blocks",
        lambda plan, facts: (
            f"{plan.pipeline} processes of {chunks(plan)} stages each ({plan.schedule}) for {facts.layers} blocks"
        ),
        lambda plan, facts: (f"at most {_pipelines(plan, facts)[-1]}",),
    ),
    Refusal(
        lambda plan, facts: facts.packed and (plan.zero == 3 or plan.tensor > 1),
        "parallel.zero=3 and parallel.tensor cannot share out packed weights",
        lambda plan, facts: f"quantize, zero {plan.zero}, tensor {plan.tensor}",
        lambda plan, facts: ("zero 0 to 2, tensor 1",),
        "leave quantize out, or take parallel.zero=1 or 2: packed weights are small",
    ),
    Refusal(
        lambda plan, facts: plan.pipeline == 1 and plan.schedule != "1f1b",
        "parallel.schedule would do nothing: there is no pipeline",
        lambda plan, facts: f"schedule {plan.schedule}, pipeline 1",
        NOTHING,
        "leave parallel.schedule out, or set parallel.pipeline",
    ),
)
"""In the order in which they are asked."""


def explained(plan: Plan, facts: Facts) -> Iterator[ConfigError]:
    """Everything that speaks against a plan, as errors."""
    for one in REFUSALS:
        if one.applies(plan, facts):
            valid = ", ".join(map(str, one.valid(plan, facts)))
            yield ConfigError(
                one.what, got=one.got(plan, facts), wanted=valid or None, cure=one.cure or None
            )


def refuse(plan: Plan, facts: Facts) -> None:
    """Raises for the first thing that speaks against a plan.

    Raises:
        ConfigError: with the values that would do.
    """
    for error in explained(plan, facts):
        raise error
