"""Which place of a model each tensor of an adapter's file belongs to.

PEFT puts `base_model.model.` before the model's own name. Files are met in which it stands twice or not at all, or in
which the model's own names are those of another version of Transformers (`language_model.model.layers` became
`model.language_model.layers`). One beginning is then exchanged for another, if just one exchange fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from afina.adapters.layout import PREFIX
from afina.errors import AdapterError

Move = tuple[str, str]
"""A beginning of names in the file, and what stands there in the model."""

STANDARD: Move = (PREFIX, "")

_COPY = re.compile(r"\.(base_layer|original_module)$")
_SAVED = re.compile(r"\.modules_to_save(\.[^.]+)?$")
_NUMBER = re.compile(r"(^|\.)\d+(\.|$)")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        key: its name in the file.
        module: the module it belongs to, as the file calls it.
        part: the ending of its key after the module (`lora_A.weight`), or the parameter's own name (`weight`).
        role: "part" of what a technique added; "whole" parameter of the base that was trained; "copy" of one that was
            not.
        tensor: the values.
    """

    key: str
    module: str
    part: str
    role: str
    tensor: Tensor


def entries(
    tensors: Mapping[str, Tensor], ending: re.Pattern[str], part: Callable[[re.Match[str]], str]
) -> list[Entry]:
    """The tensors of a file, taken apart by their names.

    Args:
        tensors: by key.
        ending: of the keys of a technique's own tensors; see `Kind`.
        part: the ending without an adapter's name.

    Raises:
        AdapterError: when the file holds several adapters, or one tensor under two spellings.
    """
    found: list[Entry] = []
    adapters: set[str] = set()
    for key, tensor in sorted(tensors.items()):
        match = ending.search(key)
        if match is not None:
            adapters |= {match["adapter"]} if match["adapter"] else set()
            found.append(Entry(key, key[: match.start()], part(match), "part", tensor))
            continue
        module, _, name = key.rpartition(".")
        copied = _COPY.sub("", module)
        role = "copy" if copied != module else "whole"
        found.append(Entry(key, _SAVED.sub("", copied), name, role, tensor))
    if len(adapters) > 1:
        raise AdapterError(
            "the file holds several adapters",
            got=", ".join(sorted(adapters)),
            wanted="one adapter a folder",
            cure="save each with PEFT: model.save_pretrained(folder, selected_adapters=[name])",
        )
    return found


def places(
    modules: Iterable[str], known: set[str], fits: Callable[[str, str], bool]
) -> tuple[dict[str, str], dict[Move, list[str]]]:
    """The model's own name of each module of a file.

    Args:
        modules: as the file calls them.
        known: the model's own names.
        fits: whether a module of the file can be this one of the model, by its shapes.

    Returns:
        Own name by name in the file, also for what the model does not have (as PEFT writes it then); and the modules
        that each move brought to their places, PEFT's own among them.

    Raises:
        AdapterError: when several moves fit.
    """
    found: dict[str, str] = {}
    used: dict[Move, list[str]] = {}
    moves = [STANDARD]
    for group in _groups(modules):
        move = next((m for m in moves if any(_moved(n, m) in known for n in group)), None)
        if move is None:
            move = _search(group, known, fits) or STANDARD
            moves.append(move)
        found.update({name: _moved(name, move) or name for name in group})
        used.setdefault(move, []).extend(found[name] for name in group)
    return found, used


def seen_as(names: Iterable[str], moves: Iterable[Move]) -> dict[str, str]:
    """How the configuration beside a file calls the model's modules: moved back, without PEFT's beginning."""
    back = sorted(((new, old) for old, new in moves), key=lambda pair: -len(pair[0]))
    seen: dict[str, str] = {}
    for name in names:
        seen[name] = name
        for new, old in back:
            if name.startswith(new):
                while old.startswith(PREFIX):
                    old = old.removeprefix(PREFIX)
                seen[name] = old + name[len(new) :]
                break
    return seen


def plain_module(module: str) -> str:
    """The name of a module without what PEFT sets before it."""
    while module.startswith(PREFIX):
        module = module.removeprefix(PREFIX)
    return module


def _groups(modules: Iterable[str]) -> list[list[str]]:
    """Modules that move together: those of one stack of blocks; each other one moves alone, after the stacks."""
    stacks: dict[str, list[str]] = {}
    alone: list[list[str]] = []
    for name in sorted(set(modules)):
        number = _NUMBER.search(name)
        if number is None:
            alone.append([name])
        else:
            stacks.setdefault(name[: number.start()], []).append(name)
    return [*stacks.values(), *alone]


def _moved(name: str, move: Move) -> str | None:
    old, new = move
    return new + name[len(old) :] if name.startswith(old) else None


def _search(group: list[str], known: set[str], fits: Callable[[str, str], bool]) -> Move | None:
    """The one move that brings every module of the group to a place that it fits; the shortest beginning first."""
    first = group[0]
    starts = [0, *(i + 1 for i, sign in enumerate(first) if sign == ".")]
    for old in (first[:start] for start in starts):
        if _NUMBER.search(old) or not all(name.startswith(old) for name in group):
            return None
        rest = first[len(old) :]
        heads = {k[: -len(rest)] for k in known if k == rest or k.endswith(f".{rest}")}
        options = [
            (old, new)
            for new in sorted(heads)
            if not _NUMBER.search(new)
            and all((place := _moved(n, (old, new))) in known and fits(n, place) for n in group)
        ]
        if len(options) > 1:
            raise AdapterError(
                "the adapter's names fit this model in several ways",
                got=first,
                wanted="one of " + ", ".join(new + rest for _, new in options),
                cure="rename the tensors in the file to the names of the model",
            )
        if options:
            return options[0]
    return None
