"""What `bench/train.py` is asked for, and the parts that give the figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import llama
from .cache import cores, machine
from .peers import OTHERS, how_to_install, version_of
from .prompts import long_system
from .quality import Quality, verdicts
from .races import OURS, Race
from .report import Figure, table, write_figures
from .rows import Rows, make_rows
from .side import SideBySide, peers_folder
from .single import floor_figures, memory_figures, start_figures
from .variants import (
    FULL_LR,
    LARGE,
    QUICK,
    QUICK_LARGE,
    Variant,
    Windows,
    full_variants,
    heap_variants,
    large_variants,
    variants,
)

MODEL = "smollm2-135m"
TRAIN_ROWS, TEST_ROWS = 1920, 200
PARTS = ("windows", "peers", "memory", "floor", "full", "large", "start", "heap", "quality")
QUICK_PARTS = ("windows", "peers", "floor", "full", "start")
"""What `--quick` does unless one part is asked for."""


def parse(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="train.jsonl and test.jsonl (default: made); may be given several times",
    )
    add("--prompted", action="store_true", help="also each under a system prompt of 300 tokens")
    add(
        "--made",
        choices=("plain", "prompted"),
        action="append",
        help="beside the folders, the made rows, as they are or under that prompt",
    )
    add("--quick", action="store_true", help="short windows of small batches, and no long runs")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--work", type=Path, default=Path("runs/bench"), help="finished pieces are kept here")
    add("--only", choices=PARTS, help="leave the other parts out")
    tools = ("peer", "afina", *(other.key for other in OTHERS))
    add("--tool", choices=tools, help="run pieces of this tool only")
    add(
        "--setting",
        action="append",
        metavar="NAME",
        help="run pieces of this setting only (usual, default, expert, …); may be given several times",
    )
    add(
        "--rounds",
        type=int,
        metavar="N",
        help="windows of each setting (default: 5; of the large model and the floor 3)",
    )
    add(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="environments of further tools, by their names (default: WORK/peers)",
    )
    add("--seed", type=int, action="append", metavar="N", help="of quality runs (default: 0 and 1)")
    add("--cached", action="store_true", help="run nothing; take the newest of each piece")
    add("--threads", type=int, default=cores(), help="CPU threads of every tool")
    return parser.parse_args(arguments)


def bench(options: argparse.Namespace) -> int:
    """Runs what is asked for and not there yet, prints the table; 1 if a piece failed."""
    from transformers import AutoTokenizer

    from afina.models.hub import resolve
    from afina.models.precision import choose, fast_bf16

    print(f"{machine()}; {choose('cpu')}")
    model, fast = str(resolve(MODEL)), fast_bf16() is not None
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = parts(options)
    sides: list[SideBySide] = []
    if set(wanted) - {"large", "start"}:
        for folder, system in works(options):
            rows = make_rows(folder, tokenizer, TRAIN_ROWS, TEST_ROWS, system)
            sides.append(SideBySide(options, rows, model, fast))
    figures = list(of_works(sides, wanted))
    if "large" in wanted:
        if not options.cached:
            llama.make(options.work, options.threads)
        place = str(llama.place(options.work))
        sides.append(SideBySide(options, llama.random_rows(), place, fast))
        figures += large_race(sides[-1])
    if "start" in wanted:
        sides.append(SideBySide(options, Rows("requests", [], []), model, fast))
        figures += start_figures(sides[-1], made_folder(options) / "train.jsonl")
    figures = [f for f in figures if f.value is not None or f.peer_value is not None]
    print(table(figures) if figures else "nothing is there yet")
    for line in [*verdicts(figures), *(left_out(options) if "peers" in wanted else ())]:
        print(line)
    if options.json:
        write_figures(options.json, figures)
    return 1 if any(side.failures for side in sides) else 0


def parts(options: argparse.Namespace) -> tuple[str, ...]:
    """Which parts are done."""
    if options.only:
        return (options.only,)
    return QUICK_PARTS if options.quick else PARTS


def works(options: argparse.Namespace) -> Iterator[tuple[Path, str | None]]:
    """Each folder of rows, and the system prompt that they get."""
    folders = list(options.data or ([] if options.made else [made_folder(options)]))
    for folder in folders:
        yield folder, None
        if options.prompted:
            yield folder, long_system()
    for kind in options.made or ():
        yield made_folder(options), None if kind == "plain" else long_system()


def made_folder(options: argparse.Namespace) -> Path:
    """A folder of generated requests."""
    from demo.calls import write

    folder = options.work / "requests"
    write(folder, train=TRAIN_ROWS, test=TEST_ROWS)
    return folder


def left_out(options: argparse.Namespace) -> Iterator[str]:
    """A line for each tool that is not installed."""
    folder = peers_folder(options)
    for other in OTHERS:
        if version_of(other, folder) is None:
            yield f"{other.name} is left out; to have it: {how_to_install(other, folder)}"


# --- the parts ---


def of_works(sides: Sequence[SideBySide], wanted: Sequence[str]) -> Iterator[Figure]:
    """The parts that every set of rows has."""
    makers = {"windows": windows_race, "peers": peers_race, "full": full_race}
    for part, make in makers.items():
        if part in wanted:
            yield from raced([make(side) for side in sides])
    if "heap" in wanted:
        yield from raced([race for side in sides for race in heap_races(side)])
    for side in sides:
        if "memory" in wanted:
            yield from memory_figures(side)
        if "floor" in wanted:
            yield from floor_figures(side, usual_size(side))
        if "quality" in wanted:
            yield from Quality(side).figures()


def raced(races: Sequence[Race]) -> Iterator[Figure]:
    """The figures of races whose rounds take turns, so that one that is stopped has as many windows as the others."""
    for window in range(max((race.size.count for race in races), default=0)):
        for race in races:
            race.round(window)
    for race in races:
        yield from race.figures()


def usual_size(side: SideBySide) -> Windows:
    """Of windows."""
    return QUICK if side.options.quick else Windows()


def windows_race(side: SideBySide) -> Race:
    """LoRA beside both settings of the usual peer."""
    return Race(side, "window", variants(side.fast_bf16), usual_size(side), shares=True)


def peers_race(side: SideBySide) -> Race:
    """LoRA beside the further tools, near their defaults; afina's windows are those of the other race."""
    ours = next(each for each in variants(side.fast_bf16) if each.setting == OURS)
    dtype = ours.knobs["dtype"]
    further = [
        Variant(key, key, {"dtype": dtype, "group_by_length": False, **other.knobs})
        for key, other in side.others.items()
    ]
    names = {key: other.name for key, other in side.others.items()}
    return Race(side, "window", [ours, *further], usual_size(side), peers=names)


def full_race(side: SideBySide) -> Race:
    """Full fine-tuning beside the expert's."""
    every, more = full_variants(side.fast_bf16), {"lr": FULL_LR}
    return Race(side, "full", every, usual_size(side), label="full", more=more)


def heap_races(side: SideBySide) -> list[Race]:
    """LoRA and full fine-tuning beside themselves with an allocator that gives nothing back."""
    kinds: dict[str, dict[str, Any]] = {"lora": {}, "full": {"lr": FULL_LR}}
    return [
        Race(
            side,
            f"heap-{method}",
            heap_variants(side.fast_bf16, method),
            usual_size(side),
            label=method,
            peers={"kept heap": "afina"},
            more=more,
        )
        for method, more in kinds.items()
    ]


def large_race(side: SideBySide) -> Iterator[Figure]:
    """LoRA on the large model, one row in a pass, beside the expert's."""
    size = QUICK_LARGE if side.options.quick else LARGE
    return raced([Race(side, "window", large_variants(side.fast_bf16), size)])
