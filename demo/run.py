"""The demo: a real language model learns to turn requests into JSON calls, in about two minutes on two cores.

It makes the data, asks the model before and after, shows both, draws what happened, and says what to type next.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calls import SYSTEM, write

MODEL = "smollm2-135m"


def main(words: Sequence[str] | None = None) -> int:
    """Runs the demo; the exit status is 0 when the model has learnt the task."""
    options = _options(words)
    from rich.console import Console

    import afina
    from afina.data.dataset import prepare

    console = Console()
    out: Path = options.out
    console.rule("1. data, made by code")
    train_file, test_file = write(out.parent / "data", train=options.rows, test=options.test)
    console.print(f"{train_file}: {options.rows} requests in English and Portuguese")
    console.print(f"{test_file}: {options.test} more, worded in ways that training never sees")

    console.rule("2. the model")
    model, tokenizer = afina.load(MODEL)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    console.print(f"{MODEL}: {parameters:.0f} million parameters, weights in {model.dtype}")
    rows = prepare(test_file, tokenizer, afina.DataSettings(), role="eval").rows

    console.rule("3. before")
    settings = _scoring()
    before = afina.evaluate(model, tokenizer, rows, settings)
    console.print(f"exact match on unseen wordings: {before.exact_match:.2f}")

    console.rule("4. training")
    edit = afina.apply(model, [afina.LoRA(rank=16)])
    began = time.perf_counter()
    run = afina.train(
        model,
        tokenizer,
        train_file,
        edit,
        out,
        rows_per_step=8,
        lr=2e-3,
        epochs=1,
        options=afina.RunOptions(base=MODEL, overwrite=True),
    )
    minutes = (time.perf_counter() - began) / 60
    console.print(f"{run.steps} steps in {minutes:.1f} minutes; loss at the end {run.loss:.3f}")

    console.rule("5. after")
    after = afina.evaluate(model, tokenizer, rows, settings)
    console.print(_beside(rows, before, after))
    console.print(
        f"exact match on unseen wordings: before {before.exact_match:.2f}, "
        f"after [bold]{after.exact_match:.2f}[/bold] "
        f"(standard error {after.errors['exact_match']:.2f}, {after.n} requests)"
    )
    console.print(f"plot: {_plot(out, before, after)}")
    console.rule("what to type next")
    for command in (
        f"chat {out} --system '{SYSTEM}' --beside-base",
        f"eval {out} {test_file}",
        f"train {MODEL} your.jsonl -o runs/yours",
    ):
        console.print(f".venv/bin/afina {command}", markup=False, highlight=False, soft_wrap=True)
    learnt = (after.exact_match or 0.0) > max(0.5, before.exact_match or 0.0)
    return 0 if learnt else 1


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo/run"), help="the run's folder")
    parser.add_argument("--rows", type=int, default=320, help="training rows")
    parser.add_argument("--test", type=int, default=48, help="test rows")
    return parser.parse_args(words)


def _scoring() -> Any:
    import afina

    answers = afina.GenerateSettings(max_new_tokens=40, batch_rows=24)
    return afina.EvalSettings(answers=answers)


def _beside(rows: Sequence[Any], before: Any, after: Any) -> Any:
    """Three requests with the answers before and after."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("request", "before", "after", "wanted", show_lines=True)
    for row, one, two in list(zip(rows, before.rows, after.rows, strict=True))[:3]:
        request = row.meta["prompt"][-1]["content"]
        cells = (request, _short(one["completion"]), _short(two["completion"]), one["reference"])
        table.add_row(*map(escape, cells))
    return table


def _short(text: str) -> str:
    """One line of at most 90 letters."""
    text = " ".join(text.split())
    return text if len(text) <= 90 else text[:89] + "…"


def _plot(out: Path, before: Any, after: Any) -> Path:
    """The loss over the steps, and exact match before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from afina.train.metrics import read_metrics, smooth

    lines = read_metrics(out)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    steps, losses = [x["step"] for x in lines], [x["loss"] for x in lines]
    left.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    left.plot(steps, smooth(losses, 0.7), color="#1f4e79", linewidth=2, label="running mean")
    left.set(xlabel="optimiser step", ylabel="loss (nats a trained token)", ylim=(0, None))
    left.legend(frameon=False)
    scores = (before.exact_match, after.exact_match)
    bars = right.bar(("before", "after"), scores, color=("#c9c9c9", "#1f4e79"))
    right.bar_label(bars, fmt="%.2f")
    right.set(ylim=(0, 1.08), ylabel="exact match, unseen wordings")
    path = out.parent / "demo.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    sys.exit(main())
