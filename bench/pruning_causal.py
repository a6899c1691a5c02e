"""What pruning tokens gains and costs a decoder: time of a step, and the loss after equal tokens and equal time.

    python bench/pruning_causal.py --json pruning_causal.json
    python bench/pruning_causal.py --data FILE --steps 60    # rows of another text
    python bench/pruning_causal.py --cached                  # run nothing: the table of what is there
    python bench/pruning_causal.py --quick                   # two steps of each, to see that they run

Every way trains the same LoRA of rank 16 on SmolLM2-135M, over the same rows of 1,024 tokens in the same order, in fp32
on one thread. They take turns, a step each, so that what the machine does meanwhile meets all of them; what is counted
is processor time. The rows are Python source, of the standard library that runs this script: every way is measured on
other files than it is trained on, and always whole, as a decoder is asked. *Equal tokens* is the loss at the end.
*Equal time* is that of whole rows when they had taken as long as the way took in all, between two measurements in
proportion. *random* is the control: as many tokens are kept, but any. One seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.columns import barred, spaced  # noqa: E402
from bench.kit.report import Figure, write_figures  # noqa: E402
from bench.kit.results import Results, commit  # noqa: E402
from bench.kit.rows import content_hash  # noqa: E402

MODEL = "smollm2-135m"
WHOLE = "whole rows"
WAYS: dict[str, dict[str, Any] | None] = {
    WHOLE: None,
    "predictor": {"score": "predictor"},
    "loss": {"score": "loss"},
    "random": {"score": "random"},
}
"""Way -> settings of token pruning beside keep; None is none."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        tokens: of a row.
        steps: of each way, of one row each.
        every: steps between two measurements of the loss.
        held: rows that it is measured on.
        keep: share of the tokens kept.
    """

    tokens: int = 1024
    steps: int = 40
    every: int = 8
    held: int = 6
    keep: float = 0.5


@dataclass
class Taken:
    """What a way took.

    Attributes:
        seconds: of processor time, step by step.
        losses: on the rows that are held out, by steps done; 0 is before the first.
    """

    seconds: list[float] = field(default_factory=list[float])
    losses: dict[int, float] = field(default_factory=dict[int, float])

    def step_s(self) -> float:
        """Of the median step; the first, in which thresholds are found, is left out."""
        return statistics.median(self.seconds[1:])

    def dearest(self, whole: Taken) -> float:
        """The most that a step takes of the step of whole rows in the same turn, the first left out."""
        turns = zip(self.seconds[1:], whole.seconds[1:], strict=True)
        return max(own / beside for own, beside in turns)

    def loss_after(self, seconds: float) -> float:
        """The loss when so much time had been taken, between two measurements in proportion."""
        done = sorted(self.losses)
        times = [sum(self.seconds[:step]) for step in done]
        for number in range(1, len(done)):
            before, after = times[number - 1], times[number]
            if seconds <= after:
                share = (seconds - before) / (after - before)
                first, last = (self.losses[done[n]] for n in (number - 1, number))
                return first + share * (last - first)
        return self.losses[done[-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    size = Size(steps=options.steps, keep=options.keep)
    if options.quick:
        size = Size(tokens=128, steps=2, every=1, held=1)
        options.results = options.work / "quick"
    results = Results(options.results, cached=options.cached)
    text = None if options.cached else text_of(options.data)
    job = {**asdict(size), "ways": WAYS, "data": "own" if options.data else "library"}
    key = content_hash([job, text])
    name = f"{job['data']}-{size.keep}"
    found = results.read(name, job, key)
    if found is None and text is not None:
        found = {way: asdict(taken) for way, taken in measure(text, size).items()}
        results.write(name, job, key, found, commit())
    if found is None:
        print("nothing was measured yet")
        return 1
    taken = {
        way: Taken(one["seconds"], {int(n): loss for n, loss in one["losses"].items()})
        for way, one in found.items()
    }
    print("\n".join(lines(taken, markdown=options.markdown)))
    if options.json:
        write_figures(options.json, figures(taken, name))
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="a text (default: Python's standard library)")
    add("--steps", type=int, default=Size.steps, help="of each way")
    add("--keep", type=float, default=Size.keep, help="share of the tokens kept")
    add("--quick", action="store_true", help="two short steps of each way, kept apart")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--markdown", action="store_true", help="print the table as the documentation has it")
    add("--work", type=Path, default=Path("runs/bench"), help="results of --quick are kept here")
    add("--results", type=Path, default=ROOT / "bench/results/pruning_causal", help="the others")
    add("--cached", action="store_true", help="run nothing; take what is there")
    return parser.parse_args(arguments)


def text_of(file: Path | None) -> str:
    """The text that rows are cut from: modules of the standard library, every seventh in the order of their names."""
    if file is not None:
        return file.read_text(encoding="utf-8")
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n\n".join(module.read_text(encoding="utf-8") for module in modules[::7])


# --- measuring -----------------------------------------------------------------------------------------------------


def measure(text: str, size: Size) -> dict[str, Taken]:
    """All ways, in turns."""
    import torch

    import afina
    from afina.types import Row

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded, tokenizer = afina.load(MODEL, dtype="fp32", device="cpu")
    model: Any = loaded
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    wanted = size.steps + size.held
    cuts = [tuple(ids[at : at + size.tokens]) for at in range(0, len(ids), size.tokens)]
    flags = tuple(place > 0 for place in range(size.tokens))
    # Rows that are held out come from the end of the text, of other files.
    rows = [
        Row(cut, flags, n)
        for n, cut in enumerate([*cuts[: size.steps], *cuts[-1 - size.held : -1]])
    ]
    if len(cuts) <= wanted:
        raise SystemExit(f"the text is too short: {len(cuts)} rows, and {wanted} are needed")
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        ways = {
            name: stepper(stack, model, settings, rows, size) for name, settings in WAYS.items()
        }
        taken = {name: Taken() for name in ways}
        in_turns(ways, taken, size)
    return taken


Stepper = tuple[Iterator[object], Callable[[], float]]


def stepper(
    stack: ExitStack, model: Any, settings: dict[str, Any] | None, rows: Sequence[Any], size: Size
) -> Stepper:
    """The steps of one way, and what measures its loss.

    Args:
        stack: closes what is opened.
        model: copied for this way.
        settings: of token pruning; None is none.
        rows: a step each, and then those that are held out.
        size: how much is measured.
    """
    import copy

    import afina
    from afina.config import TrainSettings
    from afina.models.blocks import Blocks
    from afina.models.forward import packing
    from afina.models.head import head_of
    from afina.parallel.runtime import OneProcess
    from afina.techniques.token_pruning import TokenPruning
    from afina.train.loop import loop
    from afina.train.passes import Passes
    from afina.train.plan import optimiser_of
    from afina.train.validate import mean_loss
    from afina.train.work import Work

    mine = copy.deepcopy(model)
    beside = [] if settings is None else [TokenPruning(keep=size.keep, **settings)]
    edit = afina.apply(mine, [afina.LoRA(rank=16), *beside])
    chosen = TrainSettings(steps=size.steps, lr=1e-3, schedule="constant", warmup_steps=0)
    seams = edit.seams(size.steps)
    stack.enter_context(packing(mine, True))
    stack.enter_context(Blocks(mine).running())
    passes = Passes(mine, True, False, 0, head_of(mine))
    mine.train()
    work = Work(
        mine,
        edit,
        optimiser_of(edit, chosen, seams),
        chosen,
        lambda some: [list(some)],
        passes,
        OneProcess(),
        seams,
        size.steps,
        0,
    )
    held = [[row] for row in rows[size.steps :]]
    steps = loop(work, iter([[row] for row in rows[: size.steps]]))
    return steps, lambda: mean_loss(mine, held, passes)


def in_turns(ways: dict[str, Stepper], taken: dict[str, Taken], size: Size) -> None:
    """A step of each way after the other, beginning with another each time."""
    names = list(ways)
    for step in range(size.steps + 1):
        if step % size.every == 0 or step == size.steps:
            for name, (_, loss) in ways.items():
                taken[name].losses[step] = loss()
            shown = "  ".join(f"{name} {taken[name].losses[step]:.4f}" for name in names)
            print(f"  step {step}: {shown}", flush=True)
        if step == size.steps:
            return
        first = step % len(names)
        for name in names[first:] + names[:first]:
            began = time.process_time()
            next(ways[name][0])
            taken[name].seconds.append(time.process_time() - began)


# --- what it came to ---------------------------------------------------------------------------------------------


def lines(taken: dict[str, Taken], *, markdown: bool = False) -> Iterator[str]:
    """The table."""
    whole = taken[WHOLE]
    end = max(whole.losses)
    head = ("way", "step time", "loss after equal tokens", "of whole rows after equal time")
    rows = [
        (
            name,
            f"{one.step_s() / whole.step_s():.2f}",
            f"{one.losses[end]:.3f}",
            f"{whole.loss_after(sum(one.seconds)):.3f}",
        )
        for name, one in taken.items()
    ]
    yield from barred(head, rows) if markdown else spaced(head, rows)
    yield f"before training: {whole.losses[0]:.3f}; after {end} steps of one row"
    most = ", ".join(f"{n} {one.dearest(whole):.2f}" for n, one in taken.items() if n != WHOLE)
    yield f"the dearest step after the first, beside that of whole rows: {most}"


def figures(taken: dict[str, Taken], work: str) -> list[Figure]:
    """The rows of the JSON file."""
    whole = taken[WHOLE]
    end = max(whole.losses)
    made: list[Figure] = []
    for name, one in taken.items():
        for metric, unit, own, beside in (
            ("processor time of a step", "s", one.step_s(), whole.step_s()),
            ("loss after equal tokens", "nats", one.losses[end], whole.losses[end]),
            ("loss after equal time", "nats", one.losses[end], whole.loss_after(sum(one.seconds))),
        ):
            made.append(Figure("pruning_causal", work, name, metric, unit, own, WHOLE, beside))
    return made


if __name__ == "__main__":
    sys.exit(main())
