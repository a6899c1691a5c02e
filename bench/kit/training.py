"""The pieces of `bench/train.py`: which jobs there are, and the figures made from what they leave."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .answers import score
from .cache import cores, job_key, machine, model_hash, tool_version
from .jobs import Job, write_json
from .meter import last_tenth_loss, read_notes, tokens_per_second
from .peers import OTHERS, Other, how_to_install, python_of, version_of
from .pieces import newest, result_of, run_piece
from .prompts import long_system
from .report import Figure, table, write_figures
from .rows import Rows, content_hash, make_rows, shared_share, write_rows

MODEL = "smollm2-135m"
TRAIN_ROWS, TEST_ROWS, STEPS = 1920, 200, 120
MAX_NEW_TOKENS = 96
PEER = "Trainer + PEFT"


@dataclass(frozen=True)
class Windows:
    """How speed is measured: so many windows of so many steps of `batch` rows, after `warm` steps not counted."""

    count: int = 5
    steps: int = 20
    warm: int = 3
    batch: int = 16


QUICK = Windows(count=2, steps=3, warm=1, batch=4)


@dataclass(frozen=True)
class Variant:
    """A tool with one of its settings."""

    tool: str
    setting: str
    knobs: dict[str, Any]


def variants(fast_bf16: bool) -> list[Variant]:
    """What is measured, in the order of a round of windows."""
    dtype = "bfloat16" if fast_bf16 else "float32"
    usual = {
        "dtype": dtype,
        "attention": "sdpa",
        "autocast_adapter": True,
        "compile": False,
        "group_by_length": False,
        "pad_to": None,
        "keep_heap": False,
    }
    expert = {
        "dtype": dtype,
        "attention": "eager",
        "autocast_adapter": False,
        "compile": True,
        "group_by_length": True,
        "pad_to": 32,
        "keep_heap": True,
    }
    return [
        Variant("peer", "usual", usual),
        Variant("afina", "default", {"dtype": dtype}),
        Variant("peer", "expert", expert),
    ]


def for_quality(variant: Variant, batch: int) -> Variant:
    """The variant with equal batches, and without what changes only speed and memory."""
    if variant.tool == "afina":
        return variant
    changes = {
        "compile": False,
        "group_by_length": False,
        "pad_to": None,
        "keep_heap": True,
        "micro": max(1, batch // 4),
    }
    return replace(variant, knobs={**variant.knobs, **changes})


def quality_variants(fast_bf16: bool, batch: int = 16) -> list[Variant]:
    """Those whose result can differ: in fp32 the expert's numbers are the usual ones."""
    every = [for_quality(each, batch) for each in variants(fast_bf16)]
    return [each for each in every if fast_bf16 or each.setting != "expert"]


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
    add("--quick", action="store_true", help="short windows of small batches, and no quality runs")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--work", type=Path, default=Path("runs/bench"), help="finished pieces are kept here")
    add("--only", choices=("windows", "quality"), help="leave the other part out")
    tools = ("peer", "afina", *(other.key for other in OTHERS))
    add("--tool", choices=tools, help="run pieces of this tool only")
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
    model = resolve(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(model)
    figures: list[Figure] = []
    failures: list[str] = []
    for folder, system in works(options):
        rows = make_rows(folder, tokenizer, TRAIN_ROWS, TEST_ROWS, system)
        side = SideBySide(options, rows, str(model), fast_bf16() is not None)
        write_rows(side.rows_file, rows)
        figures += side.figures()
        failures += side.failures
    print(table(figures) if figures else "nothing is there yet")
    for line in [*verdicts(figures), *left_out(options)]:
        print(line)
    if options.json:
        write_figures(options.json, figures)
    return 1 if failures else 0


def works(options: argparse.Namespace) -> Iterator[tuple[Path, str | None]]:
    """Each folder of rows, and the system prompt that they get."""
    for folder in options.data or [made_folder(options)]:
        yield folder, None
        if options.prompted:
            yield folder, long_system()


def made_folder(options: argparse.Namespace) -> Path:
    """A folder of generated requests."""
    from demo.calls import write

    folder = options.work / "requests"
    write(folder, train=TRAIN_ROWS, test=TEST_ROWS)
    return folder


def peers_folder(options: argparse.Namespace) -> Path:
    """Where the environments of further tools are."""
    return options.peers or options.work / "peers"


def left_out(options: argparse.Namespace) -> Iterator[str]:
    """A line for each tool that is not installed."""
    if options.only == "quality":
        return
    folder = peers_folder(options)
    for other in OTHERS:
        if version_of(other, folder) is None:
            yield f"{other.name} is left out; to have it: {how_to_install(other, folder)}"


class SideBySide:
    """The pieces of one bench over one set of rows.

    Args:
        options: of the command line.
        rows: to train and test on.
        model: its folder.
        fast_bf16: whether this CPU multiplies bf16 itself.
    """

    def __init__(
        self, options: argparse.Namespace, rows: Rows, model: str, fast_bf16: bool
    ) -> None:
        self.options, self.rows, self.model, self.fast_bf16 = options, rows, model, fast_bf16
        self.work = options.work.resolve()
        self.rows_file = self.work / f"rows-{rows.hash}.json"
        self.windows = QUICK if options.quick else Windows()
        self.seeds = options.seed or [0, 1]
        self.failures: list[str] = []

    @cached_property
    def model_hash(self) -> str:
        """Fingerprint of the base model."""
        return model_hash(self.model)

    @cached_property
    def others(self) -> dict[str, Other]:
        """The further tools that are installed, by key; where nothing is run, all of them."""
        folder, cached = peers_folder(self.options), self.options.cached
        return {each.key: each for each in OTHERS if cached or version_of(each, folder) is not None}

    @cached_property
    def versions(self) -> dict[str, str]:
        """Each tool's version, as it was when the bench began."""
        found = {tool: tool_version(tool) for tool in ("peer", "afina")}
        folder = peers_folder(self.options)
        return found | {key: version_of(each, folder) or "" for key, each in self.others.items()}

    def figures(self) -> Iterator[Figure]:
        """All figures that either side has, running what is wanted for them."""
        found: list[Figure] = []
        if self.options.only != "quality":
            found += self.speed_figures()
        if self.options.only != "windows" and not self.options.quick:
            found += self.quality_figures()
        return (f for f in found if f.value is not None or f.peer_value is not None)

    # --- speed and memory ---

    def speed_figures(self) -> Iterator[Figure]:
        """Medians over the windows, afina's beside each setting of the peer and beside each further tool."""
        found: dict[str, list[tuple[float, float]]] = {}
        dtype = variants(self.fast_bf16)[0].knobs["dtype"]
        further = [
            Variant(key, key, {"dtype": dtype, "group_by_length": False, **other.knobs})
            for key, other in self.others.items()
        ]
        for window in range(self.windows.count):
            for variant in [*variants(self.fast_bf16), *further]:
                folder = self.train(self.window_job(variant, window), f"window{window}")
                if folder is not None:
                    found.setdefault(variant.setting, []).append(self.speed(folder))
        ours = found.get("default", [])
        if ours:
            size = self.windows
            share = shared_share(self.rows, size.batch, size.steps)
            yield self.figure("", "tokens left by shared beginnings", "share", share, None)
        peers = {"usual": PEER, "expert": PEER, **{k: each.name for k, each in self.others.items()}}
        for setting, peer in peers.items():
            theirs = found.get(setting, [])
            if setting in self.others and not theirs:
                continue
            for at, (metric, unit) in enumerate((("speed", "tokens/s"), ("peak memory", "GiB"))):
                values = [[each[at] for each in side] for side in (ours, theirs)]
                yield self.figure(setting, metric, unit, *map(_median, values), peer=peer)
                yield self.figure(
                    setting, f"{metric}, lowest window", unit, *map(_least, values), peer=peer
                )
                yield self.figure(
                    setting, f"{metric}, highest window", unit, *map(_most, values), peer=peer
                )

    def window_job(self, variant: Variant, window: int) -> Job:
        """The job of one window: other rows in each, the same for all tools."""
        size = self.windows
        knobs = dict(variant.knobs)
        if variant.tool != "afina":
            knobs["micro"] = size.batch
        return self.job(
            replace(variant, knobs=knobs), window, size.warm + size.steps, size.warm, size.batch
        )

    def speed(self, folder: Path) -> tuple[float, float]:
        """Real tokens a second, and peak GiB."""
        result = result_of(folder)
        assert result is not None
        speed = tokens_per_second(read_notes(folder), self.windows.warm)
        return speed, result["peak_bytes"] / 2**30

    # --- quality ---

    def quality_figures(self) -> Iterator[Figure]:
        """Of each seed, afina's beside each setting of the peer that can differ."""
        for seed in self.seeds:
            found = {
                variant.setting: self.quality(variant, seed)
                for variant in quality_variants(self.fast_bf16)
            }
            ours = found.pop("default")
            for setting, theirs in found.items():
                for metric, unit in dict.fromkeys([*ours, *theirs]):
                    values = (side.get((metric, unit)) for side in (ours, theirs))
                    yield self.figure(f"{setting}, seed {seed}", metric, unit, *values)

    def quality(self, variant: Variant, seed: int) -> dict[tuple[str, str], float]:
        """(metric, unit) -> value of one full run; empty when it is not there."""
        job = self.job(variant, seed, STEPS, 0, 16)
        folder = self.train(replace(job, save=True), "quality")
        if folder is None:
            return {}
        notes = read_notes(folder)
        figures = {
            ("loss, first step", "nats"): float(notes[0]["loss"]),
            ("loss, last tenth", "nats"): last_tenth_loss(notes),
        }
        answers = self.answers(variant, folder, seed)
        if answers is not None:
            references = [row["reference"] for row in self.rows.test]
            for name, (share, error) in score(answers, references).items():
                figures[name, "share"] = share
                figures[f"{name}, standard error", "share"] = error
        return figures

    def answers(self, variant: Variant, trained: Path, seed: int) -> list[str] | None:
        """The tuned model's answers to the test rows."""
        job = self.answers_job(variant, trained)
        contents = [self.rows.hash, self.model_hash, model_hash(trained / "adapter")]
        key = content_hash([job["dtype"], MAX_NEW_TOKENS, *contents])
        name = f"{self.rows.work}-answers-{variant.tool}-{variant.setting}-{seed}"
        folder = self.piece("answers", name, key, job, variant.tool)
        result = None if folder is None else result_of(folder)
        return None if result is None else result["answers"]

    def answers_job(self, variant: Variant, trained: Path) -> dict[str, Any]:
        """The job of answering with the adapter of a trained piece, without its folder."""
        return {
            "dtype": variant.knobs["dtype"],
            "max_new_tokens": MAX_NEW_TOKENS,
            "threads": self.options.threads,
            "model": self.model,
            "adapter": str(trained / "adapter"),
            "rows": str(self.rows_file),
        }

    # --- pieces ---

    def job(self, variant: Variant, seed: int, steps: int, warm: int, batch: int) -> Job:
        """A job without its folder."""
        return Job(
            variant.tool,
            variant.setting,
            variant.knobs,
            self.model,
            str(self.rows_file),
            "",
            seed,
            steps,
            warm,
            batch=batch,
            threads=self.options.threads,
        )

    def train(self, job: Job, kind: str) -> Path | None:
        """The folder of a finished training job; None when it is not there and not to be run, or failed."""
        where = "" if job.save else machine()
        key = job_key(job, self.rows.hash, self.model_hash, self.versions[job.tool], where)
        quick = "quick-" if self.options.quick else ""
        name = f"{self.rows.work}-{quick}{kind}-{job.tool}-{job.setting}"
        return self.piece(
            job.tool, f"{name}-{job.seed}" if job.save else name, key, asdict(job), job.tool
        )

    def piece(
        self, worker: str, name: str, key: str, job: dict[str, Any], tool: str
    ) -> Path | None:
        """The folder of a finished piece: found by its key, or run if it is wanted now."""
        if self.options.cached:
            return newest(self.work, name, job)
        folder = self.work / f"{name}-{key}"
        if result_of(folder) is not None:
            return folder
        if self.options.tool not in (None, tool):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "versions.json", {"tool": self.versions[tool], "machine": machine()})
        try:
            python = sys.executable
            if worker in self.others:
                python = python_of(self.others[worker], peers_folder(self.options)).absolute()
            run_piece(worker, folder, {**job, "folder": str(folder)}, python)
        except RuntimeError as error:
            print(f"  {folder.name} failed: {error}", flush=True)
            self.failures.append(folder.name)
            return None
        return folder

    def figure(
        self,
        setting: str,
        metric: str,
        unit: str,
        ours: float | None,
        theirs: float | None,
        *,
        peer: str = PEER,
    ) -> Figure:
        """A figure of this bench."""
        bench = "train, quick" if self.options.quick else "train"
        return Figure(bench, self.rows.work, setting, metric, unit, ours, peer, theirs)


def verdicts(figures: Sequence[Figure]) -> Iterator[str]:
    """A line for each promise that the figures can judge.

    The promises: loss over the last tenth at most 1.03 times the peer's; shares of right answers no lower by more than
    two standard errors of the difference.
    """
    errors = {(f.setting, f.metric): f for f in figures}
    for figure in figures:
        if figure.ratio is None or figure.value is None or figure.peer_value is None:
            continue
        if figure.metric == "loss, last tenth":
            word = "holds" if figure.ratio <= 1.03 else "FAILS"
            yield f"{figure.setting}: loss {figure.ratio:.3f} times the peer's, at most 1.03: {word}"
        error = errors.get((figure.setting, f"{figure.metric}, standard error"))
        if error is not None and error.value is not None and error.peer_value is not None:
            most = 2 * math.hypot(error.value, error.peer_value)
            gap = figure.value - figure.peer_value
            word = "holds" if gap >= -most else "FAILS"
            yield f"{figure.setting}: {figure.metric} {gap:+.3f}, at least {-most:.3f}: {word}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)
