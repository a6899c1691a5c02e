"""One training run of one method for `bench/methods.py`: what trained, what was learnt, what is answered.

A job holds `techniques` (as in a run's configuration), `lr`, `seed`, `steps`, `batch`, `dtype`, `model`, `rows`,
`threads` and `folder`, for the run and its log. With `max_new_tokens` the model answers in words; where that is None,
the rows are labelled and it gives classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .answers import score
from .jobs import Job
from .labelled import read_labelled
from .ours import arranged
from .rows import read_rows


def run(job: dict[str, Any]) -> dict[str, float]:
    """Trains, and scores the tuned model on the test rows; the result depends on the job alone."""
    import afina
    from afina.train.metrics import last_tenth_loss
    from afina.train.report import Lines

    out = Path(job["folder"]) / "run"
    model, tokenizer, train, test = loaded(job)
    edit = afina.apply(model, made(job["techniques"]), seed=job["seed"], undoable=False)
    trained = sum(p.numel() for p in edit.trainable().values())
    with (out.parent / "log").open("w", encoding="utf-8") as log:
        options = afina.RunOptions(base=job["model"], reporter=Lines(log), overwrite=True)
        afina.train(model, tokenizer, train, edit, out, settings=settings(job), options=options)
    return {
        "trained_parameters": trained,
        "loss": last_tenth_loss(out),
        "adapter_bytes": sum(file.stat().st_size for file in out.glob("adapter/**/*.safetensors")),
        **scores(model, tokenizer, test, job),
    }


def loaded(job: dict[str, Any], quantize: Any = None) -> tuple[Any, Any, list[Any], list[Any]]:
    """Model, tokenizer, training rows and test rows; with `quantize` the weights are packed as they are read."""
    import afina

    how = {"dtype": job["dtype"], "device": "cpu", "quantize": quantize}
    if job["max_new_tokens"] is None:
        labelled = read_labelled(job["rows"])
        model, tokenizer = afina.load(job["model"], labels=labelled.names, **how)
        return model, tokenizer, labelled.train, labelled.test
    rows = read_rows(job["rows"])
    model, tokenizer = afina.load(job["model"], **how)
    # In the order of every bench: seed by seed the same for all methods.
    order = Job("afina", "", {}, "", "", "", job["seed"], job["steps"], batch=job["batch"])
    return model, tokenizer, arranged(rows, order), rows.test


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


def scores(model: Any, tokenizer: Any, test: list[Any], job: dict[str, Any]) -> dict[str, float]:
    """Shares of right answers to the test rows: the likeliest class, or greedy decoding beside the adapter."""
    import afina

    if job["max_new_tokens"] is None:
        found = afina.evaluate(model, tokenizer, test, afina.EvalSettings(batch_rows=32))
        return {"accuracy": found.values["accuracy"], "macro_f1": found.values["macro_f1"]}
    limit = afina.GenerateSettings(max_new_tokens=job["max_new_tokens"], batch_rows=50)
    answers = afina.generate(model, tokenizer, [row["ids"] for row in test], limit)
    shares = score([each.text for each in answers], [row["reference"] for row in test])
    return {name: share for name, (share, _) in shares.items()}
