"""`afina train`: adapt a model to data, into a run folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from afina.cli import compiled
from afina.cli.processes import Several, several
from afina.cli.starting import (
    head_for,
    in_parts,
    is_finished,
    quantiser_of,
    scoring,
    sources_of,
    start_from,
)

EXAMPLES = (
    "afina train smollm2-135m calls.jsonl -o runs/calls-001",
    "afina train smollm2-135m calls.jsonl -o runs/calls-002 --val held_out.jsonl --steps 200 --rank 8",
    "afina train smollm2-135m calls.jsonl -o runs/calls-003 --set train.lr=1e-3 --set data.over_long=truncate",
    "afina train -c run.yaml -o runs/calls-004",
    "afina train smollm2-135m calls.jsonl -o runs/full-001 --technique full --lr 5e-5",
    "afina train smollm2-135m calls.jsonl -o runs/calls-005 --nproc 2",
    "afina train --resume -o runs/calls-001",
    "afina train --resume --allow-changes --steps 400 -o runs/calls-001",
)

Flag = typer.Option

FLAGS = {
    "model": "model",
    "revision": "revision",
    "data": "data.source",
    "val": "val",
    "on_bad_row": "data.on_bad_row",
    "technique": "techniques",
    "rank": "techniques.lora.rank",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "lr": "train.lr",
    "rows_per_step": "train.rows_per_step",
    "seed": "train.seed",
    "on_nan": "train.on_nan",
}
"""Option -> the setting that it gives, for this verb and for `check`, which takes the same command line."""


def command(
    model: Annotated[
        str | None, typer.Argument(help="folder, hub id, GGUF file or demo name")
    ] = None,
    data: Annotated[
        str | None, typer.Argument(help="jsonl, json, csv, parquet, txt, a folder, or a hub id")
    ] = None,
    out: Annotated[Path | None, Flag("-o", "--out", help="the run's folder")] = None,
    config: Annotated[Path | None, Flag("-c", "--config", help="a run.yaml")] = None,
    val: Annotated[str | None, Flag(help="validation data")] = None,
    technique: Annotated[
        list[str] | None, Flag(help="lora (default), or another, or several: see afina techniques")
    ] = None,
    rank: Annotated[int | None, Flag(help="of LoRA")] = None,
    steps: Annotated[int | None, Flag(help="optimiser steps")] = None,
    epochs: Annotated[float | None, Flag(help="passes over the data (default 1)")] = None,
    lr: Annotated[float | None, Flag(help="peak learning rate")] = None,
    rows_per_step: Annotated[int | None, Flag(help="rows of one optimiser step")] = None,
    seed: Annotated[int | None, Flag(help="of order, starting values and dropout")] = None,
    on_bad_row: Annotated[
        str | None, Flag(help="error (default), or skip: drop and list such rows")
    ] = None,
    sets: Annotated[
        list[str] | None, Flag("--set", help="any setting, as train.warmup_steps=10")
    ] = None,
    init_from: Annotated[
        Path | None, Flag(help="start from this adapter's weights (a folder, or a run)")
    ] = None,
    allow_partial: Annotated[
        bool, Flag("--allow-partial", help="start from what fits of that adapter")
    ] = False,
    revision: Annotated[str | None, Flag(help="branch, tag or commit of a hub id")] = None,
    token: Annotated[str | None, Flag(envvar="HF_TOKEN", help="token of the Hub")] = None,
    offline: Annotated[bool, Flag("--offline", help="download nothing")] = False,
    on_nan: Annotated[
        str | None, Flag(help="stop or skip, at a loss or gradient that is not finite")
    ] = None,
    resume: Annotated[bool, Flag("--resume", help="go on from the last checkpoint")] = False,
    resume_from: Annotated[
        str | None, Flag(help="go on from an earlier checkpoint, as step-000100")
    ] = None,
    allow_changes: Annotated[
        bool, Flag("--allow-changes", help="resume with other data or settings too")
    ] = False,
    overwrite: Annotated[bool, Flag("--overwrite", help="replace the run in the folder")] = False,
    nproc: Annotated[
        int | None, Flag("--nproc", min=1, help="processes on this machine that share the run")
    ] = None,
    hosts: Annotated[int, Flag("--hosts", min=1, help="machines that share the run")] = 1,
    host_rank: Annotated[int, Flag("--host-rank", help="of this machine, from 0")] = 0,
    master: Annotated[
        str | None, Flag("--master", help="the first machine, as 10.0.0.1:29500")
    ] = None,
    print_config: Annotated[
        bool, Flag("--print-config", help="show the resolved settings and stop")
    ] = False,
) -> None:
    """Adapt a model to data.

    The folder that it leaves is all that chat, eval and generate need.
    """
    given = locals()
    from afina.config import dump
    from afina.errors import ConfigError

    if out is None and not print_config:
        raise ConfigError("there is no folder for the run", cure="name one: -o runs/my-run")
    refuse_contradictions(given)
    flags = flags_of(given)
    resume = resume or resume_from is not None
    if resume and out is not None:
        from afina.train.folder import refuse_no_run

        refuse_no_run(out)
        asked = (config, resume_from, sets, allow_changes, print_config, *flags.values())
        if not any(asked) and is_finished(out):
            return
        config = config or out / "config.yaml"
    resolved = resolve(config, flags, sets or [])
    if print_config or out is None:
        sys.stdout.write(dump(resolved))
        return
    hub = {"token": token, "offline": offline or None}
    way = {"resume": resume, "overwrite": overwrite}
    changing = {"resume_from": resume_from, "allow_changes": allow_changes}
    start = {"source": init_from, "allow_partial": allow_partial}
    reads = {} if resume else sources_of(resolved.config, config, init_from)
    processes = several(given)
    with compiled.kept(), processes.reported():
        resolved = _with_absolute_paths(resolved)
        _refuse_early(resolved, out, hub, processes, way=way, reads=reads)
        if processes.starts:
            processes.launch(out, resolved.config.parallel.timeout_s)
            return
        _run(
            resolved,
            out,
            hub,
            processes.mesh(resolved.config),
            start=start,
            way=way,
            changing=changing,
        )


def refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Raises for options that make no sense together.

    Raises:
        ConfigError: naming what to add or to leave out.
    """
    from afina.errors import ConfigError

    resume = given["resume"] or given["resume_from"] is not None
    if given["allow_changes"] and not resume:
        raise ConfigError("--allow-changes is of a run that goes on", cure="add --resume")
    if resume and (given["overwrite"] or given["init_from"] is not None):
        raise ConfigError(
            "--resume goes on with a run as it is",
            cure="leave out --overwrite and --init-from",
        )
    if given["allow_partial"] and given["init_from"] is None:
        raise ConfigError(
            "--allow-partial is about an adapter to start from", cure="add --init-from FOLDER"
        )


