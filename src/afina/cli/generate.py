"""`afina generate`: answer a file of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from afina.cli.common import resolve_run
from afina.cli.loading import (
    AllowPartial,
    Device,
    Dtype,
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
from afina.cli.output import note, progress, refuse_unwritable, write_jsonl
from afina.errors import counted

if TYPE_CHECKING:
    from afina.models.generate import Completion

EXAMPLES = (
    "afina generate runs/calls-001 prompts.txt -o answers.jsonl",
    "afina generate runs/calls-001 test.jsonl -o answers.jsonl --max-new-tokens 64 --batch-rows 32",
    "afina generate smollm2-135m prompts.txt -o - --temperature 0.7 --seed 1",
    "afina generate runs/base-001 prompts.txt -o more.jsonl --plain --stop '###'",
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
) -> None:
    """Answer a file of prompts, in batches.

    Each line of the output has the prompt, the completion, its number of tokens, and why it stopped. An answer does not
    depend on the batch it was made in. The output appears when all is done, whole.
    """
    from afina.cli.prompts import columns_of, read_prompts
    from afina.config import GenerateSettings, build

    refuse_unwritable(out, force=force)
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
    asked = read_prompts(prompts, columns_of(run_settings(resolve_run(name))))
    loaded = load_source(Source(name, dtype, device, revision, token, offline, allow_partial))
    from afina.models.generate import encode, generate

    without = is_plain(loaded, plain)
    show = progress()
    answers = generate(
        loaded.model,
        loaded.tokenizer,
        [
            encode(
                loaded.tokenizer,
                one.as_prompt(plain=without),
                system=settings.system,
                tools=one.tools,
            )
            for one in asked
        ],
        settings,
        on_progress=None if show is None else lambda done, total: show("answers", done, total),
    )
    write_jsonl(
        out,
        (
            {
                "id": number,
                "prompt": one.messages[0]["content"] if len(one.messages) == 1 else one.messages,
                "completion": answer.text,
                "tokens": len(answer.tokens),
                "stop_reason": answer.stop_reason,
            }
            for number, (one, answer) in enumerate(zip(asked, answers, strict=True))
        ),
    )
    note(f"{counted(len(answers), 'answer')} in {out}{_cut_short(answers, max_new_tokens)}")


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
