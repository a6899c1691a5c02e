"""A weight in few bits, in the place where the weight was: a tensor of its shape, type and device.

Products with it go through `ops.product`. Whatever else reads it (a norm, a sum, a cast) gets its values as an ordinary
tensor; nothing can write into it. Copying and moving it copies and moves its parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from afina.errors import TechniqueError
from afina.ops.product import multiply
from afina.ops.quantise import Quantised, Scheme, dequantise, quantise
from afina.ops.sample import sample

_PARTS = ("codes", "scales", "second", "offset", "kept", "apart_b", "apart_a")


class PackedWeight(Tensor):
    """A frozen weight in few bits; `pack` makes it.

    Attributes:
        scheme: how it is kept.
        codes, scales, second, offset: see `Quantised`.
        kept: the sample of the weight that it was made of; see `ops.sample`.
        apart_b, apart_a: factors, as the weight lies, of a part of that weight that rounding took off and a low-rank
            change can give back; None where they were not asked for. They take no part in what is computed.
        compute: type of the products; None is that of the input.
        settings: what it was made by, for whoever must make it again.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    second: Tensor | None
    offset: Tensor | None
    kept: Tensor
    apart_b: Tensor | None
    apart_a: Tensor | None
    compute: torch.dtype | None
    settings: str

    @property
    def apart(self) -> tuple[Tensor, Tensor] | None:
        """Both factors, (rows, r) and (r, columns) of the weight as it lies; None where there are none."""
        if self.apart_b is None or self.apart_a is None:
            return None
        return self.apart_b, self.apart_a

    def remember(self, b: Tensor, a: Tensor) -> None:
        """Keeps such factors."""
        self.apart_b, self.apart_a = b, a

    @property
    def packed(self) -> Quantised:
        """Its parts."""
        parts = (self.codes, self.scales, self.second, self.offset)
        return Quantised(self.shape, self.scheme, *parts)

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """What is computed with, as an ordinary tensor.

        Args:
            dtype: None is the weight's own. The values are rounded to the type of the products first.
        """
        own = self.dtype if dtype is None else dtype
        return dequantise(self.packed, self.compute or own).to(own)

    def changed(
        self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> PackedWeight:
        """The same weight, its parts copied or moved by `change`; of another type, if one is given."""
        held = {name: getattr(self, name) for name in _PARTS}
        parts = {name: change(part) for name, part in held.items() if part is not None}
        return _made(parts, self.shape, {**self._about(), "dtype": dtype or self.dtype})

    def _about(self) -> dict[str, Any]:
        """All but the parts and the shape."""
        names = ("scheme", "dtype", "compute", "settings")
        return {name: getattr(self, name) for name in names}

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """What it is, without its values."""
        about = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"PackedWeight({self.scheme}, {about})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Names of the parts, and the rest: how torch's compiler takes it apart."""
        return [name for name in _PARTS if getattr(self, name) is not None], self._about()

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], about: Mapping[str, Any], shape: Any, stride: Any
    ) -> PackedWeight:
        """The reverse of `__tensor_flatten__`."""
        return _made(parts, torch.Size(shape), about)

    def _stable_hash_for_caching(self) -> str:
        """Of what a compiled graph depends on, for the compiler's cache."""
        parts = [(name, getattr(self, name)) for name in _PARTS]
        told = [(name, str(p.dtype), tuple(p.shape)) for name, p in parts if p is not None]
        text = repr((tuple(self.shape), str(self.device), told, self._about()))
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Products of its own; refusals; all else as torch does it."""
        own = _OWN.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies and moves of the packed weight; any other operation sees its values."""
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return args[0].changed(_itself)
        if func is aten.clone.default:
            return args[0].changed(torch.clone)
        if func is aten._to_copy.default:
            return _moved(args[0], kwargs or {})
        _refuse_writing(func, args, kwargs or {})
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.unpacked, (args, kwargs or {}))
        return func(*args, **kwargs)


