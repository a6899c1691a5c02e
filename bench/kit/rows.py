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


def make_rows(
    folder: Path, tokenizer: Any, train_rows: int, test_rows: int, system: str | None = None
) -> Rows:
    """Rows of a folder with `train.jsonl` and `test.jsonl`, tokenised by afina.

    The training rows are the first ones after a shuffle with seed 0; the test rows are the file's first.

    Args:
        folder: of the data: messages, or prompts and completions, or questions and answers.
        tokenizer: with a chat template.
        train_rows: how many to take; all, when there are fewer.
        test_rows: likewise.
        system: what all rows begin with, in place of their own system prompt; None leaves them as they are.
    """
    from afina.data.dataset import prepare
    from afina.data.settings import DataSettings

    # Shuffled and cut before they are tokenised: most rows of a large file are never needed.
    lines = read_lines(folder / "train.jsonl")
    random.Random(0).shuffle(lines)
    train = prepare(
        _as_said(lines[:train_rows], system), tokenizer, DataSettings(), role="train"
    ).rows
    lines = read_lines(folder / "test.jsonl")[:test_rows]
    test = prepare(_as_said(lines, system), tokenizer, DataSettings(), role="eval").rows
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
    return Rows(folder.name if system is None else f"{folder.name}, prompted", pairs, asked)


def _as_said(lines: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """The lines as prompts and completions or as messages, these with the system prompt before them."""
    lines = [
        {"prompt": line["question"], "completion": line["answer"]} if "question" in line else line
        for line in lines
    ]
    if system is None:
        return lines
    first = {"role": "system", "content": system}
    said = [
        line.get("messages")
        or [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["completion"]},
        ]
        for line in lines
    ]
    return [{"messages": [first, *(t for t in turns if t["role"] != "system")]} for turns in said]


def shared_share(rows: Rows, batch: int, steps: int, seed: int = 0) -> float:
    """Tokens that are left where the rows of each step share their beginnings, as a share of all."""
    from afina.data.prefix import unique_tokens
    from afina.types import Row

    order = sequence(len(rows.train), seed, batch * steps)
    every = [
        Row(tuple(ids), tuple(label != IGNORE for label in labels), place)
        for place in order
        for ids, labels in [rows.train[place]]
    ]
    left = sum(unique_tokens(every[at : at + batch]) for at in range(0, len(every), batch))
    return left / sum(len(row.tokens) for row in every)


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
