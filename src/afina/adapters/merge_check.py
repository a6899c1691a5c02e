"""Whether a merged model says what base and adapter said: both are run on the same texts, and compared.

| measure | of base + adapter (p) and merged (q) |
|---|---|
| largest, mean | absolute difference of a logit |
| relative | root mean square of the differences over that of p's logits, each position's mean taken out |
| KL | sum p log(p / q) over the vocabulary, in nats, per position |
| top-1 | share of positions at which both would say the same token |

The mean is taken out because the probabilities do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afina.adapters.merge_shards import NAMES
from afina.adapters.merge_texts import Text
from afina.config import GenerateSettings
from afina.models.generate import evaluating, generate

POSITIONS = 64
"""Positions compared of each text, its last ones; what is before them is read all the same."""

ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 2.0**-6}
"""Largest relative error of rounding to a format. Of Q8_0, blocks of 8-bit integers under one scale: half a step is
1/254 of the block's largest value, which is up to four times a usual value of the block."""

LEAST = 1e-4
"""Well above what sums in another order change in fp32 (SmolLM2: 2e-6): nothing below is held against a merge."""

HALF = 0.5
"""Share of the adapter's effect that may be lost before the merged model is nearer to its base than to it."""


def roundoff(dtype: str | torch.dtype) -> float:
    """Largest relative error of rounding to a format."""
    return ROUNDOFF[dtype if isinstance(dtype, str) else NAMES[dtype]]


def tolerance(roundoff: float, maps: int) -> float:
    """The largest relative difference of the logits that rounding explains: roundoff · sqrt(maps).

    Each map is rounded on its own, each weight by at most `roundoff` of itself, up and down alike. So a map's output
    is off by no more than that share of itself, and independent errors of n maps add up to sqrt(n) times it. It is a
    generous estimate: a weight is off by less than half of the most on average, and what a block adds is a part of
    the sum that goes through the model. SmolLM2 with LoRA merged into bf16: 0.008, where this allows 0.057.

    Args:
        roundoff: of the merged model's format; see `ROUNDOFF`.
        maps: linear maps that the model has.
    """
    return max(LEAST, roundoff * math.sqrt(max(1, maps)))


@dataclass(frozen=True)
class Seen:
    """What one model said.

    Attributes:
        outputs: for each text (positions, vocabulary), in fp32 or wider on the CPU; (positions, width) of an encoder.
        answers: greedy answers to the prompts; None of a model that does not generate.
        logits: whether the outputs are logits.
    """

    outputs: tuple[Tensor, ...]
    answers: tuple[str, ...] | None
    logits: bool


@torch.inference_mode()
def look(model: Any, tokenizer: Any, texts: Sequence[Text], max_new_tokens: int) -> Seen:
    """Runs a model on texts, one at a time, and lets it answer their prompts."""
    outputs: list[Tensor] = []
    logits = True
    device = model.get_input_embeddings().weight.device
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    with evaluating(model):
        for text in texts:
            ids = torch.tensor([text.tokens[:limit]], device=device)
            out = model(input_ids=ids)
            logits = getattr(out, "logits", None) is not None
            found = out.logits if logits else out.last_hidden_state
            wide = torch.promote_types(found.dtype, torch.float32)
            rows = found[0] if found.dim() == 3 else found
            outputs.append(rows[-POSITIONS:].to("cpu", wide, copy=True))
    answers = None
    # Minus infinity alone is a token ruled out; where the largest is not finite there is no answer.
    sound = all(bool(found.amax(-1).isfinite().all()) for found in outputs)
    if sound and logits and max_new_tokens and model.can_generate():
        settings = GenerateSettings(max_new_tokens=max_new_tokens)
        prompts = [list(text.prompt[-_room(limit, max_new_tokens) :]) for text in texts]
        answers = tuple(done.text for done in generate(model, tokenizer, prompts, settings))
    return Seen(tuple(outputs), answers, logits)


def _room(limit: int | None, answer: int) -> int:
    """Tokens of a prompt that leave room for an answer, at least one."""
    return 0 if limit is None else max(1, limit - answer)


