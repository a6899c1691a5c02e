"""afina: adapt Transformer models with a fraction of the cost of full fine-tuning.

Public names are imported when they are first used, so that `import afina` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afina.adapters.combine import CombineSettings, combine
    from afina.adapters.extract import ExtractSettings, extract
    from afina.adapters.files import load as load_adapter
    from afina.adapters.inspection import inspect
    from afina.adapters.merge import Merged, MergeSettings, merge
    from afina.adapters.resize import ResizeSettings, resize
    from afina.config import EvalSettings, GenerateSettings, TrainSettings
    from afina.data.curriculum import Curriculum
    from afina.data.settings import DataSettings
    from afina.errors import AfinaError
    from afina.evaluate.evaluate import evaluate
    from afina.models.generate import generate
    from afina.models.hub import load
    from afina.optim.gradient_noise import GradientNoise
    from afina.optim.layer_decay import LayerDecay
    from afina.reports.check import check
    from afina.table import apply
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
    from afina.techniques.quantize import Quantize
    from afina.techniques.reversible import Reversible
    from afina.techniques.token_pruning import TokenPruning
    from afina.techniques.trainable_tokens import TrainableTokens
    from afina.train.job import Run
    from afina.train.options import RunOptions
    from afina.train.run import train
    from afina.tree import Edit

__version__ = "0.1.0"

_HOMES = {
    "AdaLoRA": "afina.techniques.adalora",
    "AfinaError": "afina.errors",
    "BitFit": "afina.techniques.bitfit",
    "Bottleneck": "afina.techniques.bottleneck",
    "CombineSettings": "afina.adapters.combine",
    "Curriculum": "afina.data.curriculum",
    "DataSettings": "afina.data.settings",
    "DoRA": "afina.techniques.dora",
    "Edit": "afina.tree",
    "EvalSettings": "afina.config",
    "ExtractSettings": "afina.adapters.extract",
    "Full": "afina.techniques.full",
    "GenerateSettings": "afina.config",
    "GradientNoise": "afina.optim.gradient_noise",
    "IA3": "afina.techniques.ia3",
    "LayerDecay": "afina.optim.layer_decay",
    "LoRA": "afina.techniques.lora",
    "MergeSettings": "afina.adapters.merge",
    "Merged": "afina.adapters.merge",
    "PTuning": "afina.techniques.p_tuning",
    "PrefixTuning": "afina.techniques.prefix",
    "PromptTuning": "afina.techniques.prompt",
    "Quantize": "afina.techniques.quantize",
    "ResizeSettings": "afina.adapters.resize",
    "Reversible": "afina.techniques.reversible",
    "Run": "afina.train.job",
    "RunOptions": "afina.train.options",
    "TokenPruning": "afina.techniques.token_pruning",
    "TrainSettings": "afina.config",
    "TrainableTokens": "afina.techniques.trainable_tokens",
    "apply": "afina.table",
    "check": "afina.reports.check",
    "combine": "afina.adapters.combine",
    "evaluate": "afina.evaluate:",
    "extract": "afina.adapters.extract",
    "generate": "afina.models.generate",
    "inspect": "afina.adapters.inspection",
    "load": "afina.models.hub",
    "load_adapter": "afina.adapters.files:load",
    "merge": "afina.adapters.merge",
    "resize": "afina.adapters.resize",
    "train": "afina.train:",
}

__all__ = [
    "IA3",
    "AdaLoRA",
    "AfinaError",
    "BitFit",
    "Bottleneck",
    "CombineSettings",
    "Curriculum",
    "DataSettings",
    "DoRA",
    "Edit",
    "EvalSettings",
    "ExtractSettings",
    "Full",
    "GenerateSettings",
    "GradientNoise",
    "LayerDecay",
    "LoRA",
    "MergeSettings",
    "Merged",
    "PTuning",
    "PrefixTuning",
    "PromptTuning",
    "Quantize",
    "ResizeSettings",
    "Reversible",
    "Run",
    "RunOptions",
    "TokenPruning",
    "TrainSettings",
    "TrainableTokens",
    "apply",
    "check",
    "combine",
    "evaluate",
    "extract",
    "generate",
    "inspect",
    "load",
    "load_adapter",
    "merge",
    "resize",
    "train",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'afina' has no attribute {name!r}")
    module, whole, other = home.partition(":")
    found = importlib.import_module(module)
    # "room:" is the room itself, which can be called (see callable_room).
    value = found if whole and not other else getattr(found, other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
