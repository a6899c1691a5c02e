"""Fills the documentation from the code; mkdocs runs it as a hook.

One page a technique: what its file says of itself (sentence, formula, legend, source), its settings, how to use it, and
what it cannot be combined with. In any page, `{{ settings: module.Class }}`, `{{ verbs }}` and `{{ exits }}` become
tables. Nothing is written to docs/: all this exists only in the built site.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import afina.errors
from afina.cli import INTERRUPTED, VERBS
from afina.config.document import write
from afina.errors import AfinaError
from afina.table import CLASHES, ORDER, TECHNIQUES
from afina.tree import Technique

SECTION = "Techniques"
PAIRS = "techniques/pairs.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages to their section of the navigation, in the order of the table."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and SECTION in entry:
            entry[SECTION].append({"Which go together": PAIRS})
            entry[SECTION].extend({cls.__name__: address(key)} for key, cls in TECHNIQUES.items())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Gives mkdocs the pages."""
    for key in TECHNIQUES:
        files.append(File.generated(config, address(key), content=page(key)))
    files.append(File.generated(config, "techniques/index.md", content=index()))
    files.append(File.generated(config, PAIRS, content=pairs()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts tables where a page asks for them."""
    return fill(markdown)


def fill(markdown: str) -> str:
    """The text with every `{{ … }}` replaced.

    Raises:
        KeyError: for a word that stands for nothing.
    """
    return re.sub(r"\{\{ (\w+)(?:: ([\w.]+))? \}\}", lambda found: table(*found.groups()), markdown)


def table(word: str, argument: str | None) -> str:
    """What one `{{ word: argument }}` stands for."""
    if word == "settings" and argument:
        module, _, name = argument.rpartition(".")
        return "\n".join(settings(getattr(importlib.import_module(module), name)))
    return "\n".join({"verbs": verbs, "exits": exits}[word]())


def verbs() -> Iterator[str]:
    """The rows of the table of verbs."""
    for verb, (_, what) in VERBS.items():
        yield f"| `afina {verb}` | {what} |"


def exits() -> Iterator[str]:
    """The table of exit codes, from the kinds of error."""
    yield "| code | meaning |"
    yield "|---|---|"
    yield "| 0 | done |"
    for kind in sorted(AfinaError.__subclasses__(), key=lambda kind: kind.exit_code):
        if kind.__module__ == afina.errors.__name__:
            yield f"| {kind.exit_code} | {(inspect.getdoc(kind) or '').splitlines()[0]} |"
    yield f"| {INTERRUPTED} | interrupted |"


def address(key: str) -> str:
    """The page's place below docs/."""
    return f"techniques/{key}.md"


def index() -> str:
    """The page that lists them all."""
    lines = [
        "# Techniques",
        "",
        "A technique is a frozen value; a run has a list of them. `afina techniques` prints this list, and",
        "`afina techniques --json` everything on these pages.",
        "",
        "| key | class | what it does |",
        "|---|---|---|",
    ]
    for key, cls in TECHNIQUES.items():
        lines.append(f"| [`{key}`]({key}.md) | `afina.{cls.__name__}` | {sentence(cls)} |")
    acting = ", ".join(f"`{key}`" for key in ORDER)
    lines += [
        "",
        f"Whatever the order in which they are given, they act in this one: {acting}.",
        "",
        "[Which go together](pairs.md) has every pair of them.",
        "",
    ]
    return "\n".join(lines)


def pairs() -> str:
    """The page that has every pair: whether it works, and why not."""
    numbers = {key: number for number, key in enumerate(ORDER, 1)}
    lines = [
        "# Which go together",
        "",
        "Every pair with a tick is tried by a test: it trains five steps with finite losses, goes on bit for bit when "
        "it is stopped in between, is saved and loaded, and is undone bit for bit. Where one of the two starts as the "
        "base, the other's gradients are those that it has alone. Crossed pairs are refused before anything is loaded, "
        "with the reason. Three go together where each two of them do, which is tried on some.",
        "",
        f"| | {' | '.join(map(str, numbers.values()))} |",
        f"|---|{':-:|' * len(ORDER)}",
    ]
    for row in ORDER:
        cells = ["" if row == column else cell(row, column) for column in ORDER]
        lines.append(f"| {numbers[row]} [`{row}`]({row}.md) | {' | '.join(cells)} |")
    lines += ["", "## Refused", ""]
    for (one, other), why in CLASHES.items():
        lines += [
            f"### {one} and {other} {{#{one}-{other}}}",
            "",
            f"{why[:1].upper()}{why[1:]}.",
            "",
        ]
    lines += [
        "## By a value",
        "",
        "Some refusals are of values and not of techniques, and name the setting: `train.step_in_backward` beside what "
        "looks at all gradients (`adalora`, `gradient_noise`), or tensors that would be saved nowhere.",
        "",
    ]
    return "\n".join(lines)


def cell(row: str, column: str) -> str:
    """What the table says of a pair: ✓, or ✗ with a link to the reason."""
    first, second = sorted((row, column), key=ORDER.index)
    return f"[✗](#{first}-{second})" if (first, second) in CLASHES else "✓"


def page(key: str) -> str:
    """One technique's page."""
    cls = TECHNIQUES[key]
    _, _, body = told(cls).partition("\n")
    parts = [
        f"# {cls.__name__}",
        f"{sentence(cls)}",
        body.strip("\n"),
        "## Use it",
        use(key, cls),
        "## Settings",
        "\n".join(settings(cls)),
        "## Beside others",
        "\n".join(beside(key)),
    ]
    return "\n\n".join(parts) + "\n"


def told(cls: type[Technique]) -> str:
    """What the technique's file says at its top."""
    return inspect.getdoc(sys.modules[cls.__module__]) or ""


def sentence(cls: type[Technique]) -> str:
    """The first sentence there, without the name that it begins with."""
    first = told(cls).split("\n", 1)[0]
    said = first.split(": ", 1)[-1]
    return said[:1].upper() + said[1:]


def use(key: str, cls: type[Technique]) -> str:
    """The same technique in Python, on the command line and in a file."""
    given = {name: field.default for name, field in cls.model_fields.items() if shown(field)}
    given = dict(list(given.items())[:2])
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    flags = " ".join(
        f"--set techniques.{key}.{name}={write(value)}" for name, value in given.items()
    )
    return "\n".join(
        [
            "```python",
            f"edit = afina.apply(model, [afina.{cls.__name__}({arguments})])",
            "```",
            "",
            "```yaml",
            "techniques:",
            f"  - {key}: {write(given)}",
            "```",
            *(["", "```", f"afina train MODEL DATA -o RUN {flags}", "```"] if flags else []),
        ]
    )


def shown(field: FieldInfo) -> bool:
    """Whether an example shows this setting: a plain number, which a reader will want to change."""
    return isinstance(field.default, (int, float)) and not isinstance(field.default, bool)


def settings(cls: type[BaseModel]) -> Iterator[str]:
    """The table of settings."""
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in cls.model_fields.items():
        default = write(field.get_default(call_default_factory=True))
        meaning = (field.description or "").replace("|", "\\|")
        yield f"| `{name}` | {kind(field.annotation)} | `{default}` | {meaning} |"


def kind(annotation: Any) -> str:
    """A type in words."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(kind(a) for a in inner if a is not NoneType)
    if origin is Literal:
        return " or ".join(f"`{a}`" for a in inner)
    if origin in (tuple, list):
        return f"list of {kind(inner[0])}s"
    if origin is dict:
        return f"mapping from {kind(inner[0])} to {kind(inner[1])}"
    words = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def beside(key: str) -> Iterator[str]:
    """What it cannot be combined with, and why."""
    reasons = {(set(pair) - {key}).pop(): why for pair, why in CLASHES.items() if key in pair}
    if not reasons:
        yield "It can be combined with every other technique."
    for other, why in reasons.items():
        yield f"* not with [`{other}`]({other}.md): {why}."
