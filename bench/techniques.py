"""What each technique takes beside plain LoRA: time and memory of a step, and the loss, on SmolLM2 and real rows.

    python bench/techniques.py --data FOLDER --json techniques.json --plot techniques.svg
    python bench/techniques.py --data FOLDER --only reversible     # some; a rerun goes on where the last one stopped
    python bench/techniques.py --data FOLDER --cached --markdown   # run nothing: the table that is there
    python bench/techniques.py --quick                             # few small steps of each, to see that they run

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used. Every way trains LoRA of
rank 16 on all linears unless its name says otherwise, in fp32 on one thread, in a process of its own. A few of them and
the baseline make their steps in turns: processor time is that of the median step, memory the most that the process
held, both as ratios to the baseline's in the same turns. The rows are those of two steps, which come again and again:
so cached inputs are used, and a loss after few steps differs from the baseline's by what the technique changes.

On the frontier of the plot is what no other way beats in both time and memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.beside import Cost, in_turns  # noqa: E402
from bench.kit.cache import model_hash  # noqa: E402
from bench.kit.columns import barred, spaced  # noqa: E402
from bench.kit.points import frontier, scatter  # noqa: E402
from bench.kit.report import Figure, write_figures  # noqa: E402
from bench.kit.results import Results, commit  # noqa: E402
from bench.kit.rows import content_hash, make_rows, write_rows  # noqa: E402

MODEL = "smollm2-135m"
BASELINE = "lora"
LORA: dict[str, Any] = {"lora": {"rank": 16}}
UPPER: dict[str, Any] = {"lora": {"rank": 16, "layers": "20-29"}}
TOGETHER = 3
"""Ways that take turns with one run of the baseline."""


@dataclass(frozen=True)
class Way:
    """A way to run a training step.

    Attributes:
        beside: techniques beside LoRA.
        train: settings of the run.
        base: in the place of LoRA.
    """

    beside: dict[str, Any] = field(default_factory=dict[str, Any])
    train: dict[str, Any] = field(default_factory=dict[str, Any])
    base: dict[str, Any] = field(default_factory=lambda: LORA)

    @property
    def techniques(self) -> list[dict[str, Any]]:
        """As a run's configuration lists them."""
        return [{key: values} for key, values in {**self.base, **self.beside}.items()]


