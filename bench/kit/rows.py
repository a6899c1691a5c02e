"""The rows file: token ids and labels written once, so that every tool trains on the same numbers.

The file is JSON: `{"hash", "work", "train": [[ids, labels], …], "test": [{"ids", "reference"}, …]}`. `ids` are a row's
tokens, `labels` the same numbers where they are trained and -100 elsewhere (not shifted); a test row's `ids` are its
prompt, ready to be continued, and `reference` is the answer wanted.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jobs import write_json

IGNORE = -100


@dataclass(frozen=True)
class Rows:
    """What a rows file holds.

    Attributes:
        work: name of the data, for the table.
        train: one (ids, labels) pair a row.
        test: one dict a row: ids of the prompt, and the reference's text.
    """

    work: str
    train: list[tuple[list[int], list[int]]]
    test: list[dict[str, Any]]

    @property
    def hash(self) -> str:
        """Of the numbers and texts."""
        return content_hash([self.train, self.test])


def content_hash(value: object) -> str:
    """First 16 hexadecimal digits of the sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_rows(folder: Path, tokenizer: Any, train_rows: int, test_rows: int) -> Rows:
    """Rows of a folder with `train.jsonl` and `test.jsonl`, tokenised by afina.

    The training rows are the first ones after a shuffle with seed 0; the test rows are the file's first.

    Args:
        folder: of the data.
        tokenizer: with a chat template.
        train_rows: how many to take; all, when there are fewer.
        test_rows: likewise.
    """
    from afina.data.dataset import prepare
    from afina.data.settings import DataSettings

    # Shuffled and cut before they are tokenised: most rows of a large file are never needed.
    lines = read_lines(folder / "train.jsonl")
    random.Random(0).shuffle(lines)
    train = prepare(lines[:train_rows], tokenizer, DataSettings(), role="train").rows
    lines = read_lines(folder / "test.jsonl")[:test_rows]
    test = prepare(lines, tokenizer, DataSettings(), role="eval").rows
    pairs = [
        (
            list(row.tokens),
            [t if label else IGNORE for t, label in zip(row.tokens, row.trained, strict=True)],
        )
        for row in train
    ]
    asked = [
        {"ids": list(row.tokens[: row.prompt_tokens]), "reference": row.meta["reference"]}
        for row in test
    ]
    return Rows(folder.name, pairs, asked)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The values of a jsonl file, one a line."""
    return [json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip()]


def write_rows(path: Path, rows: Rows) -> None:
    """Writes a rows file, complete or not at all."""
    body = {"hash": rows.hash, "work": rows.work, "train": rows.train, "test": rows.test}
    write_json(path, body)


def read_rows(path: str | Path) -> Rows:
    """Reads a rows file and checks its hash.

    Raises:
        ValueError: the content is not what was written.
    """
    body = json.loads(Path(path).read_text("utf-8"))
    rows = Rows(body["work"], [(ids, labels) for ids, labels in body["train"]], body["test"])
    if rows.hash != body["hash"]:
        raise ValueError(f"{path}: hash {rows.hash}, but the file says {body['hash']}: delete it")
    return rows


def sequence(rows: int, seed: int, wanted: int) -> list[int]:
    """The order in which rows are trained on: shuffled epoch by epoch, cut to `wanted` places."""
    if rows < 1:
        raise ValueError("no rows to put in order")
    draw, places = random.Random(seed), list(range(rows))
    out: list[int] = []
    while len(out) < wanted:
        draw.shuffle(places)
        out += places
    return out[:wanted]


def trained_tokens(labels: list[int]) -> int:
    """Labels that count: the first token has nothing before it to be predicted from."""
    return sum(label != IGNORE for label in labels[1:])
