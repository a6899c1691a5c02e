"""`afina config-schema`: the JSON schema of a run.yaml, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

LINE = "# yaml-language-server: $schema="
"""The first line of a YAML file that names its schema. Source: the YAML language server, which most editors use."""

EXAMPLES = (
    "afina config-schema | less",
    "afina config-schema -o run.schema.json",
    f"{LINE}run.schema.json    (the first line of run.yaml)",
)


def command(
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="a file; default: the standard output")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
) -> None:
    """Write the JSON schema of a run.yaml.

    An editor that is given it completes the settings, shows what they mean, and underlines unknown names and values
    that are out of range. Most take it from the first line of run.yaml. `afina train -c` checks the same, and more.
    """
    from afina.cli.output import note, refuse_unwritable, write_text
    from afina.config import schema
    from afina.data.settings import DataSettings
    from afina.table import TECHNIQUES

    place = "-" if out is None else str(out)
    refuse_unwritable(place, force=force)
    made = schema(techniques=TECHNIQUES, data_settings=DataSettings)
    write_text(place, json.dumps(made, indent=2) + "\n")
    if out is not None:
        note(f"{out}; in the first line of run.yaml: {LINE}{out}")
