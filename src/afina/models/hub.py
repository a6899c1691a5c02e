"""From what the user names to a model in memory: a folder, a hub id, a GGUF file, or a demo name.

Weights are read from safetensors only, and code that comes with a model is never run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..places import exists, local
from .classes import check_names, name_head
from .locate import resolve
from .packing import Packer, Packing, check_packer
from .precision import choose, parse_device
from .strict import check_loaded
from .task import Task, check_task, class_of, task_of
from .tokenizer import check_vocabulary, repair_pad

__all__ = ["Task", "config_of", "load", "load_tokenizer", "quiet", "resolve", "skeleton", "task_of"]

log = logging.getLogger(__name__)


def load(
    source: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    task: Task | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    quantize: Packer | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
) -> tuple[Any, Any]:
    """The model, in evaluation mode, and the tokenizer of `source`.

    Args:
        source: a Hugging Face folder, a .gguf file, a demo name, or a hub id.
        dtype: of the weights; None lets the device decide (see `precision`).
        device: None is the first CUDA device, else the CPU.
        task: None asks the config: a causal language model, an encoder, or a classifier of whole texts
            (classification) or of their tokens (token_classification).
        num_labels: classes of a new classification head (its weights are drawn from a fixed seed).
        labels: their names, in the order of their numbers, kept in the model's config; a model that has classes of
            these names keeps its own head and order.
        quantize: an `afina.Quantize`: weights are packed one by one while they are read, so that the model is never in
            memory unpacked.
        revision: of a hub id: branch, tag or commit.
        token: of the Hub.
        offline: True downloads nothing; None follows $HF_HUB_OFFLINE.

    Raises:
        ModelError: not found, not usable, or not safe; the message says what to do.
        ConfigError: unknown dtype or task, or what is no name or number.
        TechniqueError: the weights cannot be quantised so.
    """
    labels = check_names(labels, num_labels)
    check_task(task, len(labels) if labels else num_labels)
    check_packer(quantize)
    place, precision = parse_device(device), choose(device, dtype)
    folder = resolve(source, revision=revision, token=token, offline=offline)
    warn_unverified(source, folder)
    config = config_of(folder)
    kind = task or task_of(config, len(labels) if labels else num_labels)
    num_labels = name_head(config, kind, labels, num_labels)
    started = time.perf_counter()
    packing = None if quantize is None else Packing(quantize, place)
    model = _model(folder, config, kind, precision.base, num_labels, packing)
    tokenizer = _tokenizer(folder)
    check_vocabulary(folder, model, tokenizer)
    repair_pad(model, tokenizer)
    model = model.to(place)
    # What the user named, so that an adapter says that and not the cache's folder.
    model.name_or_path = model.config._name_or_path = str(source)
    warn_coupled(source, model)
    seconds = time.perf_counter() - started
    log.info("%s (%s) on %s in %.1f s; %s", source, kind, place, seconds, precision)
    return model, tokenizer


def warn_unverified(source: str | Path, folder: Path) -> None:
    """Says so when a merge made this model and did not find it right; see `adapters/merge_record.py`."""
    for record in (folder / "merge.json", local(f"{source}.merge.json")):
        if not exists(record):
            continue
        try:
            verified = json.loads(record.read_text(encoding="utf-8"))["verified"]
        except (OSError, ValueError, KeyError, TypeError):
            verified = None
        if verified is not True:
            log.warning(
                "%s was merged from an adapter and was not verified: %s says why", source, record
            )


def warn_coupled(source: str | Path, model: Any) -> None:
    """Says so when a model's blocks were coupled in training: loaded alone, they say something else."""
    if getattr(model.config, "afina_reversible", None) is not None:
        log.warning(
            "%s was trained with blocks in additive coupling (reversible), and says something else without: the "
            "verbs of afina put it back by themselves, in Python afina.apply(model, []) does",
            source,
        )


