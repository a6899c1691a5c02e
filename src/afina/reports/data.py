"""What reading the data did: which format, and the fate of every row."""

from __future__ import annotations

from collections.abc import Sequence

from afina.data.dataset import BAD, CUT_AWAY, OVER_LONG, TRUNCATED, UNTRAINED
from afina.data.report import DataReport
from afina.errors import counted
from afina.train.preflight import Finding


def format_of(reports: Sequence[DataReport]) -> Finding:
    """The format of each source, and why."""
    if not reports:
        return Finding("format", "ok", "rows prepared in Python: nothing is recognised")
    first = reports[0]
    said = f"{first.format}: {first.why}"
    if first.template != "classes":
        said += f"; template {first.template}, a turn ends with {first.stop}"
    other = [f"{one.role}: {one.format}: {one.why}" for one in reports[1:]]
    notes = [note for one in reports for note in one.notes]
    values = {"format": first.format, "why": first.why, "template": first.template}
    status = "note" if notes else "ok"
    return Finding("format", status, said, details=(*other, *notes), values=values)


def fate_of(reports: Sequence[DataReport]) -> Finding:
    """Rows dropped and truncated, how many and which."""
    if not reports:
        return Finding("rows", "ok", "rows prepared in Python: none is dropped or cut")
    lost: list[str] = []
    for one in reports:
        fates = _fates(one)
        for why, count in fates.items():
            which = ", ".join(one.places.get(why, ()))
            more = ", …" if count > len(one.places.get(why, ())) else ""
            dropped = "" if why == TRUNCATED else "dropped: "
            lost.append(f"{one.role}: {counted(count, 'row')} {dropped}{why} ({which}{more})")
    kept, read = sum(one.kept for one in reports), sum(one.read for one in reports)
    tokens = sum(one.lost_tokens for one in reports)
    first = reports[0]
    said = f"{first.kept} of {counted(first.read, 'row')} kept"
    said += "".join(f", for validation {one.kept} of {one.read}" for one in reports[1:])
    values = {
        "read": read,
        "kept": kept,
        "lost_tokens": tokens,
        "dropped": {one.role: one.dropped for one in reports},
        "truncated": {one.role: one.truncated for one in reports},
    }
    if not lost:
        return Finding("rows", "ok", f"{said}, none cut", values=values)
    return Finding(
        "rows",
        "warning",
        said + (f"; {counted(tokens, 'token')} lost" if tokens else ""),
        _cure(reports),
        (*lost, *(line for one in reports for line in one.bad)),
        values,
    )


def _fates(report: DataReport) -> dict[str, int]:
    """Why rows are not there as they were given -> how many."""
    return {**report.dropped, **({TRUNCATED: report.truncated} if report.truncated else {})}


def _cure(reports: Sequence[DataReport]) -> str:
    """What would save the rows that were lost, for each way of losing them."""
    fates = {why for one in reports for why in _fates(one)}
    ways: list[str] = []
    if fates & {OVER_LONG, CUT_AWAY, TRUNCATED}:
        more = "raise data.max_tokens, " if any(one.may_be_longer for one in reports) else ""
        ways.append(
            f"{more}shorten the long rows, or choose data.over_long (error, drop, truncate)"
        )
    if UNTRAINED in fates:
        ways.append("give an answer to the rows that have none")
    if BAD in fates:
        ways.append("correct the rows that cannot be used")
    return "; ".join(ways)
