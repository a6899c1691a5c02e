"""The files of an adapter folder, and reading them without trusting them.

| file | what | whose |
|---|---|---|
| `adapter_config.json` | what was adapted | PEFT's layout |
| `adapter_model.safetensors` | the tensors | PEFT's layout |
| `afina.json` | which base, data, settings and scores; see `card` | ours, and PEFT passes over it |
| `README.md` | the same for people: the model card | ours |

Source: the files that PEFT 0.21.2 writes and reads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from afina.adapters.target import inner_adapter
from afina.errors import AdapterError, counted
from afina.models.locate import TUNED, nearby
from afina.places import exists

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
RECORD = "afina.json"
CARD = "README.md"
TOKENIZER = frozenset({
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json",
})  # fmt: skip
"""Files of a tokenizer; they are taken from one place, so that no part of another one stays."""

TEMPLATES = "additional_chat_templates"
"""The folder in which a tokenizer keeps its chat templates that have names."""

STACK = "AFINA_STACK"
"""The `peft_type` of a folder that holds one folder for each of several techniques; PEFT refuses it by name."""

_ADALORA = (".lora_A", ".lora_B", ".lora_E")

PREFIX = "base_model.model."
"""What stands before every name in the tensors' file."""


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A file that holds one table of settings; `what` names it in errors.

    Raises:
        AdapterError: when it is no such file.
    """
    try:
        found = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_once,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{what} is not JSON", got=f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise AdapterError(f"{what} is not a table of settings", got=f"{path}: {str(found)[:80]}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table, in which a key may stand once: readers differ in which of two counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"given twice: {', '.join(k for k in found if keys.count(k) > 1)}")
    return found


def _finite(text: str) -> float:
    """A number, such as JSON means: finite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number here")
    return number


def read_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`, as it stands there.

    Raises:
        AdapterError: when there is none, or it is not JSON.
    """
    if (folder / CONFIG).is_file():
        return read_json(folder / CONFIG, "the adapter's configuration")
    raise AdapterError(
        "there is no adapter here",
        got=folder,
        wanted=f"a folder with {CONFIG}",
        cure=_where(folder),
    )


def _where(folder: Path) -> str | None:
    """Where the adapter may be that is not in a folder."""
    inside = inner_adapter(folder)
    if inside:
        return inside
    near = [] if exists(folder) else nearby(str(folder), TUNED)
    return f"did you mean {' or '.join(near)}?" if near else None


def stacked(folder: Path, config: dict[str, Any]) -> dict[str, Path] | None:
    """The folders of an adapter of several techniques, by their keys; None for an adapter of one.

    Raises:
        AdapterError: they are not named, or not there.
    """
    if config.get("peft_type") != STACK:
        return None
    parts = config.get("parts")
    if not isinstance(parts, list) or not parts or len(set(map(str, parts))) < len(parts):
        raise AdapterError("the adapter does not say of what it consists", got=f"parts {parts!r}")
    plain = [part for part in parts if isinstance(part, str) and part.isidentifier()]
    lost = [part for part in parts if part not in plain or not (folder / part / CONFIG).is_file()]
    if lost:
        raise AdapterError(
            "a part of the adapter is not there",
            got=", ".join(map(str, lost)),
            wanted=f"a folder of that name in {folder}, with {CONFIG}",
            cure="copy the whole folder again",
        )
    return {part: folder / part for part in plain}


def recorded(folder: Path) -> Path:
    """The folder whose `afina.json` is about an adapter: its own; or, for one part of several, that of them all."""
    above = folder.resolve().parent
    if (folder / RECORD).is_file() or not (above / CONFIG).is_file():
        return folder
    config = read_config(above)
    parts = config.get("parts")
    mine = isinstance(parts, list) and folder.resolve().name in parts
    return above if config.get("peft_type") == STACK and mine else folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder, by the names they have in its file; those of several parts begin with `PART/`.

    Raises:
        AdapterError: when there is no safetensors file, it is damaged, or holds what is no finite number.
    """
    if (folder / CONFIG).is_file() and not (folder / WEIGHTS).exists():
        parts = stacked(folder, read_config(folder))
        if parts is not None:
            found = {key: read_tensors(place) for key, place in parts.items()}
            return {f"{key}/{n}": t for key, tensors in found.items() for n, t in tensors.items()}
    path = folder / WEIGHTS
    if not path.exists():
        raise _no_weights(folder)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            "the adapter's file is damaged",
            got=f"{path}: {error}",
            cure="get the file again",
        ) from None
    tensors = {key: tensor for key, tensor in tensors.items() if not _cut_away(key, tensor)}
    refuse_unusable(tensors, path)
    return tensors


def _cut_away(key: str, tensor: Tensor) -> bool:
    """Whether this is of an AdaLoRA's module that has no direction left, as PEFT writes it: sizes r × in and no r."""
    return (
        tensor.dim() == 2
        and sorted(tensor.shape)[0] == 0 < max(tensor.shape)
        and key.endswith(_ADALORA)
    )


def refuse_unusable(tensors: dict[str, Tensor], where: object) -> None:
    """Raises when a tensor holds nothing, or other things than finite floating-point numbers.

    Raises:
        AdapterError: naming them.
    """
    whole = [f"{k}: {t.dtype}" for k, t in tensors.items() if not t.is_floating_point()]
    if whole:
        raise AdapterError(
            "the adapter holds what is no floating-point number",
            got=f"{where}: {counted(len(whole), 'tensor')}: {', '.join(sorted(whole)[:4])}",
            cure="save the adapter unquantised",
        )
    empty = sorted(k for k, t in tensors.items() if t.numel() == 0)
    if empty:
        raise AdapterError(
            f"the adapter holds {counted(len(empty), 'empty tensor')}",
            got=f"{where}: {', '.join(empty[:4])}",
            cure="save it with its values gathered from all processes",
        )
    broken = sorted(k for k, t in tensors.items() if not t.float().isfinite().all())
    if broken:
        raise AdapterError(
            f"the adapter holds NaN or infinity in {len(broken)} of {counted(len(tensors), 'tensor')}",
            got=f"{where}: {', '.join(broken[:4])}",
            wanted="finite numbers",
            cure="take an earlier checkpoint, and train on with a lower learning rate",
        )


def _no_weights(folder: Path) -> AdapterError:
    pickled = sorted(p.name for p in folder.glob("adapter_model.*") if p.suffix != ".safetensors")
    return AdapterError(
        "the adapter has no safetensors file",
        got=f"{', '.join(pickled)}, a pickle, which can run code when it is read"
        if pickled
        else folder,
        wanted=folder / WEIGHTS,
        cure="convert it where it may run, with PEFT: model.save_pretrained(folder)"
        if pickled
        else None,
    )
