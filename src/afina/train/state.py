"""Where a run stands, what it was made from, and what was decided for the machine: the text of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from afina.adapters.card import Record
from afina.adapters.fingerprint import same_base
from afina.config import TrainSettings
from afina.errors import RunError, counted
from afina.ops import native
from afina.parallel.plan import Plan
from afina.train import ways
from afina.tree import Edit
from afina.types import Row

FORMAT = 1

BASE = "the base model's weights"
TRAIN_ROWS = "the training rows"
VAL_ROWS = "the validation rows"
START = "the starting weights"
TECHNIQUES = "the techniques"
PROCESSES = "the processes"

OF_THE_MACHINE = ("train.device", "train.dtype", "train.threads", "train.compile")
"""Settings that stand in `Machine` as what they came to, so that "the best there is" is compared by what it was."""

HARMLESS = (
    "train.save_every", "train.keep_last", "train.save_async", "train.tensorboard", "train.step_in_backward",
    "train.offload_activations", "train.kernels",
)  # fmt: skip
"""Settings that change nothing of what is learnt or kept in the end but its last bits."""


@dataclass(frozen=True)
class Machine:
    """What was decided for, or by, this machine.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of the frozen weights.
        threads: of torch, on the CPU: how a sum is split over them shows in its last bits.
        compiled: whether the blocks run as compiled graphs, whose last bits differ; None before it is decided.
        torch, transformers: versions.
        cpu: the instructions that torch's kernels were chosen for.
        kernels: whether afina's kernels in C++ take part.
    """

    device: str
    dtype: str
    threads: int
    compiled: bool | None
    torch: str
    transformers: str
    cpu: str
    kernels: bool = False

    @classmethod
    def here(
        cls, model: nn.Module, *, compiled: bool | None = None, kernels: bool = True
    ) -> Machine:
        """As it is now.

        Args:
            model: to be trained.
            compiled: see above.
            kernels: whether they are wanted where they can be had.
        """
        import transformers

        parameter = next(model.parameters())
        return cls(
            device=parameter.device.type,
            dtype=str(parameter.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            compiled=compiled,
            torch=torch.__version__,
            transformers=transformers.__version__,
            cpu=torch.backends.cpu.get_cpu_capability(),
            kernels=kernels and native.serves(parameter),
        )


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        step: optimiser steps done, the skipped ones among them.
        total_steps: of the whole run.
        rows_seen, tokens_seen: the data position: rows and real tokens of all steps so far.
        skipped: steps at which the optimiser was not moved, for a loss that is not finite or rows without a label.
        best_score: of the best evaluation so far (lower is better), None before the first.
        best_step: its step.
        since_best: evaluations since.
        micro_tokens: tokens of a micro-batch, as decided for this machine; None when set by the user.
        machine: what else was decided.
        settings: what must be equal for a resumed run to be the same run, by dotted name or in words.
        unscored: the evaluation due after this step failed, and is still to be made.
    """

    step: int
    total_steps: int = 0
    rows_seen: int = 0
    tokens_seen: int = 0
    skipped: int = 0
    best_score: float | None = None
    best_step: int | None = None
    since_best: int = 0
    micro_tokens: int | None = None
    machine: Machine | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    unscored: bool = False


