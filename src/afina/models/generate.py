"""Answers to prompts: in batches with a KV cache, or streamed one piece of text at a time.

The decoding loop is Transformers' `generate`; what surrounds it here makes a row's answer independent of its batch:
left padding with an attention mask, an end found by where the stop token was generated and never by the padding's id,
and random draws that belong to the row (`sampling.py`). In fp32 and fp64 a batched answer is the one the prompt gets
alone. In bf16 the rounding of a product depends on the shape of the batch, so that two nearly equal logits can change
places.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import BaseStreamer

from afina.config import GenerateSettings, of_kind
from afina.models.answerable import check_generates, most_tokens, refuse_unanswerable
from afina.models.finite import Finite
from afina.models.prompts import Prompt, check_pair, check_prompts, encode
from afina.models.sampling import Draw
from afina.models.stops import Stopper, cut, held, never, stop_ids
from afina.problems import refuse_uncallable

__all__ = ["Completion", "Prompt", "encode", "evaluating", "generate", "stop_ids", "stream"]


@dataclass(frozen=True)
class Completion:
    """What the model answered.

    Attributes:
        text: the answer without special tokens, cut before a stop text.
        tokens: the ids generated; the stop token is not among them.
        stop_reason: "stop" at a stop token or stop text, "length" at the largest number of tokens.
    """

    text: str
    tokens: tuple[int, ...]
    stop_reason: Literal["stop", "length"]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout and the like off inside; each module's own mode again afterwards.

    Gradients are left alone: a generator that holds this open must not turn them off for whoever reads from it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: GenerateSettings | None = None,
    *,
    answered: Mapping[int, Completion] | None = None,
    on_answers: Callable[[dict[int, Completion]], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Answers every prompt; the answers are in the prompts' order.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer.
        prompts: see `Prompt`.
        settings: defaults when None. Prompt number i draws from (seed, i), whatever is beside it.
        answered: answers there are already, by the number of their prompt: these are not asked again.
        on_answers: called after each batch with its answers, by number, so that they can be kept.
        on_progress: called after each batch with the prompts answered so far and the number of all.

    Raises:
        ModelError: the model does not generate, or a prompt fills its context.
        DataError: a prompt without tokens, or one that is none; a text in place of the list.
        ConfigError: settings of another kind.
        RunError: the model's logits are not finite; what was answered before is with `on_answers`.
    """
    settings = of_kind(GenerateSettings, settings)
    refuse_uncallable(on_answers=on_answers, on_progress=on_progress)
    check_pair(model, tokenizer)
    check_generates(model)
    ids = [encode(tokenizer, one, system=settings.system) for one in check_prompts(prompts)]
    stops = stop_ids(model, tokenizer)
    for number, tokens in enumerate(ids, start=1):
        refuse_unanswerable(model, tokenizer, tokens, f"prompt {number}")
    budgets = [most_tokens(model, tokens, settings) for tokens in ids]
    answers = dict(answered or {})
    left = [row for row in range(len(ids)) if row not in answers]
    with evaluating(model):
        for rows in _batches(left, ids, budgets, settings):
            job = _Job(model, tokenizer, settings, stops, [ids[row] for row in rows], tuple(rows))
            made = dict(zip(rows, job.run(min(budgets[row] for row in rows)), strict=True))
            answers.update(made)
            if on_answers is not None:
                on_answers(made)
            if on_progress is not None:
                on_progress(len(answers), len(ids))
    return [answers[row] for row in range(len(ids))]


def stream(
    model: Any,
    tokenizer: Any,
    messages: Prompt,
    settings: GenerateSettings | None = None,
    *,
    tools: Any = None,
) -> Generator[str, None, None]:
    """Answers one prompt piece by piece; the pieces joined are the text `generate` would give.

    A character that takes several tokens comes when it is whole. Closing the iterator, or an interrupt while it waits,
    stops the model before the next token.

    Raises:
        As `generate`, at the first piece.
    """
    settings = of_kind(GenerateSettings, settings)
    check_pair(model, tokenizer)
    check_generates(model)
    ids = encode(tokenizer, messages, system=settings.system, tools=tools)
    refuse_unanswerable(model, tokenizer, ids, "the prompt")
    most = most_tokens(model, ids, settings)
    job = _Job(model, tokenizer, settings, stop_ids(model, tokenizer), [ids], (0,))
    tokens: list[int] = []
    shown = ""
    with evaluating(model):
        for token in job.tokens(most):
            tokens.append(token)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            whole = cut(text, settings.stop)
            ready = whole if whole != text else text[: len(text) - held(text, settings.stop)]
            if len(ready) > len(shown):
                yield ready[len(shown) :]
                shown = ready
    rest = cut(tokenizer.decode(tokens, skip_special_tokens=True), settings.stop)[len(shown) :]
    if rest:
        yield rest


