"""Losses of rows and of whole choices, from right-padded batches in which no row sees another.

Legend: B rows, T tokens, C classes, N trained positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from afina import seams
from afina.data.packing import collate
from afina.errors import ModelError
from afina.models.finite import not_finite
from afina.models.forward import to_device, token_losses, trained_logits
from afina.types import Row

LOGITS_AT_ONCE = 2**27
"""Most logits of one forward pass: 512 MiB in fp32. A single row may need more, and then gets it."""

POSITIONS_AT_ONCE = 512
"""Positions whose logits are made fp32 at once, since that copy can be the largest tensor of an evaluation."""

Progress = Callable[[int, int], None]


def row_losses(
    model: Any, rows: Sequence[Row], batch_rows: int, on_progress: Progress | None = None
) -> list[float]:
    """Sum of each row's token losses over its trained tokens, in nats, in the order of `rows`.

    A row without a trained token gets 0. The model should be in evaluation mode.

    Args:
        model: a causal language model.
        rows: prepared rows.
        batch_rows: most rows of one forward pass.
        on_progress: called after each batch with the rows done so far and the number of all.

    Raises:
        RunError: a loss is NaN. An infinite one is a token that the model rules out, and counts.
    """
    sums = [0.0] * len(rows)
    done = sum(row.trained_tokens == 0 for row in rows)
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config().vocab_size
    with torch.no_grad():
        for numbers in _batches(rows, batch_rows, vocabulary):
            batch = [rows[n] for n in numbers]
            for n, loss in zip(numbers, _batch_losses(model, batch, device), strict=True):
                if math.isnan(loss):
                    raise not_finite(model, f"a loss of NaN at {named(rows[n])}")
                sums[n] = loss
            done += len(numbers)
            if on_progress is not None:
                on_progress(done, len(rows))
    return sums


def class_scores(
    model: Any, rows: Sequence[Row], batch_rows: int, on_progress: Progress | None = None
) -> list[tuple[float, int]]:
    """Loss in nats and predicted class of each labelled row, by the model's classification head.

    Raises:
        ModelError: the model has no classification head, or fewer classes than the labels need.
        RunError: a loss is NaN.
    """
    _check_classifies(model, rows)
    # A decoder classifies at its last token and finds it by the padding's id; without one, a row must go alone.
    pad = model.config.get_text_config().pad_token_id
    size = batch_rows if pad is not None else 1
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n].tokens))
    device = model.get_input_embeddings().weight.device
    scored: dict[int, tuple[float, int]] = {}
    with torch.no_grad():
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            batch = to_device(collate([rows[n] for n in numbers], False, pad or 0), device)
            mask_BT = (batch.segments_BT >= 0).long()
            logits_BC = model(input_ids=batch.tokens_BT, attention_mask=mask_BT).logits
            labels_B = torch.tensor([rows[n].label for n in numbers], device=device)
            losses = functional.cross_entropy(logits_BC.float(), labels_B, reduction="none")
            guesses = logits_BC.argmax(dim=-1)
            if losses.isnan().any():
                first = rows[numbers[int(losses.isnan().int().argmax())]]
                raise not_finite(model, f"a loss of NaN at {named(first)}")
            pairs = zip(losses.tolist(), guesses.tolist(), strict=True)
            scored.update(zip(numbers, pairs, strict=True))
            if on_progress is not None:
                on_progress(len(scored), len(rows))
    return [scored[n] for n in range(len(rows))]


def tag_scores(
    model: Any, rows: Sequence[Row], batch_rows: int, on_progress: Progress | None = None
) -> list[tuple[float, list[int], list[int]]]:
    """Of each tagged row the summed loss in nats, the predicted and the right class of each tagged token.

    Raises:
        ModelError: the model does not classify tokens, or has fewer classes than the tags need.
        RunError: a loss is NaN.
    """
    _check_classifies(model, rows)
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n].tokens))
    device = model.get_input_embeddings().weight.device
    scored: dict[int, tuple[float, list[int], list[int]]] = {}
    with torch.no_grad():
        for start in range(0, len(order), batch_rows):
            numbers = order[start : start + batch_rows]
            batch = to_device(collate([rows[n] for n in numbers], False, 0), device)
            logits_NC, targets_N = trained_logits(model, batch)
            sizes = [rows[n].trained_tokens for n in numbers]
            parts = zip(
                numbers,
                token_losses(logits_NC, targets_N).split(sizes),
                logits_NC.argmax(dim=-1).split(sizes),
                targets_N.split(sizes),
                strict=True,
            )
            for n, losses, guesses, right in parts:
                if losses.isnan().any():
                    raise not_finite(model, f"a loss of NaN at {named(rows[n])}")
                scored[n] = math.fsum(losses.tolist()), guesses.tolist(), right.tolist()
            if on_progress is not None:
                on_progress(len(scored), len(rows))
    return [scored[n] for n in range(len(rows))]


def named(row: Row) -> str:
    """Where a row came from, else its number."""
    return row.source or f"row {row.id}"


def _check_classifies(model: Any, rows: Sequence[Row]) -> None:
    tagged = rows[0].label is None
    if seams.classifies(model) != ("tokens" if tagged else "rows"):
        raise ModelError(
            f"the rows have {'tags' if tagged else 'labels'}, and this model has no classification head for these",
            got=type(model).__name__,
            wanted="a model loaded for classification, or rows whose answer is text",
            cure="evaluate the run that was trained on labels, or give the label as the completion",
        )
    most = max(max(row.tags or (row.label or 0,)) for row in rows)
    if most >= model.config.num_labels:
        raise ModelError(
            "a label is outside the model's classes",
            got=f"label {most}",
            wanted=f"0 to {model.config.num_labels - 1}",
            cure="use the data's own label numbering of the training run",
        )


def _batches(rows: Sequence[Row], batch_rows: int, vocabulary: int) -> Iterator[list[int]]:
    """Numbers of the rows that have trained tokens, in batches of like length, longest first."""
    order = sorted(
        (n for n in range(len(rows)) if rows[n].trained_tokens),
        key=lambda n: (-len(rows[n].tokens), n),
    )
    batch: list[int] = []
    kept: set[int] = set()
    for n in order:
        union = kept.union(_predicting(rows[n]))
        full = len(batch) == batch_rows
        if batch and (full or len(union) * (len(batch) + 1) * vocabulary > LOGITS_AT_ONCE):
            yield batch
            batch, union = [], set(_predicting(rows[n]))
        batch.append(n)
        kept = union
    if batch:
        yield batch


def _predicting(row: Row) -> list[int]:
    """Positions whose logits predict a trained token: the one before each."""
    return [t - 1 for t in range(1, len(row.tokens)) if row.trained[t]]


def _batch_losses(model: Any, rows: Sequence[Row], device: Any) -> list[float]:
    # The padding's id is arbitrary: it is masked, and nothing predicts it.
    logits_NV, targets_N = trained_logits(model, to_device(collate(rows, False, 0), device))
    slices = zip(
        logits_NV.split(POSITIONS_AT_ONCE), targets_N.split(POSITIONS_AT_ONCE), strict=True
    )
    losses_N = torch.cat([token_losses(logits, targets) for logits, targets in slices])
    parts = losses_N.cpu().split([row.trained_tokens for row in rows])
    return [math.fsum(part.tolist()) for part in parts]
