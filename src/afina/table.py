"""The table of techniques: what `afina techniques`, the configuration, the documentation and the battery read.

Adding a technique is one file, one line here, one row in the battery and one page of documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from afina.data.curriculum import Curriculum
from afina.errors import ConfigError, TechniqueError
from afina.optim.gradient_noise import GradientNoise
from afina.optim.layer_decay import LayerDecay
from afina.seams import require_model
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
from afina.techniques.quantize import Quantize, found_in
from afina.techniques.reversible import Reversible, coupled, marked
from afina.techniques.token_pruning import TokenPruning
from afina.techniques.trainable_tokens import TrainableTokens
from afina.tree import Edit, Technique, stands_on

TECHNIQUES: dict[str, type[Technique]] = {
    "quantize": Quantize,
    "lora": LoRA,
    "dora": DoRA,
    "adalora": AdaLoRA,
    "trainable_tokens": TrainableTokens,
    "prompt": PromptTuning,
    "prefix": PrefixTuning,
    "p_tuning": PTuning,
    "bitfit": BitFit,
    "ia3": IA3,
    "bottleneck": Bottleneck,
    "full": Full,
    "layer_decay": LayerDecay,
    "gradient_noise": GradientNoise,
    "token_pruning": TokenPruning,
    "reversible": Reversible,
    "curriculum": Curriculum,
}

ORDER: tuple[str, ...] = (
    "quantize",
    "full",
    "trainable_tokens",
    "lora",
    "dora",
    "adalora",
    "bitfit",
    "ia3",
    "bottleneck",
    "prefix",
    "prompt",
    "p_tuning",
    "token_pruning",
    "reversible",
    "layer_decay",
    "gradient_noise",
    "curriculum",
)
"""The order in which techniques act on a model, whatever the order in which they were given."""

CLASHES: dict[tuple[str, str], str] = {
    ("full", "trainable_tokens"): "an embedding that trains itself needs no rows beside it; "
    "to train some modules whole beside chosen tokens, set trainable_tokens.modules_to_save",
    (
        "quantize",
        "full",
    ): "a weight in few bits cannot train itself; to train some modules whole beside a method, "
    "set its modules_to_save and leave them out with quantize.exclude",
    ("full", "lora"): "a weight that trains itself needs no low-rank change beside it; "
    "to train some modules whole beside LoRA, set lora.modules_to_save",
    ("full", "adalora"): "a weight that trains itself needs no low-rank change beside it; "
    "to train some modules whole beside AdaLoRA, set adalora.modules_to_save",
    (
        "full",
        "bitfit",
    ): "full trains the biases too; to train some modules whole beside BitFit, set "
    "bitfit.modules_to_save",
    ("full", "dora"): "a weight that trains itself needs no change of direction beside it; "
    "to train some modules whole beside DoRA, set dora.modules_to_save",
    ("lora", "dora"): "DoRA is LoRA with magnitudes: its direction is learnt by a LoRA of its own; "
    "use one of them, and raise its rank",
    (
        "dora",
        "adalora",
    ): "each is a low-rank change of the same maps, and DoRA sets the length of the base's own rows; "
    "use one of them",
    ("full", "ia3"): "a weight that trains itself needs no factors beside it; "
    "to train some modules whole beside IA3, set ia3.modules_to_save",
    (
        "full",
        "bottleneck",
    ): "a model that trains itself is saved as Transformers knows it, which has no "
    "place for adapters; to train some modules whole beside them, set bottleneck.modules_to_save",
    (
        "full",
        "prefix",
    ): "a model that trains itself is saved as Transformers knows it, which has no "
    "place for a prefix; to train some modules whole beside it, set prefix.modules_to_save",
    (
        "full",
        "prompt",
    ): "a model that trains itself is saved as Transformers knows it, which has no "
    "place for a prompt; to train some modules whole beside it, set prompt.modules_to_save",
    (
        "full",
        "p_tuning",
    ): "a model that trains itself is saved as Transformers knows it, which has no "
    "place for a prompt; to train some modules whole beside it, set p_tuning.modules_to_save",
    ("prefix", "prompt"): "both want the places in front of a row; raise tokens of one of them",
    ("prefix", "p_tuning"): "both want the places in front of a row; raise tokens of one of them",
    ("prompt", "p_tuning"): "both put vectors in front of a row, and which come first is not said; "
    "raise tokens of one of them",
}
"""Pairs that cannot be combined, and why; each pair in the order of ORDER."""


def check(techniques: Sequence[Technique]) -> list[Technique]:
    """The techniques in the order in which they act.

    Raises:
        TechniqueError: when one is no technique, one is given twice, or two clash.
    """
    listed = isinstance(techniques, Iterable) and not isinstance(techniques, Technique | str)
    if not listed or not all(isinstance(t, Technique) for t in techniques):
        raise TechniqueError(
            "this is not a list of techniques",
            got=repr(techniques)[:200],
            wanted="values such as [afina.LoRA(rank=16)]",
        )
    keys = [t.key for t in techniques]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise TechniqueError("a technique is given twice", got=", ".join(twice), wanted="once each")
    for pair, reason in CLASHES.items():
        if set(pair) <= set(keys):
            raise TechniqueError(f"{pair[0]} and {pair[1]} cannot be combined: {reason}")
    return sorted(techniques, key=lambda t: ORDER.index(t.key))


def _refuse_beside(model: nn.Module, techniques: Sequence[Technique]) -> None:
    """Raises for a technique that cannot act beside those of earlier edits of the model.

    A tensor that an earlier edit trained in place is a base like any other, and so is a quantised one.

    Raises:
        TechniqueError: naming the two, with the reason.
    """
    earlier = {t.key for stand in stands_on(model) for t in stand.techniques}
    mine = {t.key for t in techniques}
    for pair, reason in CLASHES.items():
        first, second = pair
        crossed = (first in earlier and second in mine) or (second in earlier and first in mine)
        if crossed and not set(pair) & {"full", "quantize"}:
            there = first if first in earlier else second
            raise TechniqueError(
                f"{first} and {second} cannot be combined: {reason}",
                got=f"an earlier edit of this model, with {there}",
                cure="undo that first; it can be put on again when this one is undone",
            )


def apply(
    model: nn.Module,
    techniques: Sequence[Technique],
    *,
    seed: int = 0,
    undoable: bool = True,
    tokenizer: Any = None,
) -> Edit:
    """Changes `model` by every technique and gives the new parameters their starting values.

    All of the base is frozen first; what trains is what the techniques say.

    Args:
        model: a Transformers model.
        techniques: frozen values, as `[afina.LoRA(rank=16)]`; checked before anything is changed.
        seed: of the starting values; they do not depend on the order of drawing or on other techniques.
        undoable: keep the originals of tensors that are trained in place (a second copy of each) or quantised, so that
            `undo` restores them.
        tokenizer: the model's, for techniques that start from a text.

    Returns:
        The edit; its `undo()` gives the base back bit for bit.

    Raises:
        TechniqueError: when a technique does not fit the model; the model is then as it was.
        ModelError: for what is no model.
        ConfigError: for a seed that is no whole number.
    """
    require_model(model)
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ConfigError("a seed is a whole number", got=repr(seed)[:80], wanted="seed=0")
    listed = check(techniques)
    if tokenizer is not None:
        listed = [technique.told(tokenizer) for technique in listed]
    base = found_in(model)
    if base is not None and not any(isinstance(t, Quantize) for t in listed):
        listed = check([base, *listed])  # a model that was loaded quantised is changed so
    coupling = None if coupled(model) else marked(model)
    if coupling is not None and not any(isinstance(t, Reversible) for t in listed):
        listed = check([*listed, coupling])  # one that was trained so says nothing of use otherwise
    _refuse_beside(model, listed)
    with Edit(model, listed).whole() as edit:
        edit.stand()
        for technique in edit.techniques:
            part = technique.apply(model, undoable=undoable)
            # Absorbed before it gets its values: should these fail, it goes back with the rest.
            edit.absorb(part)
            if not any(p.is_meta for p in part.trainable().values()):
                technique.init(part, seed=seed)
    if not undoable:
        edit.give_up_originals()
    return edit


def restore(model: nn.Module) -> None:
    """Puts back what a model was trained with and cannot do without, as its config says: coupled blocks.

    Raises:
        ModelError: the config does not say how.
        TechniqueError: the model's blocks cannot be coupled so.
    """
    coupling = None if coupled(model) else marked(model)
    if coupling is not None:
        coupling.apply(model)
