"""Which modules a pattern means."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from afina.errors import TechniqueError, nearest


def matches(name: str, pattern: str) -> bool:
    """Whether a module name fits a pattern: a whole name, its last parts (`q_proj`, `mlp.up_proj`), or a glob."""
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
    return name == pattern or name.endswith(f".{pattern}")


def match(names: Iterable[str], patterns: Iterable[str], *, setting: str) -> list[str]:
    """The names that fit any pattern, in their own order; every pattern must fit at least one.

    Args:
        names: module names.
        patterns: see `matches`.
        setting: what the user wrote them under, for the error.

    Raises:
        TechniqueError: naming each pattern that matched nothing and the nearest names.
    """
    names = list(names)
    wanted = list(patterns)
    unmatched = [p for p in wanted if not any(matches(n, p) for n in names)]
    if unmatched:
        tails = sorted({n.rsplit(".", 1)[-1] for n in names})
        near = {p: nearest(p.rsplit(".", 1)[-1], tails) or tails[:8] for p in unmatched}
        raise TechniqueError(
            f"{setting}: nothing in this model matches",
            got=", ".join(repr(p) for p in unmatched),
            wanted="; ".join(f"for {p!r} perhaps {', '.join(n)}" for p, n in near.items()),
            cure="use a module's name, its last part, or a glob such as 'model.layers.*.q_proj'",
        )
    return [n for n in names if any(matches(n, p) for p in wanted)]
