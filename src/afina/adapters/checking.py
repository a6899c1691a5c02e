"""What is wrong with an adapter for a model, as (tensor or place, why) pairs; nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afina import seams
from afina.adapters.layout import CONFIG
from afina.adapters.placing import Placed
from afina.errors import AdapterError

Problem = tuple[str, str]

SHOWN = 8
"""Problems that an error lists; it counts the others."""

_APART = re.compile(r"\.experts\.\d+\.\w+\.lora_")
"""A LoRA's tensor at one expert."""

NO_PLACE = "the model has no such place"
LACKS = "the file lacks it"


def take_copies(placed: Placed) -> list[Problem]:
    """Takes out the copies of base tensors that are this base's own; the problems of the others.

    PEFT writes them beside adapted embeddings. It also saves whole embeddings along when the vocabulary was resized:
    these are the base as it became, so a tied one is the same under all its names.
    """
    problems = [
        (name, "a copy of the base's tensor, and it differs: other base weights")
        for name, copy in placed.copies.items()
        if not _same(placed, name, copy)
    ]
    for name in [n for n in placed.whole if _along(placed, n)]:
        tensor = placed.whole[name]
        if _same(placed, name, tensor):
            placed.copies[name] = placed.whole.pop(name)
        elif tensor.shape == placed.own[name].shape:
            placed.notes.append(f"{name}: the file brings its own values along; they are used")
            for tied in _tied(placed, name):
                placed.whole.setdefault(tied, tensor)
    return problems


def part_problems(placed: Placed) -> list[Problem]:
    """Of what the technique added: places, shapes, and whether the configuration means the same ones."""
    wanted = placed.kind.named(placed.model, placed.config, placed.seen)
    problems: list[Problem] = []
    for name, parts in placed.parts.items():
        if name not in placed.sites:
            wrong = dict.fromkeys(parts, NO_PLACE)
        elif wanted is not None and name not in wanted:
            wrong = dict.fromkeys(parts, f"{CONFIG} does not name this place")
        else:
            wrong = placed.kind.misfit(placed.sites[name], parts)
        problems += [(f"{name}.{part}", why) for part, why in wrong.items()]
    inside = tuple(f"{_module(name)}." for name in placed.whole)
    absent = sorted((wanted or set()) - set(placed.parts))
    problems += [
        (name, f"{CONFIG} names it, and {LACKS}")
        for name in absent
        if not f"{name}.".startswith((*inside, *placed.others))
    ]
    return problems


def whole_problems(placed: Placed) -> list[Problem]:
    """Of modules that were trained whole."""
    problems: list[Problem] = []
    for name, tensor in placed.whole.items():
        own = placed.own.get(name)
        if own is None:
            problems.append((name, NO_PLACE))
        elif own.shape != tensor.shape:
            why = f"shape {tuple(tensor.shape)}, the model wants {tuple(own.shape)}"
            problems.append((name, why + _resize(placed, name, tensor)))
        elif not _named_whole(placed, _module(name)) and not _is_embedding(placed, name):
            problems.append((name, f"modules_to_save in {CONFIG} does not name it"))
    modules = {_module(name) for name in placed.whole}
    for name in placed.own:
        if _module(name) in modules and name not in placed.whole:
            problems.append((name, LACKS))
    # PEFT lists heads by every name it knows; those that this model has not are nobody's loss.
    for pattern in placed.saved:
        there = [n for n in seams.holders(placed.model) if placed.seen[n].endswith(pattern)]
        if there and not any(f"{m}.".startswith(f"{t}.") for m in modules for t in there):
            problems.append((there[0], f"{CONFIG} names it, and {LACKS}"))
    return problems


def tie_problems(placed: Placed) -> list[Problem]:
    """A tensor that this model has under two names must be one in the file too."""
    problems: list[Problem] = []
    for name in placed.whole:
        ties = _tied(placed, name)
        if any(
            tied not in placed.whole or not torch.equal(placed.whole[name], placed.whole[tied])
            for tied in ties
        ):
            last = ties[-1]
            why = (
                f"one tensor in this model ({' = '.join(ties)}), and trained apart in the file; to load it, untie "
                f"the base first: model.{last} = torch.nn.Parameter(model.{last}.detach().clone())"
            )
            problems.append((name, why))
    return problems


def _same(placed: Placed, name: str, copy: Tensor) -> bool:
    """Whether a copy is the base's own tensor, in the coarser of the two types."""
    own = placed.own.get(name)
    if own is None or own.shape != copy.shape:
        return False
    own = placed.value(name)
    copy = copy.to(own.device)
    return torch.equal(own, copy.to(own.dtype)) or torch.equal(own.to(copy.dtype), copy)


def _tied(placed: Placed, name: str) -> list[str]:
    own = placed.own.get(name)
    return [n for n, p in placed.own.items() if p is own] if own is not None else []


def _along(placed: Placed, name: str) -> bool:
    """Whether this is an embedding that was saved beside the adapter, and not trained with it."""
    return _is_embedding(placed, name) and not _named_whole(placed, _module(name))


def _is_embedding(placed: Placed, name: str) -> bool:
    ends = (seams.head(placed.model).name, seams.input_embedding(placed.model))
    return name in placed.own and _module(name) in ends


def _named_whole(placed: Placed, module: str) -> bool:
    """Whether `modules_to_save` names a module or one that holds it: as in PEFT, by any end of the name."""
    pieces = placed.seen[module].split(".")
    above = [".".join(pieces[: i + 1]) for i in range(len(pieces))]
    return any(name.endswith(pattern) for name in above for pattern in placed.saved)


def _resize(placed: Placed, name: str, tensor: Tensor) -> str:
    own = placed.own[name]
    if _is_embedding(placed, name) and own.dim() == 2 and own.shape[1:] == tensor.shape[1:]:
        return f"; resize the base first: model.resize_token_embeddings({tensor.shape[0]})"
    return ""


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def misfit_error(
    folder: Path,
    config: Mapping[str, Any],
    problems: list[Problem],
    other_base: str | None,
    total: int,
    cure: str | None,
) -> AdapterError:
    """What is said of an adapter that does not fit.

    Args:
        folder: of the adapter.
        config: its `adapter_config.json`.
        problems: of its tensors.
        other_base: how its base differs; None where it does not, or nothing is known.
        total: tensors that it has.
        cure: `{base}` in it stands for the base that the adapter names; None where it is applied all the same.
    """
    lines = [f"{name}: {why}" for name, why in problems]
    hidden = len(lines) - SHOWN
    lines = [*lines[:SHOWN], *([f"… and {hidden} more"] if hidden > 0 else [])]
    if not problems:
        lines = [f"other weights; all its tensors ({total}) have a place here"]
    if cure is not None and any(_APART.search(name) for name, _ in problems):
        cure = (
            "its experts are apart, as Transformers 4 had them; PEFT fuses them: "
            "PeftModel.from_pretrained(model, FOLDER).save_pretrained(OUT)"
        )
    what = f"the adapter in {folder} does not fit this model"
    if other_base:
        what = f"the adapter in {folder} was made for another base: {other_base}"
    return AdapterError(
        what,
        got="\n          ".join(lines),
        wanted=f"all of its tensors ({total}) in place, on the base that they were trained beside",
        cure=None if cure is None else cure.format(base=config.get("base_model_name_or_path")),
    )
