"""What the bench of methods trains: each method's techniques, and each model's work with the rates of its methods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Listed = list[dict[str, dict[str, Any]]]
"""Techniques as a run's configuration lists them: `[{"lora": {"rank": 16}}]`."""


@dataclass(frozen=True)
class Method:
    """A way to train a model.

    Attributes:
        techniques: what changes it.
        kind: methods of one kind take the same learning rates.
    """

    techniques: Listed
    kind: str = "low rank"


BASELINE = "lora"
"""The method that every other stands beside."""

HEAD = "classifier"
"""What the head is called in the models of this bench that have classes."""

METHODS: dict[str, Method] = {
    BASELINE: Method([{"lora": {"rank": 16}}]),
    "full": Method([{"full": {}}], "full"),
    "dora": Method([{"dora": {"rank": 16}}]),
    "bitfit": Method([{"bitfit": {}}], "biases"),
    "ia3": Method([{"ia3": {}}], "small"),
    "prefix": Method([{"prefix": {"tokens": 20}}], "small"),
    "pfeiffer": Method([{"bottleneck": {"kind": "pfeiffer"}}]),
    "lora+": Method([{"lora": {"rank": 16, "loraplus_ratio": 16.0}}], "lora+"),
    "pissa": Method([{"lora": {"rank": 16, "start": "pissa"}}], "of weights"),
    "nf4 + lora": Method([{"quantize": {}}, {"lora": {"rank": 16}}]),
    "lora, q and v": Method([{"lora": {"rank": 16, "target": ["attention"]}}]),
    "lora, rank 64, rslora": Method([{"lora": {"rank": 64, "alpha": 16.0, "rslora": True}}]),
    "olora": Method([{"lora": {"rank": 16, "start": "olora"}}], "of weights"),
    "adalora": Method([{"adalora": {}}], "adalora"),
    "houlsby": Method([{"bottleneck": {"kind": "houlsby"}}]),
    "parallel": Method([{"bottleneck": {"kind": "parallel"}}]),
    "prompt": Method([{"prompt": {"tokens": 20}}], "prompt"),
    "p_tuning": Method([{"p_tuning": {"tokens": 20}}], "p_tuning"),
}
"""In the order in which they are run."""


@dataclass(frozen=True)
class Work:
    """What all methods do with one model, with equal rows and steps.

    Attributes:
        kind: the model answers in words (answers), or gives each row a class (classes).
        score: what is measured on the test rows.
        train_rows, test_rows: how many of each.
        steps: optimiser steps.
        batch: rows of a step.
        cost_batch: rows of a step whose time and memory are taken.
        cost_steps: how many of those count.
        max_new_tokens: of an answer; None for classes.
        rates: two learning rates for each kind of method.
        head_lr: rate of a new head beside every method; None where there is none.
        dtype: of the frozen weights.
    """

    kind: Literal["answers", "classes"]
    score: str
    train_rows: int
    test_rows: int
    steps: int
    batch: int
    cost_batch: int
    cost_steps: int
    max_new_tokens: int | None
    rates: dict[str, tuple[float, float]]
    head_lr: float | None = None
    dtype: str = "fp32"

    def techniques(self, name: str, lr: float) -> Listed:
        """Those of a method, and what gives a new head its own rate: at the method's it would hardly move."""
        if self.head_lr is None:
            return METHODS[name].techniques
        scales = {HEAD: self.head_lr / lr}
        return [*METHODS[name].techniques, {"layer_decay": {"decay": 1.0, "scales": scales}}]


WORKS: dict[str, Work] = {
    "smollm2-135m": Work(
        kind="answers",
        score="exact_match",
        train_rows=960,
        test_rows=200,
        steps=60,
        batch=16,
        cost_batch=16,
        cost_steps=7,
        max_new_tokens=96,
        rates={
            "low rank": (2e-3, 5e-3),
            "of weights": (5e-4, 1e-3),
            "lora+": (3e-4, 1e-3),
            "adalora": (3e-3, 1e-2),
            "small": (1e-2, 3e-2),
            "biases": (1e-2, 3e-2),
            "prompt": (3e-2, 1e-1),
            "p_tuning": (3e-3, 1e-2),
            "full": (1e-4, 3e-4),
        },
        dtype="bf16",
    ),
    "minilm-l6-v2": Work(
        kind="classes",
        score="accuracy",
        train_rows=1280,
        test_rows=500,
        steps=160,
        batch=8,
        cost_batch=16,
        cost_steps=9,
        max_new_tokens=None,
        rates={
            "low rank": (1e-3, 3e-3),
            "of weights": (1e-4, 3e-4),
            "lora+": (1e-4, 3e-4),
            "adalora": (3e-3, 1e-2),
            "small": (3e-3, 1e-2),
            "biases": (1e-3, 3e-3),
            "prompt": (3e-3, 1e-2),
            "p_tuning": (3e-3, 1e-2),
            "full": (1e-4, 3e-4),
        },
        head_lr=3e-2,
    ),
}
"""By the model's name."""


def quick(work: Work) -> Work:
    """The same in a few small steps, which say nothing but that every method runs."""
    few = None if work.max_new_tokens is None else 8
    return replace(
        work,
        train_rows=16,
        test_rows=4,
        steps=5,
        batch=2,
        cost_batch=2,
        cost_steps=2,
        max_new_tokens=few,
    )
