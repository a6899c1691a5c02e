"""A job: one training process of one tool, described so completely that its file is all a worker needs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One training process.

    Attributes:
        tool: "peer" (Hugging Face Trainer + PEFT) or "afina".
        setting: name of the tool's setting, for the table ("usual", "expert", "default").
        knobs: what the setting means, for the worker of that tool.
        model: folder of the model, in Hugging Face's layout.
        rows: the rows file (see `rows.py`).
        folder: where the worker writes `metrics.jsonl`, `result.json` and, when `save`, `adapter/`.
        seed: of the adapter's first values and of the order of the rows.
        steps: optimiser steps in all.
        warm: leading steps that the speed does not count (start-up, compilation).
        save: keep the adapter, and checkpoints on the way: a quality run, not a window.
        batch: rows of one optimiser step.
        lr: peak learning rate, then linear to 0.
        warmup_steps: of the learning rate; with none, both tools have the same rate at every step (the Trainer's
            warm-up begins at 0, afina's above it).
        rank: of LoRA, on all linears of the blocks.
        alpha: of LoRA.
        threads: CPU threads.
    """

    tool: str
    setting: str
    knobs: dict[str, Any]
    model: str
    rows: str
    folder: str
    seed: int
    steps: int
    warm: int = 0
    save: bool = False
    batch: int = 16
    lr: float = 1e-3
    warmup_steps: int = 0
    rank: int = 16
    alpha: int = 32
    threads: int = 2


def write_job(job: Job) -> Path:
    """Writes the job into its folder and returns the file's path."""
    path = Path(job.folder) / "job.json"
    write_json(path, asdict(job))
    return path


def read_job(path: str | Path) -> Job:
    """Reads what `write_job` wrote."""
    return Job(**json.loads(Path(path).read_text("utf-8")))


def write_json(path: Path, value: object) -> None:
    """Writes JSON under a temporary name and renames it, so that a file that exists is complete.

    The name is of this process: two benches may write the same rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, path)
