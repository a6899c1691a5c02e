"""Damaged adapters end in an error that says what is wrong, and never in a traceback or a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from afina.adapters.combine import combine
from afina.adapters.inspection import inspect
from afina.adapters.inspection_words import lines
from afina.adapters.resize import ResizeSettings, resize
from afina.errors import AfinaError
from tests.adapters.kit import CONFIG, WEIGHTS
from tests.adapters.test_combine import made_by_peft

SETTINGS: dict[str, Any] = {
    "r": 2,
    "target_modules": ["q_proj", "embed_tokens"],
    "rank_pattern": {"layers.1.self_attn.q_proj": 1},
    "alpha_pattern": {"embed_tokens": 5},
}
VALUES: list[Any] = [
    None,
    -1,
    0,
    1e30,
    True,
    "",
    "(",
    [],
    [None],
    {},
    {"(": 1},
    {"q_proj": None},
    [[]],
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    made_by_peft("llama", folder, SETTINGS, 0)
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def survives(folder: Path) -> int:
    """Runs each verb; how many refused."""
    refused = 0
    for number, verb in enumerate(
        (
            lambda out: "\n".join(lines(inspect(folder))),
            lambda out: combine({folder: 0.5}, out),
            lambda out: resize(folder, out, settings=ResizeSettings(rank=1)),
        )
    ):
        out = folder.parent / f"out{number}"
        try:
            verb(out)
        except AfinaError:
            refused += 1
            assert not out.exists()
    assert not list(folder.parent.glob(".*"))
    return refused


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_were_changed(whole: dict[str, bytes], seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for name, data in whole.items():
        folder = tmp_path / name / "a"
        folder.mkdir(parents=True)
        for other, text in whole.items():
            (folder / other).write_bytes(text)
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(min(len(data), 800))] = chance.randrange(256)
        (folder / name).write_bytes(bytes(damaged[: chance.choice([len(data), len(data) // 2])]))
        survives(folder)


@pytest.mark.parametrize(
    "key", ["r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "peft_type"]
)
def test_settings_of_any_kind(whole: dict[str, bytes], key: str, tmp_path: Path) -> None:
    refused = 0
    for number, value in enumerate(VALUES):
        folder = tmp_path / str(number) / "a"
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(whole[WEIGHTS])
        config = json.loads(whole[CONFIG]) | {key: value}
        (folder / CONFIG).write_text(json.dumps(config))
        refused += survives(folder)
    assert refused > 0
