"""Token pruning of an encoder: what it costs in accuracy, and what it gains in time, by how many tokens are kept.

    python bench/pruning.py --data ../shared/data/banking77 --json pruning.json --plot pruning.png
    python bench/pruning.py --data FOLDER --cached                # run nothing: the table that is there
    python bench/pruning.py --quick                               # a few steps, to see that it runs

MiniLM with LoRA gives each row its class; the new head learns at a rate of its own. Rows are whole, or are pruned in
training and at inference: by attention, the rest fused into one token (`fuse`), or by likeness into each other
(`merge`). *Accuracy*: each way trains for the same steps on the same rows, seed 0, and answers the same test rows; a
finished run is a small file in `--results` and is not made again. *Time*: the ways take turns on one thread, forward
alone and with backward, on rows of the data and on made rows of 512 and of 1,024 tokens; the median of processor time,
as examples a second beside those of whole rows. MiniLM reads 512 tokens: for longer rows it has random weights.

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.jobs import write_json  # noqa: E402
from bench.kit.labelled import Labelled, make_labelled  # noqa: E402
from bench.kit.results import Results, commit  # noqa: E402
from bench.kit.rows import content_hash  # noqa: E402
from bench.kit.turns import interleaved  # noqa: E402
from bench.kit.works import HEAD  # noqa: E402

MODEL = "minilm-l6-v2"
KEEPS = (0.9, 0.7, 0.5, 0.3)
SCORES = {"fuse": "attention", "merge": "similarity"}
TRAIN_ROWS, TEST_ROWS, STEPS, ROWS, LR, HEAD_LR, RANK = 1920, 400, 120, 16, 1e-3, 3e-2, 16
LONG, LONGER, LONG_TOKENS, TIMES = 512, 1024, 2048, 3

Way = tuple[str, float]
"""What becomes of the tokens that leave, and the share that is kept."""

WHOLE: Way = ("whole", 1.0)
WAYS: tuple[Way, ...] = (WHOLE, *((way, keep) for way in SCORES for keep in KEEPS))


def name_of(way: Way) -> str:
    """As tables have it."""
    return "whole rows" if way == WHOLE else f"{way[0]}, keep {way[1]:g}"


def techniques(way: Way) -> list[Any]:
    """Of one way."""
    import afina

    lora = afina.LoRA(rank=RANK)
    if way == WHOLE:
        return [lora]
    return [afina.TokenPruning(keep=way[1], score=SCORES[way[0]]), lora]  # type: ignore[arg-type]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--quick", action="store_true", help="two steps, few rows, kept apart")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy and time there")
    add("--work", type=Path, default=Path("runs/bench"), help="runs are kept here")
    add("--results", type=Path, default=ROOT / "bench/results/pruning", help="finished ones here")
    add("--steps", type=int, default=STEPS, help="of a training run")
    add("--part", choices=("accuracy", "speed"), help="leave the other part out")
    add("--cached", action="store_true", help="run nothing; take what is there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.results = options.work / "quick-pruning"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    import torch

    options = parse(arguments)
    torch.set_num_threads(1)
    bench = Bench(options)
    figures = bench.figures()
    print("\n".join(lines(figures)))
    if options.json:
        write_json(options.json, figures)
    if options.plot:
        plot(figures, options.plot)
    return 0


# --- what is measured ----------------------------------------------------------------------------------------------


class Bench:
    """The runs over one set of rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results(options.results, cached=options.cached)
        self.rows: Labelled | None = None if options.cached else self._rows()
        data = options.data.name if options.data else "requests"
        self.work = self.rows.work if self.rows else data

    def _rows(self) -> Labelled:
        folder: Path = self.options.data or self.options.work / "requests"
        sizes = (24, 8) if self.options.quick else (TRAIN_ROWS, TEST_ROWS)
        if self.options.data is None:
            from demo.calls import write

            write(folder, train=sizes[0], test=sizes[1])
        return make_labelled(folder, *sizes)

    def figures(self) -> list[dict[str, Any]]:
        """All that is there, one row a figure."""
        found: list[dict[str, Any]] = []
        how = {"steps": self.steps, "rows": ROWS, "lr": LR, "head_lr": HEAD_LR, "rank": RANK}
        accuracy = {
            way: self._kept(
                f"accuracy-{_slug(way)}", {**how, "way": list(way)}, partial(self.accuracy, way)
            )
            for way in sorted(WAYS, key=_urgent)
        }
        accuracy = {way: accuracy[way] for way in WAYS}
        found += self._beside("accuracy", self.work, accuracy, "accuracy", "")
        for work, ids in (("data", None), ("long", LONG), ("longer", LONGER)):
            job = {"rows": work, "rank": RANK}
            speed = self._kept(f"speed-{work}", job, partial(self.speed, ids))
            label = self.work if ids is None else f"made rows of {ids:,} tokens"
            for kind in ("inference", "training"):
                values = {
                    way: {kind: speed[f"{kind}, {name_of(way)}"]} if speed else None for way in WAYS
                }
                found += self._beside(f"{kind} speed", label, values, kind, "examples/s")
        return found

    def _kept(
        self, name: str, job: dict[str, Any], make: Callable[[], dict[str, float]]
    ) -> dict[str, float] | None:
        """A result, made if it is not there."""
        key = content_hash([job, self.rows.hash if self.rows else ""])
        file = f"{self.work}-{name}"
        result = self.results.read(file, job, key)
        left_out = self.options.part not in (None, name.partition("-")[0])
        if result is None and not self.options.cached and not left_out:
            result = make()
            self.results.write(file, job, key, result, commit())
            print(f"  {file}: {result}", flush=True)
        return result

    @property
    def steps(self) -> int:
        """Of a training run."""
        return 2 if self.options.quick else self.options.steps

    def _beside(
        self, metric: str, work: str, values: dict[Way, Any], key: str, unit: str
    ) -> list[dict[str, Any]]:
        whole = values[WHOLE]
        return [
            {
                "bench": "pruning",
                "work": work,
                "setting": name_of(way),
                "metric": metric,
                "unit": unit,
                "value": value[key],
                "peer": "whole rows",
                "peer_value": whole[key],
                "ratio": value[key] / whole[key] if whole[key] else None,
            }
            for way, value in values.items()
            if value and whole
        ]

    def _model(self) -> Any:
        import afina

        assert self.rows is not None
        return afina.load(MODEL, labels=self.rows.names, dtype="fp32", device="cpu")

    def accuracy(self, way: Way) -> dict[str, float]:
        """Trains, and answers the test rows."""
        import torch

        import afina

        assert self.rows is not None
        torch.manual_seed(0)
        model, tokenizer = self._model()
        head = afina.LayerDecay(decay=1.0, scales={HEAD: HEAD_LR / LR})
        edit = afina.apply(model, [*techniques(way), head], seed=0)
        out = self.options.work / f"pruning-{self.work}-{_slug(way)}-{self.steps}"
        options = afina.RunOptions(overwrite=True)
        afina.train(
            model, tokenizer, self.rows.train, edit, out, options=options,
            steps=self.steps, rows_per_step=ROWS, lr=LR, compile=False, micro_rows=ROWS,
        )  # fmt: skip
        scores = afina.evaluate(model, tokenizer, self.rows.test)
        assert scores.confusion is not None
        return {"accuracy": scores.confusion.accuracy, "loss": float(scores.loss or 0)}

    def speed(self, length: int | None) -> dict[str, float]:
        """Examples a second of processor time, the ways taking turns; of the data's rows, or of made ones."""
        import afina

        model, tokenizer = self._model() if length != LONGER else (_longer(), None)
        batch = self._batch(tokenizer, length)
        rows = batch["input_ids"].shape[0]
        seconds: dict[str, float] = {}

        def turn(way: Way, kind: str) -> None:
            edit = afina.apply(model, techniques(way))
            seconds[f"{kind}, {name_of(way)}"] = _pass(model, batch, kind)
            edit.undo()

        found: dict[str, float] = {}
        for kind in ("inference", "training"):
            ways = {f"{kind}, {name_of(way)}": partial(turn, way, kind) for way in WAYS}
            times = 1 if self.options.quick else TIMES
            medians = interleaved(ways, times, reads=seconds.__getitem__)
            found |= {name: rows / passed for name, passed in medians.items()}
        return found

    def _batch(self, tokenizer: Any, length: int | None) -> dict[str, Any]:
        import torch

        assert self.rows is not None
        if length is None:
            texts = [row["text"] for row in self.rows.test[: 2 * ROWS]]
            return dict(tokenizer(texts, padding=True, return_tensors="pt"))
        drawn = torch.Generator().manual_seed(0)
        count = 1 if self.options.quick else LONG_TOKENS // length
        ids = torch.randint(1000, 20000, (count, length), generator=drawn)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _longer() -> Any:
    """A model of the same shape that reads longer rows, of random weights: for time, which does not depend on them."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from afina.models.hub import resolve

    config = AutoConfig.from_pretrained(resolve(MODEL), max_position_embeddings=LONGER)
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


def _pass(model: Any, batch: dict[str, Any], kind: str) -> float:
    """Processor time in seconds of one pass over a batch."""
    import torch

    model.train(kind == "training")
    began = time.process_time()
    with torch.set_grad_enabled(kind == "training"):
        loss = model(**batch).logits.logsumexp(-1).sum()
        if kind == "training":
            loss.backward()
    return time.process_time() - began


# --- what is shown -------------------------------------------------------------------------------------------------


def lines(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The table in Markdown: accuracy, and times as ratios to whole rows."""
    columns = list(dict.fromkeys((row["metric"], row["work"]) for row in figures))
    by = {(row["setting"], row["metric"], row["work"]): row for row in figures}
    head = [f"{metric}, {work}" for metric, work in columns]
    made = [f"| way | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for way in WAYS:
        cells: list[str] = []
        for metric, work in columns:
            cells += [_cell(by[key]) if (key := (name_of(way), metric, work)) in by else "–"]
        made.append(f"| {name_of(way)} | {' | '.join(cells)} |")
    return made


def _cell(row: dict[str, Any]) -> str:
    return f"{row['value']:.1%}" if row["metric"] == "accuracy" else f"{row['ratio']:.2f}×"


def plot(figures: Sequence[dict[str, Any]], file: Path) -> None:
    """Accuracy, and examples a second beside those of whole rows, by the share kept."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    by = {(row["setting"], row["metric"], row["work"]): row for row in figures}
    works = list(dict.fromkeys(row["work"] for row in figures if row["metric"] != "accuracy"))
    for way, mark in zip(SCORES, "os", strict=True):
        ways = [WHOLE, *((way, keep) for keep in KEEPS)]
        shown = [by[key] for w in ways if (key := (name_of(w), "accuracy", works[0])) in by]
        keeps = [w[1] for w in ways if (name_of(w), "accuracy", works[0]) in by]
        left.plot(keeps, [row["value"] for row in shown], marker=mark, label=way)
        for work, style in zip(works, ("--", "-"), strict=False):
            speeds = [by[name_of(w), "inference speed", work]["ratio"] for w in ways]
            right.plot([w[1] for w in ways], speeds, style, marker=mark, label=f"{way}, {work}")
    left.set(xlabel="share of tokens kept", ylabel="accuracy")
    right.set(xlabel="share of tokens kept", ylabel="examples a second beside whole rows")
    right.axhline(1, color="grey", linewidth=0.5)
    for axes in (left, right):
        axes.invert_xaxis()
        axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _urgent(way: Way) -> tuple[float, str]:
    """Whole rows first, then those that say most."""
    return (-1.0 if way == WHOLE else abs(way[1] - 0.5), way[0])


def _slug(way: Way) -> str:
    return "whole" if way == WHOLE else f"{way[0]}-{way[1]:g}"


if __name__ == "__main__":
    sys.exit(main())
