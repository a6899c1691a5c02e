"""Folding a change into a weight: added in fp32, rounded once; and giving a tied weight a tensor of its own.

    W' = round(W + dW)

Legend: W a base's weight in its own dtype, dW the change in fp32, W' the result in W's dtype or another.

Rounding dW first and the sum again, as adding both in bf16 does, gives another W' for up to a third of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.tree.biases import settings_for, text_config
from afina.tree.technique import Delta, exact_products


@torch.no_grad()
def fold(
    weight: Tensor, deltas: Sequence[Delta], *, name: str, dtype: torch.dtype | None = None
) -> tuple[Tensor, float]:
    """W' of the plain map that does what a map and its children do together, and what the rounding cost.

    Args:
        weight: W as the map stores it, any floating-point dtype; it is not changed.
        deltas: the map's children, in the order in which they act.
        name: of the weight, for errors.
        dtype: of W'; None is W's.

    Returns:
        W', and ||W' - (W + dW)|| / ||dW||: the share of the change that was lost; 0 where there is no change.

    Raises:
        TechniqueError: a child or a dtype does not allow it, or W' would hold a NaN or an infinity.
    """
    if not weight.is_floating_point():
        raise TechniqueError(
            f"{name} is quantised: a change cannot be folded into it",
            got=weight.dtype,
            wanted="a floating-point weight",
            cure="load the base unquantised, or keep the adapter unmerged",
        )
    weight = as_computed(weight)
    turned = deltas[0].transposed
    exact_OI = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    exact_OI = exact_OI.t() if turned else exact_OI
    with exact_products():
        for delta in deltas:
            exact_OI = delta.scaled_weight(exact_OI)
    exact = exact_OI.t() if turned else exact_OI
    rounded = exact.to(dtype or weight.dtype, copy=True, memory_format=torch.contiguous_format)
    lost, size = _norm(exact - rounded), _norm(exact.sub_(weight))
    _refuse_broken(size, lost, rounded, name)
    return rounded, lost / size if size else 0.0


def as_computed(weight: Tensor) -> Tensor:
    """The weight as an ordinary tensor: one that is kept in few bits knows the values that it stands for."""
    unpacked: Callable[[], Tensor] = getattr(weight, "unpacked", weight.detach)
    return unpacked()


@torch.no_grad()
def fold_bias(bias: Tensor | None, deltas: Sequence[Delta], dtype: torch.dtype) -> Tensor | None:
    """b' of the same map; None where there is none.

    Args:
        bias: b, or None; it is not changed.
        deltas: the map's children, in the order in which they act.
        dtype: of b'.
    """
    exact = bias
    if bias is not None:
        exact = bias.to(torch.promote_types(bias.dtype, torch.float32), copy=True)
    for delta in deltas:
        exact = delta.scaled_bias(exact)
    return None if exact is None else exact.to(dtype, copy=True)


def _refuse_broken(size: float, lost: float, rounded: Tensor, name: str) -> None:
    if not (math.isfinite(size) and math.isfinite(lost)):
        raise TechniqueError(
            f"{name}: the folded weight would not be finite",
            got=f"a change of norm {size:g}, rounded to {rounded.dtype}",
            wanted="finite numbers",
            cure="the adapter is damaged if its change is not finite; else fold into a wider dtype",
        )


def _norm(tensor: Tensor) -> float:
    return float(cast("Tensor", torch.linalg.vector_norm(tensor)))  # pyright: ignore[reportUnknownMemberType]


class Folds:
    """The changes of a model, folded into its weights; the original tensors are kept and can be put back.

    A weight is not written: the module gets another tensor in its place. So putting back is exact and costs nothing,
    and a tensor that two modules share is changed for the one that asked, or for both where their change is the same.

    Attributes:
        rounding: of each module, the share of its change that was lost; see `fold`.
        number: of those that were made, so that a later one has a larger number.
    """

    _numbers = count(1)

    def __init__(self, model: nn.Module, deltas: Mapping[str, Delta]) -> None:
        self.rounding: dict[str, float] = {}
        self.number = next(Folds._numbers)
        self._model = model
        self._places: list[tuple[nn.Module, str, nn.Parameter | None, nn.Parameter]] = []
        self._shared = ""
        self._retie: Callable[[], None] | None = None
        added: list[str] = []
        every, shared = by_module(deltas), dict[int, nn.Parameter]()
        for target, parts in every.items():
            module, name = model.get_submodule(target), f"{target}.weight"
            refuse_unfoldable(parts, target)
            if any("weight" not in part.weights() for part in parts):
                self._fold_named(target, parts)
                continue
            weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
            names = names_of(model, weight)
            tied = len(names) > 1 and stays_tied(names, every)
            if len(names) > 1 and not tied:
                refuse_other_ties(model, name)
                self._shared = name
            folded, self.rounding[target] = fold(weight, parts, name=name)
            new = self._replace(module, "weight", folded, weight)
            if tied:
                self._places[-1] = (module, "weight", weight, shared.setdefault(id(weight), new))
            new_bias = fold_bias(bias, parts, weight.dtype if bias is None else bias.dtype)
            if new_bias is not None:
                self._replace(module, "bias", new_bias, bias)
                added += [f"{target}.bias"] if bias is None else []
        self._settings = self._with_biases(added)
        self.put_in()

    def _with_biases(self, added: Sequence[str]) -> Mapping[str, bool]:
        """Settings of the configuration with which the model has these biases; the others that they bring are zero."""
        if not hasattr(self._model, "config"):
            return {}
        found = settings_for(self._model, added)
        for name in found.zero:
            module = self._model.get_submodule(name.rpartition(".")[0])
            weight = module.get_parameter("weight")
            zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
            self._replace(module, "bias", zeros, None)
        return found.settings

    def _fold_named(self, target: str, parts: Sequence[Delta]) -> None:
        """Of a module that is no map, such as fused experts: each tensor that is changed, by its own name."""
        module = self._model.get_submodule(target)
        for own in sorted({own for part in parts for own in part.weights()}):
            weight, name = module.get_parameter(own), f"{target}.{own}"
            mine = [part.weights()[own] for part in parts if own in part.weights()]
            folded, self.rounding[name] = fold(weight, mine, name=name)
            self._replace(module, own, folded, weight)

    def _replace(
        self, module: nn.Module, name: str, folded: Tensor, old: nn.Parameter | None
    ) -> nn.Parameter:
        trains = old is not None and old.requires_grad
        new = nn.Parameter(folded, requires_grad=trains)
        self._places.append((module, name, old, new))
        return new

    def made(self, parameter: nn.Parameter) -> bool:
        """Whether this very tensor was made here."""
        return any(new is parameter for *_, new in self._places)

    def put_in(self) -> None:
        """The folded weights take their places."""
        if self._shared:
            self._retie = untie(self._model)
        for module, name, _, folded in self._places:
            setattr(module, name, folded)
        self._configure(on=True)

    def _configure(self, *, on: bool) -> None:
        model: Any = self._model
        for name in self._settings:
            setattr(text_config(model.config), name, on)

    def take_out(self) -> None:
        """The originals take theirs."""
        for module, name, original, _ in self._places:
            setattr(module, name, original)
        self._configure(on=False)
        if self._retie is not None:
            self._retie()
            self._retie = None


def _told(delta: Delta) -> str:
    """What acts, in words: the method's name is that of its child's class."""
    return type(delta).__name__.removesuffix("Delta").lower()


def refuse_unfoldable(deltas: Sequence[Delta], target: str) -> None:
    """Raises where a child's change is none of weight and bias.

    Raises:
        TechniqueError: naming it.
    """
    for delta in deltas:
        if not delta.foldable:
            raise TechniqueError(
                f"{_told(delta)} cannot be merged: it is no change of a weight",
                got=f"it acts at {target or 'the model itself'}",
                cure="keep the adapter beside the model",
            )


def by_module(deltas: Mapping[str, Delta]) -> dict[str, list[Delta]]:
    """The children of each module, in the order in which they act."""
    found: dict[str, list[Delta]] = {}
    for name, delta in deltas.items():
        found.setdefault(name.rpartition(".")[0], []).append(delta)
    return found


# --- ties ------------------------------------------------------------------------------------------------------


def names_of(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    """Every name under which `model` holds this very tensor."""
    every = model.named_parameters(remove_duplicate=False)
    return [name for name, other in every if other is parameter]


def stays_tied(names: Sequence[str], deltas: Mapping[str, Sequence[Delta]]) -> bool:
    """Whether what changes a tied tensor is the same under all of its names, so that it stays one tensor.

    Args:
        names: of the tensor.
        deltas: the children of each module that has some.
    """
    ends = [deltas.get(name.rpartition(".")[0], ()) for name in names]
    changes = {id(delta.origin()) for end in ends for delta in end}
    return len(changes) == 1 and all(len(end) == 1 for end in ends)


def untie(model: Any) -> Callable[[], None]:
    """Changes what says that a model's input embedding and head are one tensor; the result puts it back."""
    configs = {id(c): c for c in (model.config, model.config.get_text_config())}
    tied = [c for c in configs.values() if getattr(c, "tie_word_embeddings", False)]
    keys = model.all_tied_weights_keys
    for config in tied:
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}

    def restore() -> None:
        for config in tied:
            config.tie_word_embeddings = True
        model.all_tied_weights_keys = keys

    return restore


def refuse_other_ties(model: Any, name: str) -> None:
    """Raises unless the only shared tensor is the weight of input embedding and head.

    Raises:
        TechniqueError: another one is shared.
    """
    groups = tied_groups(model)
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = {id(getattr(end, "weight", None)) for end in ends}
    usual = len(weights) == 1 and len(groups) == 1
    if usual and id(model.get_parameter(groups[0][0])) in weights:
        return
    raise TechniqueError(
        f"{name} is one tensor with another, and this model has no setting that parts them",
        got="; ".join(" = ".join(group) for group in groups),
        wanted="at most the input embedding tied to the head",
        cure="keep the adapter unmerged, or train without this target",
    )


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, for each tensor with more than one."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return [names for names in by_tensor.values() if len(names) > 1]
