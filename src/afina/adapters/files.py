"""Adapters on disk, in Hugging Face PEFT's layout: written by afina and read by PEFT, and the reverse.

An adapter is written beside its place, read back, compared, and then put into its place: what is there is whole. It is
read strictly: every tensor of the file has its place in the model, or nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from afina.adapters.card import Record, card, dumps, record_of
from afina.adapters.checking import SHOWN
from afina.adapters.contents import (
    fill,
    name_in_model,
    part_config,
    parts_of,
    peft_config,
    peft_tensors,
)
from afina.adapters.fitting import Fitted, fit
from afina.adapters.layout import (
    CARD,
    CONFIG,
    RECORD,
    read_tensors,
)
from afina.adapters.replace import replace_folder
from afina.adapters.writing import write
from afina.errors import AdapterError, AfinaError, counted
from afina.places import local
from afina.problems import name_of
from afina.seams import require_model
from afina.table import apply
from afina.tree import Edit, edits_on

__all__ = ["Fitted", "Record", "fit", "load", "peft_config", "peft_tensors", "put", "read_tensors"]
__all__ += ["replace_folder", "restore", "save"]


def save(
    edit: Edit,
    folder: str | Path,
    *,
    base: str,
    tokenizer: Any = None,
    record: Record | None = None,
) -> Path:
    """Writes the adapter of `edit` to `folder`, whole or not at all; equal adapters give equal bytes.

    Args:
        edit: of a model that one technique changed, or several; see `contents`.
        folder: of an adapter that is there already every file is replaced; others in it stay.
        base: name or folder of the base model, for whoever loads the adapter.
        tokenizer: saved beside it, with its chat template.
        record: data, settings and scores, for `afina.json` and the model card.

    Returns:
        The folder.

    Raises:
        AdapterError: when the edit has something that PEFT's layout cannot hold, or NaN or infinity, or is undone or
            disabled; when the folder holds something else; or when what was written reads back otherwise.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / CONFIG).exists() and any(folder.iterdir()):
        raise AdapterError(
            "the folder holds something else than an adapter",
            got=folder,
            cure="name another folder",
        )
    _refuse_state(edit)
    record = record or Record()
    with edit.unfolded():
        config = peft_config(edit, base, record.revision)
        # Clones, for a tied tensor stands under two keys and the file must hold it twice.
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in peft_tensors(edit).items()}
        known = record_of(edit, base, record)
        configs = _part_configs(edit, base, record.revision)
    texts = {
        CONFIG: dumps(config),
        RECORD: dumps(known),
        CARD: card(known, tensors, chats=bool(getattr(tokenizer, "chat_template", None))),
        **{f"{key}/{CONFIG}": dumps(part) for key, part in configs.items()},
    }
    write(folder, tensors, texts, parts=configs, beside=_saves(tokenizer))
    return folder


def _saves(tokenizer: Any) -> Callable[[Path], object]:
    """Writes the tokenizer into a folder, if there is one."""
    return (lambda folder: None) if tokenizer is None else tokenizer.save_pretrained


def _part_configs(edit: Edit, base: str, revision: str | None) -> dict[str, dict[str, Any]]:
    """The configuration of each part's own folder; none for an edit of one technique."""
    parts = parts_of(edit)
    if len(parts) == 1:
        return {}
    return {part.technique.key: part_config(part, base, revision) for part in parts}


def _refuse_state(edit: Edit) -> None:
    """Raises for an edit whose tensors are not, or not just now, what was trained."""
    if edit.undone:
        what, cure = "the edit was undone, and what it trained is gone", "save before edit.undo()"
    elif not any(edit.strengths.values()) and edit.strengths:
        what, cure = "the edit is disabled", "save outside of edit.disabled(), or after edit.on()"
    elif not edit.whole_strength:
        what = "the edit is scaled or partly off, and its files are of what was trained"
        cure = "save after edit.on() and edit.scale(1); afina combine OUT:0.5 -o HALF writes a scaled one"
    elif any(tensor.is_meta for tensor in edit.trainable().values()):
        what, cure = "the model is on the meta device and has no values", "load its weights first"
    else:
        return
    raise AdapterError(what, got=", ".join(t.key for t in edit.techniques), cure=cure)


