"""Techniques in a model whose matrices processes share: a run is that of one process, adapter and all.

What cannot be is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.config import ParallelSettings
from afina.data.curriculum import Curriculum
from afina.optim.gradient_noise import GradientNoise
from afina.optim.layer_decay import LayerDecay
from afina.parallel.processes import Processes
from afina.techniques.adalora import AdaLoRA
from afina.techniques.bitfit import BitFit
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.p_tuning import PTuning
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.reversible import Reversible
from afina.techniques.trainable_tokens import TrainableTokens
from afina.train.metrics import read_metrics
from afina.tree import Technique
from tests.parallel.parity import joined, placed
from tests.parallel.pool import Pool
from tests.parallel.tensor_kit import FAMILIES
from tests.train.kit import run

pytestmark = pytest.mark.dist

Choice = tuple[str, list[Technique]]

CHOICES: dict[str, Choice] = {
    "lora with dropout": ("llama", [LoRA(rank=2, dropout=0.3)]),
    "lora from the weights": ("llama", [LoRA(rank=2, start="pissa")]),
    "lora at the ends": ("tied", [LoRA(rank=2, target=("embed_tokens", "q_proj"))]),
    "lora of joined maps": ("phi3", [LoRA(rank=2, dropout=0.3)]),
    "lora and a head": ("llama", [LoRA(rank=2, modules_to_save=("lm_head",))]),
    "lora of experts": ("mixtral", [LoRA(rank=2, target=("all-linear", "experts"))]),
    "dora": ("biased", [DoRA(rank=2)]),
    "dora with dropout": ("biased", [DoRA(rank=2, dropout=0.3)]),
    "adalora": ("llama", [AdaLoRA(init_rank=4, target_rank=2, tinit=1, tfinal=1, dropout=0.2)]),
    "ia3": ("biased", [IA3(target=("all-linear",))]),
    "bitfit": ("biased", [BitFit()]),
    "new biases": ("llama", [BitFit()]),
    "ia3 and biases": ("llama", [IA3(target=("all-linear",)), BitFit()]),
    "bottleneck": ("gemma2", [Bottleneck(reduction_factor=4)]),
    "parallel bottleneck": ("llama", [Bottleneck(kind="scaled_parallel", reduction_factor=4)]),
    "prefix": ("llama", [PrefixTuning(tokens=3)]),
    "prefix by a network": ("llama", [PrefixTuning(tokens=3, projection=True)]),
    "prompt": ("llama", [PromptTuning(tokens=3)]),
    "p-tuning": ("llama", [PTuning(tokens=3, network="lstm")]),
    "tokens": ("tied", [TrainableTokens(tokens=(3, 7, 200))]),
    "full": ("qwen3", [Full(layers="1")]),
    "full, tied": ("tied", [Full()]),
    "steps": ("llama", [LoRA(rank=2), GradientNoise(eta=1.0), LayerDecay(decay=0.5), Curriculum()]),
    "reversible": ("llama", [LoRA(rank=2), Reversible()]),
}


def model_of(family: str) -> Any:
    return FAMILIES["llama"](tie_word_embeddings=True) if family == "tied" else FAMILIES[family]()


def trained(out: Path, choice: Choice, settings: ParallelSettings | None) -> dict[str, Any]:
    """What trains, at the end of four steps, as this process holds it: pieces in their places."""
    family, techniques = choice
    model, options = model_of(family), {}
    if settings is not None:
        options["mesh"] = Processes(settings)
    how: dict[str, Any] = {"optimizer": "sgd", "lr": 0.2, "steps": 4, "clip": 1.0}
    run(out, techniques, model=model, options=options, **how)
    named = model.named_parameters()
    return {n: placed(p, p.detach()) for n, p in named if p.requires_grad}


def all_trained(
    out: Path, names: Sequence[str], settings: ParallelSettings
) -> list[dict[str, Any]]:
    """The same of several choices, one after the other."""
    return [trained(out / name, CHOICES[name], settings) for name in names]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """What the run left."""
    found: dict[str, torch.Tensor] = {}
    for folder in ("adapter", "model"):
        for file in (out / folder).glob("*.safetensors"):
            found |= load_file(file)
    return found


def figures(out: Path, name: str) -> list[Any]:
    """Of each step."""
    return [line.get(name) for line in read_metrics(out)]


@pytest.mark.parametrize("part", range(4))
def test_a_run_is_that_of_one_process(pool: Pool, tmp_path: Path, part: int) -> None:
    names = list(CHOICES)[part::4]
    found = pool.run(2, all_trained, tmp_path / "two", names, ParallelSettings(tensor=2))
    for number, name in enumerate(names):
        # What rounds states to a grid rounds some of them the other way.
        near = 1e-3 if "reversible" in name else 1e-9
        alone = trained(tmp_path / "alone" / name, CHOICES[name], None)
        together = joined([each[number] for each in found])
        assert together.keys() == alone.keys(), name
        for key, value in together.items():
            assert float((value - alone[key]).abs().max()) < near, (name, key)
        for figure in ("loss", "gradient_norm"):
            expected = figures(tmp_path / "alone" / name, figure)
            assert figures(tmp_path / "two" / name, figure) == pytest.approx(expected, rel=near)
        left, expected = (weights(tmp_path / where / name) for where in ("two", "alone"))
        assert left.keys() == expected.keys(), name
        for key, value in left.items():
            assert float((value - expected[key]).abs().max()) < max(near, 1e-6), (name, key)
