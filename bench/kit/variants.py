"""What `bench/train.py` sets beside each other: each tool with its settings, and how much each is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Windows:
    """How speed is measured: so many windows of so many steps of `batch` rows, after `warm` steps not counted."""

    count: int = 5
    steps: int = 20
    warm: int = 3
    batch: int = 16


QUICK = Windows(count=2, steps=3, warm=2, batch=4)
LARGE = Windows(count=3, steps=4, warm=2, batch=4)
"""Of a model that takes long: its rows are of one length, so that few steps tell."""
QUICK_LARGE = Windows(count=1, steps=1, warm=1, batch=4)

FULL_LR = 1e-4
"""Learning rate of full fine-tuning."""


@dataclass(frozen=True)
class Variant:
    """A tool with one of its settings."""

    tool: str
    setting: str
    knobs: dict[str, Any]


def variants(fast_bf16: bool) -> list[Variant]:
    """What is measured, in the order of a round of windows."""
    dtype = "bfloat16" if fast_bf16 else "float32"
    usual = {
        "dtype": dtype,
        "attention": "sdpa",
        "autocast_adapter": True,
        "compile": False,
        "group_by_length": False,
        "pad_to": None,
        "keep_heap": False,
    }
    expert = {
        "dtype": dtype,
        "attention": "eager",
        "autocast_adapter": False,
        "compile": True,
        "group_by_length": True,
        "pad_to": 32,
        "keep_heap": True,
    }
    return [
        Variant("peer", "usual", usual),
        Variant("afina", "default", {"dtype": dtype}),
        Variant("peer", "expert", expert),
    ]


def with_knobs(variant: Variant, **knobs: Any) -> Variant:
    """The variant with other or further knobs."""
    return replace(variant, knobs={**variant.knobs, **knobs})


def for_quality(variant: Variant, batch: int) -> Variant:
    """The variant with equal batches, and without what changes only speed and memory."""
    if variant.tool == "afina":
        return variant
    return with_knobs(
        variant,
        compile=False,
        group_by_length=False,
        pad_to=None,
        keep_heap=True,
        micro=max(1, batch // 4),
    )


def quality_variants(fast_bf16: bool, batch: int = 16) -> list[Variant]:
    """Those whose result can differ: in fp32 the expert's numbers are the usual ones."""
    every = [for_quality(each, batch) for each in variants(fast_bf16)]
    return [each for each in every if fast_bf16 or each.setting != "expert"]


def full_variants(fast_bf16: bool) -> list[Variant]:
    """Full fine-tuning: afina's, and the expert's with two kinds of weights.

    With bf16 the expert's weights and both averages of AdamW are bf16, which rounds small steps away. afina keeps fp32
    masters and averages beside its bf16 weights; *expert, fp32 weights* keeps as much, and multiplies in bf16 too.
    """
    _, ours, expert = (with_knobs(each, method="full") for each in variants(fast_bf16))
    if not fast_bf16:
        return [ours, expert]
    wide = replace(expert, setting="expert, fp32 weights")
    return [ours, expert, with_knobs(wide, dtype="float32", autocast="bfloat16")]


def heap_variants(fast_bf16: bool, method: str) -> list[Variant]:
    """afina as it is, and with an allocator that gives nothing back.

    Args:
        fast_bf16: as of `variants`.
        method: "lora" or "full".
    """
    ours = next(each for each in variants(fast_bf16) if each.tool == "afina")
    ours = with_knobs(ours, method=method)
    return [ours, replace(with_knobs(ours, keep_heap=True), setting="kept heap")]


def large_variants(fast_bf16: bool) -> list[Variant]:
    """afina and the expert with one row in a pass."""
    return [with_knobs(each, micro=1) for each in variants(fast_bf16) if each.setting != "usual"]
