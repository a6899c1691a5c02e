"""Where an answer ends: the model's own stop tokens, and texts the user names.

An answer ends where a stop token was *generated*. Padding is never recognised by its id, since many models pad with the
very token that ends a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

_MARK = "afina-answer"


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template puts after an assistant's words, found by rendering an answer and looking.

    Returns:
        Its id; None without a template, or when the template ends a turn with ordinary text.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # whoever renders with it will be told why
        return None
    _, mark, tail = text.rpartition(_MARK)
    if not mark:
        return None
    marks = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in marks), None)


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's end, the generation config's, the template's end of turn.

    Returns:
        Their ids, ascending; empty when none of the three names any.
    """
    config = getattr(model, "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    named = [listed] if listed is None or isinstance(listed, int) else list(listed)
    named += [tokenizer.eos_token_id, end_of_turn(tokenizer)]
    return tuple(sorted({int(token) for token in named if token is not None}))


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the earliest of the stop texts; all of it when none occurs."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may still become a stop text, or a character not yet whole."""
    whole = text.rstrip("\ufffd")
    begun = [size for stop in stops for size in range(1, len(stop)) if whole.endswith(stop[:size])]
    return len(text) - len(whole) + max(begun, default=0)


def never() -> bool:
    """No: nothing cancels an answer that runs to its end."""
    return False


class Stopper(StoppingCriteria):
    """Ends each row at its first stop token or stop text, and remembers how many tokens the row then had.

    Args:
        tokenizer: decodes, when there are stop texts.
        ids: stop tokens.
        texts: stop texts.
        prompt_tokens: width of the padded prompts.
        rows: of the batch.
        cancelled: asked after every token; true ends all rows.

    Attributes:
        lengths: for each row the number of generated tokens that belong to the answer (a stop token does not, the
            tokens of a stop text do), or None while the row goes on.
    """

    def __init__(
        self,
        tokenizer: Any,
        ids: Sequence[int],
        texts: Sequence[str],
        *,
        prompt_tokens: int,
        rows: int,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        self.tokenizer, self.ids, self.texts = tokenizer, frozenset(ids), tuple(texts)
        self.prompt_tokens, self.cancelled = prompt_tokens, cancelled
        self.lengths: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows (B) have ended, given everything so far (B, T)."""
        made = input_ids.shape[1] - self.prompt_tokens
        last = input_ids[:, -1].tolist()
        for row, length in enumerate(self.lengths):
            if length is not None:
                continue
            if last[row] in self.ids:
                self.lengths[row] = made - 1
            elif self.texts and self._has_text(input_ids[row, self.prompt_tokens :]):
                self.lengths[row] = made
        ended = [length is not None or self.cancelled() for length in self.lengths]
        return torch.tensor(ended, device=input_ids.device)

    def _has_text(self, tokens_T: Tensor) -> bool:
        text = self.tokenizer.decode(tokens_T.tolist(), skip_special_tokens=True)
        return any(stop in text for stop in self.texts)
