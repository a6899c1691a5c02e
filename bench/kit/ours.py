"""afina's worker: `afina.train` on a rows file. Run as `python -m bench.kit.ours JOB.json`.

Knobs: `dtype` of the frozen base ("float32" or "bfloat16"); where they are given, `method` ("full" in place of LoRA),
`micro` (rows of a pass), `share_prefixes`, `keep_heap` (see `heap.py`), and `floor` (the products of each step are
timed beside it, see `floor.py`). Everything else is afina's default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .floor import floor_of
from .heap import keep_heap
from .jobs import Job, read_job, write_json
from .meter import Notes, compile_s, now_s, peak_memory_bytes
from .rows import IGNORE, Rows, read_rows, sequence, trained_tokens


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics, result and, when asked, the adapter in its folder."""
    import afina
    from afina.train.metrics import read_metrics
    from afina.train.report import Lines
    from afina.tree import Seams

    if job.knobs.get("keep_heap"):
        keep_heap()
    rows = read_rows(job.rows)
    model, tokenizer = afina.load(job.model, dtype=job.knobs["dtype"], device="cpu")
    edit = afina.apply(model, [technique(job)], seed=job.seed, undoable=False)
    ends: dict[int, tuple[float, float]] = {}
    after: tuple[Callable[[int], object], ...] = (
        lambda step: ends.update({step + 1: (now_s(), compile_s())}),
    )
    floor = floor_of(model, sizes(rows, job)) if job.knobs.get("floor") else None
    if floor is not None:
        after = (*after, floor.after_step)
    out = Path(job.folder) / "run"
    resume = job.save and (out / "checkpoints" / "latest").exists()
    loaded_bytes = peak_memory_bytes()
    afina.train(
        model,
        tokenizer,
        arranged(rows, job),
        edit,
        out,
        settings=settings(job),
        options=afina.RunOptions(
            base=job.model,
            data_settings=afina.DataSettings(share_prefixes=job.knobs.get("share_prefixes", True)),
            reporter=Lines(sys.stdout),
            resume=resume,
            overwrite=not resume,
            seams=Seams(after_step=after),
        ),
    )
    notes = Notes(job.folder)
    notes.path.unlink(missing_ok=True)
    for line in read_metrics(out):
        # Steps of an earlier process have no end on this one's clock; only windows, never resumed, are timed.
        end = ends.get(line["step"], (0.0, 0.0))
        notes.write(line["step"], line["loss"], line["tokens"], line["trained_tokens"], *end)
    if job.save:
        (out / "adapter").rename(Path(job.folder) / "adapter")
    result = {"peak_bytes": peak_memory_bytes(), "loaded_bytes": loaded_bytes}
    write_json(Path(job.folder) / "result.json", result | (floor.result() if floor else {}))


def technique(job: Job) -> Any:
    """What trains."""
    import afina

    if job.knobs.get("method") == "full":
        return afina.Full()
    return afina.LoRA(rank=job.rank, alpha=job.alpha)


def sizes(rows: Rows, job: Job) -> list[tuple[int, int]]:
    """Tokens and trained positions of each step."""
    order = sequence(len(rows.train), job.seed, job.steps * job.batch)
    steps = [order[at : at + job.batch] for at in range(0, len(order), job.batch)]
    return [
        (
            sum(len(rows.train[place][0]) for place in step),
            sum(trained_tokens(rows.train[place][1]) for place in step),
        )
        for step in steps
    ]


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
    if "micro" in job.knobs:
        values["micro_rows"] = job.knobs["micro"]
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
