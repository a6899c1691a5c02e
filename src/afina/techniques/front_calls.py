"""Places in front of a trunk's rows: put into what it is called with, and taken out of what it gives.

A call of the trunk has mask, positions, types and a cache, each of which must come to know the places (`FrontCalls`);
the values at the places are the child's matter (`front.FrontDelta`).
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afina import seams
from afina.errors import ModelError


class FrontCalls:
    """Puts the places into what the trunk is called with, and takes them out of what it gives.

    Looks the child up in the module it is given, so that a deep copy uses its own child.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.added = 0
        """Places in this call that its caller knows nothing of."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What the trunk is called with instead; a forward pre-hook.

        Raises:
            ModelError: mask, positions or cache do not allow places in front.
        """
        delta = getattr(module, self.key)
        self.added = 0
        if not delta.acts:
            return None
        names = list(inspect.signature(module.forward).parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        embedding = cast("Any", module).get_input_embeddings()
        past = _cached(named, self.key)
        if named.get("afina_context") is not None:
            ids_BT = named.pop("input_ids")
            named["inputs_embeds"] = delta(ids_BT, embedding(ids_BT.clamp(min=0)), embedding)
        else:
            self.added = 0 if past else delta.front
            _make_room(module, named, names, delta.front, past)
        if self.added:
            y_BTD = named.get("inputs_embeds")
            y_BTD = embedding(named.pop("input_ids")) if y_BTD is None else y_BTD
            vectors_nD = delta.vectors(embedding).to(y_BTD.dtype)
            front_BnD = vectors_nD.expand(y_BTD.shape[0], -1, -1)
            named["inputs_embeds"] = torch.cat((front_BnD, y_BTD), dim=1)
        delta.told(named, past)
        return (), named

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """What the trunk gives, without the places; a forward hook."""
        delta = getattr(module, self.key)
        if delta.acts:
            delta.checked(kwargs)
        if not self.added:
            return output
        if isinstance(output, tuple):
            return tuple(_behind(part, self.added) for part in cast("tuple[Any, ...]", output))
        for name, part in list(output.items()):
            output[name] = _behind(part, self.added)
        return output


def _cached(named: dict[str, Any], key: str) -> int:
    """Positions in the cache, those in front among them.

    Raises:
        ModelError: its size is fixed, and has no room for them.
    """
    cache = next((named[n] for n in ("cache", "past_key_values") if named.get(n) is not None), None)
    if cache is None:
        return 0
    if getattr(cache, "is_compileable", False):
        raise ModelError(
            f"{key} needs a cache that grows, and this one is of a fixed size",
            got=type(cache).__name__,
            cure="with generate, leave cache_implementation at 'dynamic'",
        )
    return int(cache.get_seq_length())


def _make_room(
    module: nn.Module, named: dict[str, Any], names: list[str], front: int, past: int
) -> None:
    """Mask, positions and types of a call, changed as the places in front ask for."""
    given = named.get("input_ids")
    given = named["inputs_embeds"] if given is None else given
    rows, length = given.shape[:2]
    mask_BS, positions_BT = named.get("attention_mask"), named.get("position_ids")
    for name, what, dims in (
        ("attention_mask", mask_BS, (2,)),
        ("position_ids", positions_BT, (1, 2)),
    ):
        if what is not None and (not isinstance(what, Tensor) or what.dim() not in dims):
            raise ModelError(
                f"places in front of the rows need {name} with one number a token",
                got=tuple(what.shape) if isinstance(what, Tensor) else type(what).__name__,
                wanted="(rows, tokens)",
            )
    if past and mask_BS is not None and mask_BS.shape[1] + front != past + length:
        raise ModelError(
            "the mask is not as long as the cache and the tokens behind it, the places in front left out",
            got=mask_BS.shape[1],
            wanted=past + length - front,
            cure="fill the cache with the same techniques on",
        )
    first = seams.first_position(module)
    if positions_BT is None and mask_BS is not None and "position_ids" in names:
        # A row's own tokens stand right behind the front, on whichever side it is padded.
        counted_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
        positions_BT = counted_BS[:, -length:] + first
    if mask_BS is not None:
        named["attention_mask"] = F.pad(mask_BS, (front, 0), value=1)
    if positions_BT is not None:
        behind_BT = positions_BT.expand(rows, -1) + front
        places = torch.arange(first, first + front, device=behind_BT.device).expand(rows, -1)
        named["position_ids"] = behind_BT if past else torch.cat((places, behind_BT), dim=1)
    if named.get("token_type_ids") is not None and not past:
        named["token_type_ids"] = F.pad(named["token_type_ids"], (front, 0), value=0)


def _behind(part: Any, front: int) -> Any:
    """The same without the places in front: states (B, T, D), or of each layer; attention keeps them among its keys."""
    if isinstance(part, tuple):
        return tuple(_behind(one, front) for one in cast("tuple[Any, ...]", part))
    if not isinstance(part, Tensor) or part.dim() not in (3, 4):
        return part
    return part[:, front:] if part.dim() == 3 else part[:, :, front:]