def config_of(folder: Path) -> Any:
    """The configuration of the model in `folder`.

    Raises:
        ModelError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # what a class of hundreds makes of a value it did not expect
        raise ModelError(
            "transformers cannot read the model's config.json",
            got=f"{folder}: {_said(error)}",
            wanted="values as the model's publisher wrote them",
            cure="copy config.json of the original model, or upgrade transformers",
        ) from error


def skeleton(
    folder: Path,
    task: Task | None = None,
    labels: Sequence[str] | None = None,
    num_labels: int | None = None,
) -> Any:
    """The model in `folder` without its weights: names, shapes and ties, every tensor on the meta device.

    Args:
        folder: of the model.
        task: as for `load`.
        labels: as for `load`.
        num_labels: as for `load`.

    Raises:
        ModelError: its configuration cannot be read, or says something that afina does not adapt.
    """
    config = config_of(folder)
    labels = check_names(labels, num_labels)
    count = len(labels) if labels else num_labels
    kind = task or task_of(config, count)
    count = name_head(config, kind, labels, count)
    if count is not None:
        config.num_labels = count
    with torch.device("meta"), quiet():
        return class_of(kind).from_config(config, trust_remote_code=False)


def _model(
    folder: Path,
    config: Any,
    kind: Task,
    base: torch.dtype,
    labels: int | None,
    packing: Packing | None,
) -> Any:
    if labels is not None:
        config.num_labels = labels
    way = {} if packing is None else {"quantization_config": packing.settings()}
    try:
        # A new head's values must not depend on what was drawn before, nor change what is drawn after.
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(0)
            model, loaded = class_of(kind).from_pretrained(
                folder,
                config=config,
                dtype=base,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_loaded judges them
                trust_remote_code=False,
                local_files_only=True,
                **way,
            )
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # what a class of hundreds makes of a config or weights it did not expect
        if packing is not None and packing.failed is not None:
            raise packing.failed from None
        raise _no_model(folder, config, kind, error) from error
    if packing is not None:
        packing.clean(model)
    check_loaded(folder, loaded, new_head=kind != "causal", model=model)
    return model


def _no_model(folder: Path, config: Any, kind: Task, error: Exception) -> ModelError:
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return ModelError(
            "there is not enough memory for this model",
            got=f"{folder}: {_said(error)}",
            wanted="memory for all its weights at once",
            cure="a smaller model, dtype bf16, or another device; if config.json asks for sizes that the weights "
            "have not, copy the original file",
        )
    packed = getattr(config, "quantization_config", None)
    return ModelError(
        f"the weights cannot be loaded as a model for {kind}",
        got=f"{folder}: {_said(error)}",
        wanted=f"weights that fit {(config.architectures or ['the config'])[0]}",
        cure="load the model that was not quantised"
        if packed
        else "check that the files are whole and belong together (in Python task=… sets another kind)",
    )


def _said(error: Exception) -> str:
    """An error of another library on one line, with its kind where its words alone say nothing."""
    text = " ".join(str(error).split())
    return text[:400] if " " in text else f"{type(error).__name__}: {text[:400]}"


def load_tokenizer(folder: Path, model: Any = None) -> Any:
    """The tokenizer saved in `folder`; with a pad token that suits `model`, where that is given.

    Raises:
        ModelError: it cannot be loaded.
    """
    tokenizer = _tokenizer(folder)
    if model is not None:
        repair_pad(model, tokenizer)
    return tokenizer


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    cure = "copy the tokenizer files of the original model into the folder"
    wanted = "tokenizer.json and tokenizer_config.json, or files that transformers can convert"
    try:
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (
        Exception
    ) as error:  # of JSON, of a converter, of the tokenizers library, which raises Exception itself
        raise ModelError(
            "the model's tokenizer cannot be loaded",
            got=f"{folder}: {_said(error)}",
            wanted=wanted,
            cure=cure,
        ) from error
    # Without its files a class makes a vocabulary of its special tokens alone, and says nothing.
    names = {"tokenizer.json", *dict(made.vocab_files_names).values()}
    if made.vocab_files_names and not any((folder / name).exists() for name in names):
        raise ModelError(
            "the model's tokenizer has no vocabulary",
            got=f"{folder}: none of {', '.join(sorted(names))}",
            wanted=wanted,
            cure=cure,
        )
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: loading is short, and what is wrong is an error of ours."""
    from transformers.utils import logging as theirs

    shown, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if shown:
            theirs.enable_progress_bar()
