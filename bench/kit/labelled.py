"""Rows of text and class for encoders, made from the same folders as rows of prompt and answer.

The file is JSON: `{"hash", "work", "train": [{"text", "label"}, …], "test": […]}`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .answers import first_field
from .jobs import write_json
from .rows import content_hash, read_lines


@dataclass(frozen=True)
class Labelled:
    """What a file of labelled rows holds.

    Attributes:
        work: name of the data, for the table.
        train, test: one `{"text", "label"}` a row.
    """

    work: str
    train: list[dict[str, str]]
    test: list[dict[str, str]]

    @property
    def hash(self) -> str:
        """Of the texts and labels."""
        return content_hash([self.train, self.test])

    @property
    def names(self) -> list[str]:
        """Of the classes, as the training rows have them."""
        return sorted({row["label"] for row in self.train})


def make_labelled(folder: Path, train_rows: int, test_rows: int) -> Labelled:
    """Rows of a folder with `train.jsonl` and `test.jsonl`: the question is the text, the answer the class.

    Of answers that are JSON objects beginning with the same key, that key's value is the class. What all texts begin
    with, such as an instruction, is left out. Training rows are the first ones after a shuffle with seed 0; test rows
    are the file's first, without those of a class that no training row has.

    Args:
        folder: of the data.
        train_rows: how many to take; all, when there are fewer.
        test_rows: likewise.
    """
    files = [read_lines(folder / f"{name}.jsonl") for name in ("train", "test")]
    train, test = ([_pair(line) for line in lines] for lines in files)
    field = first_field([answer for _, answer in train])
    begin = _common([text for text, _ in [*train, *test]])

    def made(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        return [
            {"text": text[begin:], "label": answer if field is None else json.loads(answer)[field]}
            for text, answer in pairs
        ]

    random.Random(0).shuffle(train)
    kept = made(train[:train_rows])
    names = {row["label"] for row in kept}
    return Labelled(
        folder.name, kept, [row for row in made(test) if row["label"] in names][:test_rows]
    )


def _pair(line: dict[str, Any]) -> tuple[str, str]:
    """(question, answer) of a line in any of three forms."""
    if "messages" in line:
        said = {turn["role"]: turn["content"] for turn in line["messages"]}
        return said["user"], said["assistant"]
    question, answer = ("text", "label") if "text" in line else ("prompt", "completion")
    return line[question], line[answer]


def _common(texts: Sequence[str]) -> int:
    """Length of what all texts begin with, in whole words."""
    first, last = min(texts), max(texts)  # every other text lies between them
    same = next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    return max(first.rfind(" ", 0, same), first.rfind("\n", 0, same)) + 1


def write_labelled(path: Path, rows: Labelled) -> None:
    """Writes the file, complete or not at all."""
    body = {"hash": rows.hash, "work": rows.work, "train": rows.train, "test": rows.test}
    write_json(path, body)


def read_labelled(path: str | Path) -> Labelled:
    """Reads the file and checks its hash.

    Raises:
        ValueError: the content is not what was written.
    """
    body = json.loads(Path(path).read_text("utf-8"))
    rows = Labelled(body["work"], body["train"], body["test"])
    if rows.hash != body["hash"]:
        raise ValueError(f"{path}: hash {rows.hash}, but the file says {body['hash']}: delete it")
    return rows
