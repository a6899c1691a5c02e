"""An adapter on disk fitted to a model: all of it, or an error that lists what does not fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from afina.adapters.beside_lora import is_several, taken_apart, together
from afina.adapters.bitfit import BITFIT
from afina.adapters.card import read_record
from afina.adapters.checking import (
    Problem,
    misfit_error,
    part_problems,
    take_copies,
    tie_problems,
    whole_problems,
)
from afina.adapters.fingerprint import Read, base_fingerprint, same_base
from afina.adapters.kinds import Found, Kind, Places, refuse_settings
from afina.adapters.layout import CONFIG, PREFIX, read_config, read_tensors, stacked
from afina.adapters.names import entries
from afina.adapters.own_bottleneck import BOTTLENECK
from afina.adapters.peft_adalora import ADALORA
from afina.adapters.peft_ia3 import IA3_KIND
from afina.adapters.peft_lora import DORA, DORA_NAME, LORA
from afina.adapters.peft_prompt import P_TUNING, PREFIX_KIND, PROMPT
from afina.adapters.peft_tokens import TOKENS
from afina.adapters.placing import Placed, place
from afina.adapters.pruned import THRESHOLDS, noted, read_pruning
from afina.adapters.rounded import differences
from afina.errors import AdapterError, ConfigError, counted
from afina.tree import Technique

KINDS: Mapping[str, Kind] = {
    kind.peft_type: kind
    for kind in (
        LORA,
        ADALORA,
        TOKENS,
        IA3_KIND,
        BITFIT,
        PREFIX_KIND,
        PROMPT,
        P_TUNING,
        BOTTLENECK,
        THRESHOLDS,
    )
} | {DORA_NAME: DORA}
"""The techniques that PEFT's layout can hold, by PEFT's name."""

IN_PART = (
    "load the base model {base!r}; --allow-partial (in Python allow_partial=True) applies what fits"
)
"""What helps where an adapter is put onto a model in memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """An adapter, ready to be put onto the model that it was fitted to.

    Attributes:
        techniques: make its places; one, unless the folder holds several.
        tensors: their values, by the keys of `contents.peft_tensors`.
        notes: how the two met: how many tensors fit, what is known of the base, what was renamed or left out.
        beside: techniques without tensors that were there in training and act when the model answers too.
    """

    techniques: tuple[Technique, ...]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...]
    beside: tuple[Technique, ...] = ()


def fit(
    model: nn.Module,
    folder: Path,
    *,
    allow_partial: bool = False,
    read: Read | None = None,
    checks_base: bool = True,
    cure: str = IN_PART,
) -> Fitted:
    """Reads the adapter in `folder` and fits it to `model`, which is not changed.

    Args:
        model: the base, without this adapter on it.
        folder: in PEFT's layout.
        allow_partial: leave out what does not fit, and log a warning that lists it, instead of raising.
        read: the values of the model's tensors, where the model itself is on the meta device.
        checks_base: compare the base with the fingerprint that the adapter has, if it has one.
        cure: what the caller's user can do when it does not fit; `{base}` stands for the base that it names.

    Raises:
        AdapterError: listing what does not fit, or saying why the folder cannot be used at all.
    """
    config = read_config(folder)
    told = _Told(folder, allow_partial, read, cure)
    base: _OfBase = (None, ("its base was not compared",))
    if checks_base:
        base = _base(model, config, folder, read)
    if read is None:
        base = (base[0], (*base[1], *differences(model, folder)))
    parts = stacked(folder, config)
    if parts is not None:
        found = {k: _fit_one(model, f, read_config(f), base, told) for k, f in parts.items()}
    elif is_several(config):
        apart = taken_apart(model, config, read_tensors(folder))
        every = [_fit_one(model, folder, c, base, told, tensors) for c, tensors in apart]
        if len(every) == 1:  # a model without biases has none to train
            return _with_pruning(every[0], model, folder)
        found = {fitted.techniques[0].key: fitted for fitted in every}
    else:
        return _with_pruning(_fit_one(model, folder, config, base, told), model, folder)
    fitted = Fitted(
        tuple(technique for fitted in found.values() for technique in fitted.techniques),
        together({key: fitted.tensors for key, fitted in found.items()}),
        tuple(dict.fromkeys(note for fitted in found.values() for note in fitted.notes)),
    )
    return _with_pruning(fitted, model, folder)


def _with_pruning(fitted: Fitted, model: nn.Module, folder: Path) -> Fitted:
    pruning = read_pruning(folder, model)
    if pruning is None:
        return fitted
    return replace(fitted, beside=(pruning,), notes=(*fitted.notes, noted(pruning)))


@dataclass(frozen=True)
class _Told:
    """What the caller of `fit` asked for."""

    folder: Path
    allow_partial: bool
    read: Read | None
    cure: str


