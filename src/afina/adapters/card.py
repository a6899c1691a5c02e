"""Where an adapter comes from: `afina.json` for programs, and the model card for people.

    {"format": 1, "afina": "0.1.0",
     "base": {"name": …, "revision": …, "fingerprint": … or null where it is not known,
              "trained": [tensors of the base that the adapter brings],
              "task", "labels": of a classifier, for which head it is loaded and the names of its classes,
              "quantised_from": the type of its weights before `quantize` rounded them, where it did},
     "techniques": [{"lora": {…}}], "data": {…}, "settings": {…}, "scores": {…}}

Nothing in either depends on the time, the machine or the folder: equal adapters have equal files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from afina import seams
from afina.adapters.fingerprint import base_fingerprint
from afina.adapters.layout import CONFIG, RECORD, WEIGHTS, read_json, read_tensors, recorded
from afina.adapters.rounded import dtype_in
from afina.errors import AdapterError
from afina.models.classes import class_names
from afina.models.demo import DEMOS
from afina.techniques.quantize import Quantize
from afina.tree import Edit, Technique

TASKS = {"rows": "classification", "tokens": "token_classification"}
"""What a classifier gives classes to -> the task that `afina.load` loads it for."""

FORMAT = 1
"""The form of `afina.json`; a reader refuses later ones."""


@dataclass(frozen=True)
class Record:
    """What a run knows about the adapter that it made, as plain values.

    Attributes:
        data: such as fingerprint, rows and source of the training rows.
        settings: of the training.
        scores: on validation rows, by name.
        revision: of the base model, where it is one on the hub.
        fingerprint: of the base model; None looks at the one that the adapter is on.
    """

    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    revision: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Base:
    """The base that an adapter was made for, as `afina.json` says.

    Attributes:
        fingerprint: see `fingerprint`.
        trained: tensors of the base that it leaves out, for the adapter brings them.
    """

    fingerprint: str
    trained: tuple[str, ...]


def record_of(edit: Edit, base: str, record: Record) -> dict[str, Any]:
    """The contents of `afina.json` for an edit."""
    about: dict[str, Any] = {
        "name": base,
        "revision": record.revision,
        "fingerprint": record.fingerprint or base_fingerprint(edit.model, edit),
        "trained": sorted(edit.in_place),
    }
    kind = seams.classifies(edit.model)
    if kind is not None:
        about["task"] = TASKS[kind]
        about["labels"] = class_names(edit.model)
    rounded = dtype_in(edit.model)
    if rounded is not None:
        about["quantised_from"] = rounded
    return contents_of(about, edit.techniques, record)


def contents_of(
    base: Mapping[str, Any], techniques: Iterable[Technique], record: Record
) -> dict[str, Any]:
    """The contents of `afina.json`.

    Args:
        base: its name, revision, fingerprint (None where nobody knows it), and what of it the adapter brings.
        techniques: of the adapter.
        record: what is known beside that.
    """
    return _plain(
        {
            "format": FORMAT,
            "afina": version("afina"),
            "base": base,
            "techniques": [{t.key: t.model_dump(mode="json")} for t in techniques],
            "data": record.data,
            "settings": record.settings,
            "scores": record.scores,
        }
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings that `afina.json` has; none where there is no such file, or it cannot be read."""
    try:
        found = read_json(folder / RECORD, "the adapter's record").get("settings")
    except AdapterError:
        return {}
    return found if isinstance(found, dict) else {}


def head_of_base(folder: Path) -> dict[str, Any]:
    """How the base of a classifier's adapter is loaded, as arguments of `afina.load`; empty for any other adapter.

    Of an adapter that PEFT wrote the names of the classes are not known; their number is the head's.

    Raises:
        AdapterError: a file that cannot be read.
    """
    if (recorded(folder) / RECORD).is_file():
        base: Any = read_json(recorded(folder) / RECORD, "the adapter's record").get("base")
        if isinstance(base, dict) and base.get("task") in TASKS.values() and base.get("labels"):
            return {"task": base["task"], "labels": tuple(map(str, base["labels"]))}
    of_peft = {"SEQ_CLS": "classification", "TOKEN_CLS": "token_classification"}
    task = of_peft.get(
        str(read_json(folder / CONFIG, "the adapter's configuration").get("task_type"))
    )
    if task is None or not (folder / WEIGHTS).is_file():
        return {}
    heads = [
        tensor.shape[0]
        for name, tensor in read_tensors(folder).items()
        if tensor.dim() == 2 and re.search(r"\.(score|classifier|out_proj)\.weight$", name)
    ]
    return {"task": task, "num_labels": heads[-1]} if heads else {"task": task}


