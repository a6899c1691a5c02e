"""What is strange in an adapter's file or configuration, a sentence each; nothing is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def broken(tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with single tensors."""
    found: list[str] = []
    for key, tensor in sorted(tensors.items()):
        if tensor.numel() == 0:
            found.append(f"{key}: empty")
            continue
        if not tensor.is_floating_point():
            found.append(f"{key}: {tensor.dtype}, no floating-point numbers")
            continue
        wide = tensor.float()
        nan, infinite = int(wide.isnan().sum()), int(wide.isinf().sum())
        if nan or infinite:
            found.append(f"{key}: {nan} NaN and {infinite} infinite of {tensor.numel()}")
    return found


def idle(config: Mapping[str, Any], places: Iterable[str]) -> list[str]:
    """Names in the configuration that reach no place of the file: PEFT passes over them without a word."""
    found: list[str] = []
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(place == target or place.endswith(f".{target}") for place in places):
            found.append(f"target_modules: {target!r} is no place of the file")
    for key in ("rank_pattern", "alpha_pattern"):
        table = config.get(key) if config.get("peft_type") == "LORA" else None
        for pattern in table if isinstance(table, dict) else ():
            try:
                reaches = any(re.fullmatch(rf"(.*\.)?({pattern})", place) for place in places)
            except re.error:
                reaches = False
            if not reaches:
                found.append(f"{key}: {pattern!r} is no place of the file")
    return found
