"""`afina resize`: an adapter made smaller, and what that costs."""

from __future__ import annotations

from typing import Annotated

import typer

from afina.cli.loading import Offline, Token
from afina.cli.output import note, refuse_over_inputs, refuse_unwritable, write_json

EXAMPLES = (
    "afina resize runs/calls-001 -o adapters/calls-r8 --rank 8",
    "afina resize runs/calls-001 -o adapters/calls-small --energy 0.95 --json table.json",
)


def command(
    adapter: Annotated[
        str, typer.Argument(metavar="RUN|ADAPTER", help="a run, a checkpoint, an adapter")
    ],
    out: Annotated[str, typer.Option("-o", "--out", help="the folder to make")],
    rank: Annotated[int | None, typer.Option(help="of every place, at most")] = None,
    energy: Annotated[
        float | None, typer.Option(help="share of each change's energy to keep, such as 0.95")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="the base model, if it lies elsewhere now")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an adapter that was computed before")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", help="also the table as JSON; - is standard output")
    ] = None,
    token: Token = None,
    offline: Offline = False,
) -> None:
    """Make a smaller adapter: of every place the best of a rank, or the smallest that keeps enough.

    The energy of a change is the sum of its squared singular values. What is kept is exact, and printed for the whole
    and for the modules that lose most.
    """
    refuse_unwritable(json_file, force=overwrite, flag="--overwrite")
    refuse_over_inputs([json_file], [adapter, base])
    from afina.adapters.computed import lines
    from afina.adapters.resize import ResizeSettings, resize
    from afina.problems import build

    settings = build(ResizeSettings, {"rank": rank, "energy": energy, "overwrite": overwrite})
    made = resize(adapter, out, settings=settings, base=base, token=token, offline=offline or None)
    show = note if json_file == "-" else print
    show("\n".join([*lines(made), f"written and read back: {out}"]))
    if json_file is not None:
        write_json(json_file, made.record)
