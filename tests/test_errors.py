"""The form of the errors, wherever they are raised."""

from __future__ import annotations

import ast
from pathlib import Path

import afina
from afina.errors import counted, sized


def sentences() -> list[tuple[str, str]]:
    """(place, beginning) of what each error written out in the source says."""
    found: list[tuple[str, str]] = []
    for path in sorted(Path(afina.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            said = (
                node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            )
            if node.func.id.endswith("Error") and isinstance(said, ast.Constant):
                found.append((f"{path.name}:{node.lineno}", str(said.value)))
    return found


def test_errors_begin_in_lower_case() -> None:
    found = sentences()
    assert len(found) > 100
    assert [each for each in found if each[1][:1].isupper()] == []


def test_one_thing_is_singular() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_bytes_are_said_as_people_say_them() -> None:
    assert [sized(n) for n in (0, 1023, 1536, 5 * 2**20, 3 * 2**40)] == [
        "0 bytes",
        "1,023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "3,072.0 GiB",
    ]
