"""Does this fit together? Asked before anything is written: model, edit, rows, settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn

from afina import seams
from afina.adapters.contents import is_adapter
from afina.config import TrainSettings
from afina.errors import ConfigError, DataError, ModelError, RunError, TechniqueError
from afina.models.precision import DTYPES
from afina.models.prompts import check_pair
from afina.optim import optimisers
from afina.parallel.beside import refuse_techniques
from afina.parallel.plan import Plan
from afina.seams import require_model
from afina.train import ways
from afina.train.classes import refuse_unfit_classifier, refuse_unlike
from afina.tree import Edit, Seams
from afina.types import Row

NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}
"""A type of torch -> what the settings call it."""


def refuse_kinds(model: Any, tokenizer: Any, edit: Any) -> None:
    """Raises for what is not what its place asks for, such as None, or a model and its tokenizer the wrong way round.

    Args:
        model: of Transformers.
        tokenizer: its; None where rows are given prepared.
        edit: from `afina.apply`, or from loading an adapter.

    Raises:
        ModelError: no model, or no tokenizer.
        TechniqueError: no edit.
    """
    require_model(model)
    if tokenizer is not None:
        check_pair(model, tokenizer)
    if not isinstance(edit, Edit):
        raise TechniqueError(
            "there is no edit, which says what trains",
            got=type(edit).__name__,
            wanted="what afina.apply gives",
            cure="edit = afina.apply(model, [afina.LoRA(rank=16)])",
        )


def refuse_unfit(model: nn.Module, edit: Edit) -> None:
    """Raises when this model cannot be trained here, or nothing would train.

    Raises:
        ModelError: for anything but a decoder that predicts the next token, or a classifier.
        RunError: for an edit of another model, an undone, merged or frozen one, or one without trainable tensors.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if seams.classifies(model) is not None:
        refuse_unfit_classifier(model, edit)
    elif type(model).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelError(
            "only causal language models and classifiers can be trained",
            got=type(model).__name__,
            wanted="a model that predicts the next token, such as LlamaForCausalLM, or a class",
            cure="choose a decoder with its language-model head, such as the demo model smollm2-135m; or train an "
            "encoder on rows of text and label (in Python afina.load(NAME, labels=[...]) gives it the head)",
        )
    if edit.model is not model:
        raise RunError(
            "the edit is of another model", cure="train the model that was given to apply"
        )
    _refuse_state(edit)
    if len(edit.aiding()) == len(edit.trainable()):
        raise RunError(
            "nothing would train",
            got=", ".join(technique.key for technique in edit.techniques) or "no technique",
            cure=_beside(edit)
            if edit.techniques
            else "apply a technique first: afina.apply(model, [...])",
        )
    _refuse_lost(edit)


def _refuse_lost(edit: Edit) -> None:
    """Raises where a technique would train tensors that are saved nowhere: beside a model that is saved as itself."""
    if is_adapter(edit):
        return
    kept = {*edit.in_place, *edit.aiding()}
    lost = [name for name in edit.trainable() if name not in kept]
    if lost:
        raise RunError(
            "the model trains itself and is saved as Transformers knows it, which has no place for what trains "
            "beside it",
            got=f"{', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}",
            cure="leave full out, or the technique that these are of",
        )


def _beside(edit: Edit) -> str:
    """How to add LoRA to techniques that train nothing themselves."""
    flags = " ".join(f"--technique {technique.key}" for technique in edit.techniques)
    values = ", ".join(f"afina.{type(technique).__name__}(…)" for technique in edit.techniques)
    return (
        f"add one that trains: {flags} --technique lora (in Python afina.apply(model, "
        f"[{values}, afina.LoRA()]))"
    )


