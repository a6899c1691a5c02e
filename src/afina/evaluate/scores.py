"""What an answer or a prediction is worth: pure functions, each with its standard error where it has one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from afina.errors import DataError, counted


def mean_loss(sums: Sequence[float], tokens: Sequence[int]) -> float:
    """Sum of all token losses over the number of trained tokens: the loss that training minimises.

    Args:
        sums: of each row's token losses, in nats.
        tokens: each row's trained tokens.

    Raises:
        DataError: no row has a trained token.
    """
    total = sum(tokens)
    if total == 0:
        raise DataError(
            "there is nothing to measure a loss on",
            got=f"{counted(len(tokens), 'row')} without a trained token",
            cure="give rows with an answer, or a text",
        )
    return math.fsum(sums) / total


def mean_loss_error(sums: Sequence[float], tokens: Sequence[int]) -> float | None:
    """Standard error of `mean_loss` over the choice of rows; None for a single row.

    A mean over tokens of whole rows is a ratio, so its error is the ratio estimator's (Cochran, "Sampling Techniques",
    1977, section 6.3): tokens of one row are not independent, rows are.
    """
    rows = len(tokens)
    if rows < 2:
        return None
    mean = mean_loss(sums, tokens)
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, tokens, strict=True))
    return math.sqrt(squares * rows / (rows - 1)) / sum(tokens)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 709 else math.inf


def proportion(flags: Sequence[bool]) -> tuple[float, float]:
    """The share of true flags, and its standard error sqrt(p (1 - p) / n).

    Raises:
        DataError: no flags.
    """
    if not flags:
        raise DataError("there is nothing to take a share of", got="0 rows")
    share = sum(flags) / len(flags)
    return share, math.sqrt(share * (1 - share) / len(flags))


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """Mean of `after - before` over the same rows, and its standard error (0 for a single row).

    Pairing takes out what makes a row hard for both, so it sees smaller changes than two separate errors would.
    """
    differences = [a - b for a, b in zip(after, before, strict=True)]
    mean = math.fsum(differences) / len(differences)
    if len(differences) < 2:
        return mean, 0.0
    variance = math.fsum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


def exact_match(answer: str, reference: str) -> bool:
    """Whether the two texts are equal, white space around them aside. Case, accents and inner space count."""
    return answer.strip() == reference.strip()


def parse_json(text: str) -> tuple[bool, Any]:
    """Whether the text, stripped, is one JSON object or list, and its value.

    A bare number, string or word is not counted as JSON here: every `42` would be.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False, None
    return isinstance(value, dict | list), value


def json_equal(a: Any, b: Any) -> bool:
    """Equality of JSON values: order of keys does not count, 1 equals 1.0, and `true` does not equal 1."""
    left = [(a, b)]
    while left:  # no call within a call: an answer may nest deeper than Python's stack
        a, b = left.pop()
        if isinstance(a, bool) or isinstance(b, bool):
            equal = a is b
        elif isinstance(a, dict) and isinstance(b, dict):
            equal = a.keys() == b.keys()
            left += [(a[key], b[key]) for key in a if equal]
        elif isinstance(a, list) and isinstance(b, list):
            equal = len(a) == len(b)
            left += zip(a, b, strict=False)
        else:
            equal = a == b
        if not equal:
            return False
    return True


def json_match(answer: str, reference: str) -> bool | None:
    """Whether both texts are the same JSON value; None when the reference is not JSON (see `parse_json`)."""
    known, wanted = parse_json(reference)
    if not known:
        return None
    valid, got = parse_json(answer)
    return valid and json_equal(got, wanted)


def json_field_match(answer: str, reference: str, field: str) -> bool | None:
    """Whether one field of two JSON objects is equal; None when the reference has no such field.

    Args:
        answer: what the model said; anything but an object with that field is no match.
        reference: what was wanted.
        field: the key; dots go deeper (`slots.city`).
    """
    there, wanted = _field(reference, field)
    if not there:
        return None
    answered, got = _field(answer, field)
    return answered and json_equal(got, wanted)


def _field(text: str, field: str) -> tuple[bool, Any]:
    known, value = parse_json(text)
    for key in field.split("."):
        if not known or not isinstance(value, dict) or key not in value:
            return False, None
        value = value[key]
    return known, value


def best_choice(losses: Sequence[float], tokens: Sequence[int], *, per_token: bool) -> int:
    """The number of the likeliest choice; the first of equals.

    Args:
        losses: minus the summed log-probability of each choice.
        tokens: each choice's tokens, at least one.
        per_token: divide by the tokens first, so that long choices are not at a disadvantage.
    """
    scored = [loss / n if per_token else loss for loss, n in zip(losses, tokens, strict=True)]
    return min(range(len(scored)), key=scored.__getitem__)