def _batches(
    rows: Sequence[int],
    ids: Sequence[Sequence[int]],
    budgets: Sequence[int],
    settings: GenerateSettings,
) -> Iterator[list[int]]:
    """Some row numbers in batches of like length, longest first, so that memory runs out at once or never.

    A row whose budget is cut short by the context goes alone: it would cut its neighbours short too.
    """
    order = sorted(rows, key=lambda row: (-len(ids[row]), row))
    yield from ([row] for row in order if budgets[row] < settings.max_new_tokens)
    full = [row for row in order if budgets[row] == settings.max_new_tokens]
    for start in range(0, len(full), settings.batch_rows):
        yield full[start : start + settings.batch_rows]


@dataclass(frozen=True)
class _Job:
    """One call of the model's `generate`: a batch of prompts as ids, and their numbers among all prompts."""

    model: Any
    tokenizer: Any
    settings: GenerateSettings
    stops: tuple[int, ...]
    prompts: Sequence[Sequence[int]]
    rows: tuple[int, ...]

    def run(self, budget: int) -> list[Completion]:
        """The batch's answers, of at most `budget` tokens each."""
        stopper = self._stopper()
        out_BT = self._decode(stopper, budget)[:, self._width :].tolist()
        return [
            self._completion(tokens, length)
            for tokens, length in zip(out_BT, stopper.lengths, strict=True)
        ]

    def tokens(self, budget: int) -> Iterator[int]:
        """The answer of a single prompt, token by token, from a thread that ends with the iterator."""
        made: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()

        def work() -> None:
            try:
                self._decode(self._stopper(left.is_set), budget, _Pipe(made))
                made.put(None)
            except BaseException as error:  # whatever it is, the reader must hear of it
                made.put(error)

        thread = threading.Thread(target=work, name="afina-stream", daemon=True)
        thread.start()
        try:
            while (item := made.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if item in self.stops:
                    return
                yield item
        finally:
            left.set()
            thread.join()

    @property
    def _width(self) -> int:
        return max(len(ids) for ids in self.prompts)

    def _stopper(self, cancelled: Callable[[], bool] = never) -> Stopper:
        return Stopper(
            self.tokenizer,
            self.stops,
            self.settings.stop,
            prompt_tokens=self._width,
            rows=len(self.prompts),
            cancelled=cancelled,
        )

    def _decode(
        self, stopper: Stopper, budget: int, streamer: BaseStreamer | None = None
    ) -> torch.Tensor:
        width, device = self._width, self.model.get_input_embeddings().weight.device
        pad = self._pad()
        tokens_BT = [[pad] * (width - len(ids)) + list(ids) for ids in self.prompts]
        mask_BT = [[0] * (width - len(ids)) + [1] * len(ids) for ids in self.prompts]
        choosing = LogitsProcessorList([Finite(self.model, stopper)])
        if self.settings.temperature > 0:
            choosing.append(Draw(self.settings, self.rows))
        with _head_reads_whole_rows(self.model):
            return self.model.generate(
                torch.tensor(tokens_BT, device=device),
                attention_mask=torch.tensor(mask_BT, device=device),
                generation_config=self._config(budget, pad),
                logits_processor=choosing,
                stopping_criteria=StoppingCriteriaList([stopper]),
                streamer=streamer,
            )

    def _config(self, budget: int, pad: int) -> GenerationConfig:
        # Every default is given, because the model's own generation config fills in whatever is not: a repetition
        # penalty from there would make a temperature of 0 something other than greedy.
        values = GenerationConfig._get_default_generation_params()
        values.update(
            max_length=None, max_new_tokens=budget, pad_token_id=pad, do_sample=False, top_k=None
        )
        return GenerationConfig(**values, eos_token_id=list(self.stops) or None)

    def _pad(self) -> int:
        """Any id will do: it is masked in the prompts, and cut off after an answer's end."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else next(iter(self.stops), 0)

    def _completion(self, tokens: list[int], length: int | None) -> Completion:
        kept = tokens if length is None else tokens[:length]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(
            text=cut(text, self.settings.stop),
            tokens=tuple(kept),
            stop_reason="length" if length is None else "stop",
        )


@contextmanager
def _head_reads_whole_rows(model: Any) -> Iterator[None]:
    """Inside, what the head multiplies lies in memory without gaps.

    After the prompt that is the last place of each row, cut out of all places. PyTorch multiplies such an input by a
    copy of the weight for each row where the weight is frozen: gigabytes for a batch of 50 and a usual vocabulary.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(
        lambda _, given: tuple(x.contiguous() if isinstance(x, torch.Tensor) else x for x in given)
    )
    try:
        yield
    finally:
        handle.remove()


class _Pipe(BaseStreamer):
    """Hands each new token to a queue; the first thing it is given is the prompt."""

    def __init__(self, made: queue.SimpleQueue[Any]) -> None:
        self.made, self.prompt_seen = made, False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt (1, T), then each token (1)."""
        if self.prompt_seen:
            self.made.put(int(value[-1]))
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing: the worker says itself when it is done."""
