"""The demo's data: requests in English and Portuguese, and the JSON call each asks for. All of it made by code.

Rows for testing use phrasings that no training row has, so that copying sentences does not help. Values (times, cities,
names) are drawn from the same lists, which a request must be read to pick from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM = "Answer with one JSON call."

ROOMS = {
    "kitchen": "cozinha",
    "bedroom": "quarto",
    "garage": "garagem",
    "bathroom": "casa de banho",
    "office": "escritório",
}
DAYS = {"today": "hoje", "tomorrow": "amanhã", "on Friday": "na sexta", "on Sunday": "no domingo"}
CITIES = ("Lisbon", "Porto", "Recife", "Berlin", "Oslo", "Madrid", "Dublin", "Turin", "Salvador")
PEOPLE = ("Ana", "Rui", "Marta", "Jonas", "Clara", "Bruno", "Helena", "Tiago", "Olga", "Peter")
ARTISTS = ("Amália", "Radiohead", "Caetano Veloso", "Björk", "Mariza", "Queen", "Elis Regina")


@dataclass(frozen=True)
class Call:
    """One kind of call.

    Attributes:
        name: as in the answer.
        draw: values of its slots; the key `en` or `pt` of a slot that differs by language is chosen by `fill`.
        phrasings: by language; the last of each language is held out for testing.
    """

    name: str
    draw: Callable[[random.Random], dict[str, tuple[str, str, str]]]
    phrasings: dict[str, tuple[str, ...]]


def _same(value: str) -> tuple[str, str, str]:
    return value, value, value


def _pair(english: str, portuguese: str, answer: str | None = None) -> tuple[str, str, str]:
    return english, portuguese, answer or english


def _alarm(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    return {"time": _same(f"{rng.randrange(5, 23):02d}:{rng.randrange(0, 60, 5):02d}")}


def _timer(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    return {"minutes": _same(str(rng.randrange(2, 60)))}


def _weather(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    english, portuguese = rng.choice(list(DAYS.items()))
    answer = english.removeprefix("on ").lower()
    return {"city": _same(rng.choice(CITIES)), "day": _pair(english, portuguese, answer)}


def _lights(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    state = rng.choice((("on", "acende", "on"), ("off", "apaga", "off")))
    room = rng.choice(list(ROOMS.items()))
    return {"room": _pair(*room), "state": state}


def _call(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    return {"person": _same(rng.choice(PEOPLE))}


def _play(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    return {"artist": _same(rng.choice(ARTISTS))}


CALLS = (
    Call(
        "set_alarm",
        _alarm,
        {
            "en": (
                "Wake me at {time}",
                "Set an alarm for {time}",
                "I need an alarm at {time}",
                "Please ring at {time} so that I get up",
            ),
            "pt": (
                "Acorda-me às {time}",
                "Põe um alarme para as {time}",
                "Quero um despertador às {time}",
                "Preciso de me levantar às {time}, põe o alarme",
            ),
        },
    ),
    Call(
        "set_timer",
        _timer,
        {
            "en": (
                "Timer for {minutes} minutes",
                "Count down {minutes} minutes",
                "Start a {minutes} minute timer",
                "Tell me when {minutes} minutes have passed",
            ),
            "pt": (
                "Temporizador de {minutes} minutos",
                "Conta {minutes} minutos",
                "Começa um temporizador de {minutes} minutos",
                "Avisa-me quando passarem {minutes} minutos",
            ),
        },
    ),
    Call(
        "get_weather",
        _weather,
        {
            "en": (
                "Weather in {city} {day}?",
                "Will it rain in {city} {day}?",
                "How warm is {city} {day}?",
                "Do I need a coat in {city} {day}?",
            ),
            "pt": (
                "Que tempo faz em {city} {day}?",
                "Vai chover em {city} {day}?",
                "Está calor em {city} {day}?",
                "Preciso de casaco em {city} {day}?",
            ),
        },
    ),
    Call(
        "lights",
        _lights,
        {
            "en": (
                "Lights {state} in the {room}",
                "Turn {state} the {room} lights",
                "Switch the {room} lights {state}",
                "I want the lights {state} in the {room}, please",
            ),
            "pt": (
                "{state} a luz: {room}",
                "Por favor {state} as luzes, {room}",
                "{room}: {state} a luz",
                "Vai lá e {state} todas as luzes, {room}",
            ),
        },
    ),
    Call(
        "call",
        _call,
        {
            "en": (
                "Call {person}",
                "Ring {person} for me",
                "Phone {person} please",
                "I would like to talk to {person} on the phone",
            ),
            "pt": (
                "Liga à {person}",
                "Telefona para {person}",
                "Faz uma chamada para {person}",
                "Quero falar com {person} ao telefone",
            ),
        },
    ),
    Call(
        "play_music",
        _play,
        {
            "en": (
                "Play {artist}",
                "Put on some {artist}",
                "Let me hear {artist}",
                "I am in the mood for songs by {artist}",
            ),
            "pt": (
                "Toca {artist}",
                "Mete música de {artist}",
                "Quero ouvir {artist}",
                "Apetecem-me canções de {artist}",
            ),
        },
    ),
)


def row(rng: random.Random, *, held_out: bool) -> dict[str, object]:
    """One row: messages with the system prompt, a request, and the call as the answer."""
    call = rng.choice(CALLS)
    language = rng.choice(("en", "pt"))
    slots = call.draw(rng)
    phrasings = call.phrasings[language]
    phrasing = phrasings[-1] if held_out else rng.choice(phrasings[:-1])
    spoken = {name: values[0 if language == "en" else 1] for name, values in slots.items()}
    answer = {"call": call.name, **{name: values[2] for name, values in slots.items()}}
    request = phrasing.format(**spoken)
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": request[0].upper() + request[1:]},
            {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)},
        ]
    }


def rows(count: int, *, seed: int, held_out: bool) -> Iterator[dict[str, object]]:
    """Rows that differ from one another, the same for the same seed."""
    rng = random.Random(f"{seed}/{held_out}")
    seen: set[str] = set()
    while len(seen) < count:
        made = row(rng, held_out=held_out)
        text = json.dumps(made, ensure_ascii=False)
        if text not in seen:
            seen.add(text)
            yield made


def write(folder: Path, *, train: int, test: int, seed: int = 0) -> tuple[Path, Path]:
    """Writes `train.jsonl` and `test.jsonl` (held-out phrasings) and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, count, held_out in zip(paths, (train, test), (False, True), strict=True):
        lines = [
            json.dumps(made, ensure_ascii=False)
            for made in rows(count, seed=seed, held_out=held_out)
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths
