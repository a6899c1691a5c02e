"""Which base model a run or an adapter belongs to: a short text that tells one base from another in no time.

It is a hash of the names (without their beginnings), shapes and some values of the base's tensors, in two parts:

| part | what of each value | the same for |
|---|---|---|
| `bf16:` or `fp16:` | the value rounded to bf16 | one checkpoint loaded in fp64, fp32 or bf16; or in fp16 |
| `signs:` | its sign bit | one checkpoint loaded in any floating-point type |

A base loaded in fp16 has been rounded once already, and rounding it again to bf16 does not always give what one
rounding gives. So its first part is its own, and `same_base` compares the signs alone when just one side is fp16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from afina.ops.packed import PackedWeight
from afina.ops.sample import sample
from afina.tree import Delta, Edit, originals

Read = Callable[[str], Tensor]
"""The values of a base tensor, by its name in the model."""


def base_fingerprint(
    model: nn.Module,
    edit: Edit | None = None,
    *,
    without: Iterable[str] = (),
    read: Read | None = None,
) -> str:
    """The fingerprint of the frozen base: equal with an edit on it or off, and on any machine.

    Args:
        model: its parameters are looked at, not its buffers, and not what techniques attached to it.
        edit: base tensors that it trains in place are left out. What edits folded into the base is not seen, nor what
            others trained in place.
        without: names of further base tensors to leave out. Whoever compares two fingerprints must leave out the same.
        read: gives the values of one tensor after the other, where the model itself is on the meta device.

    Returns:
        `bf16:<64 bits>+signs:<64 bits>`, in hexadecimal; `fp16:…` where a base tensor is fp16. A change of a tensor
        that misses its samples is not seen.
    """
    with originals(model) as kept:
        return _fingerprint(model, edit, without, read, kept)


def _fingerprint(
    model: nn.Module,
    edit: Edit | None,
    without: Iterable[str],
    read: Read | None,
    kept: Mapping[int, Tensor],
) -> str:
    named = dict(model.named_parameters(remove_duplicate=False))
    left_out = {id(p) for name in without for p in _named(named, name)}
    if edit is not None:
        left_out |= {id(p) for p in edit.in_place.values()}
    values: list[bytes] = []
    signs: list[bytes] = []
    half = False
    for name, parameter in _base(model).items():
        if id(parameter) in left_out:
            continue
        # Another edit of the model may train a base tensor in place: the base is what it was before.
        value = kept.get(id(parameter), parameter)
        seen = _sampled(value if read is None else read(name))
        half |= seen.dtype == torch.float16
        head = f"{_lasting(name)}{tuple(parameter.shape)}".encode()
        values.append(hashlib.sha256(head + _as_bf16(seen)).digest())
        negative = torch.signbit(seen.double()).numpy().tobytes()
        signs.append(hashlib.sha256(head + negative).digest())
    kind = "fp16" if half else "bf16"
    return f"{kind}:{_together(values)}+signs:{_together(signs)}"


def _named(named: dict[str, nn.Parameter], name: str) -> list[nn.Parameter]:
    """The tensor of that name, or where there is none those that differ from it in the beginning alone."""
    if name in named:
        return [named[name]]
    return [p for other, p in named.items() if _lasting(other) == _lasting(name)]


def _together(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


def _lasting(name: str) -> str:
    """The part of a name that Transformers does not change: from the block's number on, or the last two words.

    What stands before has changed (`language_model.model.layers` became `model.language_model.layers`), and so has the
    order of tensors; the base is the same.
    """
    pieces = name.split(".")
    number = next((i for i, piece in enumerate(pieces) if piece.isdigit()), len(pieces) - 2)
    return ".".join(pieces[max(0, number) :])


def same_base(one: str, other: str) -> bool:
    """Whether two fingerprints can be of one base, loaded in whatever floating-point type."""
    kinds = [text.partition(":")[0] for text in (one, other)]
    if kinds[0] == kinds[1]:
        return one == other
    return one.rpartition("+")[2] == other.rpartition("+")[2]


def _base(model: nn.Module) -> dict[str, nn.Parameter]:
    """The base's own parameters by name, a tied one under its first."""
    deltas = (m for m in model.modules() if isinstance(m, Delta))
    attached = {id(p) for delta in deltas for p in delta.parameters()}
    return {n: p for n, p in model.named_parameters() if id(p) not in attached}


def _sampled(parameter: Tensor) -> Tensor:
    """Some of its values, on the CPU; of a quantised weight those of the weight that it was made of."""
    if isinstance(parameter, PackedWeight):
        return parameter.kept.cpu()
    return sample(parameter.detach()).cpu()


def _as_bf16(seen: Tensor) -> bytes:
    """The bytes of the values, rounded once; those of whole numbers as they are."""
    if seen.is_floating_point():
        # Through fp32, as torch itself casts fp64, so that a load in fp64 and one in fp32 agree.
        seen = seen.float().bfloat16().view(torch.int16)
    return seen.numpy().tobytes()