def read_record(folder: Path) -> Base | None:
    """What `afina.json` says about the base; None when there is no such file, or it says that nobody knows.

    PEFT writes no such file, and what is computed from its adapters alone has no fingerprint.

    Raises:
        AdapterError: when the file cannot be read, or is of a later form.
    """
    folder = recorded(folder)
    if not (folder / RECORD).is_file():
        return None
    found = read_json(folder / RECORD, "the adapter's record")
    form = found.get("format")
    if form != FORMAT:
        raise AdapterError(
            "the adapter's record has a form that this version does not know",
            got=f"{folder / RECORD}: format {form!r}, written by afina {found.get('afina')}",
            wanted=f"format {FORMAT}",
            cure="use that version of afina; without the file the base cannot be checked",
        )
    base: Any = found.get("base")
    if isinstance(base, dict) and "fingerprint" in base and base["fingerprint"] is None:
        return None
    fingerprint = base.get("fingerprint") if isinstance(base, dict) else None
    trained = base.get("trained", []) if isinstance(base, dict) else None
    if not isinstance(fingerprint, str) or not isinstance(trained, list):
        raise AdapterError("the adapter's record names no base", got=folder / RECORD)
    return Base(fingerprint, tuple(map(str, trained)))


def dumps(value: Mapping[str, Any]) -> str:
    """JSON whose keys are in order."""
    return json.dumps(_plain(value), indent=2, sort_keys=True, allow_nan=False) + "\n"


def card(found: Mapping[str, Any], tensors: Mapping[str, Tensor], *, chats: bool) -> str:
    """The model card.

    Args:
        found: the contents of `afina.json`.
        tensors: of the adapter.
        chats: whether a tokenizer with a chat template is beside it.
    """
    base, revision = found["base"]["name"], found["base"]["revision"]
    numbers = sum(t.numel() for t in tensors.values())
    tags = ", ".join(key for technique in found["techniques"] for key in technique)
    head = ["---", "library_name: peft", f"tags: [afina, {tags}]"]
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base):  # the Hub takes no local paths here
        head.append(f"base_model: {base}")
    facts = {
        "base model": base,
        **({"its revision": revision} if revision else {}),
        "its fingerprint": found["base"]["fingerprint"] or "not known",
        "tensors": f"{len(tensors)} with {numbers:,} numbers",
        "made by": f"afina {found['afina']}",
    }
    tables = [
        ("Technique", dict(_flat({k: v for t in found["techniques"] for k, v in t.items()}))),
        ("Data", dict(_flat(found["data"]))),
        ("Settings", dict(_flat(found["settings"]))),
        ("Scores", dict(_flat(found["scores"]))),
    ]
    lines = [*head, "---", "", f"# An adapter for {base}", "", *_table(facts), ""]
    for title, rows in tables:
        lines += [f"## {title}", "", *(_table(rows) if rows else ["Not recorded."]), ""]
    settings = next((t[Quantize.key] for t in found["techniques"] if Quantize.key in t), None)
    quantize = None if settings is None else Quantize.model_validate(settings)
    return "\n".join([*lines, *_usage(base, revision, chats, quantize)]) + "\n"


def _usage(base: str, revision: str | None, chats: bool, quantize: Quantize | None) -> list[str]:
    beside = ", and the tokenizer" if chats else ""
    # Transformers knows no demo model by its name, but it knows a folder.
    demo = base in DEMOS
    exact = f", revision={revision!r}" if revision else ""
    rounded = "" if quantize is None else f", quantize={quantize.call}"
    theirs = "BASE" if demo else repr(base) + exact
    about = f" `BASE` is the folder that `afina models get {base}` prints." if demo else ""
    return [
        "## Use",
        "",
        f"`FOLDER` is this folder: `{CONFIG}`, `{WEIGHTS}`, `{RECORD}`{beside}.",
        "",
        "```sh",
        "afina chat FOLDER",
        "```",
        "",
        "```python",
        "import afina",
        "",
        f"model, tokenizer = afina.load({base!r}{exact}{rounded})",
        "edit = afina.load_adapter(model, FOLDER)  # an error when anything does not fit",
        "```",
        "",
        f"With Transformers and PEFT, which do not compare the base's fingerprint:{about}",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({'FOLDER' if chats else theirs})",
        f"base = AutoModelForCausalLM.from_pretrained({theirs})",
        "model = PeftModel.from_pretrained(base, FOLDER)",
        "```",
    ]


def _table(rows: Mapping[str, Any]) -> list[str]:
    cells = {k: str(v).replace("|", "\\|").replace("\n", " ") for k, v in rows.items()}
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells.items())]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Nested values under dotted names, as JSON writes them."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: what it has no form for as text, a NaN among them."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
