"""How the fuzz tests are run: always the same examples, as many as `AFINA_FUZZ` says, and what may come of one.

`AFINA_FUZZ=20 pytest tests/fuzz` runs twenty times as many examples as CI does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from afina.errors import AfinaError

FACTOR = int(os.environ.get("AFINA_FUZZ", "1"))

T = TypeVar("T")


def fuzz(examples: int) -> Any:
    """Settings of a fuzz test with so many examples in CI."""
    return settings(
        max_examples=examples * FACTOR,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def result_or_error(call: Callable[[], T]) -> T | None:
    """What a call gives; None for an error of ours, which must say something. Any other exception fails the test."""
    said = ""
    try:
        return call()
    except AfinaError as error:
        said = str(error)
    assert 0 < len(said) < 20_000
    return None


ODD = ["\0", "\ufeff", "\u2028", "\x85", "\ud83d", "\r", "\r\n", '"', "\\", "{", "[", "]", "}", ",", ":", "1e999",
       "nul",
       "-", "é", "漢", "🙂", "<|im_end|>", "</s>", "{{", "%}", "\\u0000", "\\ud800", "NaN", "9" * 400, " ", "\n", "\t",
       "~", "&a", "*a", "!!python/object:os.system", "---", "<<: *a", "? ", "0x", "1_000", ".inf"]  # fmt: skip
"""Pieces of text that parsers stumble over."""


def texts(most: int = 40) -> st.SearchStrategy[str]:
    """Texts with what parsers stumble over among ordinary letters; no half characters."""
    return st.lists(
        st.one_of(
            st.sampled_from([one for one in ODD if one != "\ud83d"]),
            st.text(st.characters(codec="utf-8"), max_size=5),
        ),
        max_size=most // 5,
    ).map("".join)


@st.composite
def mutated(draw: Any, seeds: list[bytes], most: int = 6) -> bytes:
    """One of the seeds after some cuts, insertions, flips and repetitions."""
    content = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(content)))
        to = min(len(content), at + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["cut", "insert", "odd", "flip", "repeat", "end"])):
            case "cut":
                del content[at:to]
            case "insert":
                content[at:at] = draw(st.binary(max_size=8))
            case "odd":
                content[at:at] = draw(st.sampled_from(ODD)).encode("utf-8", "surrogatepass")
            case "flip" if at < len(content):
                content[at] = draw(st.integers(0, 255))
            case "repeat":
                content[at:at] = content[at:to] * draw(st.integers(1, 3))
            case "end":
                del content[at:]
    return bytes(content)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    texts(20),
    st.sampled_from(["", "user", "a"]),
)

VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(10), inner, max_size=3),
    max_leaves=6,
)
"""What JSON can hold, NaN and infinity too."""
