"""afina's worker: `afina.train` on a rows file. Run as `python -m bench.kit.ours JOB.json`.

Knobs: `dtype` of the frozen base ("fp32" or "bf16"). Everything else is afina's default.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .jobs import Job, read_job, write_json
from .meter import Notes, now_s, peak_memory_bytes
from .rows import IGNORE, Rows, read_rows, sequence


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics, result and, when asked, the adapter in its folder."""
    import afina
    from afina.train.metrics import read_metrics
    from afina.train.report import Lines
    from afina.tree import Seams

    rows = arranged(read_rows(job.rows), job)
    model, tokenizer = afina.load(job.model, dtype=job.knobs["dtype"], device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=job.rank, alpha=job.alpha)], seed=job.seed)
    ends: dict[int, float] = {}
    out = Path(job.folder) / "run"
    resume = job.save and (out / "checkpoints" / "latest").exists()
    afina.train(
        model,
        tokenizer,
        rows,
        edit,
        out,
        settings=settings(job),
        options=afina.RunOptions(
            base=job.model,
            reporter=Lines(sys.stdout),
            resume=resume,
            overwrite=not resume,
            seams=Seams(after_step=(lambda step: ends.update({step + 1: now_s()}),)),
        ),
    )
    notes = Notes(job.folder)
    notes.path.unlink(missing_ok=True)
    for line in read_metrics(out):
        # Steps of an earlier process have no end on this one's clock; only windows, never resumed, are timed.
        end_s = ends.get(line["step"], 0.0)
        notes.write(line["step"], line["loss"], line["tokens"], line["trained_tokens"], end_s)
    if job.save:
        (out / "adapter").rename(Path(job.folder) / "adapter")
    write_json(Path(job.folder) / "result.json", {"peak_bytes": peak_memory_bytes()})


def settings(job: Job) -> Any:
    """The job's training settings; what is not named keeps afina's default."""
    import afina
    from afina.config import build

    values = {
        "steps": job.steps,
        "rows_per_step": job.batch,
        "lr": job.lr,
        "schedule": "linear",
        "warmup_steps": job.warmup_steps,
        "seed": job.seed,
        "threads": job.threads,
        "save_every": 20 if job.save else None,
        "keep_last": 1,
    }
    return build(afina.TrainSettings, values)


def arranged(rows: Rows, job: Job) -> list[Any]:
    """The rows of the job, laid so that afina's own shuffle brings them up in the job's order.

    Place order[k] gets the k-th row to be seen, where `order` is how afina will go through the places.
    """
    from afina.data.order import order
    from afina.types import Row

    wanted = sequence(len(rows.train), job.seed, job.steps * job.batch)
    laid: list[Any] = [None] * len(wanted)
    for seen, place in enumerate(order(len(wanted), job.seed, 0)):
        ids, labels = rows.train[wanted[seen]]
        trained = tuple(label != IGNORE for label in labels)
        laid[place] = Row(tuple(ids), trained, id=place, prompt_tokens=trained.index(True))
    return laid


if __name__ == "__main__":
    run(read_job(sys.argv[1]))
