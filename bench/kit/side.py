"""The pieces of `bench/train.py` over one set of rows: which job each is, where its result lies, and the run of it."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .cache import job_key, machine, model_hash, tool_version
from .jobs import Job, write_json
from .peers import OTHERS, Other, python_of, version_of
from .pieces import newest, result_of, run_piece
from .report import Figure
from .rows import Rows, write_rows
from .variants import Variant, Windows

PEER = "Trainer + PEFT"
PAIRS = 4_000_000
"""Pairs of tokens of a pass: with 5 million, eager attention of 30 layers asked for more than 24 GiB."""


def peers_folder(options: argparse.Namespace) -> Path:
    """Where the environments of further tools are."""
    return options.peers or options.work / "peers"


class SideBySide:
    """The pieces of one bench over one set of rows, which it writes.

    Args:
        options: of the command line.
        rows: to train and test on.
        model: its folder.
        fast_bf16: whether this CPU multiplies bf16 itself.
    """

    def __init__(
        self, options: argparse.Namespace, rows: Rows, model: str, fast_bf16: bool
    ) -> None:
        self.options, self.rows, self.model, self.fast_bf16 = options, rows, model, fast_bf16
        self.work = options.work.resolve()
        self.rows_file = self.work / f"rows-{rows.hash}.json"
        self.failures: list[str] = []
        if not self.rows_file.exists():
            write_rows(self.rows_file, rows)

    @cached_property
    def model_hash(self) -> str:
        """Fingerprint of the base model."""
        return model_hash(self.model)

    @cached_property
    def others(self) -> dict[str, Other]:
        """The further tools that are installed, by key; where nothing is run, all of them."""
        folder, cached = peers_folder(self.options), self.options.cached
        return {each.key: each for each in OTHERS if cached or version_of(each, folder) is not None}

    @cached_property
    def versions(self) -> dict[str, str]:
        """Each tool's version, as it was when the bench began."""
        found = {tool: tool_version(tool) for tool in ("peer", "afina")}
        folder = peers_folder(self.options)
        return found | {key: version_of(each, folder) or "" for key, each in self.others.items()}

    def rounds(self, size: Windows) -> Windows:
        """The windows with as many of them as the command line asks for."""
        return replace(size, count=self.options.rounds or size.count)

    def micro(self, batch: int, *, eager: bool) -> int:
        """Rows of a peer's pass: all of a step, halved until eager attention over the longest rows fits in memory."""
        longest = max((len(ids) for ids, _ in self.rows.train), default=0)
        while eager and batch > 1 and batch * longest**2 > PAIRS:
            batch = -(-batch // 2)
        return batch

    def job(
        self, variant: Variant, seed: int, steps: int, warm: int, batch: int, **more: Any
    ) -> Job:
        """A job without its folder.

        Args:
            variant: the tool and its setting.
            seed: of rows and values.
            steps: in all.
            warm: of them not counted.
            batch: rows of a step.
            **more: further fields.
        """
        knobs = dict(variant.knobs)
        if variant.tool != "afina":
            knobs.setdefault("micro", self.micro(batch, eager=knobs.get("attention") == "eager"))
        return Job(
            variant.tool,
            variant.setting,
            knobs,
            self.model,
            str(self.rows_file),
            "",
            seed,
            steps,
            warm,
            batch=batch,
            threads=self.options.threads,
            **more,
        )

    def train(self, job: Job, kind: str) -> Path | None:
        """The folder of a finished training job; None when it is not there and not to be run, or failed."""
        where = "" if job.save else machine()
        key = job_key(job, self.rows.hash, self.model_hash, self.versions[job.tool], where)
        name = self.name(f"{kind}-{job.tool}-{job.setting}")
        return self.piece(
            job.tool,
            f"{name}-{job.seed}" if job.save else name,
            key,
            asdict(job),
            job.tool,
            job.setting,
        )

    def name(self, piece: str) -> str:
        """The name of a piece's folder, without its key."""
        quick = "quick-" if self.options.quick else ""
        return f"{self.rows.work}-{quick}{piece}"

    def piece(
        self, worker: str, name: str, key: str, job: dict[str, Any], tool: str, setting: str
    ) -> Path | None:
        """The folder of a finished piece: found by its key, or run if it is wanted now."""
        if self.options.cached:
            return newest(self.work, name, job)
        folder = self.work / f"{name}-{key}"
        if result_of(folder) is not None:
            return folder
        if self.options.tool not in (None, tool):
            return None
        if self.options.setting and setting not in self.options.setting:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "versions.json", {"tool": self.versions[tool], "machine": machine()})
        try:
            python = sys.executable
            if worker in self.others:
                python = python_of(self.others[worker], peers_folder(self.options)).absolute()
            run_piece(worker, folder, {**job, "folder": str(folder)}, python)
        except RuntimeError as error:
            print(f"  {folder.name} failed: {error}", flush=True)
            self.failures.append(folder.name)
            return None
        return folder

    def figure(
        self,
        setting: str,
        metric: str,
        unit: str,
        ours: float | None,
        theirs: float | None,
        *,
        peer: str = PEER,
    ) -> Figure:
        """A figure of this bench."""
        bench = "train, quick" if self.options.quick else "train"
        return Figure(bench, self.rows.work, setting, metric, unit, ours, peer, theirs)


def median(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None
