"""The runs of `bench/methods.py`: which there are, which are done, and how the methods stand."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afina.errors import AfinaError

from . import method
from .beside import Cost, in_turns
from .cache import model_hash
from .labelled import make_labelled, write_labelled
from .pieces import only_one
from .results import Results, commit
from .rows import content_hash, make_rows, write_rows
from .standing import Standing
from .works import BASELINE, METHODS, Listed, Work

BEST = 6
"""Methods that run with a second seed."""
WARM = 2
"""Leading steps whose cost is not counted."""
TOGETHER = 3
"""Methods that take turns with one run of the baseline."""


@dataclass(frozen=True)
class Rows:
    """The rows of a contest, and the model.

    Attributes:
        work: name of the data.
        file: where the workers read them.
        hash: of their content.
        model: its folder.
    """

    work: str
    file: Path
    hash: str
    model: str

    @staticmethod
    def of(folder: Path, model: str, work: Work, into: Path) -> Rows:
        """From a folder of data, written into another."""
        if work.kind == "classes":
            labelled = make_labelled(folder, work.train_rows, work.test_rows)
            file = into / f"labelled-{labelled.hash}.json"
            write_labelled(file, labelled)
            return Rows(labelled.work, file, labelled.hash, model)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        rows = make_rows(folder, tokenizer, work.train_rows, work.test_rows)
        file = into / f"rows-{rows.hash}.json"
        write_rows(file, rows)
        return Rows(rows.work, file, rows.hash, model)


class Contest:
    """The methods over one set of rows.

    Args:
        options: of the command line.
        work: what each method does.
        name: of the data.
        rows: None where nothing is run.
    """

    def __init__(
        self, options: argparse.Namespace, work: Work, name: str, rows: Rows | None
    ) -> None:
        self.options, self.work, self.name, self.rows = options, work, name, rows
        self.results = Results(options.results, cached=rows is None)
        self.names = options.only or list(METHODS)
        self.failures: list[str] = []
        self._model = "" if rows is None else model_hash(rows.model)
        self._commit = commit()

    def run(self) -> None:
        """Everything that is asked for and not there yet, what tells most first; nothing without rows."""
        if self.rows is None:
            return
        if self.options.part != "cost":
            for rate in (1, 0):
                for name in self.names:
                    self._train(name, self.rates(name)[rate], 0)
            for standing in self.again():
                assert standing.lr is not None
                self._train(standing.method, standing.lr, 1)
        if self.options.part != "quality":
            left = [name for name in self.names if self.cost(name) is None]
            for at in range(0, len(left), TOGETHER):
                self._measure(left[at : at + TOGETHER])

    def again(self) -> list[Standing]:
        """The best, to run with a second seed; none until all methods have run at both rates."""
        found = self.standings(METHODS)
        complete = len(found) == len(METHODS) and all(each.rates == 2 for each in found)
        return [each for each in found[:BEST] if each.method in self.names] if complete else []

    def rates(self, name: str) -> tuple[float, float]:
        """The learning rates of a method."""
        return self.work.rates[METHODS[name].kind]

    # --- what is there ---

    def standings(self, names: Iterable[str]) -> list[Standing]:
        """The methods of which something is there, the best first."""
        found = [each for each in map(self._standing, names) if each is not None]
        return sorted(found, key=lambda each: (-(each.score or 0), each.loss or 0))

    def _standing(self, name: str) -> Standing | None:
        done: Mapping[float, Any] = {lr: self.quality(name, lr, 0) for lr in self.rates(name)}
        there = {lr: result for lr, result in done.items() if result is not None}
        cost = self.cost(name)
        if not there:
            return None if cost is None else Standing(name, cost=cost)
        lr = min(there, key=lambda lr: (-there[lr][self.work.score], there[lr]["loss"]))
        best, second = there[lr], self.quality(name, lr, 1) or {}
        return Standing(
            name,
            lr=lr,
            rates=len(there),
            trained=best["trained_parameters"],
            score=best[self.work.score],
            loss=best["loss"],
            second_score=second.get(self.work.score),
            second_loss=second.get("loss"),
            cost=cost,
        )

    def quality(self, name: str, lr: float, seed: int) -> dict[str, Any] | None:
        """The result of one training run."""
        job = self.quality_job(name, lr, seed)
        return self.results.read(self._file(name, f"{lr:g}-{seed}"), job, self._key(job))

    def cost(self, name: str) -> Cost | None:
        """What a step of a method takes."""
        job = self.cost_job(name)
        found = self.results.read(self._file(name, "cost"), job, self._key(job))
        return None if found is None else Cost(**found)

    def _file(self, name: str, what: str) -> str:
        return f"{self.name}-{slug(name)}-{what}"

    def _key(self, job: dict[str, Any]) -> str:
        return content_hash([job, self.rows.hash if self.rows else "", self._model])

    # --- what is run ---

    def quality_job(self, name: str, lr: float, seed: int) -> dict[str, Any]:
        """What a training run is, wherever it is made."""
        return {
            "techniques": self.work.techniques(name, lr),
            "lr": lr,
            "seed": seed,
            "steps": self.work.steps,
            "batch": self.work.batch,
            "dtype": self.work.dtype,
            "max_new_tokens": self.work.max_new_tokens,
        }

    def cost_job(self, name: str) -> dict[str, Any]:
        """What is measured of a method, beside the baseline."""
        counts = {"batch": self.work.cost_batch, "warm": WARM, "counted": self.work.cost_steps}
        both = {"techniques": METHODS[name].techniques, "beside": METHODS[BASELINE].techniques}
        return {**both, **counts, "dtype": self.work.dtype}

    def _train(self, name: str, lr: float, seed: int) -> None:
        """Makes one training run, unless its result is there."""
        if self.quality(name, lr, seed) is not None:
            return
        job, file = self.quality_job(name, lr, seed), self._file(name, f"{lr:g}-{seed}")
        folder = self.options.work.resolve() / f"method-{file}"
        with self._telling(file), only_one(folder / ".lock"):
            if self.quality(name, lr, seed) is not None:
                return  # another bench made it meanwhile
            result = method.run({**job, **self._places(self.options.threads, folder)})
            self.results.write(file, job, self._key(job), result, self._commit)
            shutil.rmtree(folder / "run")

    def _measure(self, names: Sequence[str]) -> None:
        """Takes the cost of some methods, all in turns with one run of the baseline."""
        told = f"{self.name}, cost of {'; '.join(names)}"
        with self._telling(told), tempfile.TemporaryDirectory() as folder:
            listed = {name: METHODS[name].techniques for name in names}
            jobs = {
                name: self._stepping(techniques, name)
                for name, techniques in {**listed, BASELINE: METHODS[BASELINE].techniques}.items()
            }
            taken = in_turns(jobs, Path(folder), warm=WARM, counted=self.work.cost_steps)
        for name in names:
            job, cost = self.cost_job(name), Cost.of(taken[name], taken[BASELINE])
            file = self._file(name, "cost")
            self.results.write(file, job, self._key(job), asdict(cost), self._commit)

    def _stepping(self, techniques: Listed, name: str) -> dict[str, Any]:
        steps = {"epoch_steps": WARM + self.work.cost_steps, "lr": self.rates(name)[0], "train": {}}
        how = {"seed": 0, "max_new_tokens": self.work.max_new_tokens, "techniques": techniques}
        return {**self.cost_job(name), **self._places(1, Path()), **steps, **how}

    def _places(self, threads: int, folder: Path) -> dict[str, Any]:
        assert self.rows is not None
        model, rows = self.rows.model, str(self.rows.file)
        return {"model": model, "rows": rows, "folder": str(folder), "threads": threads}

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Says how long it took, or why it failed; the next one is run all the same."""
        began = time.monotonic()
        try:
            yield
        except (AfinaError, RuntimeError) as error:
            print(f"  {what} failed: {error}", flush=True)
            self.failures.append(what)
        else:
            print(f"  {what}: {time.monotonic() - began:.0f} s", flush=True)


def slug(name: str) -> str:
    """A method's name as part of a file's."""
    return "-".join(re.findall(r"[\w+]+", name)).replace("-+-", "-")
