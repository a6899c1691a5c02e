"""`afina merge`: an adapter and its base made one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from afina.adapters.target import resolve_run
from afina.cli.loading import Offline, Token, run_settings
from afina.cli.output import note, refuse_over_inputs, refuse_unwritable, write_json
from afina.errors import ConfigError
from afina.places import local

EXAMPLES = (
    "afina merge runs/calls-001 -o models/calls",
    "afina merge runs/calls-001 -o models/calls --dtype bf16 --prompts test.jsonl",
    "afina merge runs/calls-001/checkpoints/step-000200 -o models/calls-200",
    "afina merge runs/calls-001 -o calls.gguf --dtype q8_0",
)

Name = Annotated[str, typer.Argument(metavar="RUN|ADAPTER", help="a run, a checkpoint, an adapter")]


def command(
    name: Name,
    out: Annotated[str, typer.Option("-o", "--out", help="a folder, or a file NAME.gguf")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, for GGUF q8_0; default: the base's")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="the base model, if it lies elsewhere now")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="texts to compare on; default: validation rows of the run, else training rows"
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an earlier merge")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="run both and compare; else say UNVERIFIED")
    ] = True,
    tolerance: Annotated[
        float | None, typer.Option(help="largest relative difference; default: by dtype")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="length of the answers compared")] = 32,
    compute_dtype: Annotated[
        str | None, typer.Option(help="in which both are run; default: fp32")
    ] = None,
    device: Annotated[str | None, typer.Option(help="on which; default: the best there is")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="also merge.json's contents; - is standard output")
    ] = None,
    token: Token = None,
    offline: Offline = False,
) -> None:
    """Make one model of an adapter and its base, and check that it says what the two say.

    The change is added in fp32 and rounded once, tensor by tensor, so memory holds about one of them. Then base, base
    + adapter and the merged model are run in turn on the same texts: validation rows of the run, where it has none its
    training rows, and without a run a few general texts. What is printed is also in merge.json. When the merged model
    differs by more than rounding explains, or is the base again, the exit status is 6, and the output is marked
    UNVERIFIED.
    """
    refuse_unwritable(json_file, force=overwrite, flag="--overwrite")
    _refuse_over(json_file, out, name, (prompts, base))
    from afina.adapters.merge import MergeSettings, merge_unchecked, refuse_failed
    from afina.adapters.merge_record import lines
    from afina.problems import build

    settings = build(
        MergeSettings,
        {
            "dtype": dtype,
            "verify": verify,
            "tolerance": tolerance,
            "max_new_tokens": max_new_tokens,
            "compute_dtype": compute_dtype,
            "device": device,
            "overwrite": overwrite,
        },
    )
    merged = merge_unchecked(
        name,
        out,
        base=base,
        prompts=None if prompts is None else _prompts(name, prompts),
        settings=settings,
        token=token,
        offline=offline or None,
    )
    show = note if json_file == "-" else print
    show("\n".join([*lines(merged.record), _outcome(merged.verified, verify, out)]))
    if json_file is not None:
        write_json(json_file, merged.record)
    refuse_failed(merged)


def _refuse_over(json_file: str | None, out: str, name: str, read: Sequence[str | None]) -> None:
    """Raises for a record that would be written over the merged model, or over what is merged."""
    if json_file is None or json_file == "-":
        return
    target = resolve_run(name)
    refuse_over_inputs([json_file], (*read, target.base, target.adapter, target.run))
    place = local(out).resolve()
    if Path(json_file).resolve().is_relative_to(place):
        raise ConfigError(
            "--json names a place in the output",
            got=json_file,
            wanted="a file elsewhere",
            cure="leave --json out: merge.json holds the same",
        )


def _outcome(verified: bool, wanted: bool, out: str) -> str:
    if verified:
        return f"verified: {out}"
    return f"NOT VERIFIED: {out}" if wanted else f"written, and not verified, as asked: {out}"


def _prompts(name: str, prompts: str) -> list[list[dict[str, str]]]:
    """The prompts of a file, read as the run's data was."""
    from afina.cli.prompts import columns_of, read_prompts

    return [
        one.messages for one in read_prompts(prompts, columns_of(run_settings(resolve_run(name))))
    ]
