"""`afina inspect`: what is in an adapter, and what is strange about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afina.cli.output import note, refuse_over_inputs, refuse_unwritable, write_json
from afina.errors import AdapterError, counted

EXAMPLES = (
    "afina inspect runs/calls-001",
    "afina inspect adapters/both --plot both.png --json both.json",
    "afina inspect runs/calls-001 --strict --most 0",
)


def command(
    adapter: Annotated[
        str, typer.Argument(metavar="RUN|ADAPTER", help="a run, a checkpoint, an adapter")
    ],
    plot: Annotated[
        str | None,
        typer.Option(
            help="a picture: norms and effective ranks over the blocks (NAME.png, .svg, .pdf)"
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="also all of it as JSON; - is standard output")
    ] = None,
    most: Annotated[
        int | None, typer.Option(min=0, help="places that are listed; default: all")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit status 6 where anything is strange")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace picture and JSON")
    ] = False,
) -> None:
    """Show an adapter: method, base, ranks, targets, sizes, and the spectrum of every change.

    The base is not needed. The norm of a change is that of its matrix; the largest of its singular values stands
    beside it, and the effective rank: r for r equal ones. Strange are NaN, changes that are nothing, tensors without
    their partner, and all for which afina would not load it.
    """
    refuse_unwritable(plot, json_file, force=overwrite, flag="--overwrite")
    refuse_over_inputs([plot, json_file], [adapter])
    from afina.adapters.inspection import inspect
    from afina.adapters.inspection_words import lines

    found = inspect(adapter)
    show = note if json_file == "-" else print
    show("\n".join(lines(found, most)))
    if plot is not None:
        from afina.adapters.inspection_plot import plot as draw

        draw(found, Path(plot))
    if json_file is not None:
        write_json(json_file, found.record)
    if strict and found.every_strange:
        raise AdapterError(
            f"the adapter is strange in {counted(len(found.every_strange), 'way')}",
            got="; ".join(found.every_strange[:4]),
        )
