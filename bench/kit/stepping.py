"""A run that makes one training step at each word from outside. Run as `python -m bench.kit.stepping JOB.json`.

The job file holds `techniques`, `train` (settings of the run beyond those of every step), `lr`, `batch`, `steps` (the
most that are asked for), `epoch_steps` (steps after which the rows come again), `model`, `rows`, `dtype`, `threads`,
`max_new_tokens` (see `method`) and `seed`. After each step a line of JSON goes to standard output: its processor
seconds, the losses so far, and the most memory that the process has held. The next step begins when a line comes in; at
the end of the input the process ends.

The run is afina's own, from its first step on, with all that a user waits for between steps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .meter import peak_memory_bytes
from .method import loaded, made


class EnoughError(Exception):
    """Nobody asks for another step."""


@dataclass
class Stepper:
    """Stands between the steps of a run.

    Attributes:
        asks: a line for each step but the first.
        tells: gets a line after each.
        folder: of the run, for its losses.
    """

    asks: IO[str]
    tells: IO[str]
    folder: Path
    began_s: float = field(default_factory=time.process_time)

    def after_step(self, step: int) -> None:
        """Tells what the step took, and waits.

        Raises:
            EnoughError: nobody asks for another.
        """
        line = {
            "step": step,
            "cpu_s": time.process_time() - self.began_s,
            "peak_bytes": peak_memory_bytes(),
            "losses": losses(self.folder),
        }
        self.tells.write(json.dumps(line) + "\n")
        self.tells.flush()
        if not self.asks.readline():
            raise EnoughError
        self.began_s = time.process_time()


def losses(folder: Path) -> list[float]:
    """Of the steps that the run has noted: all but the one that just ended."""
    from afina.train.metrics import read_metrics

    return [line["loss"] for line in read_metrics(folder)]


def run(job: dict[str, Any], asks: IO[str], tells: IO[str]) -> None:
    """Trains as long as steps are asked for."""
    import afina
    from afina.train.report import Lines
    from afina.tree import Seams

    techniques = made(job["techniques"])
    packed = [each for each in techniques if isinstance(each, afina.Quantize)]
    epoch = {**job, "steps": job["epoch_steps"]}
    model, tokenizer, train, _ = loaded(epoch, quantize=packed[0] if packed else None)
    rest = [each for each in techniques if each not in packed]
    edit = afina.apply(model, rest, seed=job["seed"], undoable=False)
    with tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(asks, tells, Path(folder) / "run")
        options = afina.RunOptions(
            base=job["model"],
            reporter=Lines(sys.stderr),
            seams=Seams(after_step=(stepper.after_step,)),
        )
        try:
            afina.train(
                model,
                tokenizer,
                train,
                edit,
                stepper.folder,
                settings=settings(job),
                options=options,
            )
        except EnoughError:
            return


def settings(job: dict[str, Any]) -> Any:
    """Of the run: whole steps in one pass, nothing saved."""
    import afina
    from afina.config import build

    values = {
        "steps": job["steps"] + 1,  # the last is never made, so that the run does not come to save
        "rows_per_step": job["batch"],
        "micro_rows": job["batch"],
        "lr": job["lr"],
        "schedule": "constant",
        "warmup_steps": 0,
        "seed": job["seed"],
        "threads": job["threads"],
        "compile": False,
        "save_every": None,
        **job["train"],
    }
    return build(afina.TrainSettings, values)


def main() -> None:
    """What else is printed goes to the log: standard output is for the figures."""
    tells = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run(json.loads(Path(sys.argv[1]).read_text("utf-8")), sys.stdin, tells)


if __name__ == "__main__":
    main()