def flags_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted path, as options give them; None for an option that was not used."""
    # A list option that was not used is empty, which must not take the place of a list in the file.
    return {
        path: None if given.get(name) == [] else given.get(name) for name, path in FLAGS.items()
    }


def resolve(config: Path | None, flags: dict[str, Any], sets: list[str]) -> Any:
    """The configuration that a file, options and --set make together.

    Raises:
        ConfigError: it cannot be, has no technique, or an option is of a technique that it has not.
    """
    from afina.config import load_config
    from afina.data.settings import DataSettings
    from afina.table import TECHNIQUES

    resolved = load_config(
        techniques=TECHNIQUES,
        data_settings=DataSettings,
        yaml_path=config,
        flags=flags,
        sets=sets,
        default_techniques=("lora",),
    )
    _refuse_techniques(resolved)
    return resolved


def _refuse_techniques(resolved: Any) -> None:
    from afina.errors import ConfigError

    if not resolved.keys:
        raise ConfigError(
            "there is no technique: nothing would train",
            got="techniques: []",
            cure="leave `techniques` out (then it is lora), or name one: --technique lora",
        )
    for option, path in FLAGS.items():
        group, _, key = path.rpartition(".")[0].rpartition(".")
        # An option lists its technique where nothing else did; beside others that were listed, that is a slip.
        if group == "techniques" and resolved.origins.get(f"{group}.{key}") == f"--{option}":
            others = [other for other in resolved.keys if other != key]
            if others:
                raise ConfigError(
                    f"--{option} is a setting of {key}, which is not among the techniques",
                    got=", ".join(others),
                    cure=f"leave --{option} out, or take {key}: --technique {key}",
                )


def _refuse_early(
    resolved: Any,
    out: Path,
    hub: dict[str, Any],
    processes: Several,
    *,
    way: dict[str, bool],
    reads: Mapping[str, Any],
) -> None:
    """Raises for what can be known before a model is read: said once, however many processes there will be."""
    from afina.table import check
    from afina.train import folder

    settings = resolved.config
    check(settings.techniques)
    if processes.first:
        folder.refuse_used(out, **way)
        folder.refuse_inside(out, reads)
        folder.refuse_busy(out)
    processes.refuse(resolved, hub, goes_on=way["resume"])


def _run(
    resolved: Any,
    out: Path,
    hub: dict[str, Any],
    mesh: Any,
    *,
    start: dict[str, Any],
    way: dict[str, bool],
    changing: dict[str, Any],
) -> None:
    """Loads, applies, trains, and says what to do next; of several processes the first says it."""
    from afina import seams
    from afina.models.precision import choose
    from afina.train import result
    from afina.train.options import RunOptions
    from afina.train.report import Silent, reporter
    from afina.train.run import train

    settings = resolved.config
    several = mesh.plan.processes > 1
    say = reporter() if mesh.writes else Silent()
    device = str(mesh.device) if several else settings.train.device
    say.say(f"{settings.model}: {choose(device, settings.train.dtype)}")
    if several:
        say.say(f"{mesh.plan.processes} processes: {mesh.plan}")
    read: dict[str, Any] = {}
    if mesh.plan.shares_weights:
        found = in_parts(settings, hub, device, init_from=start["source"])
        if isinstance(found, str):
            say.say(f"each process reads the model whole: {found}")
        else:
            model, tokenizer, edit, read["unread"] = found
    if not read:
        model, tokenizer, edit, resolved = _started(resolved, hub, start, device)
    options = RunOptions(
        base=settings.model,
        data_settings=settings.data,
        reporter=say,
        config=resolved,
        mesh=mesh,
        **read,
        **scoring(settings, tokenizer),
        **way,
        **changing,
    )
    before = result.read(out) if way["resume"] else None
    run = train(
        model,
        tokenizer,
        settings.source,
        edit,
        out,
        val=settings.val,
        settings=settings.train,
        options=options,
    )
    if run != before:  # of a run that was finished before, all is said
        for line in _told(run, classifies=seams.classifies(model) is not None):
            say.say(line)
    mesh.end()


def _started(
    resolved: Any, hub: dict[str, Any], start: dict[str, Any], device: str | None
) -> tuple[Any, Any, Any, Any]:
    """The model, its tokenizer, what was changed in it, and the configuration that says so."""
    from afina.models.hub import load
    from afina.table import apply

    settings = resolved.config
    model, tokenizer = load(
        settings.model,
        dtype=settings.train.dtype,
        device=device,
        quantize=quantiser_of(settings),
        revision=settings.revision,
        **head_for(settings),
        **hub,
    )
    if start["source"] is None:
        # Only `edit.undo()` needs the originals of what is changed in place, and nobody calls it.
        edit = apply(
            model,
            settings.techniques,
            seed=settings.train.seed,
            undoable=False,
            tokenizer=tokenizer,
        )
        return model, tokenizer, edit, resolved
    return model, tokenizer, *start_from(model, resolved, **start)


def _told(run: Any, *, classifies: bool) -> list[str]:
    """What a run came to, and what to do next."""
    from afina.errors import counted

    scores = "".join(f", validation {name} {value:.4f}" for name, value in run.scores.items())
    skipped = f" ({run.skipped} of {run.steps} skipped)" if run.skipped else ""
    return [
        f"done: {counted(run.steps, 'step')}{skipped}, loss {run.loss:.4f} over the last tenth{scores}",
        f"  {run.weights}   the trained weights",
        f"  {run.folder / 'loss.png'}   the loss",
        f"next: afina {'eval' if classifies else 'chat'} {run.folder}{' test.jsonl' if classifies else ''}",
    ]


def _with_absolute_paths(resolved: Any) -> Any:
    """The same, with files and folders named so that they are found from any working directory."""
    from dataclasses import replace

    from afina.train.record import absolute

    config = resolved.config
    named = {"model": config.model, "source": config.source, "val": config.val}
    changed = {field: absolute(name) for field, name in named.items()}
    return replace(resolved, config=replace(config, **changed))
