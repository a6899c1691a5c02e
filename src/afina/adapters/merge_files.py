"""The folder of a merged model: its weights streamed from the base's, its configuration, and all that belongs to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from afina.adapters.base_files import reader
from afina.adapters.fingerprint import base_fingerprint
from afina.adapters.fitting import fit
from afina.adapters.layout import TEMPLATES, TOKENIZER
from afina.adapters.merge_changes import changes
from afina.adapters.merge_head import configure, new_head, skeleton_of
from afina.adapters.merge_plan import make_plan
from afina.adapters.merge_shards import INDEX, Wanted, read_shards, write_index, write_shard
from afina.adapters.rounded import read_rounded
from afina.errors import AdapterError, ModelError, sized
from afina.models import hub
from afina.tree.fold import tied_groups

KEPT = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
"""What goes with a model beside its weights. Code is never copied."""

LEFT = frozenset({"config.json", INDEX, "afina.json", "merge.json"})
"""Files that are written anew, or speak of the base alone."""

OTHER_BASE = (
    "name the base that it was trained beside, {base!r}: --base MODEL (in Python base='MODEL')"
)
"""What helps against an adapter that does not fit: half a change is never merged."""

ROOM = 1.02
"""Free space wanted, as a multiple of the weights'."""


@dataclass(frozen=True)
class Written:
    """What was made of a base and an adapter.

    Attributes:
        rounding: of each folded weight, the share of its change that was lost.
        whole: base tensors that the adapter brought whole.
        untied: names that were one tensor in the base and are several now.
        notes: how adapter and base met.
        fingerprint: of the base; None where its files do not hold the model's tensors one by one.
        dtypes: formats of the written tensors, the commonest first.
    """

    rounding: Mapping[str, float]
    whole: tuple[str, ...]
    untied: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str | None
    dtypes: tuple[str, ...]


def refuse_quantised(folder: Path) -> None:
    """Raises for a base whose weights are stored quantised.

    Raises:
        ModelError: it is.
    """
    settings = _read(folder / "config.json")
    found = settings.get("quantization_config")
    if found is not None:
        kind = found.get("quant_method", "unknown") if isinstance(found, dict) else found
        raise ModelError(
            "an adapter cannot be merged into a quantised base",
            got=f"{folder}: quantised by {kind}",
            wanted="the base in bf16, fp16 or fp32",
            cure="merge into the unquantised model: --base MODEL (in Python base='MODEL'); an adapter trained beside "
            "quantised weights fits those best, so measure the result",
        )


def write_merged(
    base: Path, adapter: Path, out: Path, *, dtype: torch.dtype | None, tokenizer: Path
) -> Written:
    """Writes the merged model of `base` and `adapter` to the folder `out`, which exists and is empty.

    Args:
        base: a model's folder.
        adapter: in PEFT's layout.
        out: gets weights, configuration and tokenizer.
        dtype: of the weights; None keeps each in the base's.
        tokenizer: the folder whose tokenizer is the merged model's.

    Raises:
        AdapterError: the adapter does not fit this base, or cannot be merged into it.
        ModelError: the base's files are damaged, quantised or of a form that cannot be streamed; no space.
    """
    refuse_quantised(base)
    shards, skeleton = read_shards(base), skeleton_of(base, adapter)
    head = new_head(skeleton, shards)
    skeleton.config._name_or_path = str(base)  # for errors
    read, located = reader(skeleton, shards)
    ties = {name: group for group in tied_groups(skeleton) for name in group}
    names = [name for name, _ in skeleton.named_parameters() if name not in head.names]
    complete = all(located & {name, *ties.get(name, ())} for name in names)
    fitted = fit(skeleton, adapter, read=read, checks_base=complete, cure=OTHER_BASE)
    fingerprint = None
    if complete:
        fingerprint = base_fingerprint(skeleton, without=head.names, read=read)
    rounded = read_rounded(adapter)
    trained_as = {} if rounded is None else rounded.each(skeleton)
    made = changes(skeleton, fitted.techniques, fitted.tensors)
    plan = make_plan(skeleton, shards, made, dtype, trained_as, head)
    _refuse_small(out, plan.shards)
    settings = _settings(base, dtype, untie=bool(plan.untied), biases=plan.settings)
    if head.names:
        configure(settings, skeleton, tokenizer)
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    for file, wanted in plan.shards.items():
        write_shard(out / file, wanted)
    if (base / INDEX).is_file():
        write_index(out, plan.shards)
    copy_beside(base, out, tokenizer)
    _refuse_other_modules(skeleton_of(base, adapter), hub.skeleton(out), plan.untied)
    found = [one.dtype for file in plan.shards.values() for one in file]
    commonest = sorted(set(found), key=lambda name: (-found.count(name), name))
    return Written(
        plan.rounding,
        tuple(sorted(made.whole)),
        plan.untied,
        (
            *fitted.notes,
            *(
                []
                if rounded is None
                else [f"merged into the base as it was trained beside: {rounded}"]
            ),
        ),
        fingerprint,
        tuple(commonest),
    )


