"""Does gradient noise help? The validation loss of LoRA with and without it, on the same rows.

    python bench/noise.py --data FOLDER --json noise.json
    python bench/noise.py --data FOLDER --only none --only "relative, eta 0.3"   # some settings
    python bench/noise.py --data FOLDER --cached             # run nothing: the table of what is there
    python bench/noise.py --quick                            # one step of two settings, to see that they run

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used. Each setting runs with
each seed over the same rows (30 steps of 8, linear from 1e-3 to 0, LoRA of rank 16 on all linears), in fp32, and is
scored by its loss on 96 rows of the test file. Seed by seed all settings start from the same values and see the rows in
the same order, so that a difference between two of them is the noise's; how far two seeds lie apart says what such a
difference is worth. A finished run is a small file in `--results`, which git keeps; delete it to make it again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.cache import model_hash  # noqa: E402
from bench.kit.jobs import write_json  # noqa: E402
from bench.kit.results import Results, commit  # noqa: E402
from bench.kit.rows import content_hash, read_lines  # noqa: E402

MODEL = "smollm2-135m"
STEPS, BATCH, VAL_ROWS, LR, RANK = 30, 8, 96, 1e-3, 16
SEEDS = (0, 1)

PLAIN = "none"
SETTINGS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "relative, eta 0.01": {"eta": 0.01},
    "relative, eta 0.3": {"eta": 0.3},
    "relative, eta 1": {"eta": 1.0},
    "absolute, eta 0.01": {"eta": 0.01, "mode": "absolute"},
}
"""Settings of the noise: the paper's three variances, each as a share of the gradient, and its own form."""


@dataclass(frozen=True)
class Data:
    """Rows to train on and to score, as they stand in the files."""

    work: str
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--quick", action="store_true", help="one step of two settings, four rows")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    add("--work", type=Path, default=Path("runs/bench"), help="made rows are kept here")
    add("--results", type=Path, default=ROOT / "bench/results/noise", help="finished runs here")
    add("--only", action="append", choices=tuple(SETTINGS), help="this (may be repeated)")
    add("--cached", action="store_true", help="run nothing; take what is there")
    add("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args(arguments)
    if options.quick:
        options.results = options.work / "quick-noise"
    return options


def read(options: argparse.Namespace) -> Data:
    """The rows of the bench: of the training file the first after a shuffle, of the test file the first."""
    folder = options.data
    if options.cached:
        return Data(folder.name if folder else "requests", [], [])
    train_rows, val_rows = (4, 4) if options.quick else (STEPS * BATCH, VAL_ROWS)
    if folder is None:
        from demo.calls import write

        folder = options.work / "requests"
        write(folder, train=STEPS * BATCH, test=VAL_ROWS)
    train = read_lines(folder / "train.jsonl")
    random.Random(0).shuffle(train)
    return Data(folder.name, train[:train_rows], read_lines(folder / "test.jsonl")[:val_rows])


def jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is run, setting by setting and seed by seed."""
    quick = options.quick
    for name in options.only or list(SETTINGS)[: 2 if quick else None]:
        for seed in SEEDS[: 1 if quick else None]:
            yield {
                "noise": SETTINGS[name],
                "name": name,
                "seed": seed,
                "steps": 1 if quick else STEPS,
                "batch": 2 if quick else BATCH,
                "lr": LR,
                "rank": RANK,
            }


def train(job: dict[str, Any], data: Data, folder: str, threads: int) -> float:
    """The validation loss at the end of one run, in nats a token."""
    import afina
    from afina.train.report import Silent

    model, tokenizer = afina.load(folder, dtype="fp32", device="cpu")
    noise = [] if job["noise"] is None else [afina.GradientNoise(**job["noise"])]
    edit = afina.apply(model, [afina.LoRA(rank=job["rank"]), *noise], seed=job["seed"])
    settings = afina.TrainSettings(
        steps=job["steps"],
        rows_per_step=job["batch"],
        micro_rows=job["batch"],
        lr=job["lr"],
        warmup_steps=0,
        seed=job["seed"],
        threads=threads,
        compile=False,
        save_every=None,
    )
    with tempfile.TemporaryDirectory() as out:
        options = afina.RunOptions(base=folder, reporter=Silent(), overwrite=True)
        run = afina.train(
            model,
            tokenizer,
            data.train,
            edit,
            Path(out) / "run",
            val=data.val,
            settings=settings,
            options=options,
        )
    assert run.val_loss is not None
    return run.val_loss


def results(options: argparse.Namespace, data: Data) -> list[dict[str, Any]]:
    """Every job with its loss; those left out that are not there and shall not be run."""
    from afina.models.hub import resolve

    kept = Results(options.results, cached=options.cached)
    folder = "" if options.cached else str(resolve(MODEL))
    model = "" if options.cached else model_hash(folder)
    found: list[dict[str, Any]] = []
    for job in jobs(options):
        file = f"{data.work}-{job['name'].replace(', ', '-').replace(' ', '-')}-{job['seed']}"
        key = content_hash([job, data.train, data.val, model])
        result = kept.read(file, job, key)
        if result is None and not options.cached:
            result = {"loss": train(job, data, folder, options.threads)}
            print(f"  {job['name']}, seed {job['seed']}: {result['loss']:.4f}", flush=True)
            kept.write(file, job, key, result, commit())
        if result is not None:
            found.append({**job, **result})
    return found


def table(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a setting: its losses, and how far from the plain run's of the same seed they lie."""
    plain = {one["seed"]: one["loss"] for one in found if one["name"] == PLAIN}
    rows: list[dict[str, Any]] = []
    for name in SETTINGS:
        losses = {one["seed"]: one["loss"] for one in found if one["name"] == name}
        apart = [loss - plain[seed] for seed, loss in losses.items() if seed in plain]
        if losses and apart:
            rows.append({
                "setting": name,
                "losses": list(losses.values()),
                "mean": statistics.mean(losses.values()),
                "apart": statistics.mean(apart),
                "least": min(apart),
                "most": max(apart),
            })  # fmt: skip
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table in Markdown."""
    yield "| noise | validation loss, seed by seed | beside none, the mean | least and most |"
    yield "|---|---|---|---|"
    for row in rows:
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        apart = "" if row["setting"] == PLAIN else f"{row['apart']:+.4f}"
        spread = "" if row["setting"] == PLAIN else f"{row['least']:+.4f}, {row['most']:+.4f}"
        yield f"| {row['setting']} | {losses} | {apart} | {spread} |"


def figures(rows: Sequence[dict[str, Any]], work: str) -> list[dict[str, Any]]:
    """The rows of the JSON file, in the form of every bench; the run without noise is what the others stand beside."""
    plain = next((row["mean"] for row in rows if row["setting"] == PLAIN), None)
    return [
        {
            "bench": "noise", "work": work, "setting": row["setting"], "metric": metric, "unit": "nats",
            "value": row[key], "peer": PLAIN, "peer_value": plain if metric == "validation loss" else 0.0,
            "ratio": row[key] / plain if plain and metric == "validation loss" else None,
        }
        for row in rows
        for metric, key in (
            ("validation loss", "mean"),
            ("difference to none, least", "least"),
            ("difference to none, most", "most"),
        )
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    data = read(options)
    rows = table(results(options, data))
    print("\n".join(lines(rows)) if rows else "nothing is there yet")
    if options.json:
        write_json(options.json, figures(rows, data.work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
