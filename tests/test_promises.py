"""`docs/promises.md` names a test for each promise: all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "promises.md"


def named_tests(text: str) -> list[str]:
    """Every `tests/file.py::test` of a page."""
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)


def exists(name: str) -> bool:
    """Whether a test of that file and name is there (a class's method counts)."""
    file, _, function = name.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(tree)
    )


def test_every_promise_has_a_test_that_is_there() -> None:
    names = named_tests(PAGE.read_text(encoding="utf-8"))
    assert len(names) > 40
    assert [name for name in names if not exists(name)] == []


def test_each_row_of_the_tables_names_a_test() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Still open")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    bare = [row for row in rows if not named_tests(row) and not row.startswith("| promise")]
    assert bare == []


def test_a_test_that_is_not_there_is_seen() -> None:
    assert not exists("tests/test_promises.py::test_that_nobody_wrote")
    assert not exists("tests/no_such_file.py::test_each_row_of_the_tables_names_a_test")
    assert exists("tests/test_promises.py::test_each_row_of_the_tables_names_a_test")
