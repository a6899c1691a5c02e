"""`afina generate`: answer a file of prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afina.cli.journal import SUFFIX, Journal, key_of
from afina.cli.loading import (
    AllowPartial,
    Device,
    Dtype,
    Loaded,
    Name,
    Offline,
    Plain,
    Revision,
    Source,
    Token,
    is_plain,
    load_source,
    run_settings,
)
from afina.cli.output import (
    is_device,
    note,
    progress,
    refuse_over_inputs,
    refuse_unwritable,
    write_jsonl,
)
from afina.cli.several import Further, targets
from afina.errors import DataError, ModelError, counted

if TYPE_CHECKING:
    from afina.cli.prompts import Asked
    from afina.config import GenerateSettings
    from afina.models.generate import Completion

EXAMPLES = (
    "afina generate runs/calls-001 prompts.txt -o answers.jsonl",
    "afina generate runs/calls-001 test.jsonl -o answers.jsonl --max-new-tokens 64 --batch-rows 32",
    "afina generate smollm2-135m prompts.txt -o - --temperature 0.7 --seed 1",
    "afina generate runs/base-001 prompts.txt -o more.jsonl --plain --stop '###'",
    "afina generate smollm2-135m prompts.txt -o - --adapter runs/a:0.7 --adapter runs/b:0.3",
)


def command(
    name: Name,
    prompts: Annotated[
        str, typer.Argument(help="txt, one prompt a line; or data as train reads it; -")
    ],
    out: Annotated[str, typer.Option("-o", "--out", help="a jsonl file; - is the standard output")],
    force: Annotated[bool, typer.Option("--force", help="replace the output")] = False,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 256,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token, always")] = 0.0,
    top_p: Annotated[float, typer.Option(help="sample within this much probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="sample among this many tokens; 0: all")] = 0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends an answer")] = None,
    batch_rows: Annotated[int, typer.Option(help="prompts answered at once")] = 8,
    plain: Plain = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    token: Token = None,
    offline: Offline = False,
    allow_partial: AllowPartial = False,
    adapter: Further = None,
) -> None:
    """Answer a file of prompts, in batches.

    Each line of the output has the prompt, the completion, its number of tokens, and why it stopped. An answer does not
    depend on the batch it was made in. The output appears when all is done, whole; until then the answers are kept in
    OUT.part, and the same command goes on after an interrupt.
    """
    from afina.cli.prompts import columns_of, read_prompts
    from afina.config import GenerateSettings, build

    refuse_unwritable(out, force=force)
    further = tuple(adapter or ())
    every = [target for target, _ in targets(name, further)]
    target = every[0]
    read = (prompts, target.base, *(place for one in every for place in (one.adapter, one.run)))
    refuse_over_inputs([out, None if out == "-" else out + SUFFIX], read)
    settings = build(
        GenerateSettings,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "system": system,
            "batch_rows": batch_rows,
            "stop": tuple(stop or ()),
        },
    )
    asked = read_prompts(prompts, columns_of(run_settings(target)))
    source = Source(name, dtype, device, revision, token, offline, allow_partial, further)
    loaded = load_source(source)
    ids = _encoded(loaded, asked, settings, plain=is_plain(loaded, plain))
    settings = settings.model_copy(update={"system": None})  # it is in the prompts now
    journal = None
    if out != "-" and not is_device(Path(out)):
        journal = Journal(out, _key(loaded, settings, ids), force=force)
    answers = _answers(loaded, ids, settings, journal, lambda made: _write(out, asked, made))
    _write(out, asked, dict(enumerate(answers)))
    if journal is not None:
        journal.remove()
    note(f"{counted(len(answers), 'answer')} in {out}{_cut_short(answers, max_new_tokens)}")


def _encoded(
    loaded: Loaded, asked: Sequence[Asked], settings: GenerateSettings, *, plain: bool
) -> list[list[int]]:
    """The prompts' ids, each judged while its file and line are known."""
    from afina.models.answerable import check_generates, refuse_unanswerable
    from afina.models.prompts import encode

    check_generates(loaded.model)
    every = []
    for one in asked:
        prompt = one.as_prompt(plain=plain)
        try:
            ids = encode(loaded.tokenizer, prompt, system=settings.system, tools=one.tools)
        except (DataError, ModelError) as error:
            raise type(error)(
                f"{one.source}: {error.what}", got=error.got, wanted=error.wanted, cure=error.cure
            ) from error
        refuse_unanswerable(loaded.model, loaded.tokenizer, ids, f"the prompt at {one.source}")
        every.append(ids)
    return every


def _key(loaded: Loaded, settings: GenerateSettings, ids: list[list[int]]) -> str:
    """What the answers depend on: the weights, the settings, and the prompts."""
    from afina.adapters.fingerprint import base_fingerprint

    digest = hashlib.sha256()
    for edit in loaded.edits:
        digest.update(json.dumps(edit.strengths).encode())
        for name, tensor in edit.trainable().items():
            digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    first = loaded.edits[0] if loaded.edits else None
    weights = [base_fingerprint(loaded.model, first), digest.hexdigest()]
    place = [str(loaded.model.dtype), loaded.model.device.type]
    return key_of(weights, place, settings.model_dump(exclude={"batch_rows"}), ids)


def _answers(
    loaded: Loaded,
    ids: list[list[int]],
    settings: GenerateSettings,
    journal: Journal | None,
    write: Callable[[dict[int, Completion]], None],
) -> list[Completion]:
    """Every prompt's answer; what ends this early leaves the finished ones in the journal, or has them written."""
    from afina.models.generate import Completion, generate

    done = {} if journal is None else journal.done
    answered = {
        number: Completion(**{**row, "tokens": tuple(row["tokens"])})
        for number, row in done.items()
    }
    if answered:
        note(f"going on with {counted(len(answered), 'answer')} of an interrupted run")

    def keep(made: dict[int, Completion]) -> None:
        answered.update(made)
        if journal is not None:
            journal.add({number: asdict(answer) for number, answer in made.items()})

    show = progress()
    try:
        return generate(
            loaded.model,
            loaded.tokenizer,
            ids,
            settings,
            answered=dict(answered),
            on_answers=keep,
            on_progress=None if show is None else lambda done, total: show("answers", done, total),
        )
    except BaseException:
        if journal is None and answered:
            write(answered)
            note(f"{len(answered)} of {counted(len(ids), 'answer')} were made, and are written")
        elif journal is not None:
            journal.leave(len(ids))
        raise


def _write(out: str, asked: Sequence[Asked], answers: Mapping[int, Completion]) -> None:
    write_jsonl(
        out,
        (
            {
                "id": number,
                "prompt": one.messages[0]["content"] if len(one.messages) == 1 else one.messages,
                "completion": answers[number].text,
                "tokens": len(answers[number].tokens),
                "stop_reason": answers[number].stop_reason,
            }
            for number, one in enumerate(asked)
            if number in answers
        ),
    )


def _cut_short(answers: Sequence[Completion], most: int) -> str:
    """How many answers did not end by themselves, and what ended them."""
    lengths = [len(answer.tokens) for answer in answers if answer.stop_reason == "length"]
    by_limit = sum(length == most for length in lengths)
    by_context = len(lengths) - by_limit
    said = (
        [f"{by_limit} reached the {counted(most, 'token')} of --max-new-tokens"] if by_limit else []
    )
    said += [f"{by_context} reached the end of the model's context"] if by_context else []
    return "".join(f"; {one}" for one in said)
