"""A system prompt of about 300 tokens, as assistants have that know a list of calls."""

from __future__ import annotations

import json
import random


def long_system() -> str:
    """Rules, and for each of the demo's calls what people say and what is answered; always the same text."""
    from demo.calls import CALLS, SYSTEM

    rng = random.Random(0)
    lines = [
        SYSTEM,
        "You run a house. You hear one request at a time, in English or in Portuguese, and answer with a JSON object "
        "on one line and nothing else: its first key is `call`, the others are the call's values, in English whatever "
        "the language of the request. Values are copied from the request and never guessed. Times are written with "
        "hours and minutes, numbers as digits, names as they are spelt in the request. Where a request asks for two "
        "things, the first of them counts; where it leaves a value out, the call has none.",
        "The calls that you know, each with a request for it:",
    ]
    for call in CALLS:
        slots = call.draw(rng)
        asked = call.phrasings["en"][0].format(**{name: each[0] for name, each in slots.items()})
        answer = {"call": call.name, **{name: each[2] for name, each in slots.items()}}
        lines.append(f"{asked} -> {json.dumps(answer, ensure_ascii=False)}")
    return "\n".join(lines)