@dataclass(frozen=True)
class Difference:
    """Something that is not as it was when the run stopped."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.then} then, {self.now} now"


def to_text(state: State) -> str:
    """As JSON."""
    return json.dumps({"format": FORMAT, **asdict(state)}, indent=2, allow_nan=False) + "\n"


def from_file(path: Path) -> State:
    """The inverse of `to_text`.

    Raises:
        RunError: when the file cannot be read, or is of another format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format", None) != FORMAT:
            raise ValueError("written by another version of afina")
        return TypeAdapter(State).validate_python(found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(
            "the run's state cannot be read",
            got=f"{path}: {' '.join(str(error).split())[:200]}",
            cure=f"put the file back as it was written, or begin anew: {ways.OVERWRITE}",
        ) from None


def or_none(path: Path) -> State | None:
    """The same, None where there is no such file or it cannot be read."""
    try:
        return from_file(path)
    except RunError:
        return None


def recorded(settings: TrainSettings, edit: Edit, more: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run."""
    found = {f"train.{k}": v for k, v in settings.model_dump(mode="json").items()}
    for name in OF_THE_MACHINE:
        del found[name]
    found[TECHNIQUES] = " and ".join(technique.key for technique in edit.techniques)
    for technique in edit.techniques:
        for name, value in technique.model_dump(mode="json").items():
            found[f"techniques.{technique.key}.{name}"] = value
    return {**found, **more}


def rows_in_words(rows: Sequence[Row], fingerprint: str) -> str:
    """What tells some rows from others, and shows how many they are."""
    return f"{counted(len(rows), 'row')} ({fingerprint[:16]})"


def on_the_card(state: State, data: Mapping[str, Any], revision: str | None = None) -> Record:
    """What an adapter's card says of the run that made it; nothing of it depends on the machine or the folder.

    Args:
        state: whose settings of training and data are told.
        data: the source, number and fingerprint of its rows.
        revision: of the base, where it is one on the hub.
    """
    settings = {k: v for k, v in state.settings.items() if k.startswith(("train.", "data."))}
    told = {k: v for k, v in settings.items() if v is not None}
    return Record(data, told, revision=revision, fingerprint=state.settings.get(BASE))


def starting_weights(edit: Edit) -> str:
    """A hash of all values that will train, as they are now."""
    return of_digests({name: digest_of(name, t) for name, t in edit.trainable().items()})


def digest_of(name: str, tensor: Tensor) -> str:
    """A hash of one tensor, whole."""
    digest = hashlib.sha256(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_digests(digests: Mapping[str, str]) -> str:
    """One hash of those of several tensors, by name."""
    every = "".join(digests[name] for name in sorted(digests))
    return hashlib.sha256(every.encode()).hexdigest()[:16]


def differences(then: State, now: State) -> list[Difference]:
    """What makes the rest of a run another one than it would have been."""
    old = _as_of_today(then, now)
    if then.step:
        old[START] = now.settings.get(
            START
        )  # they were changed by training, and are in the checkpoint
    found = [
        Difference(name, old.get(name), now.settings.get(name))
        for name in dict.fromkeys([*now.settings, *old])
        if name not in (*HARMLESS, PROCESSES)
        and not _equal(name, old.get(name), now.settings.get(name))
    ]
    if any(difference.name == TECHNIQUES for difference in found):
        # What follows from that is no difference of its own: their settings, and which weights are the base's.
        found = [one for one in found if not one.name.startswith("techniques.")]
        found = [one for one in found if one.name not in (BASE, START)]
    for setting in OF_THE_MACHINE:
        name = "compiled" if setting == "train.compile" else setting.removeprefix("train.")
        one, other = getattr(then.machine, name, None), getattr(now.machine, name, None)
        # Other processes have other threads, which is told with them.
        if one != other and not (name == "threads" and spread(then, now)):
            found.append(Difference(setting, one, other))
    return found


def roundings(then: State, now: State) -> list[Difference]:
    """What may change the last bits of a number, and nothing else: versions, processors and how many processes."""
    pairs = [
        Difference(name, getattr(then.machine, name, None), getattr(now.machine, name, None))
        for name in ("torch", "transformers", "cpu", "kernels")
    ]
    return [*(pair for pair in pairs if pair.then != pair.now), *spread(then, now)]


def spread(then: State, now: State) -> list[Difference]:
    """Whether the run is spread over processes in another way."""
    pair = [_as_of_today(state, now).get(PROCESSES) for state in (then, now)]
    return [Difference(PROCESSES, *pair)] if pair[0] != pair[1] else []


def harmless(then: State, now: State) -> list[Difference]:
    """Settings that differ and change nothing of what is learnt."""
    old = _as_of_today(then, now)
    return [
        Difference(name, old.get(name), now.settings.get(name))
        for name in HARMLESS
        if old.get(name) != now.settings.get(name)
    ]


def _equal(name: str, then: Any, now: Any) -> bool:
    if name == BASE and isinstance(then, str) and isinstance(now, str):
        return same_base(then, now)
    return then == now


def _as_of_today(then: State, now: State) -> dict[str, Any]:
    """The recorded settings; those that an older afina did not have were, in effect, today's defaults."""
    fields = TrainSettings.model_fields
    defaults = {f"train.{name}": field.default for name, field in fields.items()}
    missing = {n: defaults[n] for n in now.settings if n in defaults and n not in then.settings}
    keys = [name.split(".")[1] for name in then.settings if name.startswith("techniques.")]
    if PROCESSES in now.settings:
        missing[PROCESSES] = str(Plan())
    if TECHNIQUES in now.settings:
        missing[TECHNIQUES] = " and ".join(dict.fromkeys(keys))
    return {**missing, **then.settings}
