"""Which techniques a plan has no place for: one table, asked before any weight is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from afina.errors import ConfigError
from afina.parallel.plan import Plan

ZERO_3: Mapping[str, str] = {
    "adalora": "it looks at all of its tensors between passes, where no process has more than pieces",
    "reversible": "a block's input is computed back from its output, when its weights are not there",
    "quantize": "packed weights are not shared out",
}
"""Key of a technique -> why weights cannot be shared out beside it."""

TENSOR: Mapping[str, str] = {
    "token_pruning": "which tokens stay is said by all heads of attention, and a process has its own alone",
    "quantize": "packed weights are not shared out",
}
"""Key of a technique -> why matrices cannot be shared beside it. What is not here acts on parts of a map as on the
whole (lora, dora, adalora, ia3, bitfit, prefix by its heads), or where every process has all: beside sublayers
(bottleneck), in front of rows (prompt, p_tuning), at embedding and head (trainable_tokens), around blocks (reversible),
on gradients and rows."""

PIPELINE: Mapping[str, str] = {
    "adalora": "it shares one budget of ranks among all blocks, and a process has its own alone",
    "reversible": "two streams run through all blocks, and are put together behind the last",
    "token_pruning": "blocks hand on which tokens are left, beside their states",
}
"""Key of a technique -> why blocks cannot be shared out beside it. What is not here acts within a block, or around the
stack, where each process has what it uses: a prefix in all of them, prompts and rows of the embedding in the first."""


def refuse_techniques(plan: Plan, keys: Collection[str]) -> None:
    """Raises for a technique that cannot act under a plan.

    Args:
        plan: of the run.
        keys: of its techniques.

    Raises:
        ConfigError: with the reason, and what works.
    """
    for key in keys:
        if key in ZERO_3 and plan.zero == 3 and plan.shard > 1:
            raise ConfigError(
                f"{key} does not go with parallel.zero=3: {ZERO_3[key]}",
                got=", ".join(keys),
                wanted="parallel.zero 0, 1 or 2",
                cure=f"set parallel.zero to 2, or leave {key} out",
            )
        if key in PIPELINE and plan.pipeline > 1:
            raise ConfigError(
                f"{key} does not go with parallel.pipeline: {PIPELINE[key]}",
                got=f"pipeline {plan.pipeline}, {', '.join(keys)}",
                wanted="parallel.pipeline 1",
                cure=f"leave parallel.pipeline out, or {key}",
            )
        if key in TENSOR and plan.tensor > 1:
            raise ConfigError(
                f"{key} does not go with parallel.tensor: {TENSOR[key]}",
                got=f"tensor {plan.tensor}, {', '.join(keys)}",
                wanted="parallel.tensor 1",
                cure=f"leave parallel.tensor out, or {key}",
            )