def pack(
    weight: Tensor,
    scheme: Scheme,
    *,
    name: str,
    compute: torch.dtype | None = None,
    settings: str = "",
    instead: Tensor | None = None,
) -> nn.Parameter:
    """The frozen parameter that takes the place of `weight`.

    Args:
        weight: floating point, any shape.
        scheme: how it is kept.
        name: of the weight, for the error.
        compute: type of the products; None is that of the input.
        settings: what it is made by; see `PackedWeight`.
        instead: what is rounded in its place, of its shape; None is the weight itself.

    Raises:
        TechniqueError: it holds a NaN or an infinity.
    """
    try:
        packed = quantise(weight if instead is None else instead, scheme)
    except ValueError as error:
        raise TechniqueError(
            f"{name} cannot be quantised: {error}",
            wanted="finite numbers",
            cure="the base is damaged: load it again; or leave this module out with quantize.exclude",
        ) from None
    kept = sample(weight.detach()).clone()
    names = ("codes", "scales", "second", "offset")
    held = {**{part: getattr(packed, part) for part in names}, "kept": kept}
    about = {"scheme": scheme, "dtype": weight.dtype, "compute": compute, "settings": settings}
    parts = {part: tensor for part, tensor in held.items() if tensor is not None}
    return nn.Parameter(_made(parts, weight.shape, about), requires_grad=False)


def _made(parts: Mapping[str, Tensor], shape: torch.Size, about: Mapping[str, Any]) -> PackedWeight:
    """A tensor without memory of its own, around its parts."""
    maker: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType]
    device = parts["codes"].device
    made: PackedWeight = maker(PackedWeight, shape, dtype=about["dtype"], device=device)
    for name in _PARTS:
        setattr(made, name, parts.get(name))
    made.scheme, made.compute = about["scheme"], about["compute"]
    made.settings = about["settings"]
    return made


def dense(weight: Tensor) -> Tensor:
    """The values of a weight, packed or not, as an ordinary tensor without gradient; it may be the weight's own."""
    return weight.unpacked() if isinstance(weight, PackedWeight) else weight.detach()


def stored(weight: Tensor) -> Tensor | Quantised:
    """A weight as it is kept: itself, or its parts."""
    return weight.packed if isinstance(weight, PackedWeight) else weight


def stored_bytes(tensor: Tensor) -> int:
    """What a tensor takes, packed or not."""
    if isinstance(tensor, PackedWeight):
        return tensor.packed.bytes
    return tensor.numel() * tensor.element_size()


# --- what torch's own functions do with it -----------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w'ᵀ + b, with a packed weight (out, in)."""
    if not isinstance(weight, PackedWeight):
        return F.linear(dense(input), weight, bias)
    y = multiply(input, cast("Any", weight), transposed=False)
    return y if bias is None else y + bias.to(y.dtype)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **factors: Any) -> Tensor:
    """b + x w', with a packed weight (in, out), as a `Conv1D` computes it."""
    ordinary = not any(isinstance(tensor, PackedWeight) for tensor in (input, mat1))
    if ordinary and isinstance(mat2, PackedWeight) and not factors:
        y = multiply(mat1, cast("Any", mat2), transposed=True)
        return y + input.to(y.dtype)
    values = tree_map_only(PackedWeight, PackedWeight.unpacked, [input, mat1, mat2])
    return torch.addmm(*values, **factors)


def _itself(part: Tensor) -> Tensor:
    return part


def _moved(weight: PackedWeight, kwargs: Mapping[str, Any]) -> Tensor:
    """The packed weight on another device, or said to be of another type; its scales stay as they are."""
    dtype = kwargs.get("dtype") or weight.dtype
    if not dtype.is_floating_point:
        return weight.unpacked().to(dtype)
    device = kwargs.get("device") or weight.device
    waits = bool(kwargs.get("non_blocking", False))
    return weight.changed(lambda part: part.to(device, non_blocking=waits, copy=True), dtype)


def _frozen(weight: Tensor, requires_grad: bool = True) -> Tensor:
    if requires_grad:
        raise TechniqueError(
            "a quantised weight cannot train",
            wanted="a floating-point weight",
            cure="leave the module out with quantize.exclude, or train a change beside it, such as lora's",
        )
    return weight


def _unwritable(*args: Any, **kwargs: Any) -> Any:
    raise TechniqueError(
        "a quantised weight cannot be written",
        cure="write into the base's own weight: undo the edit, or load the model unquantised",
    )


def _no_storage(*args: Any, **kwargs: Any) -> Any:
    raise TechniqueError(
        "a quantised weight cannot be saved as it is",
        cure="save the adapter; or merge it into the dequantised base: afina merge RUN -o OUT (in Python afina.merge)",
    )


def _refuse_writing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, PackedWeight):
            _unwritable()


_SETTER: Any = cast("Any", Tensor.requires_grad).__set__

_OWN: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    Tensor.requires_grad_: _frozen,
    _SETTER: _frozen,
    Tensor.__setitem__: _unwritable,
    Tensor.storage: _no_storage,  # what safetensors asks for
}
