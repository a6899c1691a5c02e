"""The errors a user can meet: each says what was got, what was wanted and what to do about it.

Source of the form: the project's rule that an error is the shortest path to a working run. Anything that is not an
`AfinaError` is a defect of afina and keeps its traceback.
"""

from __future__ import annotations


class AfinaError(Exception):
    """What went wrong, and the way out.

    Args:
        what: one sentence, without the values.
        got: the value met.
        wanted: what would have been accepted.
        cure: what to type or change.
    """

    exit_code: int = 1

    def __init__(
        self, what: str, *, got: object = None, wanted: object = None, cure: str | None = None
    ) -> None:
        self.what, self.got, self.wanted, self.cure = what, got, wanted, cure
        lines = [what]
        if got is not None:
            lines.append(f"  got:    {got}")
        if wanted is not None:
            lines.append(f"  wanted: {wanted}")
        if cure is not None:
            lines.append(f"  cure:   {cure}")
        super().__init__("\n".join(lines))


class ConfigError(AfinaError):
    """A setting is unknown, of the wrong type, or out of range."""

    exit_code = 2


class DataError(AfinaError):
    """The data cannot be read, recognised or trained on."""

    exit_code = 3


class ModelError(AfinaError):
    """The model or tokenizer cannot be found, loaded or used."""

    exit_code = 4


class TechniqueError(AfinaError):
    """A technique does not fit the model, or two techniques do not fit each other."""

    exit_code = 5


class AdapterError(AfinaError):
    """An adapter on disk does not fit the model or the format."""

    exit_code = 6


class RunError(AfinaError):
    """A run cannot start, go on, or be trusted."""

    exit_code = 7


def nearest(
    word: str, known: list[str] | tuple[str, ...], most: int = 3, *, alike: float = 0.5
) -> list[str]:
    """The known words most like `word`, best first; empty when none is near.

    Args:
        word: what was written.
        known: what is known.
        most: how many to give.
        alike: how much of two words must agree, from 0 to 1; a guess that does harm when wrong needs more.
    """
    import difflib

    return difflib.get_close_matches(word, known, n=most, cutoff=alike)


def counted(number: int, what: str) -> str:
    """A number of things, in words: "1 row", "2 rows"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def sized(size_bytes: float) -> str:
    """Bytes as people say them: "512 bytes", "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:,.0f} {unit}" if unit == "bytes" else f"{size_bytes:,.1f} {unit}"


def lasting(seconds: float) -> str:
    """Seconds in words, to two units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    whole = round(seconds)
    first = next(at for at, (size, _) in enumerate(units) if whole >= size)
    parts: list[str] = []
    for size, name in units[first : first + 2]:
        parts.append(f"{whole // size} {name}")
        whole %= size
    return " ".join(parts)
