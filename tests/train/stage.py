"""Real runs in real processes that die in the middle: one process imports everything, and each run is a fork of it.

    python -m tests.train.stage deaths|full|race NUMBER FOLDER [careless]

leaves FOLDER/outcomes.json; `careless` writes in the wrong order, for a control. Importing takes seconds and a tiny run
a fraction of one, so that fifty deaths fit into a minute. Where a run dies is chosen by the count of its file
operations (an audit hook in the child), by the size of a file (the kernel's own limit), or by chance in time; what is
asserted must hold wherever it died.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

STEPS, SAVE_EVERY, EVAL_EVERY = 6, 2, 3
WRITES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link")
GROWS = ("open", "os.mkdir")

Prepare = Callable[[Path], None]
"""What a child does to itself before it trains."""


def once(out: Path, said: list[str]) -> None:
    """One run into `out`, or the rest of the one that is there; what it says is added to `said`."""
    import numpy as np
    import torch

    from afina.table import apply
    from afina.techniques.lora import LoRA
    from afina.train.options import RunOptions
    from afina.train.report import Silent
    from afina.train.run import train
    from afina.tree import Seams
    from tests.tiny import byte_tokenizer, tiny_llama
    from tests.train.kit import ragged_rows

    class Told(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    def draw(step: int, tensors: dict[str, Any]) -> None:
        """A function of the user's that draws from every generator there is."""
        drawn = 1 + random.random() + float(np.random.rand()) + float(torch.rand(()))
        for tensor in tensors.values():
            tensor.grad.mul_(drawn)

    random.seed(3)
    np.random.seed(3)
    model = tiny_llama()
    edit = apply(model, [LoRA(rank=2, dropout=0.3)], seed=1)
    options = RunOptions(
        base="tiny",
        reporter=Told(),
        resume=(out / "config.yaml").exists(),
        seams=Seams(before_step=(draw,)),
    )
    train(
        model,
        byte_tokenizer(),
        ragged_rows(10),
        edit,
        out,
        val=ragged_rows(3, seed=9),
        options=options,
        steps=STEPS,
        save_every=SAVE_EVERY,
        eval_every=EVAL_EVERY,
        rows_per_step=4,
        lr=1e-2,
    )


def forked(out: Path, prepare: Prepare | None = None, after_s: float | None = None) -> int:
    """The status of a child that trains into `out` (as of `os.waitpid`), killed `after_s` seconds after its start."""
    said = out.with_suffix(".said")
    child = os.fork()
    if child == 0:
        _child(out, said, prepare)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _child(out: Path, said: Path, prepare: Prepare | None) -> NoReturn:
    """Trains and ends the process, with status 1 after an error."""
    status, told = 1, list[str]()
    try:
        if prepare is not None:
            prepare(out)
        once(out, told)
        status = 0
    except BaseException:
        told.append(traceback.format_exc())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        said.write_text("\n".join(told))
        os._exit(status)


def is_write(event: str, args: tuple[Any, ...], out: Path) -> bool:
    """Whether an audit event changes something in the run's folder."""
    if not args or not isinstance(args[0], str | bytes | os.PathLike):
        return False
    path = os.path.abspath(os.fsdecode(args[0]))
    inside = path == str(out) or path.startswith(f"{out}/")
    if event == "open":
        mode, flags = args[1], args[2]
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        )
        return inside and bool(writes)
    return inside and event in WRITES


def dies_at(number: int) -> Prepare:
    """The child is killed just before its file operation of this number."""

    def prepare(out: Path) -> None:
        left = [number]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if is_write(event, args, out):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return prepare


