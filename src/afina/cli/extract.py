"""`afina extract`: a LoRA made of the difference of two models."""

from __future__ import annotations

from typing import Annotated

import typer

from afina.cli.computing import Energy, Json, Out, Overwrite, Rank, tell
from afina.cli.loading import Offline, Token
from afina.cli.output import progress, refuse_over_inputs, refuse_unwritable

EXAMPLES = (
    "afina extract runs/full-001 smollm2-135m -o adapters/full-r32 --rank 32",
    "afina extract models/tuned models/base -o adapters/tuned --energy 0.95 --rest refuse",
)


def command(
    tuned: Annotated[
        str, typer.Argument(metavar="TUNED", help="a run of full fine-tuning, or a model")
    ],
    base: Annotated[str, typer.Argument(metavar="BASE", help="the model it was trained from")],
    out: Out,
    rank: Rank = None,
    energy: Energy = None,
    rest: Annotated[
        str, typer.Option(help="what changed beside the linears: save (whole), refuse or drop")
    ] = "save",
    overwrite: Overwrite = False,
    json_file: Json = None,
    token: Token = None,
    offline: Offline = False,
) -> None:
    """Make a LoRA of the difference between a tuned model and its base.

    Both are read tensor by tensor. Of every linear the difference becomes the best factors of a rank, or the smallest
    that keep enough; what is kept is measured and printed. What changed and is no linear's weight (norms, embeddings,
    biases) is saved whole beside them, or refused, or left out and counted.
    """
    refuse_unwritable(json_file, force=overwrite, flag="--overwrite")
    refuse_over_inputs([json_file], [tuned, base])
    from afina.adapters.extract import ExtractSettings, extract
    from afina.problems import build

    settings = build(
        ExtractSettings, {"rank": rank, "energy": energy, "rest": rest, "overwrite": overwrite}
    )
    made = extract(
        tuned,
        base,
        out,
        settings=settings,
        token=token,
        offline=offline or None,
        progress=progress(),
    )
    tell(made, out, json_file)
