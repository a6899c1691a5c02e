"""What is written beside a merged model about itself: `merge.json`, and a mark when it could not be verified."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from afina.adapters.merge_check import Verdict
from afina.adapters.merge_files import Written
from afina.errors import ConfigError, counted

RECORD = "merge.json"
MARK = "UNVERIFIED.md"
FORMAT = 2
"""2 names the files of the folder; 1 did not."""

WORST = 5
"""Modules whose rounding is listed in reports; the record has all."""

SHOWN = 4
"""Files that an error names; it counts the others."""


def refuse_out(out: Path, *, overwrite: bool) -> None:
    """Checks, changing nothing, that the output may be made.

    Raises:
        ConfigError: it exists and nobody said to overwrite it, or holds something that no merge wrote.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    made = (out / RECORD).is_file() if out.is_dir() else beside(out).is_file()
    if not (overwrite and made):
        raise ConfigError(
            "the output exists" if made else "the output exists, and it is not a merged model",
            got=out,
            cure="name another, or overwrite it (what is there is lost): --overwrite, in Python "
            "MergeSettings(overwrite=True)"
            if made
            else "name another",
        )
    if out.is_dir():
        _refuse_foreign(out)


def _refuse_foreign(out: Path) -> None:
    """Raises when a merged model's folder holds a file that the merge did not write."""
    try:
        own = json.loads((out / RECORD).read_text(encoding="utf-8"))["files"]
        own = {RECORD, MARK, *map(str, own)}
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            "the output folder does not say which of its files a merge wrote, so it is not overwritten",
            got=out / RECORD,
            wanted="a list of files in it, as afina writes it",
            cure="remove the folder yourself, or name another",
        ) from None
    foreign = [name for name in files_in(out) if name not in own]
    if foreign:
        more = f", and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        raise ConfigError(
            "the output folder holds something that the merge did not write, so it is not overwritten",
            got=f"{out} with {', '.join(foreign[:SHOWN])}{more}",
            cure="move it away, or name another folder",
        )


def files_in(folder: Path) -> list[str]:
    """Every file in a folder and the folders below it, as seen from there."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def beside(file: Path) -> Path:
    """The record of a single file."""
    return file.with_name(f"{file.name}.{RECORD}")


def make(
    *,
    base: str,
    adapter: Path | None,
    dtype: str,
    written: Written | None,
    verdict: Verdict | None,
    files: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The record's contents: `verified` is true, false, or null when no check was made.

    Args:
        base: its name.
        adapter: its folder; None where a whole model was exported.
        dtype: of the merged weights.
        written: how adapter and base met.
        verdict: of the check.
        files: what the merge wrote into its folder, which alone may be overwritten; None for a single file.
    """
    record: dict[str, Any] = {
        "format": FORMAT,
        "afina": version("afina"),
        "base": {"name": base, "fingerprint": None if written is None else written.fingerprint},
        "adapter": None if adapter is None else str(adapter),
        "dtype": dtype,
        "verified": None if verdict is None else not verdict.problems,
    }
    if written is not None:
        record["rounding"] = dict(sorted(written.rounding.items(), key=lambda pair: -pair[1]))
        record["whole"] = list(written.whole)
        record["untied"] = list(written.untied)
        record["notes"] = list(written.notes)
    if verdict is not None:
        record["check"] = asdict(verdict)
    if files is not None:
        record["files"] = list(files)
    return _plain(record)


def write(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record into a folder, and the mark if it is not verified."""
    (folder / RECORD).write_text(_json(record), encoding="utf-8")
    if not record["verified"]:
        (folder / MARK).write_text(mark(record), encoding="utf-8")


def write_beside(file: Path, record: dict[str, Any]) -> None:
    """Writes the record beside a file; its `verified` is the mark."""
    beside(file).write_text(_json(record), encoding="utf-8")


def mark(record: dict[str, Any]) -> str:
    """The text of the mark."""
    why = record.get("check", {}).get("problems") or [
        "No check was made (--no-verify, in Python verify=False)."
    ]
    lines = [
        "# Not verified",
        "",
        "This merged model was not found to say what its base and adapter say:",
        "",
    ]
    return "\n".join([*lines, *(f"* {one}" for one in why), "", "Details are in `merge.json`.", ""])


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(record: dict[str, Any]) -> list[str]:
    """The record for people, a line each."""
    said: list[str] = list(record.get("notes", []))
    rounding: dict[str, float] = record.get("rounding", {})
    if rounding:
        mean = sum(rounding.values()) / len(rounding)
        biases = sum(name.endswith("bias") for name in rounding)
        weights = len(rounding) - biases
        kinds = [counted(weights, "weight")] if weights else []
        kinds += ["1 bias" if biases == 1 else f"{biases} biases"] if biases else []
        folded = " and ".join(kinds)
        said.append(f"{folded} folded in fp32 and rounded once to {record['dtype']}")
        said.append(f"of its change each lost {mean:.2%} to that rounding on average; most:")
        said += [f"  {share:.2%}  {name}" for name, share in list(rounding.items())[:WORST]]
    if record.get("whole"):
        said.append(f"{counted(len(record['whole']), 'tensor')} came whole with the adapter")
    if record.get("untied"):
        said.append(f"no longer one tensor: {', '.join(record['untied'])} (config.json says so)")
    if "check" in record:
        said += _of_check(record["check"])
    return said


def _of_check(check: dict[str, Any]) -> list[str]:
    head = ("", "largest", "mean", "relative", "KL mean", "KL max", "top-1 same", "answers same")
    rows = [
        ("base -> base + adapter", check["effect"]),
        ("base + adapter -> merged", check["drift"]),
        ("base -> merged", check["rest"]),
    ]
    cells = [head, *((name, *_cells(values)) for name, values in rows if values is not None)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    said = [f"compared on {check['texts']}; differences of logits, KL in nats:"]
    said += [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    said.append(f"  largest relative difference allowed: {check['limit']:.2e}")
    for prompt, before, after in check["changed"][:2]:
        said.append(f"  an answer that differs, to {_short(prompt)}")
        said += [f"    base + adapter: {_short(before)}", f"    merged:         {_short(after)}"]
    said += [f"  note: {one}" for one in check["notes"]]
    said += [f"  PROBLEM: {one}" for one in check["problems"]]
    return said


def _cells(values: dict[str, Any]) -> list[str]:
    def number(name: str, form: str) -> str:
        return "-" if values[name] is None else format(values[name], form)

    answers = values["answers"]
    return [
        number("largest", ".2e"),
        number("mean", ".2e"),
        number("relative", ".2e"),
        number("kl_mean", ".1e"),
        number("kl_largest", ".1e"),
        number("top1", ".1%"),
        "-" if answers is None else f"{values['answers_equal']}/{answers}",
    ]


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 100 else f"{shown[:60]} … {shown[-36:]}"