def _refuse_small(out: Path, shards: Mapping[str, list[Wanted]]) -> None:
    """Raises when the disk has no room for the weights."""
    needed = sum(one.size_bytes for file in shards.values() for one in file) * ROOM
    free = shutil.disk_usage(out).free
    if needed > free:
        raise ModelError(
            "there is no space for the merged model",
            got=f"{sized(free)} free in {out.parent.parent}",
            wanted=sized(needed),
            cure="free some, or name a folder on another disk",
        )


def _settings(
    base: Path, dtype: torch.dtype | None, *, untie: bool, biases: Mapping[str, bool]
) -> dict[str, Any]:
    """Those of the merged model's `config.json`."""
    settings = _read(base / "config.json")
    parts = [settings, *(p for p in [settings.get("text_config")] if isinstance(p, dict))]
    for part in parts:
        if untie and (part is settings or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        if dtype is not None:
            named = {"dtype", "torch_dtype"} & set(part) or ({"dtype"} if part is settings else ())
            part.update(dict.fromkeys(named, str(dtype).removeprefix("torch.")))
    # Biases are a matter of the text part, where there is one.
    parts[-1].update(biases)
    return settings


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            "the model's configuration cannot be read", got=f"{file}: {error}"
        ) from None
    if not isinstance(found, dict):
        raise ModelError("the model's configuration is no table of settings", got=file)
    return found


def copy_beside(base: Path, out: Path, tokenizer: Path) -> None:
    """Copies generation settings, licence and the like from the base, and the tokenizer from its own folder."""
    for source, of_tokenizer in ((base, False), (tokenizer, True)):
        files = {file for pattern in KEPT for file in source.glob(pattern)}
        for file in sorted(files):
            if (
                file.is_file()
                and file.name not in LEFT
                and (file.name in TOKENIZER) == of_tokenizer
            ):
                shutil.copyfile(file, out / file.name)
    templates = tokenizer / TEMPLATES
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)


def _refuse_other_modules(one: Any, other: Any, untied: tuple[str, ...]) -> None:
    """Raises unless the merged model (the other) has the base's modules, each of its kind, and ties none of the untied.

    Raises:
        AdapterError: it has not.
    """
    kinds = [
        [(name, type(module).__name__) for name, module in m.named_modules()] for m in (one, other)
    ]
    tied = [group for group in tied_groups(other) if len(set(group) & set(untied)) > 1]
    if kinds[0] != kinds[1] or tied:
        raise AdapterError(
            "this model has no setting that gives embedding and head a weight each",
            got="; ".join(" = ".join(group) for group in tied) or "other modules than the base's",
            cure="keep the adapter unmerged, or train without the tied module",
        )
