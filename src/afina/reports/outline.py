"""A model without its weights, for what can be told from shapes, settings and the tokenizer alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afina.models import hub
from afina.models.precision import choose, parse_device
from afina.models.tokenizer import check_vocabulary


def outline(
    source: str | Path,
    dtype: str | None = None,
    device: str | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
    task: hub.Task | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[Any, Any]:
    """What `hub.load` gives, with every tensor on the meta device: nothing of the weights is read.

    The arguments are those of `hub.load`; the tensors have the dtype that it would give them.

    Raises:
        ModelError: not found, or its configuration or tokenizer cannot be used.
    """
    from transformers import GenerationConfig

    place = parse_device(device)
    folder = hub.resolve(source, revision=revision, token=token, offline=offline)
    model = hub.skeleton(folder, task, labels).to(choose(place, dtype).base)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    tokenizer = hub.load_tokenizer(folder, model)
    check_vocabulary(folder, model, tokenizer)
    model.name_or_path = model.config._name_or_path = str(source)
    return model, tokenizer
