"""What a process that fails leaves for whoever started it: a small file with its words, and when it was.

torchrun names a file to each process it starts (`TORCHELASTIC_ERROR_FILE`) and shows the first one's message; so does
afina's own launcher, which reads more of it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afina.errors import AfinaError, RunError
from afina.parallel.together import Failure

FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the place of this process's file."""

LAUNCHED = "AFINA_LAUNCHED"
"""Variable that afina's own launcher sets: it speaks for the processes it started."""

STOPPED = 75
"""Exit status of a process that somebody asked to stop, and that did."""

TERMINATED = 143
"""What `train.interrupt` ends a process with after SIGTERM."""


class LostError(RunError):
    """Another process did not come to a meeting, or is gone: what it did itself is the better story."""


@dataclass(frozen=True)
class Record:
    """How a process failed.

    Attributes:
        failure: what it said.
        trace: the traceback of a defect; "" for an `AfinaError`.
        status: that the whole run ends with.
        at: when, in seconds of the clock.
        lost: it only tells of another process.
    """

    failure: Failure
    trace: str
    status: int
    at: float
    lost: bool

    @classmethod
    def of(cls, error: BaseException) -> Record:
        """Of an error that was just caught."""
        ours = isinstance(error, AfinaError)
        told = error if isinstance(error, Exception) else RuntimeError(repr(error))
        trace = "" if ours else "".join(traceback.format_exception(error))
        status = error.exit_code if ours else 1
        return cls(Failure.of(told), trace, status, time.time(), isinstance(error, LostError))

    def write(self, file: Path) -> None:
        """In torchrun's form, with more beside."""
        message = self.trace or str(self.failure.error(0))
        document = {"message": message, "timestamp": int(self.at), "afina": asdict(self)}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """What a process left; None where it left nothing, or died while it wrote."""
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["afina"]
            return cls(**{**found, "failure": Failure(**found["failure"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None


PARENT_S = 1.0
"""How often a process looks whether its launcher is there."""


def follow_parent() -> None:
    """Asks this process to stop when its launcher is gone, as SIGTERM does; saved, between two steps."""
    if LAUNCHED not in os.environ:
        return

    def look() -> None:
        while os.getppid() == int(os.environ[LAUNCHED]):
            time.sleep(PARENT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="afina-launcher", daemon=True).start()


@contextmanager
def reported(rank: int) -> Iterator[None]:
    """What goes wrong inside is left for whoever started this process, and said once.

    Under afina's launcher the process says nothing itself. Under torchrun errors of ours, which all processes raise
    alike, are said by the first; torchrun shows the earliest of all in any case.

    Args:
        rank: of this process.

    Raises:
        SystemExit: in place of an error that somebody else says.
    """
    launched = LAUNCHED in os.environ
    try:
        yield
    except KeyboardInterrupt:
        if launched:
            raise SystemExit(STOPPED) from None
        raise
    except SystemExit as end:
        if launched and end.code == TERMINATED:
            raise SystemExit(STOPPED) from None
        raise
    except Exception as error:
        record = Record.of(error)
        if os.environ.get(FILE):
            record.write(Path(os.environ[FILE]))
        if launched or (rank and isinstance(error, AfinaError)):
            raise SystemExit(record.status) from None
        raise
