"""How many parameters a model has and how many of them train, part by part, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Counts = list[tuple[str, int, int]]


def parameter_counts(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> Counts:
    """(part, trainable, total) of each part of the model and of the whole; tied tensors count once.

    A part is a block (`model.layers.0`) or a module outside the blocks. Attached parameters count in both columns.
    """
    training = {id(p) for p in trainable.values()}
    rows: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        row = rows.setdefault(_part(name), [0, 0])
        row[1] += parameter.numel()
        row[0] += parameter.numel() if id(parameter) in training else 0
    parts = [(part, t, n) for part, (t, n) in rows.items()]
    return [*parts, ("all", sum(r[1] for r in parts), sum(r[2] for r in parts))]


def _part(name: str) -> str:
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1])
    return ".".join(pieces[:-1]) or name


def format_counts(counts: Counts) -> list[str]:
    """Lines of a table; consecutive blocks with equal counts share one."""
    merged: list[tuple[str, str, int, int]] = []
    for part, trained, total in counts:
        if merged and part[-1].isdigit() and merged[-1][2:] == (trained, total):
            first, last, *_ = merged[-1]
            if first.rsplit(".", 1)[0] == part.rsplit(".", 1)[0]:
                merged[-1] = (first, part.rsplit(".", 1)[-1], trained, total)
                continue
        merged.append((part, "", trained, total))
    lines = [f"{'part':<34}{'trainable':>14}{'total':>16}{'share':>10}"]
    for first, last, trained, total in merged:
        label = f"{first}..{last} (each)" if last else first
        share = 100 * trained / total if total else 0.0
        lines.append(f"{label:<34}{trained:>14,}{total:>16,}{share:>9.2f}%")
    return lines
