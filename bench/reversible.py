"""Reversible blocks beside recomputation and beside plain training: what is saved, what it takes, what is learnt.

    python bench/reversible.py --data FOLDER --json reversible.json
    python bench/reversible.py --data FOLDER --part learnt --only reversible
    python bench/reversible.py --data FOLDER --cached         # run nothing: the figures that are there
    python bench/reversible.py --quick                        # few small steps, to see that it runs

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used. Every way trains LoRA of
rank 16 on all linears of SmolLM2-135M, in fp32 on one thread. Four things are measured:

* the loss at the start, as the blocks are mixed in training and with plain blocks, by side bits and by plain blocks;
* the bytes that one forward pass saves for backward, each piece of memory once, the model's own tensors left out;
* processor time of the median step, and the most memory a process held: each way in a process of its own, all making
  their steps in turns over the same rows;
* what is learnt: the loss over the last quarter of a run's steps, and afterwards of test rows by the plain model.

Where rows begin alike, plain training and one sign for each step compute the beginning once; with a sign for each row
they cannot. What is finished lies in `--results`, which git keeps, a file a part (of what is learnt a file a way), and
is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.beside import Taken, in_turns  # noqa: E402
from bench.kit.cache import model_hash  # noqa: E402
from bench.kit.report import Figure, table, write_figures  # noqa: E402
from bench.kit.results import Results, commit  # noqa: E402
from bench.kit.reversing import as_rows, run, saved_bytes, start_losses, told  # noqa: E402
from bench.kit.rows import content_hash, make_rows, write_rows  # noqa: E402

MODEL = "smollm2-135m"
LORA: dict[str, Any] = {"lora": {"rank": 16}}
PLAIN, RECOMPUTED = "plain", "recompute"
PARTS = ("start", "saved", "steps", "learnt")

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    PLAIN: ({}, {}),
    RECOMPUTED: ({}, {"recompute": True}),
    "reversible": ({"reversible": {}}, {"recompute": True}),
    "reversible, a sign a row": ({"reversible": {"signs": "row"}}, {"recompute": True}),
    "reversible, 4 bits": ({"reversible": {"bits": 4}}, {"recompute": True}),
}
"""Techniques beside LoRA, and settings of the run: the blocks that stay plain are recomputed."""

SAVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **WAYS,
    "reversible, plain blocks kept": ({"reversible": {}}, {}),
}
"""The ways whose saved bytes are counted."""

STARTS: tuple[dict[str, Any], ...] = (
    {"bits": 1, "plain": 1},
    {"bits": 2, "plain": 1},
    {"bits": 3, "plain": 1},
    {"bits": 4, "plain": 1},
    {"bits": 3, "plain": 3},
    {"bits": 4, "plain": 3},
    {"bits": 6, "plain": 3},
    {"bits": 8, "plain": 3},
)
"""Settings whose loss at the start is measured."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        batch: rows of a step.
        warm, counted: steps of each way in turns; the first ones' time does not count.
        learnt: steps of a whole run.
        test: rows that are scored after it.
    """

    batch: int = 8
    warm: int = 2
    counted: int = 5
    learnt: int = 40
    test: int = 64

    @property
    def rows(self) -> int:
        """That are trained on, and scored."""
        return self.batch * max(self.warm + self.counted, self.learnt) + self.test


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--quick", action="store_true", help="few small steps")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--work", type=Path, default=Path("runs/bench"), help="rows and results are kept here")
    add("--only", action="append", choices=tuple(WAYS), help="this way (may be repeated)")
    add("--part", choices=PARTS, help="this part alone")
    add("--results", type=Path, default=ROOT / "bench/results/reversible", help="finished parts")
    add("--cached", action="store_true", help="run nothing; take what is there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.results = options.work / "quick-reversible"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    bench = Bench(options, Size(2, 1, 2, learnt=3, test=4) if options.quick else Size())
    figures = bench.figures()
    print(table(figures) if figures else "nothing is there yet")
    if options.json:
        write_figures(options.json, figures)
    return 0


class Bench:
    """The parts over one set of rows.

    Args:
        options: of the command line.
        size: how much is measured.
    """

    def __init__(self, options: argparse.Namespace, size: Size) -> None:
        self.options, self.size = options, size
        self.results = Results(options.results, cached=options.cached)
        self.work: str = options.data.name if options.data else "requests"
        self.key = ""
        if not options.cached:
            self.model, self.rows, rows_hash = made_rows(options, size)
            self.key = content_hash([rows_hash, model_hash(self.model)])

    def figures(self) -> list[Figure]:
        """Of all parts that are asked for."""
        options, found = self.options, list[Figure]()
        listed = STARTS[-2:] if options.quick else STARTS
        if options.part in (None, "start"):
            made = self.kept("start", {"settings": list(listed)}, lambda: self.in_process(listed))
            found += starts(made or {}, listed, self.work)
        if options.part in (None, "saved"):
            made = self.kept("saved", {"ways": SAVED}, lambda: self.in_process(None))
            found += saved(made or {}, self.work)
        if options.part in (None, "steps"):
            names = ways(options)
            made = self.kept("steps", {name: WAYS[name] for name in names}, self.in_turns)
            taken = {name: Taken(**one) for name, one in (made or {}).items()}
            found += steps(taken, self.work) if taken else []
        if options.part in (None, "learnt"):
            found += learnt({name: self.learnt(name) for name in ways(options)}, self.work)
        return found

    def kept(
        self, part: str, asked: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """A result, made if it is not there; None where it is not and nothing is run."""
        job = json.loads(json.dumps({**asdict(self.size), **asked}))  # as it is read back
        name, key = f"{self.work}-{part}", content_hash([job, self.key])
        found = self.results.read(name, job, key)
        if found is None and not self.options.cached:
            found = make()
            self.results.write(name, job, key, found, commit())
            print(f"  {name} is done", flush=True)
        return found

    def in_process(self, settings: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """The losses at the start with these settings; without them what a forward pass saves, by way."""
        import torch

        import afina
        from afina.models.forward import packing
        from bench.kit.rows import read_rows

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            model, _ = afina.load(MODEL, dtype="fp32", device="cpu")
            sample = as_rows(read_rows(self.rows).train[: self.size.batch])
            with packing(model, True):
                if settings is not None:
                    return start_losses(model, sample, settings)
                return {name: saved_bytes(model, sample, *way) for name, way in SAVED.items()}
        finally:
            torch.set_num_threads(before)

    def in_turns(self) -> dict[str, Any]:
        """What the steps of each way took."""
        with tempfile.TemporaryDirectory() as folder:
            jobs = {
                name: job(name, self.model, self.rows, self.size) for name in ways(self.options)
            }
            taken = in_turns(jobs, Path(folder), warm=self.size.warm, counted=self.size.counted)
        return {name: asdict(one) for name, one in taken.items()}

    def learnt(self, name: str) -> dict[str, Any] | None:
        """The losses of one way's run; recomputing is plain training, bit for bit, and not run."""
        if name == RECOMPUTED:
            return None
        beside, _ = WAYS[name]
        slug = name.replace(", ", "-").replace(" ", "-")
        size = {"steps": self.size.learnt, "batch": self.size.batch, "test_rows": self.size.test}

        def make() -> dict[str, Any]:
            return run(MODEL, self.rows, beside, **size)

        return self.kept(f"learnt-{slug}", {"beside": beside}, make)


