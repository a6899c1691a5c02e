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


def refuse_techniques(plan: Plan, keys: Collection[str]) -> None:
    """Raises for a technique that cannot act under a plan.

    Args:
        plan: of the run.
        keys: of its techniques.

    Raises:
        ConfigError: with the reason, and what works.
    """
    if plan.zero < 3 or plan.shard == 1:
        return
    for key in keys:
        if key in ZERO_3:
            raise ConfigError(
                f"{key} does not go with parallel.zero=3: {ZERO_3[key]}",
                got=", ".join(keys),
                wanted="parallel.zero 0, 1 or 2",
                cure=f"set parallel.zero to 2, or leave {key} out",
            )
