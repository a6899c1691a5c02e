"""Answers of a tuned model to the test prompts, by one way for every tool.

Run as `python -m bench.kit.answers JOB.json`. The adapter, in PEFT's layout whoever trained it, is loaded by PEFT and
merged; decoding is greedy. The job file holds `model`, `adapter`, `rows`, `dtype`, `max_new_tokens`, `threads` and
`folder`, where `result.json` gets one text a row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jobs import write_json
from .rows import read_rows


def run(job: dict[str, Any]) -> None:
    """Answers every test prompt of the rows file."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from afina.config import GenerateSettings
    from afina.models.generate import generate

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model = PeftModel.from_pretrained(base, job["adapter"]).merge_and_unload()
    prompts = [row["ids"] for row in read_rows(job["rows"]).test]
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    settings = GenerateSettings(max_new_tokens=job["max_new_tokens"], batch_rows=50)
    found = generate(model, tokenizer, [prompts[place] for place in order], settings)
    texts: list[str] = [""] * len(prompts)
    for place, answer in zip(order, found, strict=True):
        texts[place] = answer.text
    write_json(Path(job["folder"]) / "result.json", {"answers": texts})


def first_field(references: Sequence[str]) -> str | None:
    """The key that every reference's JSON object has first (the kind of call); None where there is none."""
    firsts: set[str | None] = set()
    for text in references:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        firsts.add(next(iter(value), None) if isinstance(value, dict) else None)
    return firsts.pop() if len(firsts) == 1 else None


def score(answers: Sequence[str], references: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Name of a score -> (share of rows, standard error).

    `exact_match` is equality of the texts; `FIELD_accuracy` of the parsed answer's FIELD, where the references are JSON
    objects that begin with the same key.
    """
    from afina.evaluate.scores import exact_match, json_field_match, proportion

    pairs = list(zip(answers, references, strict=True))
    scores = {"exact_match": proportion([exact_match(*pair) for pair in pairs])}
    field = first_field(references)
    if field is not None:
        hits = [bool(json_field_match(*pair, field)) for pair in pairs]
        scores[f"{field}_accuracy"] = proportion(hits)
    return scores


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text("utf-8")))
