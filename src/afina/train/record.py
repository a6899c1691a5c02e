"""What a run was made from, written before its first step: config.yaml, data.json, environment.json, start.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from afina.config import EvalSettings, Resolved, RunConfig, TrainSettings, as_given, dump
from afina.data.report import DataReport
from afina.data.settings import DataSettings
from afina.models.demo import DEMOS
from afina.places import exists, local
from afina.train import durable, folder, state
from afina.train.state import Difference, State
from afina.tree import Edit
from afina.types import Row

START = "start.json"
"""The state in which a run began, or went on with changes, for when it is stopped before its next checkpoint."""


@dataclass(frozen=True)
class Given:
    """What a run works on, once the data is read.

    Attributes:
        rows: for training.
        val_rows: for validation.
        reports: of how they came about.
        resolved: the configuration, for config.yaml.
        fingerprint: of the training rows.
    """

    rows: list[Row]
    val_rows: list[Row]
    reports: Sequence[DataReport]
    resolved: Resolved[Any]
    fingerprint: str

    def in_words(self) -> dict[str, Any]:
        """For the adapter's card."""
        return {
            "source": Path(self.resolved.config.source).name,
            "rows": len(self.rows),
            "fingerprint": self.fingerprint,
            "validation_rows": len(self.val_rows),
        }


def absolute(name: str | None) -> str | None:
    """A file's or folder's name as it is found from any working directory; a name of the hub, or a demo's, as it is."""
    if name is None or name in DEMOS or not exists(local(name)):
        return name
    return str(local(name).resolve())


def name_of(source: Any) -> str:
    """What config.yaml calls some data."""
    return str(source) if isinstance(source, str | Path) else "(rows given in Python)"


def as_config(
    base: str,
    source: str,
    val: str | None,
    data: DataSettings,
    edit: Edit,
    settings: TrainSettings,
) -> Resolved[DataSettings]:
    """The configuration of a run that was started from Python."""
    config = RunConfig(
        model=str(absolute(base)),
        source=str(absolute(source)),
        val=absolute(val),
        revision=None,
        data=data,
        techniques=tuple(edit.techniques),
        train=settings,
        eval=EvalSettings(),
    )
    return as_given(config, [t.key for t in edit.techniques], "Python")


def write(out: Path, given: Given, machine: Mapping[str, str]) -> None:
    """Everything the run was made from. The folder is a run's once config.yaml is there, so that comes last."""
    counts = {"train": len(given.rows), "validation": len(given.val_rows)}
    account = {"rows": counts, "sources": [asdict(report) for report in given.reports]}
    durable.write_json(out / "data.json", account)
    durable.write_json(out / "environment.json", {**folder.environment(), **machine})
    durable.write_text(out / folder.CONFIG, dump(given.resolved))


def write_start(out: Path, start: State) -> None:
    """Keeps the state in which a run begins."""
    durable.write_text(out / START, state.to_text(start))


def write_changes(
    out: Path, resolved: Resolved[Any], step: int, changes: Sequence[Difference]
) -> None:
    """Renews config.yaml for the rest of a run, with a line at its top for all that was changed so far."""
    path = out / folder.CONFIG
    old = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in old if line.startswith("# step ")]
    new = [f"# step {step}: resumed with {change}" for change in changes]
    first = {name: _first_origin(origin, path, old) for name, origin in resolved.origins.items()}
    renewed = dump(replace(resolved, origins=first))
    durable.write_text(path, "\n".join([*kept, *new, renewed]))


def _first_origin(origin: str, path: Path, lines: Sequence[str]) -> str:
    """Where a value came from that was read from line n of the run's own config.yaml: what that line says."""
    number = origin.removeprefix(f"{path}:")
    if number == origin or not number.isdecimal() or not 0 < int(number) <= len(lines):
        return origin
    return lines[int(number) - 1].rpartition("  # ")[2]
