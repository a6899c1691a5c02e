"""A model without its values, and its values in their files: for processes of which none holds the whole model.

The model is built as Transformers builds it, except that every parameter goes to the meta device as soon as it is
there; what the model computes itself (rotary frequencies, position ids) is kept as it came out. Its values are read
from the safetensors files by name and box, whoever needs them, in the dtype that the model is for.

That works where the files hold the model's own tensors, name for name. Where Transformers would rename, join or convert
some on the way, or draw a new head, it is told why not, and the model is to be loaded whole.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..tree.pieces import Box, whole_box
from .classes import check_names, name_head
from .hub import config_of, load_tokenizer, quiet, resolve, warn_coupled, warn_unverified
from .precision import choose
from .task import Task, check_task, class_of, task_of
from .tokenizer import check_vocabulary
from .weights import Stored, files_of


class NotInPartsError(Exception):
    """Why a model's values cannot be read part by part, in words."""


@dataclass(frozen=True)
class Unread:
    """The values of a model that has none yet.

    Attributes:
        dtype: of the floating-point ones.
        keys: name of each parameter, and of each buffer that the files hold -> its name in its file.
        files: of each such name.
        buffers: those that the model made itself, by name.
    """

    dtype: torch.dtype
    keys: Mapping[str, str]
    files: Mapping[str, Path]
    buffers: Mapping[str, Tensor]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a part of it, on the CPU.

        Args:
            name: in the model.
            box: which part; None is the whole.
        """
        key = self.keys[name]
        with safe_open(self.files[key], "pt") as opened:
            part = opened.get_slice(key)
            if box is None or box == whole_box(part.get_shape()):
                found: Tensor = opened.get_tensor(key)
            else:
                found = part[tuple(slice(begin, end) for begin, end in box)]
        return found.to(self.dtype) if found.is_floating_point() else found


def load_in_parts(
    source: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    task: Task | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
) -> tuple[Any, Any, Unread]:
    """The model of `source` in evaluation mode with every tensor on the meta device, its tokenizer, and its values.

    Args:
        source: as for `hub.load`, and so all others.
        dtype: of the weights.
        device: that they are for.
        task: as for `hub.load`.
        num_labels: as for `hub.load`.
        labels: as for `hub.load`.
        revision: as for `hub.load`.
        token: as for `hub.load`.
        offline: as for `hub.load`.

    Raises:
        NotInPartsError: the values do not lie in the files as the model has them: load it whole.
        ModelError: as `hub.load`.
    """
    labels = check_names(labels, num_labels)
    check_task(task, len(labels) if labels else num_labels)
    base = choose(device, dtype).base
    folder = resolve(source, revision=revision, token=token, offline=offline)
    warn_unverified(source, folder)
    config = config_of(folder)
    kind = task or task_of(config, len(labels) if labels else num_labels)
    num_labels = name_head(config, kind, labels, num_labels)
    if num_labels is not None:
        config.num_labels = num_labels
    if getattr(config, "quantization_config", None):
        raise NotInPartsError("its weights are packed")
    with without_values(), quiet():
        model = class_of(kind).from_config(config, trust_remote_code=False, dtype=base)
    unread = _unread(folder, model, base)
    _take_settings(model, folder)
    tokenizer = load_tokenizer(folder, model)
    check_vocabulary(folder, model, tokenizer)
    model.name_or_path = model.config._name_or_path = str(source)
    warn_coupled(source, model)
    return model.eval(), tokenizer, unread


@contextmanager
def without_values() -> Generator[None, None, None]:
    """Parameters of modules that are made inside the block are on the meta device; buffers are not."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    registering: Any = nn.modules.module.register_module_parameter_registration_hook
    hook = registering(empty)
    try:
        yield
    finally:
        hook.remove()


def _take_settings(model: Any, folder: Path) -> None:
    """The settings of generation that lie beside the weights."""
    from transformers import GenerationConfig

    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _unread(folder: Path, model: Any, dtype: torch.dtype) -> Unread:
    """The values of a model in their files; its buffers go to the meta device too.

    Raises:
        NotInPartsError: see above.
    """
    files = files_of(folder)
    stored = {name: one for named in files.values() for name, one in named.items()}
    wanted = dict(model.state_dict(keep_vars=True))
    keys = _keys(wanted, stored)
    _refuse_conversions(model, dtype, keys)
    buffers: dict[str, Tensor] = {}
    for place, module in model.named_modules():
        for own, buffer in list(module.named_buffers(recurse=False)):
            name = f"{place}.{own}" if place else own
            if name not in keys:
                buffers[name] = buffer
            setattr(module, own, torch.empty_like(buffer, device="meta"))
    where = {name: folder / file for file, named in files.items() for name in named}
    return Unread(dtype, keys, where, buffers)


def _keys(wanted: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, str]:
    """Name in the model -> name in the files; a tensor of several names lies under one of them at least.

    Raises:
        NotInPartsError: some lie there under no name, or in another shape.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        names.setdefault(id(tensor), []).append(name)
    keys: dict[str, str] = {}
    for alike in names.values():
        key = next((name for name in alike if name in stored), None)
        shape = tuple(wanted[alike[0]].shape)
        if key is None:
            raise NotInPartsError(f"its files have no {alike[0]}")
        if stored[key].shape != shape:
            raise NotInPartsError(f"its files have {key} as {stored[key].shape}, and not {shape}")
        keys.update(dict.fromkeys(alike, key))
    more = [n for n in stored if n not in keys.values() and n not in wanted]
    if more:
        raise NotInPartsError(f"its files have {more[0]} too, which has no place in it")
    return keys


def _refuse_conversions(model: Any, dtype: torch.dtype, keys: Mapping[str, str]) -> None:
    """Raises where Transformers makes something else of what lies in the files.

    Raises:
        NotInPartsError: see above.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        raise NotInPartsError(
            "this version of Transformers does not say what it converts"
        ) from None
    if model._get_dtype_plan(dtype):
        raise NotInPartsError("some of its weights stay in another dtype than the others")
    for change in get_model_conversion_mapping(model):
        hit = next((key for key in keys.values() if change.compiled_sources.search(key)), None)
        if hit is not None:
            raise NotInPartsError(f"{hit} is converted when it is read")
