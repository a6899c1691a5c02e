"""Reversible blocks beside recomputation and beside plain training: what is saved, what it takes, what is learnt.

    python bench/reversible.py --data FOLDER --json reversible.json
    python bench/reversible.py --quick                        # few small steps, to see that it runs

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used. Every way trains LoRA of
rank 16 on all linears of SmolLM2-135M, in fp32 on one thread. Four things are measured:

* the loss at the start, as the blocks are mixed in training and with plain blocks, by side bits and by plain blocks;
* the bytes that one forward pass saves for backward, each piece of memory once, the model's own tensors left out;
* processor time of the median step, and the most memory a process held: each way in a process of its own, all making
  their steps in turns over the same rows;
* what is learnt: the loss over the last quarter of a run's steps, and afterwards of test rows by the plain model.

Where rows begin alike, plain training and one sign for each step compute the beginning once; with a sign for each row
they cannot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.beside import Taken, in_turns  # noqa: E402
from bench.kit.report import Figure, table, write_figures  # noqa: E402
from bench.kit.rows import make_rows, write_rows  # noqa: E402

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
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    size = Size(2, 1, 2, learnt=3, test=4) if options.quick else Size()
    model, rows, work = made_rows(options, size)
    figures: list[Figure] = []
    if options.part in (None, "start", "saved"):
        figures += in_process(options, size, rows, work)
        print(table(figures), flush=True)
    if options.part in (None, "steps"):
        with tempfile.TemporaryDirectory() as folder:
            jobs = {name: job(name, model, rows, size) for name in ways(options)}
            taken = in_turns(jobs, Path(folder), warm=size.warm, counted=size.counted)
        figures += steps(taken, work)
        print(table(figures))
    if options.part in (None, "learnt"):
        figures += learnt(ways(options), rows, size, work)
        print(table(figures))
    if options.json:
        write_figures(options.json, figures)
    return 0


def ways(options: argparse.Namespace) -> list[str]:
    """Those that are asked for, and what they are measured by."""
    asked = options.only or WAYS
    return [name for name in WAYS if name in (PLAIN, RECOMPUTED) or name in asked]


def made_rows(options: argparse.Namespace, size: Size) -> tuple[str, Path, str]:
    """(model's folder, file of the rows, name of the data)."""
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
    return model, file, rows.work


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


# --- in this process -------------------------------------------------------------------------------------------


def in_process(options: argparse.Namespace, size: Size, rows: Path, work: str) -> list[Figure]:
    """The losses at the start, and what a forward pass saves."""
    import torch

    import afina
    from afina.models.forward import packing
    from bench.kit.rows import read_rows

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, _ = afina.load(MODEL, dtype="fp32", device="cpu")
        sample = as_rows(read_rows(rows).train[: size.batch])
        found: list[Figure] = []
        with packing(model, True):
            if options.part != "saved":
                found += list(starts(model, sample, work, STARTS[-2:] if options.quick else STARTS))
            if options.part != "start":
                found += list(saved(model, sample, work))
        return found
    finally:
        torch.set_num_threads(before)


def as_rows(pairs: Sequence[tuple[list[int], list[int]]]) -> list[Any]:
    """Rows of ids and labels."""
    from afina.types import IGNORE, Row

    return [
        Row(tuple(ids), tuple(label != IGNORE for label in labels), number)
        for number, (ids, labels) in enumerate(pairs)
    ]


def starts(
    model: Any, rows: Sequence[Any], work: str, settings: Sequence[Mapping[str, Any]]
) -> Iterator[Figure]:
    """The loss as trained beside that of plain blocks."""
    import torch

    import afina
    from afina.techniques.reversible import pass_of

    for values in settings:
        edit = afina.apply(model, [afina.LoRA(rank=16), afina.Reversible(**values)])
        passes = way_through(edit, shared=False)
        batch = passes.batch(rows)
        with torch.no_grad():
            with pass_of(edit).off():
                plain = float(passes.loss(batch)) / batch.trained_tokens
            with pass_of(edit).shown():
                mixed = float(passes.loss(batch)) / batch.trained_tokens
        edit.undo()
        setting = ", ".join(f"{name} {value}" for name, value in values.items())
        yield Figure("reversible", work, setting, "loss at the start", "nats", mixed, PLAIN, plain)


def way_through(edit: Any, *, shared: bool) -> Any:
    """How rows go through the edit's model."""
    from afina.models.head import head_of
    from afina.train.passes import Passes

    return Passes(edit.model, True, shared, 0, head_of(edit.model))


def saved(model: Any, rows: Sequence[Any], work: str) -> Iterator[Figure]:
    """Bytes that a forward pass saves, of each way beside plain training."""
    found = {name: saved_bytes(model, rows, *way) for name, way in SAVED.items()}
    for name, count in found.items():
        for peer in (PLAIN, RECOMPUTED):
            if name not in (PLAIN, peer):
                yield Figure("reversible", work, name, "saved", "bytes", count, peer, found[peer])


def saved_bytes(
    model: Any, rows: Sequence[Any], beside: Mapping[str, Any], train: Mapping[str, Any]
) -> int:
    """Of one forward pass in which no row shares its beginning, so that all ways see the same tokens."""
    import torch

    import afina
    from afina.models.blocks import Blocks
    from afina.table import TECHNIQUES

    listed = [TECHNIQUES[key](**values) for key, values in beside.items()]
    edit = afina.apply(model, [afina.LoRA(rank=16), *listed])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            held[place] = tensor  # so that no other takes its place
        return tensor

    model.train()
    try:
        with Blocks(model, train.get("recompute", False)).running():
            passes = way_through(edit, shared=False)
            batch = passes.batch(rows)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                loss = passes.loss(batch)
            assert loss.requires_grad
        return sum(t.untyped_storage().nbytes() for t in held.values())
    finally:
        model.eval()
        edit.undo()


# --- in turns --------------------------------------------------------------------------------------------------


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


# --- what is learnt --------------------------------------------------------------------------------------------


def learnt(names: Sequence[str], rows: Path, size: Size, work: str) -> list[Figure]:
    """Losses of whole runs over the same rows in the same order; recomputing is plain training, bit for bit."""
    found = {name: run(rows, size, WAYS[name][0]) for name in names if name != RECOMPUTED}
    return [
        Figure("reversible", work, name, metric, "nats", own[metric], PLAIN, found[PLAIN][metric])
        for name, own in found.items()
        for metric in own
        if name != PLAIN
    ]


def run(rows: Path, size: Size, beside: Mapping[str, Any]) -> dict[str, float]:
    """One run; its losses."""
    import afina
    from afina.table import TECHNIQUES
    from afina.train.metrics import read_metrics
    from afina.train.report import Lines
    from bench.kit.rows import read_rows

    model, tokenizer = afina.load(MODEL, dtype="fp32", device="cpu")
    pairs = as_rows(read_rows(rows).train)
    train, test = pairs[: -size.test], pairs[-size.test :]
    listed = [TECHNIQUES[key](**values) for key, values in beside.items()]
    edit = afina.apply(model, [afina.LoRA(rank=16), *listed], undoable=False)
    options = afina.RunOptions(base=MODEL, reporter=Lines(sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        found = afina.train(
            model,
            tokenizer,
            train,
            edit,
            Path(folder) / "run",
            val=test,
            options=options,
            steps=size.learnt,
            rows_per_step=size.batch,
            lr=1e-3,
            threads=1,
            compile=False,
            save_every=None,
        )
        losses = [line["loss"] for line in read_metrics(found.folder)]
    return {
        "loss as trained, first step": losses[0],
        "loss as trained, last quarter": statistics.mean(losses[-max(1, len(losses) // 4) :]),
        "loss of test rows, plain model": found.scores["loss"],
    }


if __name__ == "__main__":
    sys.exit(main())
