"""Rows of text and class: made from what other benches read, kept in a file; a run depends on its job alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.kit import method
from bench.kit.labelled import Labelled, make_labelled, read_labelled, write_labelled
from tests.tiny import byte_tokenizer, save_model, tiny_llama


def folder(at: Path, train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]) -> Path:
    for name, rows in (("train", train), ("test", test)):
        text = "\n".join(json.dumps(row) for row in rows)
        (at / f"{name}.jsonl").write_text(text, "utf-8")
    return at


def asked(text: str, answer: str) -> dict[str, str]:
    return {"prompt": f"Name the intent.\nMessage: {text}", "completion": answer}


def test_the_answer_is_the_class_and_the_instruction_is_left_out(tmp_path: Path) -> None:
    train = [asked("play it", "play"), asked("stop it", "stop"), asked("play", "play")]
    test = [asked("play on", "play"), asked("what", "unseen"), asked("stop", "stop")]
    rows = make_labelled(folder(tmp_path, train, test), 9, 9)
    assert rows.names == ["play", "stop"]
    assert sorted(row["text"] for row in rows.train) == ["play", "play it", "stop it"]
    assert rows.test == [{"text": "play on", "label": "play"}, {"text": "stop", "label": "stop"}]
    few = make_labelled(tmp_path, 2, 1)
    assert few.train == rows.train[:2]
    assert len(few.test) == 1


def test_the_first_field_of_a_call_is_the_class(tmp_path: Path) -> None:
    def turns(text: str, answer: dict[str, str]) -> dict[str, Any]:
        said = (("system", "x"), ("user", text), ("assistant", json.dumps(answer)))
        return {"messages": [{"role": role, "content": content} for role, content in said]}

    train = [turns("Play Queen", {"call": "play", "by": "Queen"}), turns("Stop", {"call": "stop"})]
    rows = make_labelled(folder(tmp_path, train, train), 9, 9)
    assert rows.names == ["play", "stop"]
    assert {row["text"] for row in rows.test} == {"Play Queen", "Stop"}


def test_texts_that_begin_alike_are_cut_between_words(tmp_path: Path) -> None:
    train = [{"text": "my card", "label": "a"}, {"text": "my car", "label": "b"}]
    assert [r["text"] for r in make_labelled(folder(tmp_path, train, train), 2, 2).test] == [
        "card",
        "car",
    ]


def test_a_file_of_labelled_rows_notices_a_change(tmp_path: Path) -> None:
    rows = Labelled("tiny", [{"text": "one", "label": "a"}], [{"text": "two", "label": "a"}])
    write_labelled(tmp_path / "rows.json", rows)
    assert read_labelled(tmp_path / "rows.json") == rows
    file = tmp_path / "rows.json"
    file.write_text(file.read_text("utf-8").replace("one", "won"), "utf-8")
    with pytest.raises(ValueError, match="delete it"):
        read_labelled(file)


def test_a_run_depends_on_its_job_alone(tmp_path: Path) -> None:
    """Runs follow each other in one process: what came before must not matter."""
    model = save_model(tmp_path / "model", tiny_llama(), byte_tokenizer())
    made = [{"text": f"{n} {word}", "label": word} for n in range(4) for word in ("yes", "no")]
    write_labelled(tmp_path / "rows.json", Labelled("tiny", made, made))

    def run(name: str, technique: dict[str, Any]) -> dict[str, float]:
        (tmp_path / name).mkdir()
        job: dict[str, Any] = {
            "techniques": [technique],
            "lr": 1e-2,
            "seed": 0,
            "steps": 3,
            "batch": 4,
        }
        where = {"model": str(model), "rows": str(tmp_path / "rows.json"), "threads": 1}
        how = {"dtype": "fp32", "max_new_tokens": None, "folder": str(tmp_path / name)}
        return method.run({**job, **where, **how})

    first = run("first", {"lora": {"rank": 2}})
    other = run("other", {"ia3": {}})
    again = run("again", {"lora": {"rank": 2}})
    assert again == first != other
    assert set(first) == {"trained_parameters", "loss", "adapter_bytes", "accuracy", "macro_f1"}
