"""A run in several processes, as the command line has it: who starts them, and who is one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Several:
    """The processes of a call.

    Attributes:
        nproc: to be started on this machine; None starts none.
        hosts: `afina.parallel.hosts.Hosts`; None where none are started.
        rank: of this process among others that somebody started; None where nobody did.
        set_here: settings of `parallel` are given in this call, and not by the run that goes on.
    """

    nproc: int | None
    hosts: Any
    rank: int | None
    set_here: bool

    @property
    def starts(self) -> bool:
        """Whether this process starts others, and trains nothing itself."""
        return self.rank is None and self.nproc is not None and self.nproc * self.hosts.many > 1

    @property
    def first(self) -> bool:
        """Whether this process speaks, and keeps files."""
        return not self.rank

    @contextmanager
    def reported(self) -> Iterator[None]:
        """One of several leaves what goes wrong for whoever started it."""
        if self.rank is None:
            yield
            return
        from afina.parallel.failures import follow_parent, reported

        follow_parent()
        with reported(self.rank):
            yield

    def plan(self, resolved: Any, *, goes_on: bool) -> Any:
        """How the processes share the run; what cannot be is refused, before anything is read.

        Args:
            resolved: the configuration.
            goes_on: with a run that is there: in one process, what it says of several is left aside.

        Raises:
            ConfigError: saying what would do.
        """
        from afina.parallel.plan import Plan, plan_of, refuse_alone
        from afina.train.fit import refuse_several

        settings = resolved.config
        many = self.nproc * self.hosts.many if self.starts else self._among()
        if many == 1:
            if self.set_here or not goes_on:
                refuse_alone(settings.parallel)
            return Plan()
        plan = plan_of(settings.parallel, many)
        refuse_several(plan, settings.train, [one.key for one in settings.techniques])
        return plan

    def refuse(self, resolved: Any, hub: Mapping[str, Any], *, goes_on: bool) -> None:
        """Raises for what the processes cannot do with this model, which its config says.

        Args:
            resolved: the configuration.
            hub: where models are from, as `afina.load` takes it.
            goes_on: as `plan`.

        Raises:
            ConfigError: saying what would do.
        """
        from afina.cli.starting import quantiser_of
        from afina.models.hub import config_of
        from afina.models.hub import resolve as located
        from afina.parallel.refusals import facts_of, refuse

        plan, settings = self.plan(resolved, goes_on=goes_on), resolved.config
        if plan.processes > 1:
            place = located(settings.model, revision=settings.revision, **hub)
            refuse(plan, facts_of(config_of(place), packed=quantiser_of(settings) is not None))

    def _among(self) -> int:
        from afina.parallel.processes import started

        return (started() or 1) if self.rank is not None else 1

    def mesh(self, settings: Any) -> Any:
        """What the loop runs on."""
        from afina.parallel.processes import mesh_of
        from afina.parallel.runtime import OneProcess

        found = None if self.rank is None else mesh_of(settings.parallel, settings.train.device)
        return OneProcess(settings.parallel.devices) if found is None else found

    def launch(self, out: Path, timeout_s: float) -> None:
        """Starts them, each with this call's command line, and waits.

        Raises:
            AfinaError: the first thing that went wrong in one.
        """
        from afina.cli import WORDS
        from afina.parallel.launch import Launcher

        command = [sys.executable, "-m", "afina.cli", *WORDS.get()]
        go_on = f"afina train --resume -o {out} --nproc {self.nproc}"
        Launcher(command, self.nproc or 1, self.hosts, timeout_s, go_on).run()


def several(given: Mapping[str, Any]) -> Several:
    """What a command line and its environment say of processes.

    Args:
        given: the options nproc, hosts, host_rank, master, and sets.

    Raises:
        ConfigError: they do not go together.
    """
    import os

    from afina.errors import ConfigError

    nproc = given["nproc"]
    others = {"--hosts": given["hosts"] != 1, "--host-rank": given["host_rank"] != 0}
    others["--master"] = given["master"] is not None
    if nproc is None and any(others.values()):
        raise ConfigError(
            f"{', '.join(name for name, used in others.items() if used)} would do nothing without --nproc",
            cure="say how many processes each machine starts: --nproc N",
        )
    set_here = any(text.startswith("parallel.") for text in given["sets"] or [])
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if nproc is None:
            return Several(None, None, None, set_here)
        from afina.parallel.hosts import Hosts

        hosts = Hosts(given["hosts"], given["host_rank"], given["master"])
        return Several(nproc, hosts, None, set_here)
    from afina.parallel.failures import LAUNCHED

    if nproc is not None and LAUNCHED not in os.environ:
        raise ConfigError(
            "this process was started among others already, and --nproc would start more",
            got=f"--nproc {nproc} under torchrun",
            cure="leave --nproc out, or call afina train without torchrun",
        )
    return Several(None, None, int(os.environ["RANK"]), set_here)
