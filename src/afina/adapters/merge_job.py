"""One merge: written beside its place, checked, and then put there."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from afina import seams
from afina.adapters import export_gguf, merge_record
from afina.adapters.card import head_of_base
from afina.adapters.files import load as load_adapter
from afina.adapters.merge_check import Verdict, judge, look, roundoff, tolerance
from afina.adapters.merge_files import Written, write_merged
from afina.adapters.merge_shards import DTYPES, read_shards
from afina.adapters.merge_texts import GENERAL, Text, of_prompt, texts_of
from afina.adapters.replace import replace_folder
from afina.adapters.rounded import read_rounded
from afina.adapters.target import Target
from afina.errors import AdapterError
from afina.models import gguf, hub
from afina.models.packing import unpack
from afina.models.precision import parse_device, parse_dtype
from afina.models.prompts import Prompt, check_prompts
from afina.problems import Frozen


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


@dataclass(frozen=True)
class Job:
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

    @property
    def head(self) -> dict[str, Any]:
        """How the base of a classifier's adapter is loaded, as arguments of `afina.load`."""
        return {} if self.target.adapter is None else head_of_base(self.target.adapter)

    def refuse_unusable(self, *, to_file: bool) -> None:
        """Raises for what would be found wrong only after the model was written.

        Raises:
            AfinaError: prompts, device or format of the comparison cannot be used; or, where the output is a GGUF
                file, the model is not covered.
        """
        if to_file and self.head:
            raise AdapterError(
                "a GGUF file holds no classifier's head",
                got=self.head["task"],
                cure="name a folder as the output",
            )
        if to_file:
            export_gguf.refuse_uncovered(self.base, self.tokenizer)
        parse_device(self.settings.device)
        if self.settings.compute_dtype is not None:
            kinds = "fp32, bf16, fp16 or fp64"
            parse_dtype(self.settings.compute_dtype, wanted=kinds, default="to compute in fp32")
        if self.prompts is not None:
            tokenizer = hub.load_tokenizer(self.tokenizer)
            for one in check_prompts(self.prompts):
                of_prompt(tokenizer, one)

    def to_folder(self, place: Path, out: Path) -> Merged:
        """Merges into a folder."""
        model = place / "model"
        written = self._write(model, None if self.dtype is None else DTYPES[self.dtype])
        formats = [self.dtype or name for name in written.dtypes if name in DTYPES]
        verdict = (
            self._check(lambda: self._load(model), formats[0]) if self.settings.verify else None
        )
        record = self._record(written, verdict, formats[0], merge_record.files_in(model))
        merge_record.write(model, record)
        merge_record.refuse_out(out, overwrite=self.settings.overwrite)  # who came meanwhile stays
        replace_folder(model, out)
        return Merged(out, verdict, written, record)

    def to_gguf(self, place: Path, out: Path) -> Merged:
        """Merges in fp32, so that the file's format is the only rounding, and writes that as GGUF."""
        model, written = self.base, None
        dtype = self.dtype or _commonest(self.base)
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
        merge_record.refuse_out(out, overwrite=self.settings.overwrite)
        merge_record.write_beside(out, record)  # first, so that no file is ever without its record
        os.replace(file, out)
        return Merged(out, verdict, written, record)

    def _write(self, model: Path, dtype: torch.dtype | None) -> Written:
        assert self.target.adapter is not None
        model.mkdir()
        return write_merged(
            self.base, self.target.adapter, model, dtype=dtype, tokenizer=self.tokenizer
        )

    def _load(self, folder: Path, quantize: Any = None, **head: Any) -> tuple[Any, Any]:
        """A model to be looked at, in the format of the comparison."""
        dtype = self.settings.compute_dtype or (
            "fp64" if _commonest(self.base) == "F64" else "fp32"
        )
        return hub.load(folder, dtype=dtype, device=self.settings.device, quantize=quantize, **head)

    def _load_base(self) -> tuple[Any, Any, bool]:
        """The base as the adapter was trained beside it, and whether its weights are packed."""
        rounded = None if self.target.adapter is None else read_rounded(self.target.adapter)
        if rounded is None:
            return *self._load(self.base, **self.head), False
        return *self._load(self.base, rounded, **self.head), True

    def _check(self, load_merged: Callable[[], tuple[Any, Any]], dtype: str) -> Verdict:
        """Runs base, base + adapter, and the merged model, one in memory at a time."""
        model, tokenizer, rounded = self._load_base()
        if self.tokenizer != self.base:
            tokenizer = hub.load_tokenizer(self.tokenizer, model)
        texts, of = texts_of(model, tokenizer, self.target.run, self.prompts)
        maps, most = len(seams.map_sites(model)), self.settings.max_new_tokens
        base = None
        if self.target.adapter is None:
            adapted = look(model, tokenizer, texts, most)
        else:
            edit = load_adapter(model, self.target.adapter)
            if rounded:
                unpack(model)
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
        self,
        written: Written | None,
        verdict: Verdict | None,
        dtype: str,
        made: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        return merge_record.make(
            base=self.target.base if self.target.adapter else str(self.base),
            adapter=self.target.adapter,
            dtype=dtype,
            written=written,
            verdict=verdict,
            files=made,
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
