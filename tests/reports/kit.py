"""A run with which nothing is wrong, for tests that spoil one thing of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from afina.config import TrainSettings
from afina.data.settings import DataSettings
from afina.reports.check import check
from afina.reports.checked import Checked
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train.options import RunOptions
from afina.tree import Edit, Technique
from afina.types import Row
from tests.tiny import byte_tokenizer, tiny_llama

STOPS = [256, 259]
"""The byte tokenizer's end of text and end of turn."""

POINTS = (
    "model",
    "technique",
    "folder",
    "format",
    "rows",
    "labels",
    "stop token",
    "template",
    "lengths",
    "duplicates",
    "overlap",
    "settings",
    "batch",
    "learning rate",
    "schedule",
    "capacity",
    "disk",
    "validation",
    "packing",
    "start",
    "first step",
    "pace",
)


def model(**changes: Any) -> Any:
    """A tiny model near guessing, whose generation settings name every stop."""
    made = tiny_llama(dtype=torch.float32, **{"initializer_range": 0.05, **changes})
    made.generation_config.eos_token_id = STOPS
    return made


def asked(count: int, first: int = 0) -> list[dict[str, str]]:
    """Rows of a question and its answer, no two alike."""
    return [
        {"prompt": f"say {number}", "completion": f"é{number * 7}"}
        for number in range(first, first + count)
    ]


@dataclass
class Case:
    """What `check` is given; a test changes one thing of it."""

    folder: Path
    model: Any = field(default_factory=model)
    tokenizer: Any = field(default_factory=byte_tokenizer)
    data: Any = field(default_factory=lambda: asked(40))
    val: Any = field(default_factory=lambda: asked(5, first=100))
    technique: Technique = field(default_factory=lambda: LoRA(rank=4))
    edit: Edit | None = None
    settings: dict[str, Any] = field(default_factory=lambda: {"rows_per_step": 8})
    data_settings: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def applied(self) -> Edit:
        self.edit = self.edit or apply(self.model, [self.technique])
        return self.edit

    def rows(self) -> list[Row]:
        """The data as prepared rows."""
        from afina.data.dataset import prepare

        return prepare(self.data, self.tokenizer, DataSettings(), stop_ids=STOPS).rows

    def check(self) -> Checked:
        return check(
            self.model,
            self.tokenizer,
            self.data,
            self.applied(),
            self.out,
            val=self.val,
            settings=TrainSettings(**self.settings),
            options=RunOptions(data_settings=DataSettings(**self.data_settings)),
            quick=self.quick,
        )
