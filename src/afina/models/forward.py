"""One way through a model: a batch in, the logits of its trained positions out.

Training and evaluation both go through here, so that their losses mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afina import seams
from afina.errors import ModelError
from afina.models.head import Head
from afina.ops import interface
from afina.ops.layout import with_layout
from afina.seams.whole import positions
from afina.tree import front_of
from afina.types import IGNORE, Batch, Context


@contextmanager
def packing(model: nn.Module, packed: bool) -> Iterator[None]:
    """Inside the block the model takes packed batches; with `packed` False it is left as it is.

    Raises:
        ModelError: when this model cannot keep packed rows apart.
    """
    if packed and not seams.supports_rows(model):
        raise ModelError(
            "this model cannot keep packed rows apart",
            got=type(model).__name__,
            cure="set data.packing=false",
        )
    with interface.rows(model) if packed else nullcontext():
        yield


def context_of(model: Any) -> int | None:
    """The tokens of a row that a model can read at once; None where its config does not say."""
    limit = positions(model)
    return None if limit is None else limit - front_of(model)


@contextmanager
def own_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Inside a `packing` block: the attention `name` again, for calls that carry no context (generation)."""
    speaker: Any = model
    packed = speaker.config._attn_implementation
    speaker.set_attn_implementation(name)
    try:
        yield
    finally:
        speaker.set_attn_implementation(packed)


def trained_logits(
    model: nn.Module, batch: Batch, *, step: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits of the positions that are trained, and what they must predict.

    A packed batch must be run inside `packing(model, True)`; others take the model's own attention and a mask.

    Args:
        model: a causal language model, or a classifier of tokens.
        batch: one micro-batch on the model's device.
        step: number of the optimiser step.
        seed: of this micro-batch.

    Returns:
        logits (N, V) and targets (N,), row by row; where rows share their beginnings, one for each of
        `batch.entries`, which counts for so many rows as it says.
    """
    inputs = _inputs(batch, step, seed)
    places_BT, targets = trained_places(batch)
    if seams.classifies(model) is not None:
        logits_BTC: Tensor = model(**inputs).logits
        return logits_BTC[places_BT], targets
    # The head runs on the columns where some row is trained: for a packed line, on trained positions alone.
    columns = places_BT.any(dim=0).nonzero()[:, 0]
    logits_BCV = getattr(model(**inputs, logits_to_keep=columns), "logits", None)
    if logits_BCV is None:
        raise ModelError(
            "this model predicts no tokens, so there is no loss to measure",
            got=type(model).__name__,
            wanted="a causal language model, such as LlamaForCausalLM",
            cure="load a model that generates text; an encoder or a classifier needs rows of text and label",
        )
    if batch.entries is None:
        return logits_BCV[places_BT[:, columns]], targets
    return logits_BCV[0].index_select(0, torch.searchsorted(columns, batch.entries[0])), targets


def trained_losses(
    model: nn.Module, batch: Batch, head: Head | None, *, step: int = 0, seed: int = 0
) -> Tensor:
    """Minus the log-probability of what each trained position must predict (N,), in fp32 or wider.

    Of rows with classes each row's own (B,).

    Args:
        model: a causal language model, or a classifier.
        batch: as for `trained_logits`.
        head: of this model, from `head_of`: its logits are then never all in memory; None makes them.
        step: number of the optimiser step.
        seed: of this micro-batch.

    Returns:
        One loss for each of the targets of `trained_logits`, in the same order.
    """
    if batch.labels_B is not None:
        logits_BC: Tensor = model(**_inputs(batch, step, seed)).logits
        # Lines of padding behind the rows have no class.
        count = len(batch.rows)
        return token_losses(logits_BC[:count], batch.labels_B[:count])
    if head is None:
        return token_losses(*trained_logits(model, batch, step=step, seed=seed))
    hidden_BTD = head.trunk(**_inputs(batch, step, seed)).last_hidden_state
    places_BT, targets_N = trained_places(batch)
    if batch.entries is None:
        return head.losses(hidden_BTD[places_BT], targets_N)
    return head.losses(hidden_BTD[0].index_select(0, batch.entries[0]), targets_N)


def _inputs(batch: Batch, step: int, seed: int) -> dict[str, Any]:
    """What the model is called with."""
    inputs: dict[str, Any] = {"input_ids": batch.tokens_BT, "use_cache": False}
    if batch.packed:
        context = Context(batch.segments_BT, batch.positions_BT, step=torch.tensor(step), seed=seed)
        inputs["position_ids"] = batch.positions_BT
        inputs["afina_context"] = with_layout(context, batch.runs)
    else:
        inputs["attention_mask"] = (batch.segments_BT >= 0).long()
    return inputs


def trained_places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which positions predict something that is trained (B, T), and what: targets (N,), place by place."""
    if batch.entries is None:
        trained_BT = batch.targets_BT != IGNORE
        return trained_BT, batch.targets_BT[trained_BT]
    places_N, targets_N, _ = batch.entries
    trained_BT = torch.zeros_like(batch.tokens_BT, dtype=torch.bool)
    trained_BT[0, places_N] = True
    return trained_BT, targets_N


def token_losses(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Minus the log-probability of each target (N,), in fp32 or wider."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), targets_N, reduction="none", ignore_index=IGNORE)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    if batch.entries is not None:
        moved["entries"] = tuple(part.to(device) for part in batch.entries)
    return replace(batch, **moved)
