"""`afina combine`: adapters of one base added, subtracted and mixed into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from afina.cli.computing import Energy, Json, Out, Overwrite, tell
from afina.cli.loading import Offline, Token
from afina.cli.output import refuse_over_inputs, refuse_unwritable
from afina.cli.several import weighted
from afina.errors import ConfigError

EXAMPLES = (
    "afina combine runs/calls:0.7 runs/chat:0.3 -o adapters/both",
    "afina combine runs/calls runs/rude:-1 -o adapters/polite",
    "afina combine runs/a:0.5 runs/b:0.5 -o adapters/ab --method svd --rank 16",
    "afina combine runs/a runs/b -o adapters/ab --method ties --density 0.2 --rank 32",
)


def command(
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER[:WEIGHT]…",
            help="runs, checkpoints or adapters, each with its weight in the sum (1 if none is given)",
        ),
    ],
    out: Out,
    method: Annotated[
        str,
        typer.Option(help="cat, svd, linear, ties, dare_linear, dare_ties or magnitude_prune"),
    ] = "cat",
    rank: Annotated[int | None, typer.Option(help="of the result, at most, if it is cut")] = None,
    energy: Energy = None,
    density: Annotated[
        float | None, typer.Option(help="share of the values that ties, dare and pruning keep")
    ] = None,
    seed: Annotated[int, typer.Option(help="of what dare drops")] = 0,
    base: Annotated[
        str | None, typer.Option(help="their base model, if it lies elsewhere now")
    ] = None,
    overwrite: Overwrite = False,
    json_file: Json = None,
    token: Token = None,
    offline: Offline = False,
) -> None:
    """Make one adapter of several of one base: their weighted sum, or another mix.

    The default, cat, is exact: the result changes each weight by the sum of what the adapters change, each times its
    weight, whatever their ranks, targets and scales. svd is the best approximation of a rank. ties, dare_linear,
    dare_ties and magnitude_prune mix the changes themselves and cut them to a rank. linear adds the factors, which is
    the sum only where one side is shared. What is lost is printed, for each module and for the whole.
    """
    named = [weighted(one) for one in adapters]
    _refuse_files(json_file, out, [*(name for name, _ in named), base], overwrite=overwrite)
    from afina.adapters.combine import CombineSettings, combine
    from afina.problems import build

    settings = build(
        CombineSettings,
        {
            "method": method,
            "rank": rank,
            "energy": energy,
            "density": density,
            "seed": seed,
            "overwrite": overwrite,
        },
    )
    made = combine(named, out, base=base, settings=settings, token=token, offline=offline or None)
    tell(made, out, json_file, tuple(f"{weight:+g} x {name}" for name, weight in named))


def _refuse_files(
    json_file: str | None, out: str, read: Sequence[str | None], *, overwrite: bool
) -> None:
    refuse_unwritable(json_file, force=overwrite, flag="--overwrite")
    refuse_over_inputs([json_file], read)
    if json_file is not None and json_file == out:
        raise ConfigError("--json names the output", got=json_file, cure="name another file")
