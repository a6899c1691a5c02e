"""Who writes what several processes have, and who has what."""

from __future__ import annotations

import torch

from afina.parallel.parts import first_of, places_of, shapes_of
from afina.parallel.store import Lot
from afina.tree.pieces import Piece


def test_the_first_that_has_a_piece_writes_it() -> None:
    def lot(box: tuple[tuple[int, int], ...]) -> Lot:
        sizes = [end - begin for begin, end in box]
        return Lot(torch.zeros(sizes), Piece((4, 2), box))

    upper, lower, none = ((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 4), (0, 2))
    told = [
        places_of({"a": lot(upper), "b": lot(upper)}),
        places_of({"a": lot(lower), "b": lot(upper), "c": lot(lower)}),
        places_of({"a": lot(upper), "c": lot(lower), "d": lot(none)}),
    ]
    assert [first_of(rank, told) for rank in range(3)] == [{"a", "b"}, {"a", "c"}, {"d"}]
    assert shapes_of(told) == dict.fromkeys("abcd", (4, 2))
