"""Models and cases of processes that share each matrix, and what they must come to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from afina.config import ParallelSettings
from afina.techniques.prefix import PrefixTuning
from tests.parallel import parity
from tests.parallel.parity import Case, Found, joined, run
from tests.tiny import tiny_gemma2, tiny_llama, tiny_qwen2

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _made(kind: Any, config: Any, **more: Any) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        torch.manual_seed(0)
        return kind(config(**{**SIZES, **more, **changes})).double().eval()

    return make


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "biased": functools.partial(tiny_llama, attention_bias=True, mlp_bias=True),
    "gemma2": tiny_gemma2,
    "qwen2": tiny_qwen2,
    "mistral": _made(MistralForCausalLM, MistralConfig, sliding_window=4, head_dim=8),
    "qwen3": _made(Qwen3ForCausalLM, Qwen3Config, head_dim=8),
    "phi3": _made(Phi3ForCausalLM, Phi3Config),
    # torch has no grouped products in fp64.
    "mixtral": _made(
        MixtralForCausalLM, MixtralConfig, num_local_experts=4, experts_implementation="eager"
    ),
}
parity.FAMILIES.update(FAMILIES)
parity.TECHNIQUES["prefix"] = PrefixTuning(tokens=3)


@functools.cache
def alone(case: Case) -> Found:
    """What one process comes to."""
    return run(case, None)


def runs(cases: Sequence[Case], settings: ParallelSettings) -> list[Found]:
    """Several cases one after the other, by the same processes."""
    return [run(case, settings, more=True) for case in cases]


def check(case: Case, found: Sequence[Found]) -> None:
    """Every figure is that of one process."""
    expected = alone(case)
    gradients = joined([one.gradients for one in found])
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        apart = float((gradient - expected.gradients[name]).abs().max())
        assert apart < 1e-9, (case, name, apart)
    for one in found:
        assert one.loss == pytest.approx(expected.loss, abs=1e-9), case
        assert one.norm == pytest.approx(expected.norm, rel=1e-9), case
        assert one.losses == pytest.approx(expected.losses, abs=1e-9), case
    for name, value in joined([one.values for one in found]).items():
        torch.testing.assert_close(value, expected.values[name], rtol=0, atol=1e-9)


def check_all(cases: Sequence[Case], found: Sequence[Sequence[Found]]) -> None:
    """The same of each case.

    Args:
        cases: as `runs` took them.
        found: what it gave, by rank.
    """
    for number, case in enumerate(cases):
        check(case, [each[number] for each in found])
