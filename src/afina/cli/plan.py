"""`afina plan --parallel`: what each of several processes would hold and send; this machine need not run them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLES = (
    "afina plan smollm2-135m --parallel --nproc 4",
    "afina plan models/llama-8b --parallel --nproc 8 --rank 16",
    "afina plan models/llama-8b --parallel --nproc 16 --technique full --json plan.json",
    "afina plan models/llama-8b --parallel --nproc 8 --set parallel.tensor=4 --set parallel.zero=1",
)

Flag = typer.Option


def command(
    model: Annotated[
        str | None, typer.Argument(help="folder, hub id, GGUF file or demo name")
    ] = None,
    data: Annotated[
        str | None, typer.Argument(help="training data, for a classifier's head")
    ] = None,
    parallel: Annotated[
        bool, Flag("--parallel", help="of several processes: bytes, messages, waiting")
    ] = False,
    nproc: Annotated[int, Flag("--nproc", min=1, help="processes, all machines together")] = 2,
    micro_batches: Annotated[
        int, Flag("--micro-batches", min=1, help="passes of each process in a step")
    ] = 8,
    tokens: Annotated[int, Flag("--tokens", min=1, help="tokens of one pass")] = 2048,
    config: Annotated[Path | None, Flag("-c", "--config", help="a run.yaml")] = None,
    technique: Annotated[list[str] | None, Flag(help="lora (default), or another")] = None,
    rank: Annotated[int | None, Flag(help="of LoRA")] = None,
    sets: Annotated[
        list[str] | None,
        Flag("--set", help="any setting, as parallel.zero=3: then only that layout"),
    ] = None,
    revision: Annotated[str | None, Flag(help="branch, tag or commit of a hub id")] = None,
    token: Annotated[str | None, Flag(envvar="HF_TOKEN", help="token of the Hub")] = None,
    offline: Annotated[bool, Flag("--offline", help="download nothing")] = False,
    json_file: Annotated[
        str | None, Flag("--json", help="the table, as JSON; - is the standard output")
    ] = None,
    force: Annotated[bool, Flag("--force", help="replace this file")] = False,
) -> None:
    """Say what each process of a run would hold, send and wait for, from the model's shapes alone.

    No weight is read, and there may be more processes than this machine could run.
    """
    from afina.cli.output import refuse_unwritable, write_json
    from afina.errors import ConfigError

    if not parallel:
        raise ConfigError("afina plan is of several processes", cure="add --parallel")
    refuse_unwritable(json_file, force=force)
    flags = {
        "model": model,
        "revision": revision,
        "data.source": data or (None if config else "no-data"),
        "techniques": technique or None,
        "techniques.lora.rank": rank,
    }
    resolved = _resolved(config, flags, sets or [])
    found = _judged(resolved, data, nproc, (micro_batches, tokens), token, offline or None)
    if json_file is not None:
        write_json(json_file, found.document())
    if json_file != "-":
        print("\n".join(found.lines()))


def _resolved(config: Path | None, flags: dict[str, Any], sets: list[str]) -> Any:
    from afina.cli.train import resolve
    from afina.table import check

    resolved = resolve(config, flags, sets)
    check(resolved.config.techniques)
    return resolved


def _judged(
    resolved: Any,
    data: str | None,
    processes: int,
    passes: tuple[int, int],
    token: str | None,
    offline: bool | None,
) -> Any:
    """The table, of the layout that is asked for, or of all that are worth a look."""
    from afina.cli.starting import head_for, quantiser_of
    from afina.parallel.layouts import layouts
    from afina.parallel.plan import plan_of
    from afina.parallel.refusals import facts_of, refuse
    from afina.reports.outline import outline
    from afina.reports.parallel import judge
    from afina.table import apply

    settings = resolved.config
    head = head_for(settings) if data is not None else {}
    hub = {"revision": settings.revision, "token": token, "offline": offline}
    model, tokenizer = outline(
        settings.model, settings.train.dtype, settings.train.device, **hub, **head
    )
    facts = facts_of(model.config, packed=quantiser_of(settings) is not None)
    edit = apply(model, settings.techniques, seed=0, undoable=False, tokenizer=tokenizer)
    given = any(
        path.startswith("parallel.") and origin != "default"
        for path, origin in resolved.origins.items()
    )
    chosen = [plan_of(settings.parallel, processes)] if given else layouts(processes, facts)
    if given:  # one of a list that cannot be is passed over, and one that is asked for is not
        refuse(chosen[0], facts)
    return judge(edit, chosen, facts, settings, passes)