def load(model: nn.Module, folder: str | Path, *, allow_partial: bool = False) -> Edit:
    """Puts the adapter in `folder` onto `model`; every tensor of the file is applied, or none.

    Args:
        model: the base model, unchanged.
        folder: in PEFT's layout, or of several techniques; see `contents`.
        allow_partial: leave out what does not fit, and log a warning that lists it, instead of raising.

    Returns:
        The edit; its `undo()` takes the adapter off, and its notes say how many tensors were applied, and onto what.

    Raises:
        AdapterError: listing what does not fit; the model is as it was.
        AfinaError: what is given is no model, or no name of a folder.
    """
    require_model(model)
    place = local(name_of(folder, "the adapter", "its folder"))
    return put(model, fit(model, place, allow_partial=allow_partial))


def put(model: nn.Module, fitted: Fitted) -> Edit:
    """Puts a fitted adapter onto its model.

    Raises:
        AdapterError: when the model does not take it, such as one that has an adapter on the same places.
    """
    told = fitted.notes[0].partition(":")[0]
    _refuse_two_values(model, fitted, told)
    try:
        edit = apply(model, (*fitted.beside, *fitted.techniques))
    except (AfinaError, ValidationError) as error:
        raise AdapterError(f"{told} cannot be put onto this model", got=error) from None
    try:
        restore(edit, fitted.tensors)
    except BaseException:
        edit.undo()
        raise
    edit.notes.extend([*fitted.notes, *_rounded(edit, fitted.tensors)])
    return edit


def _refuse_two_values(model: nn.Module, fitted: Fitted, told: str) -> None:
    """Raises where the file has a base tensor whole that an earlier edit of the model has trained to another value.

    Raises:
        AdapterError: naming it.
    """
    theirs = {id(p): name for edit in edits_on(model) for name, p in edit.in_place.items()}
    own = dict(model.named_parameters(remove_duplicate=False))
    names = [name_in_model(key) for key in fitted.tensors]
    twice = sorted({theirs[id(own[n])] for n in names if n in own and id(own[n]) in theirs})
    if twice:
        raise AdapterError(
            f"{told} cannot be put onto this model: it has a tensor whole that an adapter which is there has too",
            got=f"{', '.join(twice[:3])}{', …' if len(twice) > 3 else ''}",
            wanted="one value for each tensor of the base",
            cure="undo the other first, or make one of the two: afina combine A B -o C (in Python afina.combine)",
        )


def _rounded(edit: Edit, tensors: Mapping[str, Tensor]) -> list[str]:
    """Says which tensors lost digits, for the model's type is coarser than the file's."""
    lost: dict[str, float] = {}
    for key, mine in peft_tensors(edit).items():
        if mine.dtype != tensors[key].dtype:
            error = (mine.detach().cpu().double() - tensors[key].double()).abs().max()
            if error > 0:
                lost[key] = error.item()
    if not lost:
        return []
    types = sorted({str(tensors[key].dtype).removeprefix("torch.") for key in lost})
    return [
        f"rounded to this model's type, by at most {max(lost.values()):.1e}: {counted(len(lost), 'tensor')} "
        f"that the file has in {' and '.join(types)} ({min(lost)}{', …' if len(lost) > 1 else ''})"
    ]


def restore(edit: Edit, tensors: Mapping[str, Tensor]) -> None:
    """Gives `edit`'s tensors these values.

    Args:
        edit: of the very technique that the tensors are of.
        tensors: by PEFT's standard keys, as afina writes them, or as `fit` found them.

    Raises:
        AdapterError: when a tensor of either side has no partner, or a shape differs; nothing is changed then.
    """
    mine = peft_tensors(edit)
    problems = [f"{key}: the model has no such place" for key in sorted(set(tensors) - set(mine))]
    problems += [f"{key}: the file lacks it" for key in sorted(set(mine) - set(tensors))]
    problems += [
        f"{key}: shape {tuple(tensors[key].shape)}, the model wants {tuple(mine[key].shape)}"
        for key in sorted(set(mine) & set(tensors))
        if mine[key].shape != tensors[key].shape
    ]
    if problems:
        hidden = len(problems) - SHOWN
        more = [f"… and {hidden} more"] if hidden > 0 else []
        raise AdapterError(
            f"the adapter does not fit this model in {counted(len(problems), 'tensor')}",
            got="\n          ".join([*problems[:SHOWN], *more]),
            cure="load the base model that adapter_config.json names",
        )
    fill(edit, tensors)
