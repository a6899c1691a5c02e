"""`afina check`: the pre-flight of a run. It takes the command line of `afina train`, and trains nothing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from afina.cli import train as train_verb
from afina.cli.processes import several
from afina.cli.starting import head_for, quantiser_of, scoring, sources_of, start_from
from afina.errors import AfinaError, ConfigError, TechniqueError
from afina.places import exists, local

EXAMPLES = (
    "afina check smollm2-135m calls.jsonl",
    "afina check smollm2-135m calls.jsonl --val held_out.jsonl --show 3",
    "afina check run.yaml --quick --strict",
    "afina check smollm2-135m calls.jsonl -o runs/calls-001 --rank 8 --json check.json",
)

Show = Annotated[
    int, typer.Option(metavar="N", min=0, help="show the first N rows, what trains in them marked")
]
Quick = Annotated[bool, typer.Option("--quick", help="leave out what runs the model")]
Strict = Annotated[bool, typer.Option("--strict", help="exit with 1 when there are warnings")]
Json = Annotated[
    str | None, typer.Option("--json", help="the findings, as JSON; - is the standard output")
]
Force = Annotated[bool, typer.Option("--force", help="replace this file")]


def command(
    *,
    show: Show = 0,
    quick: Quick = False,
    strict: Strict = False,
    json_file: Json = None,
    force: Force = False,
    **given: Any,
) -> None:
    """Look at all that would go wrong in a run, before it is made.

    Takes the command line of `afina train`; a run.yaml or a run's folder may stand in the place of MODEL. Exits with 0
    when nothing is wrong, 1 when there are warnings and --strict was said, 2 on errors.
    """
    from afina.cli.output import note, refuse_over_inputs, refuse_unwritable, write_json

    refuse_unwritable(json_file, force=force)
    resolved = _resolved(given)
    hub = {"token": given["token"], "offline": given["offline"] or None}
    several(given).refuse(resolved, hub, goes_on=given["resume"])
    settings = resolved.config
    read = (given[name] for name in ("model", "config", "init_from", "out"))
    refuse_over_inputs([json_file], (settings.model, settings.source, settings.val, *read))
    checked = _look(resolved, given, quick=quick)
    _print(checked, show, alone=json_file == "-")
    if json_file is not None:
        write_json(json_file, checked.document())
    status = checked.exit_code(strict=strict)
    if status:
        note("not in order" if status == 2 else "there are warnings (--strict)")
        raise typer.Exit(status)


def _merged() -> inspect.Signature:
    """The options of `train` and one's own; typer reads them here."""
    of_train = inspect.signature(train_verb.command, eval_str=True).parameters.values()
    own = inspect.signature(command, eval_str=True).parameters.values()
    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in of_train]
    return inspect.Signature(
        [*keywords, *(one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD)]
    )


command.__signature__ = _merged()  # type: ignore[attr-defined]


def _resolved(given: Mapping[str, Any]) -> Any:
    """The run's configuration, as `train` would have it; MODEL may be a run.yaml or a run."""
    train_verb.refuse_contradictions(given)
    config: Path | None = given["config"]
    flags = train_verb.flags_of(given)
    if given["print_config"]:
        raise ConfigError("check prints no configuration", cure="afina train … --print-config does")
    goes_on = given["resume"] or given["resume_from"] is not None
    if goes_on and given["out"] is not None:
        config = config or given["out"] / "config.yaml"
    file = _as_config(given["model"])
    if file is not None:
        if config is not None:
            raise ConfigError(
                "the configuration is given twice",
                got=f"{file} and {config}",
                cure="leave one of them out",
            )
        config, flags["model"] = file, None
    return train_verb.resolve(config, flags, given["sets"] or [])


def _as_config(name: str | None) -> Path | None:
    """The file that a name in the place of MODEL means, if it is a configuration or a run's folder."""
    if name is None:
        return None
    path = local(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    return path / "config.yaml" if exists(path / "config.yaml") else None


def _look(resolved: Any, given: Mapping[str, Any], *, quick: bool) -> Any:
    """Loads and applies, and looks; what fails is a finding, and the rest is looked at all the same."""
    from afina.cli.output import note
    from afina.models.hub import load
    from afina.models.precision import choose
    from afina.reports.check import Case
    from afina.reports.outline import outline
    from afina.train.options import RunOptions

    settings = resolved.config
    options = RunOptions(
        data_settings=settings.data,
        config=resolved,
        resume=given["resume"],
        resume_from=given["resume_from"],
        overwrite=given["overwrite"],
    )
    case = Case(None, None, None, settings.train, options, given["out"], quick, disposable=True)
    case.reads = sources_of(settings, given["config"], given["init_from"])
    # An adapter to start from needs the weights that it was trained on.
    whole = partial(load, quantize=quantiser_of(settings))
    ways = [outline] if quick and given["init_from"] is None else [whole, outline]
    try:
        note(f"{settings.model}: {choose(settings.train.device, settings.train.dtype)}")
    except AfinaError as error:  # a device that is not there
        case.failed["model"] = error
        ways = []
    for way in ways:
        try:
            case.model, case.tokenizer = way(
                settings.model,
                dtype=settings.train.dtype,
                device=settings.train.device,
                revision=settings.revision,
                token=given["token"],
                offline=given["offline"] or None,
                **head_for(settings),
            )
            break
        except AfinaError as error:  # without weights the outline will do, for what needs no more
            of_model = not isinstance(error, TechniqueError)
            case.failed.setdefault("model" if of_model else "technique", error)
    case.options = replace(options, **scoring(settings, case.tokenizer))
    if case.model is not None and "technique" not in case.failed:
        try:
            case.edit = _applied(case.model, case.tokenizer, resolved, given)
        except AfinaError as error:
            case.failed["technique"] = error
    return case.look(settings.source, settings.val)


def _applied(model: Any, tokenizer: Any, resolved: Any, given: Mapping[str, Any]) -> Any:
    """The edit of the run: fresh, or as an adapter has it."""
    from afina.table import apply

    source, partial = given["init_from"], given["allow_partial"]
    if source is not None:
        return start_from(model, resolved, source, allow_partial=partial)[0]
    settings = resolved.config
    return apply(
        model,
        settings.techniques,
        seed=settings.train.seed,
        undoable=False,
        tokenizer=tokenizer,
    )


COLOURS = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "skipped": "dim",
}


def _print(checked: Any, show: int, *, alone: bool) -> None:
    """The report, and some rows, for people: beside the results where JSON is alone on the standard output."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=alone, soft_wrap=True, highlight=False)
    for status, line in checked.lines():
        console.print(Text.assemble((f"{status:<8} ", COLOURS.get(status, "")), line))
    console.print(checked.summary())
    if show and not checked.rows:
        console.print("there are no rows to show")
    elif show:
        from afina.reports.show import legend, shown

        console.print(legend(colour=console.is_terminal))
        for row in checked.rows[:show]:
            console.print(shown(row, checked.tokenizer, colour=console.is_terminal))
