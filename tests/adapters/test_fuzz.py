"""Bytes changed anywhere in an adapter folder: an AdapterError or an adapter, and never anything else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afina.adapters import files
from afina.errors import AdapterError
from afina.table import apply
from afina.techniques.lora import LoRA
from tests import battery
from tests.adapters.kit import CONFIG, RECORD, WEIGHTS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    edit = apply(battery.build("llama", torch.float32), [LoRA(rank=2, target=("q_proj",))])
    folder = files.save(edit, tmp_path_factory.mktemp("fuzz") / "a", base="tiny")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


CHANGES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["set", "cut", "insert", "drop", "repeat"]), st.binary(max_size=4)),
    min_size=1,
    max_size=3,
)  # fmt: skip


def changed(text: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for share, how, new in changes:
        at = int(share * len(text))
        if how == "cut":
            text = text[:at]
        elif how == "insert":
            text = text[:at] + new + text[at:]
        elif how == "drop":
            text = text[:at] + text[at + len(new) :]
        elif how == "repeat":
            text = text[:at] + text[at : at + 40] + text[at:]
        else:
            text = text[:at] + new + text[at + len(new) :]
    return text


@given(name=st.sampled_from([CONFIG, WEIGHTS, RECORD]), changes=CHANGES)
def test_changed_bytes(
    whole: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    changes: list[tuple[float, str, bytes]],
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    for other, text in whole.items():
        (folder / other).write_bytes(text)
    # The header of the tensors is a small part of their file, and the part to fuzz.
    text = whole[name]
    head = 8 + int.from_bytes(text[:8], "little") if name == WEIGHTS else len(text)
    (folder / name).write_bytes(changed(text[:head], changes) + text[head:])
    _load(folder)


def _load(folder: Path) -> None:
    model = battery.build("llama", torch.float32)
    before = battery.picture(model)
    with suppress(AdapterError):
        edit = files.load(model, folder)
        assert battery.logits(model).isfinite().all()
        edit.undo()
    battery.same_picture(battery.picture(model), before)
