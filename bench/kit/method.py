"""One run of one method for `bench/methods.py`. Run as `python -m bench.kit.method JOB.json`.

The job file holds `techniques` (as in a run's configuration), `lr`, `seed`, `steps`, `batch`, `model`, `rows`, `dtype`,
`threads`, `max_new_tokens` and `folder`, where `result.json` is left: what trained, what it cost, what it answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .answers import score
from .jobs import Job, write_json
from .meter import now_s, peak_memory_bytes
from .ours import arranged
from .rows import Rows, read_rows

WARM = 3
"""Leading steps that the speed does not count."""


def run(job: dict[str, Any]) -> None:
    """Trains, answers the test rows with the tuned model, and writes the result."""
    import afina
    from afina.train.metrics import last_tenth_loss, read_metrics
    from afina.train.report import Lines
    from afina.tree import Seams

    folder = Path(job["folder"])
    rows = read_rows(job["rows"])
    model, tokenizer = afina.load(job["model"], dtype=job["dtype"], device="cpu")
    edit = afina.apply(model, made(job["techniques"]), seed=job["seed"])
    trained = sum(p.numel() for p in edit.trainable().values())
    ends: list[float] = []
    afina.train(
        model,
        tokenizer,
        laid(rows, job),
        edit,
        folder / "run",
        settings=settings(job),
        options=afina.RunOptions(
            base=job["model"],
            reporter=Lines(sys.stdout),
            overwrite=True,
            seams=Seams(after_step=(lambda step: ends.append(now_s()),)),
        ),
    )
    lines = read_metrics(folder / "run")
    result = {
        "trained_parameters": trained,
        "loss": last_tenth_loss(folder / "run"),
        "tokens_per_s": sum(line["tokens"] for line in lines[WARM:]) / (ends[-1] - ends[WARM - 1]),
        "peak_bytes": peak_memory_bytes(),
        "adapter_bytes": sum(
            f.stat().st_size for f in (folder / "run").glob("adapter/**/*.safetensors")
        ),
        **scores(model, tokenizer, rows, job),
    }
    write_json(folder / "result.json", result)


def made(listed: list[dict[str, dict[str, Any]]]) -> list[Any]:
    """Techniques from `[{"lora": {"rank": 16}}]`."""
    from afina.table import TECHNIQUES

    return [TECHNIQUES[key](**values) for each in listed for key, values in each.items()]


def settings(job: dict[str, Any]) -> Any:
    """The run's settings; what is not named keeps afina's default."""
    import afina

    return afina.TrainSettings(
        steps=job["steps"],
        rows_per_step=job["batch"],
        lr=job["lr"],
        schedule="linear",
        warmup_steps=0,
        seed=job["seed"],
        threads=job["threads"],
        compile=False,
    )


def laid(rows: Rows, job: dict[str, Any]) -> list[Any]:
    """The rows in the order of every bench: seed by seed the same for all methods."""
    order = Job("afina", "", {}, "", "", "", job["seed"], job["steps"], batch=job["batch"])
    return arranged(rows, order)


def scores(model: Any, tokenizer: Any, rows: Rows, job: dict[str, Any]) -> dict[str, float]:
    """Shares of right answers to the test rows, decoded greedily beside the adapter, not merged."""
    from afina.config import GenerateSettings
    from afina.models.generate import generate

    limit = GenerateSettings(max_new_tokens=job["max_new_tokens"], batch_rows=50)
    found = generate(model, tokenizer, [row["ids"] for row in rows.test], limit)
    shares = score([each.text for each in found], [row["reference"] for row in rows.test])
    return {name: share for name, (share, _) in shares.items()}


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text("utf-8")))
