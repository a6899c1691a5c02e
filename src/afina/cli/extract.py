"""`afina extract`: a LoRA made of the difference of two models."""

from __future__ import annotations

from typing import Annotated

import typer

from afina.cli.loading import Offline, Token
from afina.cli.output import note, progress, refuse_over_inputs, refuse_unwritable, write_json

EXAMPLES = (
    "afina extract runs/full-001 smollm2-135m -o adapters/full-r32 --rank 32",
    "afina extract models/tuned models/base -o adapters/tuned --energy 0.95 --rest refuse",
)


def command(
    tuned: Annotated[
        str, typer.Argument(metavar="TUNED", help="a run of full fine-tuning, or a model")
    ],
    base: Annotated[str, typer.Argument(metavar="BASE", help="the model it was trained from")],
    out: Annotated[str, typer.Option("-o", "--out", help="the folder to make")],
    rank: Annotated[int | None, typer.Option(help="of every place, at most")] = None,
    energy: Annotated[
        float | None, typer.Option(help="share of each difference's energy to keep, such as 0.95")
    ] = None,
    rest: Annotated[
        str, typer.Option(help="what changed beside the linears: save (whole), refuse or drop")
    ] = "save",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an adapter that was computed before")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", help="also the table as JSON; - is standard output")
    ] = None,
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
    from afina.adapters.computed import lines
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
    show = note if json_file == "-" else print
    show("\n".join([*lines(made), f"written and read back: {out}"]))
    if json_file is not None:
        write_json(json_file, made.record)
