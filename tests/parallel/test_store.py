"""Pieces in files: any part is read from any cut, and what is missing or twice is seen."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp  # noqa: TID251 - another reader of the same files
from safetensors import safe_open
from safetensors.torch import save_file

from afina.errors import RunError
from afina.parallel.store import PLACES, Lot, Stored, file_of, write
from afina.tree.pieces import Box, Piece, whole_box


def cut(value: torch.Tensor, box: Box) -> Lot:
    piece = Piece(tuple(value.shape), box)
    return Lot(piece.of(value), piece)


def boxes_of(shape: tuple[int, ...], cuts: tuple[list[int], ...]) -> list[Box]:
    """The boxes between the cuts of each dimension."""
    found: list[Box] = [()]
    for size, at in zip(shape, cuts, strict=True):
        ends = [0, *at, size]
        found = [(*box, (a, b)) for box in found for a, b in pairwise(ends)]
    return found


def written(folder: Path, value: torch.Tensor, boxes: list[Box], name: str = "w") -> list[Path]:
    for rank, box in enumerate(boxes):
        write(file_of(folder, rank), {name: cut(value, box)})
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_any_part_of_any_cut_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.randn(7, 5, 3) * 9).to(dtype)
    # Empty pieces among them, and a cut that nobody reads by.
    boxes = boxes_of((7, 5, 3), ([2, 2, 6], [1], []))
    stored = Stored(written(tmp_path, value, boxes))
    assert stored.problems() == []
    assert stored.shapes == {"w": (7, 5, 3)}
    assert torch.equal(stored.read("w"), value)
    draw = random.Random(3)
    for _ in range(40):
        box = tuple(tuple(sorted(draw.sample(range(size + 1), 2))) for size in (7, 5, 3))
        assert torch.equal(stored.read("w", box), value[tuple(slice(a, b) for a, b in box)])


def test_numbers_alone_and_whole_files_are_read_too(tmp_path: Path) -> None:
    write(file_of(tmp_path, 0), {"step": cut(torch.tensor(3.0), ())})
    save_file({"whole": torch.arange(6).view(2, 3)}, tmp_path / "other.safetensors")
    stored = Stored(tmp_path.glob("*.safetensors"))
    assert stored.read("step") == 3
    assert torch.equal(stored.read("whole", ((1, 2), (0, 3))), torch.tensor([[3, 4, 5]]))
    assert stored.problems() == []


def test_what_is_missing_twice_or_of_another_shape_is_said(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    boxes = boxes_of((6, 4), ([2, 4], []))
    files = written(tmp_path, value, boxes)
    for lost in range(3):
        rest = Stored(file for number, file in enumerate(files) if number != lost)
        assert rest.problems() == ["w: 16 of 24 numbers"]
        with pytest.raises(RunError, match="16 of 24 numbers"):
            rest.read("w")
    assert torch.equal(Stored(files[:2]).read("w", ((1, 4), (0, 4))), value[1:4])
    write(file_of(tmp_path, 7), {"w": cut(value, ((3, 5), (1, 2)))})
    twice = Stored(tmp_path.glob("*.safetensors"))
    assert twice.problems() == ["w: ((2, 4), (0, 4)) of (6, 4) lies in several files"]
    whole = Stored(files)
    whole.check({"w": (6, 4)})
    for wanted, said in (
        ({"w": (6, 4), "v": (1,)}, "v: no file holds it"),
        ({}, "w: nobody has it"),
        ({"w": (8, 4)}, r"w: \(6, 4\), and not \(8, 4\)"),
    ):
        with pytest.raises(RunError, match=said):
            whole.check(wanted)
    with pytest.raises(RunError, match="a tensor is not in these files"):
        whole.read("x")


def test_files_of_different_tensors_do_not_mix(tmp_path: Path) -> None:
    for rank, rows in enumerate((6, 7)):
        write(file_of(tmp_path, rank), {"w": cut(torch.zeros(rows, 2), ((0, 3), (0, 2)))})
    with pytest.raises(RunError, match="pieces of different tensors called w"):
        Stored(tmp_path.glob("*.safetensors"))


def test_a_tensor_without_a_number_is_refused_and_an_empty_piece_left_out(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="without a single number"):
        write(file_of(tmp_path, 0), {"w": cut(torch.zeros(0, 4), whole_box((0, 4)))})
    write(file_of(tmp_path, 0), {"w": cut(torch.zeros(2, 4), ((2, 2), (0, 4)))})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError, match="w is no such piece"):
        write(file_of(tmp_path, 0), {"w": Lot(torch.zeros(3), Piece((4,), ((0, 2),)))})


def test_equal_pieces_give_equal_bytes_and_nothing_says_how_many_wrote(tmp_path: Path) -> None:
    held = {name: cut(torch.ones(4, 2), ((1, 3), (0, 2))) for name in ("b", "a", "c")}
    for rank, order in enumerate(("abc", "cba")):
        write(file_of(tmp_path, rank), {name: held[name] for name in order})
    one, other = (file_of(tmp_path, rank).read_bytes() for rank in (0, 1))
    assert one == other
    with safe_open(file_of(tmp_path, 0), "pt") as opened:
        told = json.loads(opened.metadata()[PLACES])
        assert opened.metadata().keys() == {PLACES}
    assert told["a"] == {"saved_offsets": [1, 0], "whole_shape": [4, 2]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_reads_the_folder(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    written(tmp_path, value, boxes_of((6, 4), ([2, 5], [3])))
    found = {"w": torch.zeros(6, 4)}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["w"], value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_torch_wrote_is_read(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save({"w": value}, storage_writer=writer, no_dist=True)
    assert torch.equal(Stored(tmp_path.glob("*.safetensors")).read("w"), value)