def counts(into: Path) -> Prepare:
    """The child writes down how many file operations it made."""

    def prepare(out: Path) -> None:
        def hook(event: str, args: tuple[Any, ...]) -> None:
            if is_write(event, args, out):
                handle = os.open(into, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(handle, b"x")
                os.close(handle)

        sys.addaudithook(hook)

    return prepare


def no_larger(size: int, *, dies: bool) -> Prepare:
    """No file of the child gets larger: the write that would make it so is cut short, and the next kills or fails."""

    def prepare(out: Path) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if dies else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return prepare


def full_from(number: int) -> Prepare:
    """From its file operation of this number on, nothing of the child's grows; removing and renaming go on working."""

    def prepare(out: Path) -> None:
        seen = [0]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if is_write(event, args, out):
                seen[0] += 1
                if seen[0] >= number and event in GROWS:
                    raise OSError(errno.ENOSPC, "No space left on device", os.fsdecode(args[0]))

        sys.addaudithook(hook)

    return prepare


def where(out: Path) -> dict[str, int]:
    """The last step whose figures are written whole, and the step of the checkpoint to go on from."""
    from afina.errors import RunError
    from afina.train import checkpoint
    from afina.train.metrics import read_metrics

    lines = read_metrics(out)
    try:
        newest = checkpoint.latest(out) if out.exists() else None
    except RunError:
        newest = (
            None  # damaged, as only careless writing leaves it: the run cannot go on, and says so
        )
    return {
        "told": lines[-1]["step"] if lines else 0,
        "saved": checkpoint.step_of(newest) if newest else 0,
    }


def end_of(out: Path) -> dict[str, Any]:
    """What a finished run left: everything that must not depend on where it was killed."""
    from afina.train.metrics import read_metrics

    lines = read_metrics(out)
    steps = [json.loads(x)["step"] for x in (out / "metrics.jsonl").read_text().splitlines()]
    kept = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    return {
        "manifest": (out / f"checkpoints/step-{STEPS:06d}/manifest.json").read_text(),
        "weights": (out / "adapter/adapter_model.safetensors").read_bytes().hex(),
        "losses": [[line["loss"], line.get("val_loss")] for line in lines],
        "steps": steps,
        "files": kept,
    }


def finish(out: Path, whole: dict[str, Any]) -> dict[str, Any]:
    """Lets the run in `out` go to its end, and says whether that is the end of a run that nobody killed."""
    status = forked(out)
    said = out.with_suffix(".said").read_text()
    if status != 0:
        return {"finished": False, "said": said}
    end = end_of(out)
    return {"finished": True, "differs": [key for key in whole if end[key] != whole[key]]}


def deaths(number: int, folder: Path) -> list[dict[str, Any]]:
    """Kills `number` runs, lets each go on, and says what came of it; every third is killed a second time."""
    tally = folder / "tally"
    began = time.monotonic()
    assert forked(folder / "whole", counts(tally)) == 0
    lasts_s = time.monotonic() - began
    operations = tally.stat().st_size
    whole = end_of(folder / "whole")
    largest = max(p.stat().st_size for p in (folder / "whole").rglob("*") if p.is_file())
    draw = random.Random(number)
    outcomes: list[dict[str, Any]] = []
    for trial in range(number):
        out = folder / f"run-{trial:03d}"
        kind = ("operation", "operation", "size", "time")[trial % 4]
        place: float = 0
        if kind == "operation":
            place = 1 + int(operations * (trial + draw.random()) / number)
            status = forked(out, dies_at(int(place)))
        elif kind == "size":
            place = draw.randrange(largest)
            status = forked(out, no_larger(int(place), dies=True))
        else:
            status = forked(out, after_s=draw.random() * lasts_s)
        outcome = {"kind": kind, "place": place, "signal": status & 0x7F, **where(out)}
        if trial % 3 == 0 and (out / "config.yaml").exists():
            again = draw.randrange(1, operations)
            outcome["again"] = forked(out, dies_at(again)) & 0x7F
        outcomes.append(outcome | finish(out, whole))
        shutil.rmtree(out, ignore_errors=True)
    return outcomes


def full_disks(number: int, folder: Path) -> list[dict[str, Any]]:
    """Lets the disk become full at `number` places, then makes room and goes on."""
    tally = folder / "tally"
    assert forked(folder / "whole", counts(tally)) == 0
    operations = tally.stat().st_size
    whole = end_of(folder / "whole")
    sizes = sorted({p.stat().st_size for p in (folder / "whole").rglob("*") if p.is_file()})
    outcomes: list[dict[str, Any]] = []
    for trial in range(number):
        out = folder / f"run-{trial:03d}"
        if trial % 3 == 2:
            kind, place = "size", sizes[len(sizes) * trial // number] // 2
            status = forked(out, no_larger(place, dies=False))
        else:
            kind, place = "operation", 1 + operations * trial // number
            status = forked(out, full_from(place))
        said = out.with_suffix(".said").read_text()
        left = [p.name for p in out.rglob("*") if p.name.startswith(".") and p.name != ".lock"]
        outcome = {"kind": kind, "place": place, "status": status, "said": said, "left": left}
        out.with_suffix(".said").unlink()
        outcomes.append(outcome | where(out) | finish(out, whole))
        shutil.rmtree(out, ignore_errors=True)
    return outcomes


def race(number: int, folder: Path) -> list[dict[str, Any]]:
    """Starts `number` runs into one folder at the same moment."""
    reader, writer = os.pipe()
    out = folder / "one"
    children: list[int] = []
    for place in range(number):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # returns when the parent closes its end: the start for all
            _child(out, folder / f"said-{place}", None)
        children.append(child)
    os.close(writer)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return [
        {"status": status, "said": (folder / f"said-{place}").read_text()}
        for place, status in enumerate(statuses)
    ]


def careless() -> None:
    """From here on a checkpoint is named the latest before it is written, and is written under its own name."""
    from afina.train import checkpoint, durable
    from afina.train.saving import Saving

    whole = Saving._write

    def write(self: Saving) -> dict[str, str]:
        place, hidden = self.folder, self.temporary
        durable.write_text(place.parent / checkpoint.LATEST, place.name)
        place.mkdir(exist_ok=True)
        self.temporary = place
        found = whole(self)
        self.temporary = hidden
        shutil.copytree(place, hidden, dirs_exist_ok=True)
        return found

    Saving._write = write


def main() -> None:
    """See the top of the file."""
    what, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).resolve()
    import torch

    from afina.train import keeper

    torch.set_num_threads(1)
    keeper.plot_loss = lambda folder: None  # it takes as long as all the rest
    if "careless" in sys.argv:
        careless()
    once(folder / "warm", [])  # so that nothing is left for each child to import
    found = {"deaths": deaths, "full": full_disks, "race": race}[what](number, folder)
    (folder / "outcomes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
