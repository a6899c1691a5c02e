"""Into how many parts the matrices of a model can be shared out: asked of its config, and of the model itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from afina import seams
from afina.errors import ConfigError
from afina.parallel.plan import divisors
from afina.parallel.tensor_plan import OF_EXPERTS, WAY_OUT, WAYS, Way, refused_unknown

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Under these names configs have the number of experts."""

WIDTHS = (
    "intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Under these names configs have the widths of feed-forwards that are cut."""


def counts_of(config: Any) -> dict[str, int]:
    """What must be shared out evenly, in words, with how many there are, as a config says it.

    Args:
        config: of a model.

    Raises:
        ConfigError: its plan has a string that is not known.
    """
    text = config.get_text_config()
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    for name, style in plan.items():
        if style not in WAYS and style not in OF_EXPERTS:
            raise refused_unknown(name, style)
    cut = {name.rpartition(".")[2] for name, style in plan.items() if WAYS.get(style) == "columns"}
    found: dict[str, int] = {}
    if cut & set(seams.QUERY_VALUE):
        heads = int(text.num_attention_heads)
        found["heads of queries"] = heads
        found["heads of keys and values"] = _least(
            getattr(text, "num_key_value_heads", None), heads
        )
    if any("mlp" in n or "feed_forward" in n for n, s in plan.items() if WAYS.get(s) == "columns"):
        for name in WIDTHS:
            if isinstance(width := getattr(text, name, None), int) and width:
                found[name] = width
    if "moe_tp_experts" in plan.values():
        experts = next((e for n in EXPERTS if (e := getattr(text, n, None))), None)
        if experts is not None:
            found["experts"] = int(experts)
    return found


def _least(value: Any, default: int) -> int:
    """A number of each layer, or of all of them: what divides all of it."""
    if isinstance(value, list | tuple):
        return math.gcd(*(int(one) for one in value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return int(value) if value else default


def sizes(counts: Mapping[str, int]) -> list[int]:
    """The numbers of parts that all of these can be shared out into."""
    return divisors(math.gcd(*counts.values())) if counts else [1]


def refuse_size(parts: int, counts: Mapping[str, int]) -> None:
    """Raises for a number of parts that does not divide what is shared out.

    Args:
        parts: processes that share each matrix.
        counts: see `counts_of`.

    Raises:
        ConfigError: with the numbers that would do.
    """
    over = {words: count for words, count in counts.items() if count % parts}
    if over:
        raise ConfigError(
            "parallel.tensor does not divide what it shares out",
            got=f"tensor {parts} for {', '.join(f'{count} {words}' for words, count in over.items())}",
            wanted=" or ".join(map(str, sizes(counts))),
            cure=f"set parallel.tensor to {sizes(counts)[-1]}"
            if sizes(counts)[-1] > 1
            else WAY_OUT,
        )


def counts_in(model: Any, ways: Mapping[str, Way]) -> dict[str, int]:
    """What must be shared out evenly in a model, in words, with how many there are.

    Args:
        model: on any device.
        ways: of its modules.
    """
    found: dict[str, int] = {}
    attention = tuple(f"{name}." for name in seams.attention_modules(model))
    for name, way in ways.items():
        module = model.get_submodule(name)
        if way == "experts":
            found["experts"] = math.gcd(found.get("experts", 0), int(module.num_experts))
        if way not in ("columns", "columns_joined", "rows", "rows_split"):
            continue
        out, into = module.weight.shape
        count = out if way in ("columns", "columns_joined") else into
        owner, _, tail = name.rpartition(".")
        head = getattr(model.get_submodule(owner), "head_dim", None)
        by_heads = head is not None and way in ("columns", "rows") and name.startswith(attention)
        words = f"{'heads' if by_heads else 'numbers'} of {tail}"
        found[words] = math.gcd(found.get(words, 0), count // head if by_heads else count)
    return found
