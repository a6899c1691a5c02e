"""`afina resize`: an adapter made smaller, and what that costs."""

from __future__ import annotations

from typing import Annotated

import typer

from afina.cli.computing import Energy, Json, Out, Overwrite, Rank, tell
from afina.cli.loading import Offline, Token
from afina.cli.output import refuse_over_inputs, refuse_unwritable

EXAMPLES = (
    "afina resize runs/calls-001 -o adapters/calls-r8 --rank 8",
    "afina resize runs/calls-001 -o adapters/calls-small --energy 0.95 --json table.json",
)


def command(
    adapter: Annotated[
        str, typer.Argument(metavar="RUN|ADAPTER", help="a run, a checkpoint, an adapter")
    ],
    out: Out,
    rank: Rank = None,
    energy: Energy = None,
    base: Annotated[
        str | None, typer.Option(help="the base model, if it lies elsewhere now")
    ] = None,
    overwrite: Overwrite = False,
    json_file: Json = None,
    token: Token = None,
    offline: Offline = False,
) -> None:
    """Make a smaller adapter: of every place the best of a rank, or the smallest that keeps enough.

    The energy of a change is the sum of its squared singular values. What is kept is exact, and printed for the whole
    and for the modules that lose most.
    """
    refuse_unwritable(json_file, force=overwrite, flag="--overwrite")
    refuse_over_inputs([json_file], [adapter, base])
    from afina.adapters.resize import ResizeSettings, resize
    from afina.problems import build

    settings = build(ResizeSettings, {"rank": rank, "energy": energy, "overwrite": overwrite})
    made = resize(adapter, out, settings=settings, base=base, token=token, offline=offline or None)
    tell(made, out, json_file)
