"""What was made of adapters or models, as values, and in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afina.adapters.arithmetic import Place, error_of, kept_of
from afina.errors import counted

SHOWN = 5
"""Places that a report lists; the record has all."""


@dataclass(frozen=True)
class Computed:
    """An adapter that was computed.

    Attributes:
        out: its folder.
        places: what became of each change.
        whole: base tensors that it brings whole.
        notes: how adapters and base met.
        told: what it was made of, and how.
    """

    out: Path
    places: tuple[Place, ...]
    whole: tuple[str, ...]
    notes: tuple[str, ...]
    told: Mapping[str, Any]

    @property
    def kept(self) -> float:
        """The share of the energy of all changes that the result has."""
        return kept_of(self.places)

    @property
    def error(self) -> float:
        """‖result - wanted‖ / ‖wanted‖, over all changes."""
        return error_of(self.places)

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        places = [
            {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
            for row in map(asdict, self.places)
        ]
        return {
            **self.told,
            "out": str(self.out),
            "places": places,
            "whole": list(self.whole),
            "notes": list(self.notes),
        }


def lines(computed: Computed) -> list[str]:
    """What was made, for people: a line each."""
    said = list(computed.notes)
    ranks = Counter(place.rank for place in computed.places)
    counts = ", ".join(f"{number} of rank {rank}" for rank, number in sorted(ranks.items()))
    said.append(f"{counted(len(computed.places), 'place')}: {counts}")
    if computed.whole:
        names = ", ".join(computed.whole[:SHOWN])
        more = f", and {len(computed.whole) - SHOWN} more" if len(computed.whole) > SHOWN else ""
        said.append(f"{counted(len(computed.whole), 'tensor')} whole: {names}{more}")
    if computed.error < EXACT:
        return [*said, "exact: nothing of the changes was cut"]
    # What cross terms add is energy too, and no share of what was wanted.
    shares = all(place.kept <= 1 for place in computed.places)
    whole = f"kept {computed.kept:.3%} of the energy, " if shares else ""
    said.append(f"{whole}off by {computed.error:.3%}; most:")
    worst = sorted(computed.places, key=lambda place: -place.error)
    return said + [
        f"  off {place.error:8.3%}  "
        + (f"kept {place.kept:8.3%}  " if shares else "")
        + f"rank {place.rank}  {place.name}"
        for place in worst[:SHOWN]
    ]


EXACT = 1e-6
"""Relative errors below are the rounding of the file's fp32."""
