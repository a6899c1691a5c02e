"""Any optimiser of torch.optim by name, with groups by learning rate and fp32 masters for half-precision tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afina.errors import ConfigError, nearest

# They need a closure or sparse gradients, which the loop does not give.
UNUSABLE = ("LBFGS", "SparseAdam", "Optimizer")

WHOLE = ("adafactor", "muon")
"""Those whose step of a tensor is not a step of each of its numbers: means over rows and columns, or its matrix."""


BUNCH = 2**20
"""Numbers that move together where their gradients are widened first; a tensor of more moves alone."""


class Optimiser:
    """A torch optimiser over named tensors.

    A tensor held in fp16 or bf16 trains through an fp32 master, for its own dtype would round small steps away.

    Attributes:
        names: the tensors, in the order of the optimiser's state.
        inner: the torch optimiser.
    """

    def __init__(
        self,
        tensors: Mapping[str, nn.Parameter],
        scales: Mapping[str, float],
        name: str,
        options: Mapping[str, Any],
    ) -> None:
        self.names = list(tensors)
        self._tensors = dict(tensors)
        self._masters = {n: _master(p) for n, p in tensors.items()}
        groups: list[dict[str, Any]] = []
        for scale in sorted({scales.get(n, 1.0) for n in self.names}):
            members = [n for n in self.names if scales.get(n, 1.0) == scale]
            groups.append({"params": [self._masters[n] for n in members], "scale": scale})
        # A process in whose part of the model nothing trains moves nothing.
        groups = groups or [{"params": [], "scale": 1.0}]
        self.inner = _build(groups, name, options)
        groups_of = {id(p): group for group in self.inner.param_groups for p in group["params"]}
        self._group_of = {n: groups_of[id(master)] for n, master in self._masters.items()}
        self._bunches = self._bunched()

    def set_lr(self, lr: float) -> None:
        """Sets the run's rate; each group takes its multiple of it."""
        for group in self.inner.param_groups:
            group["lr"] = lr * group["scale"]

    def spread(self, lr: float) -> str | None:
        """The lowest and the highest learning rate in words; None where all tensors have one.

        Args:
            lr: the run's.
        """
        scales = {n: float(self._group_of[n]["scale"]) for n in self.names}
        if len(set(scales.values())) < 2:
            return None
        least, most = (choose(scales, key=lambda n: scales[n]) for choose in (min, max))
        return (
            f"learning rates from {lr * scales[least]:.3g} ({least}) to {lr * scales[most]:.3g} ({most}), "
            f"in {len(set(scales.values()))} groups"
        )

    @torch.no_grad()
    def step(self) -> None:
        """One step on the gradients that the tensors hold."""
        if self._bunches is None:
            self.inner.step()
        else:
            for names in self._bunches:
                self._step(names)

    @torch.no_grad()
    def step_of(self, name: str) -> None:
        """One step of one tensor, on the gradient that it holds: bit for bit its part of `step`."""
        self._step([name])

    def _step(self, names: Sequence[str]) -> None:
        """One step of tensors of one group; their fp32 gradients are there no longer than it takes."""
        halves = [n for n in names if self._masters[n] is not self._tensors[n]]
        for n in halves:
            gradient = self._tensors[n].grad
            self._masters[n].grad = None if gradient is None else gradient.float()
        every = self.inner.param_groups
        members = [self._masters[n] for n in names]
        self.inner.param_groups = [{**self._group_of[names[0]], "params": members}]
        try:
            self.inner.step()
        finally:
            self.inner.param_groups = every
        for n in halves:
            self._tensors[n].copy_(self._masters[n])
            self._masters[n].grad = None

    def _bunched(self) -> list[list[str]] | None:
        """Tensors that move together; None for all at once, where none has a master.

        fp32 gradients of all tensors of a model would be new memory of twice its size at every step; those of a few
        tensors at a time lie in the same memory each time, which is then in the caches.
        """
        if all(self._masters[n] is self._tensors[n] for n in self.names):
            return None
        bunches: list[list[str]] = []
        for group in self.inner.param_groups:
            room = -1
            for n in (n for n in self.names if self._group_of[n] is group):
                room -= self._tensors[n].numel()
                if room < 0:
                    bunches.append([])
                    room = BUNCH - self._tensors[n].numel()
                bunches[-1].append(n)
        return bunches

    def clear_gradients(self) -> None:
        """Drops every gradient."""
        for parameter in self._tensors.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """What must be kept to go on exactly: state by `name.key`, and the masters that are not the tensors."""
        kept: dict[str, Tensor] = {}
        for n in self.names:
            master = self._masters[n]
            if master is not self._tensors[n]:
                kept[f"{n}.master"] = master.detach()
            for key, value in self.inner.state.get(master, {}).items():
                kept[f"{n}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return kept

    @torch.no_grad()
    def load_state_tensors(self, kept: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`."""
        for n in self.names:
            master = self._masters[n]
            mine = {k.removeprefix(f"{n}."): v for k, v in kept.items() if k.startswith(f"{n}.")}
            saved = mine.pop("master", None)
            if saved is not None:
                master.copy_(saved)
            # A tensor's name can begin another's (`x` and `x.y`): state keys hold no dot.
            state = {
                k: v.to(self._home(k, master), copy=True) for k, v in mine.items() if "." not in k
            }
            if state:
                self.inner.state[master] = state

    def _home(self, key: str, master: nn.Parameter) -> torch.device:
        """Where a part of the state lives: with its tensor; a count of steps on the CPU, unless kernels read it."""
        in_kernels = self.inner.defaults.get("fused") or self.inner.defaults.get("capturable")
        return torch.device("cpu") if key == "step" and not in_kernels else master.device


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float16, torch.bfloat16):
        return nn.Parameter(parameter.detach().float())
    return parameter


def kinds() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimisers of torch.optim that the loop can drive, by name in small letters."""
    found: dict[str, Any] = {n: getattr(torch.optim, n) for n in dir(torch.optim)}
    return {
        name.lower(): kind
        for name, kind in found.items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and name not in UNUSABLE
    }


def kind_of(name: str) -> type[torch.optim.Optimizer]:
    """The optimiser of this name, however it is spelt in capitals.

    Raises:
        ConfigError: torch.optim has none that the loop can drive.
    """
    known = kinds()
    if name.lower() not in known:
        raise ConfigError(
            "train.optimizer: torch.optim has no such optimiser that this loop can drive",
            got=repr(name),
            wanted=", ".join(nearest(name.lower(), list(known)) or sorted(known)),
        )
    return known[name.lower()]


def refuse_pieces(name: str, setting: str) -> None:
    """Raises for an optimiser that cannot move a tensor in pieces.

    Args:
        name: of the optimiser.
        setting: that has processes share tensors out, and its value.

    Raises:
        ConfigError: naming those that can.
    """
    kind = kind_of(name)
    if kind.__name__.lower() in WHOLE:
        raise ConfigError(
            f"train.optimizer: {kind.__name__} looks at whole tensors, and with {setting} a process moves pieces",
            got=name,
            wanted=", ".join(sorted(set(kinds()) - set(WHOLE))),
            cure=f"take another optimiser, or leave {setting.partition('=')[0]} out",
        )


def takes(kind: type[torch.optim.Optimizer], option: str) -> bool:
    """Whether an optimiser has an option; one of this name that is something else (Adafactor's two eps) is not it."""
    accepted = inspect.signature(kind).parameters.get(option)
    return accepted is not None and (option != "eps" or isinstance(accepted.default, float))


def _build(
    groups: list[dict[str, Any]], name: str, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    kind = kind_of(name)
    given = {key: value for key, value in options.items() if takes(kind, key)}
    devices = {p.device.type for g in groups for p in g["params"]}
    if takes(kind, "fused") and devices <= {"cpu", "cuda"}:
        given["fused"] = True
    make: Any = kind
    try:
        return make(groups, **given)
    except ValueError as error:  # Muon, for one, moves matrices alone
        raise ConfigError(
            f"train.optimizer: {kind.__name__} cannot train these tensors",
            got=error,
            cure="take another optimiser, such as adamw",
        ) from None
