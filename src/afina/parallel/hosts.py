"""The machines of a run, and the store in which their processes meet."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from afina.errors import AfinaError, ConfigError, RunError
from afina.parallel.together import Failure
from afina.parallel.watch import STEP

FAILED = "afina/failed"
LEFT = "afina/left"
"""Keys: what went wrong on some machine, and how many have ended."""

LEAVE_S = 10.0
"""So long the first machine keeps the store for the others."""

ASK_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: an interface's address."""

INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
"""Variables with the interface that processes talk over; a machine's name often leads to one that ends in itself."""


@dataclass(frozen=True)
class Hosts:
    """The machines of a run.

    Attributes:
        many: how many there are.
        rank: of this one, from 0.
        master: address and port of the first, as `10.0.0.1:29500`; None for one machine.

    Raises:
        ConfigError: these do not go together.
    """

    many: int = 1
    rank: int = 0
    master: str | None = None

    def __post_init__(self) -> None:
        if self.many == 1 and (self.rank or self.master is not None):
            raise ConfigError(
                "--host-rank and --master are for several machines", cure="add --hosts N"
            )
        if self.many > 1 and self.master is None:
            raise ConfigError(
                "several machines must know where they meet",
                got=f"--hosts {self.many}",
                cure="add --master ADDRESS:PORT of the first, as 10.0.0.1:29500",
            )
        if not 0 <= self.rank < self.many:
            raise ConfigError(
                "there is no such machine",
                got=f"--host-rank {self.rank}",
                wanted=f"0 to {self.many - 1}, another on each machine",
            )
        _ = self.address

    @property
    def address(self) -> tuple[str, int]:
        """Where processes meet; port 0 is any that is free.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.master is None:
            return "127.0.0.1", 0
        name, _, port = self.master.rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                "--master cannot be read", got=self.master, wanted="ADDRESS:PORT, as 10.0.0.1:29500"
            )
        return name.strip("[]"), int(port)

    def interface(self) -> dict[str, str]:
        """Variables that name the interface to the first machine; none where the user does, or for one machine."""
        if self.many == 1 or INTERFACES & set(os.environ):
            return {}
        found = interface_to(self.address[0])
        return {} if found is None else dict.fromkeys(sorted(INTERFACES), found)


def interface_to(address: str) -> str | None:
    """The interface over which a machine is reached; None where the system does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((address, 9))  # sends nothing
            own = asked.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    told = fcntl.ioctl(asked, ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(told[20:24]) == own:
                    return name
    except OSError:
        return None
    return None


class Meeting:
    """The store, as those see it who start processes. It is at the first machine, and outlives the processes.

    Args:
        hosts: of the run.
        timeout_s: in which the first machine answers.

    Attributes:
        address: where processes meet.

    Raises:
        RunError: it cannot be made, or nobody answers.
    """

    def __init__(self, hosts: Hosts, timeout_s: float) -> None:
        address, port = hosts.address
        self._hosts, leads = hosts, hosts.rank == 0
        try:
            self._store = dist.TCPStore(
                address,
                port,
                is_master=leads,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except dist.DistError as error:
            words = " ".join(str(error).split())[:200]
            raise RunError(
                "there is no place to meet at" if leads else "the first machine does not answer",
                got=f"{address}:{port}: {words}",
                wanted="a free port" if leads else f"an answer within {timeout_s:g} s",
                cure="name another port (--master)"
                if leads
                else "start the first machine too (--host-rank 0), or name the right --master",
            ) from None
        self.address = address, self._store.port

    def step_of(self, rank: int) -> int | None:
        """The step that a process noted last; None before the first."""
        told = self._told(STEP.format(rank))
        return None if told is None else int(told)

    def failed(self) -> AfinaError | None:
        """What went wrong on another machine."""
        told = self._told(FAILED) if self._hosts.many > 1 else None
        if told is None:
            return None
        found: dict[str, Any] = json.loads(told)
        return Failure(**found["failure"]).error(found["rank"])

    def fail(self, failure: Failure, rank: int) -> None:
        """Tells the other machines."""
        self._tell(FAILED, json.dumps({"failure": asdict(failure), "rank": rank}))

    def leave(self) -> None:
        """This machine has ended; the first one waits a little for the others, whose store it has."""
        if self._hosts.many == 1:
            return
        try:
            left = self._store.add(LEFT, 1)
            until = time.monotonic() + LEAVE_S
            while self._hosts.rank == 0 and left < self._hosts.many and time.monotonic() < until:
                time.sleep(0.1)
                left = self._store.add(LEFT, 0)
        except RuntimeError:
            return

    def _told(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:  # the first machine is gone, which its processes' silence tells
            return None

    def _tell(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError:
            return