def ways(options: argparse.Namespace) -> list[str]:
    """Those that are asked for, and what they are measured by."""
    asked = options.only or WAYS
    return [name for name in WAYS if name in (PLAIN, RECOMPUTED) or name in asked]


def made_rows(options: argparse.Namespace, size: Size) -> tuple[str, Path, str]:
    """(model's folder, file of the rows, their hash)."""
    from transformers import AutoTokenizer

    from afina.models.hub import resolve

    folder = options.data
    if folder is None:
        from demo.calls import write

        folder = options.work / "requests"
        write(folder, train=size.rows, test=1)
    model = str(resolve(MODEL))
    rows = make_rows(folder, AutoTokenizer.from_pretrained(model), size.rows, 1)
    file = options.work.resolve() / f"rows-{rows.hash}.json"
    write_rows(file, rows)
    return model, file, rows.hash


def job(name: str, model: str, rows: Path, size: Size) -> dict[str, Any]:
    """A way, as the worker reads it."""
    beside, train = WAYS[name]
    return {
        "techniques": [{key: value} for key, value in {**LORA, **beside}.items()],
        "train": train,
        "lr": 1e-3,
        "seed": 0,
        "batch": size.batch,
        "epoch_steps": size.warm + size.counted,
        "model": model,
        "rows": str(rows),
        "dtype": "fp32",
        "threads": 1,
        "max_new_tokens": 1,
    }


# --- what it came to ------------------------------------------------------------------------------------------


def starts(
    found: Mapping[str, list[float]], settings: Sequence[Mapping[str, Any]], work: str
) -> list[Figure]:
    """The loss as trained beside that of plain blocks, of those settings that were measured."""
    return [
        Figure("reversible", work, name, "loss at the start", "nats", *_beside(found[name]))
        for name in map(told, settings)
        if name in found
    ]


def _beside(pair: Sequence[float]) -> tuple[float, str, float]:
    return pair[0], PLAIN, pair[1]


def saved(found: Mapping[str, int], work: str) -> list[Figure]:
    """Bytes that a forward pass saves, of each way beside plain training and beside recomputation."""
    return [
        Figure("reversible", work, name, "saved", "bytes", count, peer, found[peer])
        for name, count in found.items()
        for peer in (PLAIN, RECOMPUTED)
        if name not in (PLAIN, peer)
    ]


def steps(taken: Mapping[str, Taken], work: str) -> list[Figure]:
    """Time and memory of each way beside plain training, and time and memory beside recomputation."""
    found: list[Figure] = []
    for name, own in taken.items():
        for peer in (PLAIN, RECOMPUTED):
            if name in (PLAIN, peer):
                continue
            beside = taken[peer]
            pairs = [
                (
                    "processor time",
                    "s a step",
                    *map(statistics.median, (own.seconds, beside.seconds)),
                ),
                ("peak memory", "bytes", own.peak_bytes, beside.peak_bytes),
            ]
            found += [
                Figure("reversible", work, name, metric, unit, value, peer, other)
                for metric, unit, value, other in pairs
            ]
    return found


def learnt(found: Mapping[str, dict[str, float] | None], work: str) -> list[Figure]:
    """Losses of whole runs over the same rows in the same order, of those that are there."""
    plain = found.get(PLAIN)
    return [
        Figure("reversible", work, name, metric, "nats", own[metric], PLAIN, plain[metric])
        for name, own in found.items()
        if own is not None and plain is not None and name != PLAIN
        for metric in own
    ]


if __name__ == "__main__":
    sys.exit(main())
