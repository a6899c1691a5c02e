"""After the first steps: does every trainable tensor really learn?

Checkpointing, wrong hooks or a frozen path leave gradients empty without any error, and the loss may still fall a
little through the others. An adapter's A is zero-gradient at the first step by construction (its B is zero), so it is
judged at the second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from afina.errors import RunError

AUDITED_STEPS = 2
"""How many steps are looked at: the first, and the one at which what starts silent must speak."""


def silent_tensors(trainable: Mapping[str, nn.Parameter]) -> tuple[list[str], list[str]]:
    """Names of the tensors whose gradient is missing, and of those whose gradient is all zero."""
    missing = [n for n, p in trainable.items() if p.grad is None]
    zero = [
        n for n, p in trainable.items() if p.grad is not None and not bool(torch.any(p.grad != 0))
    ]
    return missing, zero


def refuse_silent(
    missing: Sequence[str],
    zero: Sequence[str],
    of: int,
    step: int,
    may_be_silent: Collection[str],
) -> None:
    """Raises when a tensor that should learn got no gradient.

    Args:
        missing: names of the tensors that got none.
        zero: names of those whose gradient was all zero.
        of: how many trainable tensors there are.
        step: 0 or 1.
        may_be_silent: names that may have a zero gradient at this step.

    Raises:
        RunError: naming the tensors.
    """
    zero = [n for n in zero if n not in may_be_silent]
    if not missing and not zero:
        return
    shown = [f"{n} (no gradient)" for n in missing] + [f"{n} (all zero)" for n in zero]
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    raise RunError(
        f"after optimiser step {step + 1}, {len(shown)} of {of} trainable tensors did not learn",
        got=", ".join(shown[:5]) + more,
        wanted="a gradient that is not zero in every trainable tensor",
        cure="leave these modules out by the technique's own setting: --set 'techniques.lora.exclude=[…]' for LoRA "
        "(in Python LoRA(exclude=…)), or look for a part of the model that the loss does not reach",
    )
