"""`afina models list | get | rm`: what is in the cache, what can be fetched, and what can go."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated, Any

import typer

EXAMPLES = (
    "afina models list",
    "afina models get smollm2-135m",
    "afina models get HuggingFaceTB/SmolLM2-360M-Instruct --revision main",
    "afina models get downloads/model.Q4_K_M.gguf",
    "afina models rm smollm2-135m",
)


def _examples(*lines: str) -> str:
    # \b keeps click from joining the lines into one paragraph.
    return "\b\nexamples:\n" + "\n".join(f"  {line}" for line in lines)


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List, get and remove models of the cache.\n\n"
    "Exit status: 0 done; 2 wrong usage; 4 the model cannot be found, fetched or converted.",
)


@app.command("list", epilog=_examples("afina models list", "afina models list --json"))
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Show the models in the cache and the demo models that can be fetched."""
    rows = rows_of_list()
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from afina.models import cache

    width = max(len(row["name"]) for row in rows)
    for row in rows:
        state = megabytes(row["size_bytes"]) if row["cached"] else "not fetched"
        typer.echo(f"{row['name']:<{width}}  {state:>12}  {row['about']}")
    typer.echo(f"\ncache: {cache.root()}   fetch one: afina models get NAME")


@app.command(
    "get",
    epilog=_examples(
        "afina models get smollm2-135m",
        "afina models get HuggingFaceTB/SmolLM2-360M-Instruct --revision main",
        "afina models get downloads/model.Q4_K_M.gguf",
    ),
)
def get(
    source: Annotated[str, typer.Argument(help="A demo name, a hub id, a .gguf file or a folder.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HF_TOKEN", help="Token of the Hugging Face Hub.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Download nothing.")] = False,
) -> None:
    """Fetch and convert a model, so that later runs need no network; print its folder."""
    from afina.models.hub import resolve

    # On the error stream: a script that takes the printed folder reads the other one.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("afina").setLevel(logging.INFO)
    folder = resolve(source, revision=revision, token=token, offline=offline or None)
    typer.echo(str(folder))


@app.command("rm", epilog=_examples("afina models rm smollm2-135m"))
def remove(
    names: Annotated[list[str], typer.Argument(help="Names as `afina models list` shows them.")],
) -> None:
    """Delete models from the cache and say how much room that makes."""
    from afina.models import cache

    for name in names:
        entry = cache.remove(name)
        typer.echo(f"removed {entry.name}: {megabytes(entry.size_bytes)} free again")


def rows_of_list() -> list[dict[str, Any]]:
    """One row a model: name, cached, size_bytes (on disk, or of the download), about, folder; the cached ones first."""
    from afina.models import cache
    from afina.models.demo import DEMOS

    rows = []
    for entry in cache.entries():
        demo = DEMOS.get(entry.name)
        rows.append(
            {
                "name": entry.name,
                "cached": True,
                "size_bytes": entry.size_bytes,
                "about": demo.summary if demo else f"from {entry.manifest.get('source')}",
                "folder": str(entry.folder),
            }
        )
    there = {row["name"] for row in rows}
    for demo in DEMOS.values():
        if demo.name not in there:
            about = f"{demo.summary}; {megabytes(demo.download_bytes)} to fetch"
            rows.append(
                {
                    "name": demo.name,
                    "cached": False,
                    "size_bytes": demo.download_bytes,
                    "about": about,
                    "folder": None,
                }
            )
    return rows


def megabytes(size_bytes: int) -> str:
    """`size_bytes` in MB of a million bytes, or GB above a thousand of them."""
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.1f} GB"
    return f"{size_bytes / 1e6:.0f} MB"
