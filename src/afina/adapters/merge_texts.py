"""Texts to compare two models on: rows that the run was validated on, the user's prompts, or a few general ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afina.config import load_config
from afina.data.dataset import prepare
from afina.data.settings import DataSettings
from afina.data.split import content_of, split
from afina.errors import AfinaError, counted
from afina.models.generate import encode, stop_ids
from afina.models.prompts import Prompt
from afina.table import TECHNIQUES

ROWS = 8
"""Rows of a run's data that are looked at."""

READ = 64
"""Rows that are read to find them."""

GENERAL = (
    "The old bridge was closed for repairs, so the baker took the long road and",
    "Name three things that float on water, and say why each of them does.",
    "def area(width, height):\n    return",
    "If a train leaves at 14:35 and arrives at 17:05, how long is the journey?",
    "Translate into French: The library opens at nine on weekdays.",
    "Dear Ms Okafor, thank you for your letter of 3 May. We are sorry to hear that",
    "Summarise in one sentence: Rain fell all week. The river rose over its banks, and two fields of barley were lost.",
    '{"city": "Lisbon", "country": "Portugal"}\n{"city": "Nairobi", "country":',
)
"""Texts for an adapter of which nothing else is known."""


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        tokens: all of it.
        prompt: its beginning, which an answer follows.
    """

    tokens: tuple[int, ...]
    prompt: tuple[int, ...]


def texts_of(
    model: Any, tokenizer: Any, run: Path | None, prompts: Sequence[Prompt] | None
) -> tuple[list[Text], str]:
    """The texts, and what they are in a few words.

    Args:
        model: the base.
        tokenizer: of the adapter.
        run: the adapter's run, if it has one.
        prompts: the user's own; these come first.

    Raises:
        AfinaError: a prompt of the user's cannot be read.
    """
    if prompts:
        given = [of_prompt(tokenizer, one) for one in prompts]
        return given, counted(len(given), "given prompt")
    why = ""
    if run is not None:
        try:
            found, of = _of_run(model, tokenizer, run)
        except (AfinaError, OSError) as error:
            why = f" (the run's data cannot be read: {str(error).splitlines()[0]})"
        else:
            if found:
                return found, f"{counted(len(found), f'{of} row')} of the run"
    general = [of_prompt(tokenizer, _asked(tokenizer, text)) for text in GENERAL]
    return general, counted(len(general), "general text") + why


def _of_run(model: Any, tokenizer: Any, run: Path) -> tuple[list[Text], str]:
    settings = load_config(
        techniques=TECHNIQUES, data_settings=DataSettings, yaml_path=run / "config.yaml"
    ).config
    source, of = (settings.val, "validation") if settings.val else (settings.source, "training")
    most = min(settings.data.max_rows or READ, READ)
    data = settings.data.model_copy(update={"max_rows": most})
    rows = prepare(
        _found(source, run),
        tokenizer,
        data,
        role="val" if settings.val else "train",
        max_tokens=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        stop_ids=stop_ids(model, tokenizer),
    ).rows
    if data.val_fraction and not settings.val and len({content_of(row) for row in rows}) > 1:
        rows, of = split(rows, data.val_fraction, data.seed)[1], "validation"
    asked = [row for row in rows if 0 < row.prompt_tokens < len(row.tokens)] or rows
    return [
        Text(row.tokens, row.tokens[: row.prompt_tokens] or row.tokens[:1]) for row in asked[:ROWS]
    ], of


def _found(source: str, run: Path) -> str:
    """A run's data by its name, also from another working directory than the run was started in."""
    if Path(source).is_absolute() or Path(source).exists():
        return source
    home = run.resolve()
    places = (folder / source for folder in (home, *home.parents))
    return next((str(place) for place in places if place.exists()), source)


def _asked(tokenizer: Any, text: str) -> Prompt:
    """A text as it would be sent: by the chat template, where there is one."""
    chats = getattr(tokenizer, "chat_template", None)
    return [{"role": "user", "content": text}] if chats else text


def of_prompt(tokenizer: Any, prompt: Prompt) -> Text:
    """A prompt as it would be sent; messages without a chat template as their text.

    Raises:
        AfinaError: it cannot be read.
    """
    if not getattr(tokenizer, "chat_template", None) and not isinstance(prompt, str):
        (first, *more) = prompt
        if isinstance(first, Mapping) and not more:
            prompt = str(first.get("content"))
    tokens = tuple(encode(tokenizer, prompt))
    return Text(tokens, tokens)
