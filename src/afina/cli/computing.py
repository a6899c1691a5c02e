"""What the verbs that compute an adapter share: their options, and what they say at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from afina.cli.output import note, write_json

if TYPE_CHECKING:
    from afina.adapters.computed import Computed

Out = Annotated[str, typer.Option("-o", "--out", help="the folder to make")]
Rank = Annotated[int | None, typer.Option(help="of every place, at most")]
Energy = Annotated[
    float | None, typer.Option(help="share of each change's energy to keep, such as 0.95")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="replace an adapter that was computed before")
]
Json = Annotated[
    str | None, typer.Option("--json", help="also the table as JSON; - is standard output")
]


def tell(made: Computed, out: str, json_file: str | None, before: tuple[str, ...] = ()) -> None:
    """Prints what became of an adapter, and writes it as JSON where that is wanted.

    Args:
        made: the adapter.
        out: its folder, as the user named it.
        json_file: a file; "-" is the standard output, and what is for people goes to the other one.
        before: lines that come first.
    """
    from afina.adapters.computed import lines

    show = note if json_file == "-" else print
    show("\n".join([*before, *lines(made), f"written and read back: {out}"]))
    if json_file is not None:
        write_json(json_file, made.record)