def _refuse_state(edit: Edit) -> None:
    """Raises for an edit that does not act, or does not train, just now."""
    if edit.undone:
        raise RunError("the edit was undone", cure="apply again: afina.apply(model, [...])")
    if edit.merged:
        raise RunError(
            "the edit is merged: what it attached does not act, and would not learn",
            cure="edit.unmerge()",
        )
    if edit.strengths and not edit.whole_strength:
        raise RunError(
            "the edit is scaled or off in part: what is trained so is not what its files would say",
            cure="edit.on() and edit.scale(1) before training",
        )
    frozen = [name for name, parameter in edit.trainable().items() if not parameter.requires_grad]
    if frozen:
        raise RunError(
            "tensors of the edit are frozen: it lies under a later one, or somebody froze them",
            got=f"{', '.join(frozen[:3])}{', …' if len(frozen) > 3 else ''}",
            cure="undo the later edit first, or apply all techniques in one call",
        )


def refuse_other_place(edit: Edit, settings: TrainSettings) -> None:
    """Raises when a device or a type is asked for that the model, which is loaded already, is not in.

    Raises:
        ConfigError: saying how to load it so.
    """
    attached = {id(p) for name, p in edit.trainable().items() if name not in edit.in_place}
    base = [p for p in edit.model.parameters() if id(p) not in attached]
    for name, wanted, found in (
        ("dtype", settings.dtype, {NAMES[p.dtype] for p in base if p.dtype in NAMES}),
        ("device", settings.device, {str(p.device) for p in base} | {p.device.type for p in base}),
    ):
        if wanted is not None and found and wanted not in found:
            raise ConfigError(
                f"train.{name} would do nothing: the model is loaded already",
                got=f"{wanted}, and a model in {' and '.join(sorted(found))}",
                cure=f"load it so: afina.load(…, {name}={wanted!r}), or leave train.{name} out",
            )


def refuse_rows(model: nn.Module, rows: Sequence[Row], val_rows: Sequence[Row]) -> None:
    """Raises when the rows cannot train, or cannot score, this model.

    Raises:
        DataError: no rows, rows of another kind than the model is for, or not one trained token among them.
    """
    for name, part in (("training", rows), ("validation", val_rows)):
        refuse_unlike(model, part, name)
        if part and not any(row.trained_tokens for row in part):
            raise DataError(f"not one token of the {name} rows would be trained")
    if not rows:
        raise DataError("there are no rows to train on", got="0 rows")


def refuse_idle_settings(
    settings: TrainSettings, validates: bool, measured: Collection[str] | None = None
) -> None:
    """Raises when a setting could have no effect, or names what is not there.

    Args:
        settings: of the training.
        validates: there are validation rows.
        measured: names of the scores that validation gives; None when that is not known beforehand.

    Raises:
        ConfigError: for settings of validation without validation rows, early stopping without evaluations, a score
            that is not measured, an optimiser or a package that there is not, or options that it does not take.
    """
    _refuse_idle_options(settings)
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "train.tensorboard needs the tensorboard package",
            cure="pip install 'afina[plot]', or leave train.tensorboard out",
        )
    idle = [
        f"train.{name}"
        for name, used in (
            ("early_stopping", settings.early_stopping is not None),
            ("eval_every", settings.eval_every is not None),
            ("best", settings.best != "loss"),
        )
        if used
    ]
    if idle and not validates:
        raise ConfigError(
            f"{' and '.join(idle)} would do nothing: there are no validation rows",
            cure="give some: --val FILE (in Python val=…), or --set data.val_fraction=0.1 (in Python "
            "DataSettings(val_fraction=0.1))",
        )
    if settings.early_stopping is not None and settings.eval_every is None:
        raise ConfigError(
            "train.early_stopping would do nothing: the only evaluation is at the end",
            cure=f"say how often to evaluate: {ways.setting('eval_every', 20)}",
        )
    if validates and measured is not None:
        refuse_unmeasured(settings.best, measured)


BY_THE_LOSS = "leave train.best out: then the loss chooses"
MEASURED_BY = {
    "accuracy": "say which answers there are to choose from, in a column `choices` of the rows or for all of them: "
    "--set 'eval.choices=[yes, no]' (in Python EvalSettings(choices=…) of what RunOptions.evaluate measures)",
    "exact_match": "give validation rows with a prompt and an answer, and leave eval.generate on (in Python "
    "RunOptions.evaluate measures it)",
}
"""What makes a validation measure a score that it does not."""


