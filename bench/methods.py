"""Every method on the same rows: what it trains, what it learns, how fast, in how much memory.

    python bench/methods.py --data FOLDER --json methods.json --plot methods.png
    python bench/methods.py --only lora --only dora          # some methods; a rerun goes on where the last one stopped
    python bench/methods.py --cached --json methods.json     # run nothing: the table of what is there
    python bench/methods.py --quick                          # two steps of each, to see that they run

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used. Each method runs at two
learning rates over the same 960 rows (60 steps of 16, linear to 0, seed 0); the rate with the more right answers is
shown. The best six run again with seed 1. A run is kept by its content (method, rate, seed, rows, model): delete its
folder in `--work` to make it again. The commit that made it stands in its result.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.cache import cores, model_hash  # noqa: E402
from bench.kit.jobs import write_json  # noqa: E402
from bench.kit.pieces import result_of, run_piece  # noqa: E402
from bench.kit.rows import Rows, content_hash, make_rows, write_rows  # noqa: E402

MODEL = "smollm2-135m"
TRAIN_ROWS, TEST_ROWS, STEPS, BATCH = 960, 200, 60, 16
BEST = 6
"""Methods that run with a second seed."""

LOW_RANK, SMALL, PROMPTS, WHOLE = (5e-4, 1e-3), (3e-3, 1e-2), (1e-2, 3e-2), (3e-5, 1e-4)
"""Learning rates by kind of method."""

METHODS: dict[str, tuple[list[dict[str, dict[str, Any]]], tuple[float, float]]] = {
    "lora": ([{"lora": {"rank": 16}}], LOW_RANK),
    "lora, q and v": ([{"lora": {"rank": 16, "target": ["attention"]}}], LOW_RANK),
    "lora, rank 64, rslora": ([{"lora": {"rank": 64, "alpha": 16.0, "rslora": True}}], LOW_RANK),
    "lora+": ([{"lora": {"rank": 16, "loraplus_ratio": 16.0}}], (1e-4, 3e-4)),
    "pissa": ([{"lora": {"rank": 16, "start": "pissa"}}], LOW_RANK),
    "olora": ([{"lora": {"rank": 16, "start": "olora"}}], LOW_RANK),
    "dora": ([{"dora": {"rank": 16}}], LOW_RANK),
    "adalora": ([{"adalora": {"tinit": 10, "tfinal": 20, "delta_t": 2}}], (1e-3, 3e-3)),
    "ia3": ([{"ia3": {}}], SMALL),
    "bitfit": ([{"bitfit": {}}], SMALL),
    "houlsby": ([{"bottleneck": {"kind": "houlsby"}}], LOW_RANK),
    "pfeiffer": ([{"bottleneck": {"kind": "pfeiffer"}}], LOW_RANK),
    "parallel": ([{"bottleneck": {"kind": "parallel"}}], LOW_RANK),
    "prefix": ([{"prefix": {"tokens": 20}}], SMALL),
    "prompt": ([{"prompt": {"tokens": 20}}], PROMPTS),
    "p_tuning": ([{"p_tuning": {"tokens": 20}}], (1e-3, 3e-3)),
    "nf4 + lora": ([{"quantize": {}}, {"lora": {"rank": 16}}], LOW_RANK),
    "full": ([{"full": {}}], WHOLE),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--quick", action="store_true", help="two steps of each method, four test rows")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    add("--plot", type=Path, metavar="FILE", help="draw quality against memory there")
    add("--work", type=Path, default=Path("runs/bench"), help="finished runs are kept here")
    add("--only", action="append", choices=tuple(METHODS), help="this method (may be repeated)")
    add("--cached", action="store_true", help="run nothing; take what is there")
    add("--threads", type=int, default=cores(), help="CPU threads")
    return parser.parse_args(arguments)


class Bench:
    """The runs over one set of rows.

    Args:
        options: of the command line.
        rows: to train and test on.
        model: its folder.
        dtype: of the frozen weights.
    """

    def __init__(self, options: argparse.Namespace, rows: Rows, model: str, dtype: str) -> None:
        self.options, self.rows, self.model, self.dtype = options, rows, model, dtype
        self.work = options.work.resolve()
        self.rows_file = self.work / f"rows-{rows.hash}.json"
        self.names = options.only or list(METHODS)
        self.failures: list[str] = []
        write_rows(self.rows_file, rows)

    def table(self) -> list[dict[str, Any]]:
        """One row a method, the best first; a second seed for the best."""
        rows = [row for row in (self._method(name) for name in self.names) if row is not None]
        rows.sort(key=lambda row: (-row["exact_match"], row["loss"]))
        for row in rows[: 0 if self.options.quick else BEST]:
            again = self._run(row["method"], row["lr"], 1)
            row["exact_match, second seed"] = None if again is None else again["exact_match"]
            row["loss, second seed"] = None if again is None else again["loss"]
        return rows

    def _method(self, name: str) -> dict[str, Any] | None:
        found = ((lr, self._run(name, lr, 0)) for lr in METHODS[name][1])
        done = [{"method": name, "lr": lr, **result} for lr, result in found if result is not None]
        return min(done, key=lambda row: (-row["exact_match"], row["loss"]), default=None)

    def _run(self, name: str, lr: float, seed: int) -> dict[str, Any] | None:
        """The result of one run; None where it failed, or is not there and shall not be run."""
        quick = self.options.quick
        job = {
            "techniques": METHODS[name][0],
            "lr": lr,
            "seed": seed,
            "steps": 5 if quick else STEPS,
            "batch": 2 if quick else BATCH,
            "dtype": self.dtype,
            "max_new_tokens": 8 if quick else 96,
        }
        key = content_hash([job, self.rows.hash, model_hash(self.model)])
        slug = name.replace(", ", "-").replace(" + ", "-").replace(" ", "-")
        folder = self.work / f"method-{self.rows.work}-{slug}-{lr:g}-{seed}-{key}"
        if result_of(folder) is None and not self.options.cached:
            folder.mkdir(parents=True, exist_ok=True)
            places = {"model": self.model, "rows": str(self.rows_file), "folder": str(folder)}
            write_json(folder / "versions.json", {"commit": commit()})
            try:
                run_piece("method", folder, {**job, **places, "threads": self.options.threads})
            except RuntimeError as error:
                print(f"  {folder.name} failed: {error}", flush=True)
                self.failures.append(folder.name)
        return result_of(folder)


def commit() -> str:
    """The commit of this work tree, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table in Markdown."""
    yield "| method | trained | lr | exact match | second seed | loss | tokens/s | peak GiB |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        second = row.get("exact_match, second seed")
        cells = (
            row["method"],
            f"{row['trained_parameters']:,}",
            f"{row['lr']:g}",
            f"{row['exact_match']:.3f}",
            "" if second is None else f"{second:.3f}",
            f"{row['loss']:.4f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        )
        yield "| " + " | ".join(cells) + " |"


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Quality against memory, a point a method."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for row in rows:
        at = (row["peak_bytes"] / 2**30, row["exact_match"])
        axes.scatter(*at, color="tab:blue")
        axes.annotate(row["method"], at, xytext=(4, 3), textcoords="offset points", fontsize=8)
    axes.set(xlabel="peak memory (GiB)", ylabel="exact match on the test rows")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> int:
    """Returns the exit status: 0 unless a run failed."""
    from transformers import AutoTokenizer

    from afina.models.hub import resolve
    from afina.models.precision import fast_bf16

    options = parse()
    folder = options.data
    if folder is None:
        from demo.calls import write

        folder = options.work / "requests"
        write(folder, train=TRAIN_ROWS, test=TEST_ROWS)
    model = str(resolve(MODEL))
    test_rows = 4 if options.quick else TEST_ROWS
    rows = make_rows(folder, AutoTokenizer.from_pretrained(model), TRAIN_ROWS, test_rows)
    bench = Bench(options, rows, model, "bf16" if fast_bf16() else "fp32")
    found = bench.table()
    print("\n".join(lines(found)) if found else "nothing is there yet")
    if options.json:
        write_json(options.json, figures(found, rows.work))
    if options.plot and found:
        plot(found, options.plot)
    return 1 if bench.failures else 0


def figures(rows: Sequence[dict[str, Any]], work: str) -> list[dict[str, Any]]:
    """The rows of the JSON file, in the form of every bench; LoRA is what the others stand beside."""
    beside = next((row for row in rows if row["method"] == "lora"), {})
    units = {
        "trained_parameters": "numbers",
        "exact_match": "share",
        "exact_match, second seed": "share",
        "loss": "nats",
        "loss, second seed": "nats",
        "tokens_per_s": "tokens/s",
        "peak_bytes": "bytes",
    }
    found: list[dict[str, Any]] = []
    for row in rows:
        for metric, unit in units.items():
            value, peer = row.get(metric), beside.get(metric)
            ratio = value / peer if value is not None and peer else None
            setting = f"{row['method']}, lr {row['lr']:g}"
            found.append({
                "bench": "methods", "work": work, "setting": setting, "metric": metric, "unit": unit,
                "value": value, "peer": "lora", "peer_value": peer, "ratio": ratio,
            })  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