def _fit_one(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    base: _OfBase,
    told: _Told,
    tensors: Mapping[str, Tensor] | None = None,
) -> Fitted:
    """The adapter of one technique in `folder`, fitted."""
    kind = refuse_settings(config, KINDS, folder / CONFIG)
    tensors = read_tensors(folder) if tensors is None else tensors
    cure = None if told.allow_partial else told.cure
    try:
        if kind.read is not None:
            return _fit_bare(kind.read(model, config, tensors), folder, config, base, cure)
        placed = place(model, config, kind, entries(tensors, kind.ending, kind.part))
        placed.read = told.read
        kind.once(model, placed.parts)
        notes = _fit(placed, folder, len(tensors), base, cure=cure)
        whole = sorted({name.rpartition(".")[0] for name in placed.whole})
        assert kind.technique_of is not None
        technique = kind.technique_of(model, config, Places(placed.parts, whole, placed.seen))
    except (ConfigError, ValidationError) as error:
        raise AdapterError(f"cannot load {folder / CONFIG}", got=error) from None
    except re.error as error:
        raise AdapterError(
            f"cannot load {folder / CONFIG}: a pattern in it is no regular expression",
            got=f"{error.pattern!r}: {error}",
        ) from None
    return Fitted((technique,), _standard(placed), notes)


def _fit_bare(
    found: Found, folder: Path, config: Mapping[str, Any], base: _OfBase, cure: str | None
) -> Fitted:
    """An adapter whose file does not go by places: it fits whole or not at all."""
    other_base, known = base
    problems = list(found.problems)
    total = len(found.tensors)
    if problems or (other_base and cure is not None):
        raise misfit_error(folder, config, problems, other_base, total, cure)
    if other_base:
        error = misfit_error(folder, config, [], other_base, total, None)
        _log.warning("an adapter is applied, as asked: %s", error)
        known = (*known, f"other base: {other_base}")
    told = f"adapter {folder}: applied {total} of {counted(total, 'tensor')}"
    return Fitted((found.technique,), found.tensors, (told, *known))


_OfBase = tuple[str | None, tuple[str, ...]]
"""How a base differs from the one that an adapter was made for, None when it does not; and what is known."""


def _fit(
    placed: Placed, folder: Path, total: int, base: _OfBase, *, cure: str | None
) -> tuple[str, ...]:
    """Raises with a cure, or without one takes out, what does not fit; the notes of it all."""
    applied, config = total, placed.config
    problems = _problems(placed)
    other_base, known = base
    left_out: list[str] = []
    if problems or other_base:
        error = misfit_error(folder, config, problems, other_base, total, cure)
        if cure is not None:
            raise error
        applied -= leave_out(placed, [name for name, _ in problems])
        _log.warning("an adapter is applied IN PART, as asked: %s", error)
        left_out += [f"other base: {other_base}"] if other_base else []
        left_out += [f"left out {name}: {why}" for name, why in problems]
    if not placed.parts:
        raise AdapterError(
            f"nothing of the adapter in {folder} can be put onto this model",
            got=counted(total, "tensor"),
            wanted=f"tensors of {placed.kind.technique.__name__} for this model's modules",
            cure=f"load the base model {config.get('base_model_name_or_path')!r}",
        )
    told = f"adapter {folder}: applied {applied} of {counted(total, 'tensor')}"
    return (told, *known, *placed.notes, *left_out)


def _problems(placed: Placed) -> list[Problem]:
    return [
        *take_copies(placed),
        *part_problems(placed),
        *whole_problems(placed),
        *tie_problems(placed),
    ]


def leave_out(placed: Placed, names: list[str]) -> int:
    """Takes out every place and every whole module that has a tensor of these names.

    Returns:
        How many tensors of the file went.
    """
    bad = set(names)
    parts = [n for n in placed.parts if n in bad or any(name.startswith(f"{n}.") for name in bad)]
    # A module is saved whole, so it goes when one of its tensors does, and a tied one wherever it stands.
    modules = {name.rpartition(".")[0] for name in bad & {*placed.own, *placed.whole}}
    whole = [n for n in placed.whole if n in bad or n.rpartition(".")[0] in modules]
    copies = [name for name in placed.copies if name in bad]
    gone = sum(len(placed.parts.pop(name)) for name in parts) + len(whole) + len(copies)
    for name in whole:
        del placed.whole[name]
    return gone


def _standard(placed: Placed) -> dict[str, Tensor]:
    """The tensors under the keys that PEFT itself would write."""
    parts = placed.parts.items()
    found = {f"{PREFIX}{name}.{end}": tensor for name, p in parts for end, tensor in p.items()}
    return found | {PREFIX + name: tensor for name, tensor in placed.whole.items()}


def _base(model: nn.Module, config: Mapping[str, Any], folder: Path, read: Read | None) -> _OfBase:
    record = read_record(folder)
    if record is None:
        return None, (
            "no fingerprint of its base, which only afina writes: fit judged by names and shapes alone",
        )
    here = base_fingerprint(model, without=record.trained, read=read)
    if same_base(record.fingerprint, here):
        return None, ("its base is this model, by fingerprint",)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    wanted = config.get("base_model_name_or_path")
    return f"wanted {wanted} ({record.fingerprint}), this is {name} ({here})", ()
