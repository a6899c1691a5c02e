"""What a model is for: asked of its config, or told by the user."""

from __future__ import annotations

from typing import Any, Literal, get_args

from ..errors import ConfigError, ModelError

Task = Literal["causal", "encoder", "classification", "token_classification"]


def task_of(config: Any, num_labels: int | None = None) -> Task:
    """What a model with `config` is for, by the architecture that wrote it.

    Raises:
        ModelError: an architecture with no causal head that is no encoder either.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if num_labels is not None:
        return "classification"
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return "classification"
    if architecture.endswith("ForTokenClassification"):
        return "token_classification"
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        if causal and not getattr(config, "is_encoder_decoder", False):
            _refuse_seeing(config, architecture)
            return "causal"
        raise ModelError(
            "afina adapts causal language models and encoders",
            got=architecture,
            wanted="a decoder alone, or an encoder alone",
            cure="choose a model of one of these kinds (in Python task=… loads it as one, if it is)",
        )
    if architecture or type(config) in MODEL_FOR_MASKED_LM_MAPPING or not causal:
        return "encoder"
    return "causal"


def _refuse_seeing(config: Any, architecture: str) -> None:
    """Raises for a model that sees the tokens it is to predict."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        raise ModelError(
            "this model sees the tokens that it should predict",
            got=f"{architecture} with is_decoder false in config.json",
            wanted="a decoder (in Python task='encoder' loads it as an encoder)",
            cure="set is_decoder to true in config.json if it was trained as a decoder",
        )


def class_of(kind: Task) -> Any:
    """The class of Transformers that loads a model for a task."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    classes: dict[Task, Any] = {
        "causal": AutoModelForCausalLM,
        "encoder": AutoModel,
        "classification": AutoModelForSequenceClassification,
        "token_classification": AutoModelForTokenClassification,
    }
    return classes[kind]


def check_task(task: str | None, num_labels: int | None) -> None:
    """Raises for what is no task, or no number of classes.

    Raises:
        ConfigError: see above.
    """
    if task is not None and task not in get_args(Task):
        raise ConfigError("unknown task", got=repr(task)[:80], wanted=", ".join(get_args(Task)))
    counts = isinstance(num_labels, int) and not isinstance(num_labels, bool) and num_labels > 0
    if num_labels is not None and not counts:
        raise ConfigError(
            "num_labels is the number of classes", got=repr(num_labels)[:80], wanted="1 or more"
        )