WAYS: dict[str, Way] = {
    BASELINE: Way(),
    "reversible": Way({"reversible": {}}),
    "recompute": Way(train={"recompute": True}),
    "recompute, selective": Way(train={"recompute": "selective"}),
    "token pruning, random": Way({"token_pruning": {"keep": 0.5, "score": "random"}}),
    "token pruning, predictor": Way({"token_pruning": {"keep": 0.5, "score": "predictor"}}),
    "token pruning, loss": Way({"token_pruning": {"keep": 0.5, "score": "loss"}}),
    "upper ten blocks": Way(base=UPPER),
    "upper ten blocks, inputs cached": Way(base=UPPER, train={"cache_inputs_gib": 1.0}),
    "one row at a time": Way(train={"micro_rows": 1}),
    "layer decay": Way({"layer_decay": {}}),
    "gradient noise": Way({"gradient_noise": {}}),
    "curriculum": Way({"curriculum": {"start": 0.5}}),
    "growing rows": Way({"curriculum": {"pacing": "length", "min_tokens": 32}}),
    "nf4 base": Way({"quantize": {}}),
    "full": Way(base={"full": {}}),
    "full, steps in backward": Way(
        base={"full": {}}, train={"step_in_backward": True, "clip": None}
    ),
    "recompute, one row at a time": Way(train={"recompute": True, "micro_rows": 1}),
    "reversible, pruned": Way(
        {"reversible": {}, "token_pruning": {"keep": 0.5, "score": "random"}}
    ),
}
"""In the order in which they are run."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        batch: rows of a step.
        warm, counted: steps of each way.
    """

    batch: int = 4
    warm: int = 3
    counted: int = 5


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--quick", action="store_true", help="few small steps of each, kept apart")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw memory against time there")
    add("--markdown", action="store_true", help="print the table as the documentation has it")
    add("--work", type=Path, default=Path("runs/bench"), help="rows are kept here")
    add("--results", type=Path, default=ROOT / "bench/results/techniques", help="of each way")
    add("--only", action="append", choices=tuple(WAYS), help="this way (may be repeated)")
    add("--cached", action="store_true", help="run nothing; take what is there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 unless a way failed."""
    options = parse(arguments)
    size = Size()
    if options.quick:
        size, options.results = Size(batch=2, warm=3, counted=2), options.work / "quick"
    given = None if options.cached else made_rows(options, size)
    bench = Bench(options, size, options.data.name if options.data else "requests", given)
    bench.run()
    found = {name: cost for name in WAYS if (cost := bench.cost(name)) is not None}
    print("\n".join(lines(found, markdown=options.markdown)))
    if options.json:
        write_figures(options.json, figures(found, bench.name))
    if options.plot:
        points = {name: (cost.time, cost.memory) for name, cost in found.items()}
        scatter(
            options.plot,
            points,
            x="processor time of a step, as a ratio to LoRA's",
            y="peak memory, as a ratio to LoRA's",
            marked=frontier(points),
        )
    return 1 if bench.failures else 0


def made_rows(options: argparse.Namespace, size: Size) -> tuple[str, Path, str]:
    """(model's folder, file of the rows, key of both)."""
    from transformers import AutoTokenizer

    from afina.models.hub import resolve

    wanted = (size.warm + size.counted) * size.batch
    folder = options.data
    if folder is None:
        from demo.calls import write

        folder = options.work / "requests"
        write(folder, train=wanted, test=1)
    model = str(resolve(MODEL))
    rows = make_rows(folder, AutoTokenizer.from_pretrained(model), wanted, 1)
    file = options.work.resolve() / f"rows-{rows.hash}.json"
    write_rows(file, rows)
    return model, file, content_hash([rows.hash, model_hash(model)])


class Bench:
    """The ways over one set of rows.

    Args:
        options: of the command line.
        size: how much is measured.
        name: of the data.
        given: model, rows and their key; None where nothing is run.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        size: Size,
        name: str,
        given: tuple[str, Path, str] | None,
    ) -> None:
        self.options, self.size, self.name, self.given = options, size, name, given
        self.results = Results(options.results, cached=given is None)
        self.failures: list[str] = []
        self._commit = commit()

    def run(self) -> None:
        """What is asked for and not there yet."""
        if self.given is None:
            return
        left = [name for name in self.options.only or WAYS if self.cost(name) is None]
        for at in range(0, len(left), TOGETHER):
            self._measure(left[at : at + TOGETHER])

    def cost(self, name: str) -> Cost | None:
        """What a step of a way takes."""
        job = self.job(name)
        found = self.results.read(self._file(name), job, self._key(job))
        return None if found is None else Cost(**found)

    def job(self, name: str) -> dict[str, Any]:
        """What is measured of a way, beside the baseline."""
        techniques = {"techniques": WAYS[name].techniques, "beside": WAYS[BASELINE].techniques}
        return {**techniques, "train": WAYS[name].train, **asdict(self.size), "dtype": "fp32"}

    def _file(self, name: str) -> str:
        return f"{self.name}-{name.replace(', ', '-').replace(' ', '-')}"

    def _key(self, job: dict[str, Any]) -> str:
        return content_hash([job, self.given[2] if self.given else ""])

    def _measure(self, names: Sequence[str]) -> None:
        """Some ways, and the baseline, in turns; where one fails, the others are made without it."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                taken = in_turns(
                    {name: self._stepping(name) for name in dict.fromkeys([*names, BASELINE])},
                    Path(folder),
                    warm=self.size.warm,
                    counted=self.size.counted,
                )
        except RuntimeError as error:
            if len(names) > 1:
                for name in names:
                    self._measure([name])
                return
            print(f"  {names[0]} failed: {error}", flush=True)
            self.failures.append(names[0])
            return
        for name in names:
            job, cost = self.job(name), Cost.of(taken[name], taken[BASELINE])
            self.results.write(self._file(name), job, self._key(job), asdict(cost), self._commit)
            print(f"  {name}: time {cost.time:.2f}, memory {cost.memory:.2f}", flush=True)

    def _stepping(self, name: str) -> dict[str, Any]:
        assert self.given is not None
        model, rows, _ = self.given
        steps = {"epoch_steps": 2, "lr": 1e-4 if "full" in WAYS[name].base else 1e-3, "seed": 0}
        how = {"model": model, "rows": str(rows), "threads": 1, "max_new_tokens": 1}
        return {**self.job(name), **steps, **how}


def lines(found: dict[str, Cost], *, markdown: bool = False) -> Iterator[str]:
    """The table, and what it lacks."""
    on = frontier({name: (cost.time, cost.memory) for name, cost in found.items()})
    head = ("way", "step time", "peak memory", "loss", "LoRA's loss", "frontier")
    rows = [
        (
            name,
            f"{cost.time:.2f}",
            f"{cost.memory:.2f}",
            f"{cost.losses[-1]:.3f}",
            f"{cost.beside_losses[-1]:.3f}",
            "yes" if name in on else "",
        )
        for name, cost in sorted(found.items(), key=lambda each: each[1].memory)
    ]
    yield from barred(head, rows) if markdown else spaced(head, rows)
    left = [name for name in WAYS if name not in found]
    if left:
        yield f"not measured yet: {'; '.join(left)}"


def figures(found: dict[str, Cost], work: str) -> list[Figure]:
    """The rows of the JSON file."""
    return [
        Figure("techniques", work, name, metric, unit, own, BASELINE, beside)
        for name, cost in found.items()
        for metric, unit, own, beside in [
            *cost.pairs(),
            ("loss, first step", "nats", cost.losses[0], cost.beside_losses[0]),
            ("loss, last step but one", "nats", cost.losses[-1], cost.beside_losses[-1]),
        ]
    ]


if __name__ == "__main__":
    sys.exit(main())
