"""What is in an adapter's folder, without its base: method, sizes, spectra of its changes, and what is strange.

It reads what it can and judges the rest: a file that `load` would refuse is still shown, with the reason.

Legend: ΔW = s · B A, the change of a low-rank place; effective rank as in `ops.svd`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from afina.adapters.beside_lora import BESIDE, more_of
from afina.adapters.card import read_record, read_settings
from afina.adapters.fitting import KINDS
from afina.adapters.inspection_rows import Row, groups_of, rows_of
from afina.adapters.kinds import kind_of, refuse_settings
from afina.adapters.layout import CONFIG, RECORD, WEIGHTS, read_config, stacked
from afina.adapters.oddities import broken, idle
from afina.adapters.outputs import MADE_BY
from afina.adapters.sources import adapter_of
from afina.errors import AdapterError, AfinaError


@dataclass(frozen=True)
class Inspection:
    """What is in one folder.

    Attributes:
        folder: where it lies.
        method: what it is: the technique's key, or what the file calls it.
        facts: the base, ranks, targets and the like, by name.
        rows: its places.
        strange: what should not be so, a sentence each.
        parts: the folders of an adapter of several techniques.
    """

    folder: Path
    method: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]
    strange: tuple[str, ...]
    parts: tuple[Inspection, ...] = ()

    @property
    def every_row(self) -> list[Row]:
        """Those of the parts too."""
        return [*self.rows, *(row for part in self.parts for row in part.every_row)]

    @property
    def every_strange(self) -> list[str]:
        """Those of the parts too."""
        inner = [f"{p.method}: {one}" for p in self.parts for one in p.every_strange]
        return [*self.strange, *inner]

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "folder": str(self.folder),
            "method": self.method,
            **self.facts,
            "places": [_finite(asdict(row)) for row in self.rows],
            "strange": list(self.strange),
            **({"parts": [part.record for part in self.parts]} if self.parts else {}),
        }


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


@torch.no_grad()
def inspect(source: str | Path) -> Inspection:
    """Looks into an adapter.

    Args:
        source: a run, a checkpoint or an adapter, of any method.

    Raises:
        AdapterError: there is none, or its files cannot be read at all.
    """
    folder = adapter_of(source).adapter
    assert folder is not None
    return _inspect(folder)


def _inspect(folder: Path) -> Inspection:
    config = read_config(folder)
    parts = stacked(folder, config)
    if parts is not None:
        inner = tuple(_inspect(part) for part in parts.values())
        facts = {
            **_facts(folder, config),
            "parameters": sum(row.parameters for part in inner for row in part.every_row),
        }
        return Inspection(folder, " + ".join(p.method for p in inner), facts, (), (), inner)
    kind = kind_of(config, KINDS)
    tensors = _tensors(folder)
    if config.get("peft_type") == "ADALORA":  # PEFT keeps the places that have no direction left
        tensors = {key: t for key, t in tensors.items() if t.numel()}
    strange: list[str] = []
    # What PEFT keeps beside a LoRA is read as techniques of its own, so its settings say nothing strange.
    had = more_of(config)
    plain = {k: v for k, v in config.items() if k not in had}
    try:
        refuse_settings(plain, KINDS, folder / CONFIG)
    except AfinaError as error:
        strange.append(f"afina would not load it: {error.got}; wanted {error.wanted}")
    groups = groups_of(tensors, None if kind is None else kind.ending)
    rows = tuple(
        row
        for name, group in groups.items()
        for row in rows_of(name, group, config, folder, strange)
    )
    strange += [*broken(tensors), *idle(config, groups)]
    method = str(config.get("peft_type")) if kind is None else kind.technique.key
    method = " + ".join([method, *(BESIDE[key] for key in BESIDE if key in had)])
    facts = {
        **_facts(folder, config),
        "parameters": sum(row.parameters for row in rows),
        "types": _counts(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        "bytes": (folder / WEIGHTS).stat().st_size,
        "ranks": _counts(row.rank for row in rows if row.rank is not None),
        "targets": _counts(row.tail for row in rows),
    }
    return Inspection(folder, method, facts, rows, tuple(strange))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the file, whatever their values are.

    Raises:
        AdapterError: there is no such file, or it is damaged.
    """
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(
            "the adapter's file is not there, or damaged", got=f"{folder / WEIGHTS}: {error}"
        ) from None


def _facts(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the folder says about itself."""
    facts: dict[str, Any] = {
        "type": config.get("peft_type"),
        "base": config.get("base_model_name_or_path"),
        "revision": config.get("revision"),
        "fingerprint": None,
    }
    if (folder / RECORD).is_file():
        try:
            record = read_record(folder)
            facts["fingerprint"] = None if record is None else record.fingerprint
        except AdapterError as error:
            facts["fingerprint"] = f"not readable: {error.what}"
        made = read_settings(folder).get(MADE_BY)
        if made is not None:
            facts[MADE_BY] = made
    settings = ("r", "lora_alpha", "use_rslora", "use_dora", "task_type", "modules_to_save")
    return facts | {k: config[k] for k in settings if config.get(k) not in (None, False, [])}


def _counts(values: Iterable[Any]) -> dict[str, int]:
    """How often each value is there, the commonest first."""
    return {str(value): number for value, number in Counter(values).most_common()}