def refuse_unmeasured(best: str, measured: Collection[str]) -> None:
    """Raises when the score that chooses the best weights is not among those that are measured.

    Raises:
        ConfigError: saying what would measure it.
    """
    if best not in measured:
        raise ConfigError(
            f"train.best is {best}, which this validation does not measure",
            got=", ".join(measured),
            wanted=best,
            cure=f"{MEASURED_BY[best]}; or {BY_THE_LOSS}" if best in MEASURED_BY else BY_THE_LOSS,
        )


def _refuse_idle_options(settings: TrainSettings) -> None:
    """Raises for an unknown optimiser, and for options that were changed and that it does not take."""
    kind, default = optimisers.kind_of(settings.optimizer), TrainSettings()
    for name in ("betas", "eps", "weight_decay"):
        if getattr(settings, name) == getattr(default, name) or optimisers.takes(kind, name):
            continue
        others = [n for n, other in optimisers.kinds().items() if optimisers.takes(other, name)]
        raise ConfigError(
            f"train.{name} would do nothing: {kind.__name__} has no such option",
            got=f"train.{name}={getattr(settings, name)}",
            cure=f"leave it out, or take an optimiser that has it: {', '.join(others)}",
        )


def refuse_several(plan: Plan, settings: TrainSettings, keys: Sequence[str]) -> None:
    """Raises for what a run in one process can do and one in several cannot.

    Args:
        plan: how processes share the run.
        settings: of the run.
        keys: of the techniques.

    Raises:
        ConfigError: naming the setting, or the technique.
    """
    if plan.processes == 1:
        return
    reasons = {
        "step_in_backward": "a tensor that moves in backward does not wait for the other processes",
        "cache_inputs_gib": "each process would keep the states of all rows",
        "offload_activations": "what processes exchange would be moved with what is saved",
    }
    for name, why in reasons.items():
        if getattr(settings, name):
            raise ConfigError(
                f"train.{name} works in one process alone: {why}",
                got=f"{plan.processes} processes",
                cure=f"leave train.{name} out, or train in one process",
            )
    if plan.zero:
        optimisers.refuse_pieces(settings.optimizer, f"parallel.zero={plan.zero}")
    if plan.tensor > 1:
        optimisers.refuse_pieces(settings.optimizer, f"parallel.tensor={plan.tensor}")
    refuse_techniques(plan, keys)
    if plan.zero == 3 and settings.compile is True:
        raise ConfigError(
            "train.compile does not go with parallel.zero=3: blocks whose weights come and go are not compiled",
            got="compile true",
            cure="leave train.compile out, or set parallel.zero to 2",
        )
    if plan.splits_backward and (settings.compile is True or settings.recompute == "selective"):
        name = "compile" if settings.compile is True else "recompute"
        raise ConfigError(
            f"train.{name} does not go with parallel.schedule=zero_bubble: what it keeps serves one backward pass, and "
            "there are two",
            got=f"{name} {getattr(settings, name)}",
            wanted=f"{name} false" + (" or true" if name == "recompute" else ""),
            cure=f"leave train.{name} out, or set parallel.schedule to 1f1b",
        )


def refuse_in_stages(plan: Plan, between: Seams, *, scores: bool) -> None:
    """Raises for what must see the whole model, in a run whose processes share out its blocks.

    Args:
        plan: how processes share the run.
        between: what is done between passes.
        scores: validation measures more than the loss.

    Raises:
        ConfigError: with the reason.
    """
    if plan.pipeline == 1:
        return
    off = "leave parallel.pipeline out"
    if between.penalty:
        raise ConfigError(
            "a penalty on the loss does not go with parallel.pipeline: it is made of tensors of all blocks",
            got=f"pipeline {plan.pipeline}",
            cure=f"{off}, or the penalty",
        )
    if scores:
        raise ConfigError(
            "validation by answers does not go with parallel.pipeline: they are generated token by token by the whole "
            "model, and no process has it",
            got=f"pipeline {plan.pipeline}",
            wanted="train.best=loss",
            cure=f"validate by the loss, and score the finished adapter with afina eval; or {off}",
        )
