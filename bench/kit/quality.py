"""What full runs learn: their losses, and their answers to the test rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .answers import score
from .cache import model_hash
from .meter import last_tenth_loss, read_notes
from .pieces import result_of
from .report import Figure
from .rows import content_hash
from .side import SideBySide
from .variants import Variant, quality_variants

STEPS, BATCH = 120, 16
MAX_NEW_TOKENS = 96


class Quality:
    """The full runs over one set of rows.

    Args:
        side: the pieces.
    """

    def __init__(self, side: SideBySide) -> None:
        self.side = side
        self.seeds = side.options.seed or [0, 1]

    def figures(self) -> Iterator[Figure]:
        """Of each seed, afina's beside each setting of the peer that can differ."""
        for seed in self.seeds:
            found = {
                variant.setting: self.of(variant, seed)
                for variant in quality_variants(self.side.fast_bf16)
            }
            ours = found.pop("default")
            for setting, theirs in found.items():
                for metric, unit in dict.fromkeys([*ours, *theirs]):
                    values = (side.get((metric, unit)) for side in (ours, theirs))
                    yield self.side.figure(f"{setting}, seed {seed}", metric, unit, *values)

    def of(self, variant: Variant, seed: int) -> dict[tuple[str, str], float]:
        """(metric, unit) -> value of one full run; empty when it is not there."""
        job = self.side.job(variant, seed, STEPS, 0, BATCH, save=True)
        folder = self.side.train(job, "quality")
        if folder is None:
            return {}
        notes = read_notes(folder)
        figures = {
            ("loss, first step", "nats"): float(notes[0]["loss"]),
            ("loss, last tenth", "nats"): last_tenth_loss(notes),
        }
        answers = self.answers(variant, folder, seed)
        if answers is not None:
            references = [row["reference"] for row in self.side.rows.test]
            for name, (share, error) in score(answers, references).items():
                figures[name, "share"] = share
                figures[f"{name}, standard error", "share"] = error
        return figures

    def answers(self, variant: Variant, trained: Path, seed: int) -> list[str] | None:
        """The tuned model's answers to the test rows."""
        job = self.answers_job(variant, trained)
        contents = [self.side.rows.hash, self.side.model_hash, model_hash(trained / "adapter")]
        key = content_hash([job["dtype"], MAX_NEW_TOKENS, *contents])
        name = f"{self.side.rows.work}-answers-{variant.tool}-{variant.setting}-{seed}"
        folder = self.side.piece("answers", name, key, job, variant.tool, variant.setting)
        result = None if folder is None else result_of(folder)
        return None if result is None else result["answers"]

    def answers_job(self, variant: Variant, trained: Path) -> dict[str, Any]:
        """The job of answering with the adapter of a trained piece, without its folder."""
        return {
            "dtype": variant.knobs["dtype"],
            "max_new_tokens": MAX_NEW_TOKENS,
            "threads": self.side.options.threads,
            "model": self.side.model,
            "adapter": str(trained / "adapter"),
            "rows": str(self.side.rows_file),
        }


def verdicts(figures: Sequence[Figure]) -> Iterator[str]:
    """A line for each promise that the figures can judge.

    The promises: loss over the last tenth at most 1.03 times the peer's; shares of right answers no lower by more than
    two standard errors of the difference.
    """
    errors = {(f.work, f.setting, f.metric): f for f in figures}
    for figure in figures:
        if figure.ratio is None or figure.value is None or figure.peer_value is None:
            continue
        if figure.metric == "loss, last tenth":
            word = "holds" if figure.ratio <= 1.03 else "FAILS"
            yield f"{figure.work}, {figure.setting}: loss {figure.ratio:.3f} times the peer's, at most 1.03: {word}"
        error = errors.get((figure.work, figure.setting, f"{figure.metric}, standard error"))
        if error is not None and error.value is not None and error.peer_value is not None:
            most = 2 * math.hypot(error.value, error.peer_value)
            gap = figure.value - figure.peer_value
            word = "holds" if gap >= -most else "FAILS"
            yield f"{figure.work}, {figure.setting}: {figure.metric} {gap:+.3f}, at least {-most:.3f}: {word}"