@dataclass(frozen=True)
class Difference:
    """How far one model is from another; see the top of this file.

    Attributes:
        largest, mean: absolute difference of an output.
        relative: root mean square of the difference over that of the first model's outputs.
        kl_mean, kl_largest: in nats per position; None of an encoder.
        top1: share of positions; None of an encoder.
        answers_equal, answers: how many greedy answers are the same, of how many; None where there are none.
    """

    largest: float
    mean: float
    relative: float
    kl_mean: float | None = None
    kl_largest: float | None = None
    top1: float | None = None
    answers_equal: int | None = None
    answers: int | None = None


def difference(one: Seen, other: Seen) -> Difference:
    """Of what two models said about the same texts."""
    pairs = list(zip(one.outputs, other.outputs, strict=True))
    apart = [(b.double() - a.double()) for a, b in pairs]
    count = sum(d.numel() for d in apart)
    largest = max(float(d.abs().max()) for d in apart)
    mean = sum(float(d.abs().sum()) for d in apart) / count
    if not one.logits:
        size = sum(float(a.double().square().sum()) for a, _ in pairs)
        return Difference(largest, mean, _root(apart, size))
    size = sum(float(_centred(a.double()).square().sum()) for a, _ in pairs)
    kl = torch.cat([_kl(a.double(), b.double()) for a, b in pairs])
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    equal = total = None
    if one.answers is not None and other.answers is not None:
        total = len(one.answers)
        equal = sum(a == b for a, b in zip(one.answers, other.answers, strict=True))
    return Difference(
        largest,
        mean,
        _root([_centred(d) for d in apart], size),
        float(kl.mean()),
        float(kl.max()),
        float(same.double().mean()),
        equal,
        total,
    )


def _root(apart: Sequence[Tensor], size: float) -> float:
    square = sum(float(d.square().sum()) for d in apart)
    return math.sqrt(square / size) if size else (0.0 if square == 0 else math.inf)


def _centred(logits_TV: Tensor) -> Tensor:
    return logits_TV - logits_TV.mean(-1, keepdim=True)


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL of the distributions of two logits, per position (T,)."""
    p, q = p_TV.log_softmax(-1), q_TV.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        effect: base -> base + adapter; None where there is no adapter.
        drift: base + adapter -> merged.
        rest: base -> merged; None where there is no adapter.
        limit: the largest relative drift allowed.
        texts: where the texts came from, and how many.
        problems: why the merged model is not what it should be; empty when it is.
        notes: what else should be known.
        changed: (prompt, base + adapter's answer, merged's answer) of answers that differ.
    """

    effect: Difference | None
    drift: Difference
    rest: Difference | None
    limit: float
    texts: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    changed: tuple[tuple[str, str, str], ...]


def judge(
    base: Seen | None,
    adapted: Seen,
    merged: Seen,
    *,
    limit: float,
    texts: str,
    prompts: Sequence[str],
    problems: Sequence[str] = (),
) -> Verdict:
    """Whether the merged model is base + adapter, within `limit`, and not the base.

    Args:
        base: None where a whole model was only written in another form.
        adapted: base + adapter.
        merged: what was made of the two.
        limit: see `tolerance`.
        texts: what they were, in words.
        prompts: whose answers are compared.
        problems: already known.
    """
    drift = difference(adapted, merged)
    found, notes = list(problems), list[str]()
    if not math.isfinite(drift.relative):
        found.append("the merged model's outputs are not finite")
    elif drift.relative > limit:
        found.append(
            f"its logits differ by {drift.relative:.2e} of their size from base + adapter; at most "
            f"{limit:.2e} is explained by rounding"
        )
    effect = rest = None
    if base is not None:
        effect, rest = difference(base, adapted), difference(base, merged)
        if effect.largest == 0:
            notes.append("the adapter changes nothing on these texts")
        elif rest.largest == 0:
            found.append("it equals the base: the adapter is lost")
        elif drift.relative > HALF * effect.relative:
            share = drift.relative / effect.relative
            found.append(f"it is off by {share:.0%} of what the adapter changes")
    both = zip(prompts, adapted.answers or (), merged.answers or (), strict=False)
    changed = tuple(each for each in both if each[1] != each[2])
    return Verdict(effect, drift, rest, limit, texts, tuple(found), tuple(notes), changed)
