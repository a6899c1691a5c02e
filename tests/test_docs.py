"""The documentation names what exists, and every technique has its page."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from afina.table import CLASHES, ORDER, TECHNIQUES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_techniques", DOCS / "gen_techniques.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(value) if isinstance(value, list) else [value]


def navigation() -> set[str]:
    return set(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    written = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}
    assert navigation() == written | {"techniques/index.md"}


@pytest.mark.parametrize("key", TECHNIQUES)
def test_a_page_holds_the_file_and_every_setting(generator: ModuleType, key: str) -> None:
    page, cls = generator.page(key), TECHNIQUES[key]
    assert page.startswith(f"# {cls.__name__}\n")
    for part in ("Legend:", "Source:", f"afina.{cls.__name__}(", f"- {key}: "):
        assert part in page
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| `(.*)` \| (.+) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in rows] == list(cls.model_fields)


def test_clashes_are_told_on_both_pages(generator: ModuleType) -> None:
    for (first, second), why in CLASHES.items():
        assert f"[`{second}`]({second}.md): {why}" in generator.page(first)
        assert f"[`{first}`]({first}.md): {why}" in generator.page(second)


def test_the_page_of_pairs_has_each_once_on_either_side(generator: ModuleType) -> None:
    page = generator.pairs()
    rows = re.findall(r"^\| \d+ \[`(\w+)`\]\(\1\.md\) \| (.*) \|$", page, flags=re.MULTILINE)
    assert [key for key, _ in rows] == list(ORDER)
    cells = {key: line.split(" | ") for key, line in rows}
    assert all(len(line) == len(ORDER) for line in cells.values())
    for place, row in enumerate(ORDER):
        assert cells[row][place] == ""
        for other in range(place + 1, len(ORDER)):
            pair = (row, ORDER[other])
            wanted = f"[✗](#{row}-{ORDER[other]})" if pair in CLASHES else "✓"
            assert cells[row][other] == cells[ORDER[other]][place] == wanted
    for (one, other), why in CLASHES.items():
        assert f"{{#{one}-{other}}}\n\n{why[:1].upper()}{why[1:]}.\n" in page


def test_the_index_links_every_technique(generator: ModuleType) -> None:
    linked = re.findall(r"\[`(\w+)`\]\(\1\.md\)", generator.index())
    assert linked == list(TECHNIQUES)


def test_types_are_told_in_words(generator: ModuleType) -> None:
    assert generator.kind(int | None) == "integer"
    assert generator.kind(tuple[str, ...]) == "list of texts"
    assert generator.kind(tuple[int, ...] | str | None) == "list of integers or text"
    assert generator.kind(dict[str, float]) == "mapping from text to number"


def test_pages_are_filled_from_the_code(generator: ModuleType) -> None:
    exits = generator.fill("{{ exits }}").splitlines()
    assert "| 3 | The data cannot be read, recognised or trained on. |" in exits
    assert "| `afina train` | adapt a model to data, into a run folder |" in generator.fill(
        "{{ verbs }}"
    )
    filled = generator.fill("{{ settings: afina.config.settings.GenerateSettings }}")
    assert "| `top_p` | number | `1.0` |" in filled
    assert "| `stop` | list of texts | `[]` |" in filled


def test_a_word_that_stands_for_nothing_is_refused(generator: ModuleType) -> None:
    with pytest.raises(KeyError, match="verb"):
        generator.fill("{{ verb }}")


@pytest.mark.parametrize("file", sorted(DOCS.rglob("*.md")), ids=lambda file: file.stem)
def test_every_word_of_the_pages_can_be_filled(generator: ModuleType, file: Path) -> None:
    assert "{{" not in generator.fill(file.read_text(encoding="utf-8"))
