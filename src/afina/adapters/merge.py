"""An adapter and its base made one model, on disk: streamed tensor by tensor, then checked against the two.

    W' = round(W + dW)      for every adapted W, summed in fp32 and rounded once

Legend: W the base's weight, dW the adapter's change, W' the merged weight in the base's dtype or another.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from afina.adapters import merge_record
from afina.adapters.merge_job import Job, Merged, MergeSettings
from afina.adapters.merge_shards import DTYPES
from afina.adapters.target import Target, resolve_run
from afina.errors import AdapterError, ConfigError, ModelError
from afina.models import hub
from afina.models.demo import DEMOS
from afina.models.locate import TUNED, asking, nearby
from afina.models.precision import parse_dtype
from afina.models.prompts import Prompt
from afina.places import exists, local
from afina.problems import name_of, of_kind
from afina.tree import Edit

FEW_BITS = re.compile(
    r"(nf|int|fp|q|iq)?4([-_ ]?bits?|_[0-9a-z_]+)?|(int)?8([-_ ]?bits?)?|(q|iq)[2-8].*"
)
"""Names of formats of 2 to 8 bits, as people write them."""

__all__ = ["MergeSettings", "Merged", "merge", "merge_unchecked", "refuse_failed"]


def merge(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    prompts: Sequence[Prompt] | None = None,
    settings: MergeSettings | None = None,
    token: str | None = None,
    offline: bool | None = None,
) -> Merged:
    """Makes one model of an adapter and its base, and checks that it says what the two say.

    Args:
        source: a run's folder, an adapter's, or a checkpoint's; a whole model too, where `out` is a GGUF file.
        out: the folder to make, or a file that ends in .gguf.
        base: the base model, where it is another one than the adapter names.
        prompts: to compare on; None takes validation rows of the run, else training rows, else a few general texts.
        settings: defaults when None.
        token: of the Hub.
        offline: True downloads nothing.

    Returns:
        The result, verified unless the settings said not to.

    Raises:
        AdapterError: the adapter does not fit, or the check failed; the output is then there, marked unverified.
        AfinaError: base or settings cannot be used; nothing is written.
    """
    merged = merge_unchecked(
        source, out, base=base, prompts=prompts, settings=settings, token=token, offline=offline
    )
    refuse_failed(merged)
    return merged


def refuse_failed(merged: Merged) -> None:
    """Raises when the check found that the merged model is not base + adapter.

    Raises:
        AdapterError: saying why.
    """
    if merged.verdict is None or merged.verified:
        return
    raise AdapterError(
        f"{merged.out} is NOT VERIFIED",
        got="; ".join(merged.verdict.problems),
        wanted="a model that says what base + adapter say",
        cure="merge in fp32, which loses least: --dtype fp32 (in Python MergeSettings(dtype='fp32')); if it fails "
        "too, keep the adapter unmerged",
    )


def merge_unchecked(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    prompts: Sequence[Prompt] | None = None,
    settings: MergeSettings | None = None,
    token: str | None = None,
    offline: bool | None = None,
) -> Merged:
    """As `merge`, and the outcome of the check is only in the result and in the files."""
    settings = of_kind(MergeSettings, settings)
    if isinstance(source, Edit | nn.Module):
        raise ConfigError(
            "this merges what lies on the disk",
            got=type(source).__name__,
            wanted="the folder of a run, a checkpoint or an adapter",
            cure="in memory it is edit.merge()",
        )
    name = name_of(source, "what is merged", "the folder of a run, a checkpoint or an adapter")
    out = _place(name_of(out, "the output", "a folder to make, or a file that ends in .gguf"))
    target = resolve_run(name)
    to_file = out.suffix.lower() == ".gguf"
    _refuse_whole(target, to_file=to_file)
    merge_record.refuse_out(out, overwrite=settings.overwrite)
    wanted = _format(settings.dtype, to_file=to_file)
    folder = _base(target, base, token=token, offline=offline)
    named = target.base if base is None else base
    _refuse_inside(out, (folder, local(named), target.adapter))
    job = Job(target, folder, settings, wanted, prompts)
    job.refuse_unusable(to_file=to_file)
    with _beside(out) as place:
        return job.to_gguf(place, out) if to_file else job.to_folder(place, out)


def _place(out: str | Path) -> Path:
    """Where the output goes: a link to a folder is followed, for it is the folder that is replaced."""
    place = local(out)
    return place.resolve() if place.is_symlink() and place.is_dir() else place


def _refuse_inside(out: Path, sources: Iterable[Path | None]) -> None:
    """Raises when the output is, or holds, what is merged: to overwrite it would take that away."""
    for source in sources:
        if source is not None and exists(source) and source.resolve().is_relative_to(out.resolve()):
            raise ConfigError(
                "the output would take the place of what it is made from",
                got=f"{out}, and {source}",
                wanted="an output apart from base and adapter",
                cure="name another output",
            )


def _base(
    target: Target, named: str | Path | None, *, token: str | None, offline: bool | None
) -> Path:
    """The base's folder: the named one's, or that of the adapter's own.

    Raises:
        ModelError: it is not found, or cannot be used.
    """
    if named is not None:
        return hub.resolve(named, token=token, offline=offline)
    try:
        return hub.resolve(target.base, revision=target.revision, token=token, offline=offline)
    except ModelError as error:
        if exists(local(target.base)):
            raise
        if target.adapter is None:
            raise asking(error, nearby(target.base, TUNED)) from error
        raise ModelError(
            "the adapter's base is not found from here",
            got=f"{target.base}: {error.what}",
            wanted="a model's folder, a .gguf file, or a model that the hub has",
            cure="say where it is: --base MODEL (in Python base='MODEL')",
        ) from error


def _refuse_whole(target: Target, *, to_file: bool) -> None:
    """Raises where there is no adapter, unless a whole model is only to be exported."""
    if target.adapter is not None or to_file:
        return
    if target.run is not None:
        raise AdapterError(
            "there is nothing to merge: this run trained the model itself, and its model is whole",
            got=target.base,
            cure=f"use {target.base} as it is, or copy it",
        )
    if exists(local(target.base) / "config.json") or target.base in DEMOS:
        raise AdapterError(
            "there is nothing to merge: this is a model, without an adapter",
            got=target.base,
            wanted="a run, a checkpoint or an adapter",
        )
    near = nearby(target.base, TUNED)
    raise AdapterError(
        "there is no run, checkpoint or adapter of this name",
        got=target.base,
        wanted="a run, a checkpoint or an adapter",
        cure=f"did you mean {' or '.join(near)}?"
        if near
        else f"the working directory is {Path.cwd()}",
    )


def _format(dtype: str | None, *, to_file: bool) -> str | None:
    """The checked name of the wanted format: of `DTYPES`, or Q8_0; None keeps the base's.

    Raises:
        ConfigError: a format that the output cannot have.
    """
    if dtype is None:
        return None
    if dtype.lower() == "q8_0" and to_file:
        return "Q8_0"
    if dtype.lower() == "q8_0":
        raise ConfigError(
            "only a GGUF file holds q8_0",
            got=dtype,
            cure="name a file NAME.gguf as the output, or choose bf16",
        )
    kinds = "fp32, bf16, fp16 or q8_0" if to_file else "fp32, bf16, fp16 or fp64"
    _refuse_few_bits(dtype, kinds)
    found = parse_dtype(dtype, wanted=kinds, default="to keep the base's")
    if to_file and found == torch.float64:
        raise ConfigError("a GGUF file holds no fp64", got=dtype, wanted=kinds)
    return next(name for name, other in DTYPES.items() if other == found)


def _refuse_few_bits(dtype: str, wanted: str) -> None:
    """Raises for a format of few bits, and says why; `wanted` are those that there are.

    Raises:
        ConfigError: it is one.
    """
    if FEW_BITS.fullmatch(dtype.lower()):
        raise ConfigError(
            "a change is not merged into few bits: its steps are larger than the change, and rounding the sum to that "
            "dtype undoes most of it",
            got=dtype,
            wanted=wanted,
            cure="merge in bf16, and quantise the merged model when it is loaded: quantize in a run's techniques "
            "(in Python afina.load(…, quantize=afina.Quantize()))",
        )


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder on the disk of `out` that is gone afterwards.

    Raises:
        ConfigError: none can be made there.
    """
    made = [folder for folder in out.absolute().parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{out.name[:50]}.", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise ConfigError("the output cannot be written", got=f"{out}: {error}") from None
    try:
        yield place
    except OSError as error:
        raise AdapterError(
            "the merged model cannot be written",
            got=error,
            cure="free some space, or name a folder on another disk; nothing was overwritten",
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for folder in made if not out.exists() else ():  # nothing came of it: no trace is left
            with suppress(OSError):
                folder.rmdir()
