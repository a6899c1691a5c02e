"""What a curriculum is worth on real rows: validation loss with and without, beside its control.

    python bench/curriculum.py --data FOLDER --json curriculum.json
    python bench/curriculum.py --only none --only "length"   # some ways; a rerun goes on where the last one stopped
    python bench/curriculum.py --data FOLDER --cached        # run nothing: the table of what is there
    python bench/curriculum.py --quick                       # a few steps of each, to see that they run

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used. Every way trains the
same LoRA for the same number of steps, at the same rate, over the same rows; the first half of the run is the ramp. The
loss is a mean over the trained tokens of all test rows, whatever was shown. *control* lets in as many rows at the same
time as the others, but any rows: what it gains too does not come from the order. A finished run is a small file in
`--results`, which git keeps: it is made once for its way, seed, rows and model; delete it to make it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.cache import model_hash  # noqa: E402
from bench.kit.jobs import write_json  # noqa: E402
from bench.kit.results import Results, commit  # noqa: E402
from bench.kit.rows import content_hash, read_lines  # noqa: E402

MODEL = "smollm2-135m"
SEEDS = (0, 1)
SIZES = {"train_rows": 192, "test_rows": 48, "steps": 24, "batch": 8}
QUICK = {"train_rows": 64, "test_rows": 8, "steps": 4, "batch": 2}

WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "length": {"difficulty": "length", "start": 0.1},
    "rarity": {"difficulty": "rarity", "count": "trained", "start": 0.1},
    "loss": {"difficulty": "loss", "start": 0.1},
    "control": {"difficulty": "length", "order": "random", "start": 0.1},
    "growing rows": {"pacing": "length", "min_tokens": 24},
}
"""Way -> settings of the curriculum; None is none."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--quick", action="store_true", help="four steps of each way")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--work", type=Path, default=Path("runs/bench"), help="made rows, and logs, are kept here")
    add("--results", type=Path, default=ROOT / "bench/results/curriculum", help="finished runs")
    add("--only", action="append", choices=tuple(WAYS), help="this way (may be repeated)")
    add("--seed", action="append", type=int, choices=SEEDS, help="this seed (may be repeated)")
    add("--cached", action="store_true", help="run nothing; take what is there")
    add("--model", default=MODEL, help="as afina.load takes it")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Trains one way and measures it on all test rows."""
    import afina
    from afina.train.metrics import read_metrics
    from afina.train.report import Lines

    train, test = (
        read_lines(Path(job["data"]) / f"{name}.jsonl")[: job[f"{name}_rows"]]
        for name in ("train", "test")
    )
    model, tokenizer = afina.load(job["model"], dtype="fp32", device="cpu")
    settings = job["curriculum"]
    order = [] if settings is None else [afina.Curriculum(**settings)]
    edit = afina.apply(model, [afina.LoRA(rank=16), *order], seed=job["seed"])
    done = afina.train(
        model,
        tokenizer,
        train,
        edit,
        Path(job["folder"]) / "run",
        val=test,
        settings=afina.TrainSettings(
            steps=job["steps"],
            rows_per_step=job["batch"],
            lr=5e-4,
            warmup_steps=0,
            seed=job["seed"],
            threads=job["threads"],
            compile=False,
            schedule_by="tokens",
        ),
        options=afina.RunOptions(base=job["model"], reporter=Lines(sys.stdout), overwrite=True),
    )
    tokens = sum(line["tokens"] for line in read_metrics(done.folder))
    return {"loss": done.scores["loss"], "tokens": tokens}


def measured(options: argparse.Namespace, way: str, seed: int) -> dict[str, Any] | None:
    """The result of one run, made in a process of its own; None where it is not there and shall not be made."""
    sizes = QUICK if options.quick else SIZES
    job = {"curriculum": WAYS[way], "seed": seed, **sizes}
    kept = Results(options.results, cached=options.cached)
    name = f"{options.data.name}-{way.replace(' ', '-')}-{seed}"
    if options.cached:
        return kept.read(name, job, "")
    rows = [
        read_lines(options.data / f"{name}.jsonl")[: sizes[f"{name}_rows"]]
        for name in ("train", "test")
    ]
    key = content_hash([job, rows, model_hash(options.folder)])
    result = kept.read(name, job, key)
    if result is None:
        result = made(options, job, name)
        kept.write(name, job, key, result, commit())
    return result


def made(options: argparse.Namespace, job: dict[str, Any], name: str) -> dict[str, Any]:
    """Makes a run in a process of its own, whose log stays in `--work`."""
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        places = {"data": str(options.data), "model": options.folder, "folder": folder}
        write_json(Path(folder) / "job.json", {**job, **places, "threads": options.threads})
        command = [sys.executable, __file__, "--job", str(Path(folder) / "job.json")]
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", **os.environ}
        with (options.work / f"curriculum-{name}.log").open("w", encoding="utf-8") as log:
            subprocess.run(command, cwd=ROOT, env=quiet, stdout=log, stderr=log, check=True)
        return json.loads((Path(folder) / "result.json").read_text("utf-8"))


def figures(found: dict[str, dict[int, float]], work: str) -> list[dict[str, Any]]:
    """One row a way: the mean loss over its seeds, beside that of no curriculum over the same seeds.

    Args:
        found: way -> seed -> loss.
        work: name of the rows.
    """
    rows: list[dict[str, Any]] = []
    none = found.get("none", {})
    for way, losses in found.items():
        if not losses:
            continue
        peer = mean(none[seed] for seed in losses) if set(losses).issubset(none) else None
        value = mean(losses.values())
        rows.append({
            "bench": "curriculum", "work": work, "setting": way, "metric": "loss", "unit": "nats",
            "value": value, "peer": "none", "peer_value": peer,
            "ratio": None if peer is None else value / peer, "seeds": losses,
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures in Markdown."""
    lines = [
        "| way | loss on all test rows, by seed | mean | to none, of the same seeds |",
        "|---|---|---|---|",
    ]
    for row in rows:
        seeds = ", ".join(f"{loss:.4f} ({seed})" for seed, loss in row["seeds"].items())
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"| {row['setting']} | {seeds} | {row['value']:.4f} | {ratio} |")
    return "\n".join(lines)


def prepare(options: argparse.Namespace) -> None:
    """Finds the model, and makes the rows where none are given."""
    from afina.models.hub import resolve

    options.folder = str(resolve(options.model))
    if options.data is None:
        from demo.calls import write

        write(options.work / "requests", train=SIZES["train_rows"], test=SIZES["test_rows"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    if options.job is not None:
        job = json.loads(options.job.read_text("utf-8"))
        write_json(Path(job["folder"]) / "result.json", run(job))
        return 0
    options.work = options.work.resolve()
    if options.quick:
        options.results = options.work / "quick-curriculum"
    if not options.cached:
        prepare(options)
    options.data = options.data.resolve() if options.data else options.work / "requests"
    found: dict[str, dict[int, float]] = {way: {} for way in options.only or WAYS}
    for seed in options.seed or SEEDS:
        for way, losses in found.items():
            result = measured(options, way, seed)
            if result is not None:
                losses[seed] = result["loss"]
                print(f"  {way}, seed {seed}: {result['loss']:.4f}", flush=True)
    made = figures(found, options.data.name)
    print(table(made) if made else "nothing is there yet")
    if options.json:
        write_json(options.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
