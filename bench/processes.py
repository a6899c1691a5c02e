"""The same short run in one process and in several: are the losses those of one process?

    python -m bench.processes                      # SmolLM2, 50 steps, 2 processes
    python -m bench.processes --steps 4 --model FOLDER --layout parallel.zero=3

The runs are made by the command line, one after the other, in fp32 with the same rows. What is compared is the loss of
every step; the last digits differ, for sums are taken in another order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from afina.train.metrics import read_metrics

ROWS, ROWS_PER_STEP = 64, 4
LR = "5e-5"  # low, so that the loss is far from nothing at the end too


def rows() -> list[dict[str, str]]:
    """Short requests and their answers, no two alike and of uneven length: a wrong denominator would show."""
    rooms, things = ("kitchen", "hall", "attic", "garden"), ("light", "fan", "heater", "door")
    found: list[dict[str, str]] = []
    for number in range(ROWS):
        room, thing = rooms[number % 4], things[number // 4 % 4]
        state = "on" if number % 3 else "off"
        request = f"{thing} in the {room} {state}{' please' * (number % 3)} {number}"
        found.append({"prompt": request, "completion": f"{thing}_{state} {number}"})
    return found


def run(model: str, out: Path, steps: int, words: Sequence[str]) -> list[float]:
    """The losses of a run."""
    command = [
        sys.executable, "-m", "afina.cli", "train", model, str(out.parent / "rows.jsonl"), "-o", str(out),
        "--steps", str(steps), "--rows-per-step", str(ROWS_PER_STEP), "--rank", "8", "--lr", LR,
        "--set", "train.dtype=fp32", "--set", "train.compile=false", "--set", "train.micro_rows=2",
        "--set", "train.save_every=null", "--set", "train.threads=1", *words,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return [line["loss"] for line in read_metrics(out)]


def compare(
    model: str, steps: int, processes: int, layouts: Sequence[str]
) -> tuple[list[float], dict[str, list[float]]]:
    """The losses of one process, and those of several by their layout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
        alone = run(model, folder / "alone", steps, [])
        several = {
            layout: run(
                model,
                folder / f"several-{number}",
                steps,
                ["--nproc", str(processes), "--set", layout],
            )
            for number, layout in enumerate(layouts)
        }
    return alone, several


def largest(alone: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two losses of one step, as a share of them."""
    return max(abs(a - b) / abs(a) for a, b in zip(alone, other, strict=True))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layout", action="append", help="as parallel.zero=1; several times")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    layouts = given.layout or ["parallel.zero=0"]
    alone, several = compare(given.model, given.steps, given.processes, layouts)
    print(f"{given.model}: {given.steps} steps, loss {alone[0]:.4f} to {alone[-1]:.4f}")
    differences = {layout: largest(alone, other) for layout, other in several.items()}
    for layout, most in differences.items():
        print(f"{given.processes} processes, {layout}: losses differ by at most {most:.1e} of them")
    if given.json is not None:
        document = {
            "model": given.model,
            "processes": given.processes,
            "one_process": alone,
            "several": several,
            "largest_relative_difference": differences,
        }
        given.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
