"""Every method on the same rows: what it trains, what it learns, what a step of it takes beside LoRA's.

    python bench/methods.py --data FOLDER                          # SmolLM2 answers the rows in words
    python bench/methods.py --data FOLDER --model minilm-l6-v2     # MiniLM gives each row its class
    python bench/methods.py --data FOLDER --only lora --only dora  # some methods
    python bench/methods.py --data FOLDER --part cost              # only time and memory
    python bench/methods.py --data FOLDER --cached --markdown      # run nothing: the table that is there
    python bench/methods.py --quick                                # a few steps of each, to see that they run

FOLDER holds `train.jsonl` and `test.jsonl`; without it the demo's generated requests are used.

*Quality*: each method trains at two learning rates on equal rows in equal steps, seed 0, linear to 0 without warm-up;
the rate with the better score on the test rows is shown. Once all are there, the best six run again with seed 1. A new
head learns at one rate beside every method, which is as much higher as it has to learn more.
SmolLM2's frozen weights are in bf16, which wants a CPU that multiplies it itself, and MiniLM's in fp32. What trains is
fp32, or has a master in it.
*Cost*: a few steps of each method take turns with LoRA's, each in a process of its own, on one thread: processor time
of the median step and the most memory that the process held, both as ratios to LoRA's.

A finished result is a small file in `--results`, which git keeps: it is made once for its method, rate, seed, rows and
model, on any machine, and a rerun goes on where the last one stopped. Delete a file to make it again; the commit and
the machine that made it stand in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.kit.cache import cores  # noqa: E402
from bench.kit.contest import Contest, Rows  # noqa: E402
from bench.kit.report import write_figures  # noqa: E402
from bench.kit.standing import figures, lines, missing, plot  # noqa: E402
from bench.kit.works import METHODS, WORKS, Work, quick  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="train.jsonl and test.jsonl (default: made)")
    add("--model", choices=tuple(WORKS), default="smollm2-135m", help="and so the work")
    add("--quick", action="store_true", help="a few small steps of each, kept apart")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw the score against memory there")
    add("--markdown", action="store_true", help="print the table as the documentation has it")
    add("--work", type=Path, default=Path("runs/bench"), help="unfinished runs are kept here")
    add("--results", type=Path, default=ROOT / "bench/results/methods", help="finished ones here")
    add("--only", action="append", choices=tuple(METHODS), help="this method (may be repeated)")
    add("--part", choices=("quality", "cost"), help="leave the other part out")
    add("--cached", action="store_true", help="run nothing; take what is there")
    add("--threads", type=int, default=cores(), help="CPU threads of quality runs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 unless a run failed."""
    options = parse(arguments)
    work = WORKS[options.model]
    if options.quick:
        work, options.results = quick(work), options.work / "quick"
    rows = None if options.cached else made_rows(options, work)
    name = rows.work if rows else (options.data.name if options.data else "requests")
    contest = Contest(options, work, name, rows)
    if rows:
        contest.run()
    found = contest.standings(METHODS)
    print("\n".join(lines(found, work.score, markdown=options.markdown)))
    for line in missing(found):
        print(line)
    if options.json:
        write_figures(options.json, figures(found, name, work.score))
    if options.plot:
        plot(found, options.plot, work.score)
    return 1 if contest.failures else 0


def made_rows(options: argparse.Namespace, work: Work) -> Rows:
    """The rows of the data, written where the runs read them."""
    from afina.models.hub import resolve

    folder = options.data
    if folder is None:
        from demo.calls import write

        folder = options.work / "requests"
        write(folder, train=work.train_rows, test=work.test_rows)
    model = str(resolve(options.model))
    return Rows.of(folder, model, work, options.work.resolve())


if __name__ == "__main__":
    sys.exit(main())
