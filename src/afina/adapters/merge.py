"""An adapter and its base made one model, on disk: streamed tensor by tensor, then checked against the two.

    W' = round(W + dW)      for every adapted W, summed in fp32 and rounded once

Legend: W the base's weight, dW the adapter's change, W' the merged weight in the base's dtype or another.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from afina import seams
from afina.adapters import export_gguf, merge_record
from afina.adapters.files import load as load_adapter
from afina.adapters.merge_check import Verdict, judge, look, roundoff, tolerance
from afina.adapters.merge_files import Written, write_merged
from afina.adapters.merge_shards import DTYPES, read_shards
from afina.adapters.merge_texts import GENERAL, Text, texts_of
from afina.adapters.replace import replace_folder
from afina.adapters.target import Target, resolve_run
from afina.errors import AdapterError, ConfigError
from afina.models import gguf, hub
from afina.models.precision import parse_dtype
from afina.models.prompts import Prompt
from afina.problems import Frozen, of_kind


class MergeSettings(Frozen):
    """How a model is merged, and how the result is checked."""

    dtype: str | None = Field(
        default=None,
        description="of the merged weights: fp32, bf16 or fp16, for GGUF also q8_0; default: the base's",
    )
    verify: bool = Field(
        default=True, description="run base + adapter and the merged model, and compare"
    )
    tolerance: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="largest relative difference of the logits; default: what rounding explains",
    )
    max_new_tokens: int = Field(
        default=32, ge=0, description="length of the answers compared; 0 compares none"
    )
    compute_dtype: str | None = Field(
        default=None, description="in which both are run; default: fp32, where rounding shows best"
    )
    device: str | None = Field(
        default=None, description="on which both are run, one after the other"
    )
    overwrite: bool = Field(default=False, description="replace an earlier merge of this name")


@dataclass(frozen=True)
class Merged:
    """What was made.

    Attributes:
        out: the folder, or the GGUF file.
        verdict: of the check; None when none was made.
        written: how adapter and base met; None where a whole model was only exported.
        record: what `merge.json` holds.
    """

    out: Path
    verdict: Verdict | None
    written: Written | None
    record: dict[str, Any]

    @property
    def verified(self) -> bool:
        """Whether the merged model was found to say what base and adapter say."""
        return self.verdict is not None and not self.verdict.problems


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
        prompts: to compare on; None takes validation rows of the run, or a few general texts.
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
        cure="merge with --dtype fp32, which loses least; if it fails too, keep the adapter unmerged",
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
    settings, out = of_kind(MergeSettings, settings), Path(out).expanduser()
    target = resolve_run(str(source))
    to_file = out.suffix.lower() == ".gguf"
    _refuse_whole(target, to_file=to_file)
    merge_record.refuse_out(out, overwrite=settings.overwrite)
    wanted = _format(settings.dtype, to_file=to_file)
    folder = hub.resolve(
        base or target.base,
        revision=None if base else target.revision,
        token=token,
        offline=offline,
    )
    job = _Job(target, folder, settings, wanted, prompts)
    with _beside(out) as place:
        return job.to_gguf(place, out) if to_file else job.to_folder(place, out)


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
    raise AdapterError(
        "there is nothing to merge: this is a model, without an adapter",
        got=target.base,
        wanted="a run, a checkpoint or an adapter",
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
            cure="name a file: -o NAME.gguf, or choose bf16",
        )
    found = parse_dtype(dtype)
    if to_file and found == torch.float64:
        raise ConfigError("a GGUF file holds no fp64", got=dtype, wanted="fp32, bf16, fp16 or q8_0")
    return next(name for name, other in DTYPES.items() if other == found)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder on the disk of `out` that is gone afterwards.

    Raises:
        ConfigError: none can be made there.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{out.name[:50]}.", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise ConfigError("the output cannot be written", got=f"{out}: {error}") from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class _Job:
    """One merge: what, into which base, how.

    Attributes:
        target: the adapter, or a whole model.
        base: the base's folder.
        settings: as given.
        dtype: name of the wanted format; None is the base's.
        prompts: to compare on.
    """

    target: Target
    base: Path
    settings: MergeSettings
    dtype: str | None
    prompts: Sequence[Prompt] | None

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer is: beside the adapter, if one was saved there."""
        own = self.target.adapter
        return own if own is not None and (own / "tokenizer_config.json").is_file() else self.base

    def to_folder(self, place: Path, out: Path) -> Merged:
        """Merges into a folder."""
        model = place / "model"
        written = self._write(model, None if self.dtype is None else DTYPES[self.dtype])
        formats = [self.dtype or name for name in written.dtypes if name in DTYPES]
        verdict = (
            self._check(lambda: self._load(model), formats[0]) if self.settings.verify else None
        )
        record = self._record(written, verdict, formats[0])
        merge_record.write(model, record)
        replace_folder(model, out)
        return Merged(out, verdict, written, record)

    def to_gguf(self, place: Path, out: Path) -> Merged:
        """Merges in fp32, so that the file's format is the only rounding, and writes that as GGUF."""
        model, written = self.base, None
        dtype = self.dtype or _commonest(self.base)
        export_gguf.refuse_uncovered(self.base, self.tokenizer)
        if self.target.adapter is not None:
            model = place / "model"
            written = self._write(model, torch.float32)
        file = place / out.name
        export_gguf.export(model, file, dtype)
        verdict = None
        if self.settings.verify:
            again = place / "again"
            again.mkdir()

            def load() -> tuple[Any, Any]:
                gguf.convert(file, again)
                return self._load(again)

            verdict = self._check(load, dtype)
        record = self._record(written, verdict, dtype)
        os.replace(file, out)
        merge_record.write_beside(out, record)
        return Merged(out, verdict, written, record)

    def _write(self, model: Path, dtype: torch.dtype | None) -> Written:
        assert self.target.adapter is not None
        model.mkdir()
        return write_merged(
            self.base, self.target.adapter, model, dtype=dtype, tokenizer=self.tokenizer
        )

    def _load(self, folder: Path) -> tuple[Any, Any]:
        """A model to be looked at, in the format of the comparison."""
        dtype = self.settings.compute_dtype or (
            "fp64" if _commonest(self.base) == "F64" else "fp32"
        )
        return hub.load(folder, dtype=dtype, device=self.settings.device)

    def _check(self, load_merged: Callable[[], tuple[Any, Any]], dtype: str) -> Verdict:
        """Runs base, base + adapter, and the merged model, one in memory at a time."""
        model, tokenizer = self._load(self.base)
        if self.tokenizer != self.base:
            tokenizer = hub.load_tokenizer(self.tokenizer, model)
        texts, of = texts_of(model, tokenizer, self.target.run, self.prompts)
        maps, most = len(seams.map_sites(model)), self.settings.max_new_tokens
        base = None
        if self.target.adapter is None:
            adapted = look(model, tokenizer, texts, most)
        else:
            edit = load_adapter(model, self.target.adapter)
            adapted = look(model, tokenizer, texts, most)
            with edit.disabled():
                base = look(model, tokenizer, texts, 0)
            del edit
        error = max(roundoff(dtype), roundoff(next(model.parameters()).dtype))
        del model
        gc.collect()
        merged_model, merged_tokenizer = load_merged()
        problems = _other_tokens(tokenizer, merged_tokenizer, texts)
        merged = look(merged_model, merged_tokenizer, texts, most)
        limit = self.settings.tolerance or tolerance(error, maps)
        prompts = [tokenizer.decode(text.prompt) for text in texts]
        return judge(
            base, adapted, merged, limit=limit, texts=of, prompts=prompts, problems=problems
        )

    def _record(
        self, written: Written | None, verdict: Verdict | None, dtype: str
    ) -> dict[str, Any]:
        return merge_record.make(
            base=self.target.base if self.target.adapter else str(self.base),
            adapter=self.target.adapter,
            dtype=dtype,
            written=written,
            verdict=verdict,
        )


def _commonest(folder: Path) -> str:
    """The format of most of a model's tensors that can be computed with."""
    found = [one.dtype for file in read_shards(folder).values() for one in file]
    return max(DTYPES, key=lambda name: found.count(name))


def _other_tokens(one: Any, other: Any, texts: Sequence[Text]) -> list[str]:
    """What is wrong when two tokenizers read or render texts differently."""
    every = [*GENERAL, *(one.decode(text.tokens) for text in texts)]
    told = [
        [t(text, add_special_tokens=False)["input_ids"] for text in every] for t in (one, other)
    ]
    problems = [
        f"its tokenizer reads {text[:40]!r} otherwise"
        for text, a, b in zip(every, *told, strict=True)
        if a != b
    ]
    if getattr(one, "chat_template", None) != getattr(other, "chat_template", None):
        problems.append("its chat template is another one")
    return problems[:2]
