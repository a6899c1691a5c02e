from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from afina.data.order import order
from bench.kit.jobs import Job, read_job, write_job
from bench.kit.ours import arranged
from bench.kit.peer import step_order
from bench.kit.peers import OTHERS, how_to_install, version_of
from bench.kit.pieces import MODULES
from bench.kit.prompts import long_system
from bench.kit.rows import (
    Rows,
    make_rows,
    read_rows,
    sequence,
    shared_share,
    trained_tokens,
    write_rows,
)

ROWS = Rows(
    "tiny",
    [([5, 6, number, 9], [-100, -100, number, 9]) for number in range(10, 18)],
    [{"ids": [5, 6], "reference": "x"}],
)
JOB = Job("peer", "usual", {"micro": 4}, "model", "rows.json", "", seed=3, steps=2, batch=4)


def test_a_rows_file_holds_the_numbers_and_notices_a_change(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    write_rows(file, ROWS)
    back = read_rows(file)
    assert back == ROWS
    assert back.hash == ROWS.hash
    file.write_text(file.read_text("utf-8").replace("17", "18"), "utf-8")
    with pytest.raises(ValueError, match="delete it"):
        read_rows(file)


def test_the_hash_sees_ids_labels_and_references_but_not_the_name() -> None:
    ids, labels = ROWS.train[0]
    assert replace(ROWS, work="other").hash == ROWS.hash
    assert replace(ROWS, train=[([*ids[:-1], 8], labels), *ROWS.train[1:]]).hash != ROWS.hash
    assert replace(ROWS, train=[(ids, [*labels[:-1], -100]), *ROWS.train[1:]]).hash != ROWS.hash
    assert replace(ROWS, test=[{"ids": [5, 6], "reference": "y"}]).hash != ROWS.hash


def test_an_order_takes_every_row_once_an_epoch() -> None:
    found = sequence(5, seed=1, wanted=12)
    assert sorted(found[:5]) == [0, 1, 2, 3, 4] == sorted(found[5:10])
    assert len(found) == 12
    assert found == sequence(5, seed=1, wanted=12)
    assert found != sequence(5, seed=2, wanted=12)
    with pytest.raises(ValueError, match="no rows"):
        sequence(0, seed=1, wanted=3)


def test_the_first_token_is_no_trained_token() -> None:
    assert trained_tokens([7, -100, 8, 9]) == 2


def test_afina_meets_the_rows_in_the_same_order_as_the_peer() -> None:
    laid = arranged(ROWS, JOB)
    met = [laid[place].tokens for place in order(len(laid), JOB.seed, 0)]
    assert met == [tuple(ROWS.train[place][0]) for place in step_order(ROWS, JOB)]
    assert all(row.trained == (False, False, True, True) for row in laid)
    assert all(row.prompt_tokens == 2 for row in laid)


def test_split_steps_keep_their_rows_and_sort_them_by_length() -> None:
    ragged = Rows(
        "ragged", [([1] * length, [1] * length) for length in (9, 3, 7, 5, 8, 2, 6, 4)], []
    )
    whole = step_order(ragged, JOB)
    split = step_order(ragged, replace(JOB, knobs={"micro": 2}))
    for at in (0, 4):
        lengths = [len(ragged.train[place][0]) for place in split[at : at + 4]]
        assert lengths == sorted(lengths)
        assert set(split[at : at + 4]) == set(whole[at : at + 4])
    assert split != whole


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = replace(JOB, folder=str(tmp_path / "piece"))
    assert read_job(write_job(job)) == job


def test_without_warm_up_both_tools_have_the_same_rate_at_every_step() -> None:
    from torch import nn, optim
    from transformers import get_linear_schedule_with_warmup

    from afina.optim.schedules import factor

    def pair(warmup: int) -> tuple[list[float], list[float]]:
        optimiser = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = get_linear_schedule_with_warmup(optimiser, warmup, 12)
        ours = [factor(k, total_steps=12, warmup_steps=warmup, kind="linear") for k in range(12)]
        rates: list[float] = []
        for _ in range(12):
            rates.append(theirs.get_last_lr()[0])
            optimiser.step()
            theirs.step()
        return ours, rates

    ours, theirs = pair(Job.warmup_steps)
    assert ours == pytest.approx(theirs, abs=1e-12)
    ours, theirs = pair(5)
    assert ours[0] > theirs[0] == 0


def test_rows_of_a_folder_are_shuffled_cut_and_masked(tmp_path: Path) -> None:
    import json
    import random

    from tests.tiny import byte_tokenizer

    lines = [{"prompt": f"p{number}", "completion": f"c{number}"} for number in range(9)]
    for name in ("train", "test"):
        text = "\n".join(json.dumps(line) for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    tokenizer = byte_tokenizer()
    made = make_rows(tmp_path, tokenizer, 4, 2)
    random.Random(0).shuffle(lines)
    for (ids, labels), line in zip(made.train, lines[:4], strict=True):
        assert line["prompt"] in tokenizer.decode(ids)
        assert (
            tokenizer.decode([x for x in labels if x != -100]) == line["completion"] + "<|im_end|>"
        )
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    assert [row["reference"] for row in made.test] == ["c0", "c1"]
    assert tokenizer.decode(made.test[1]["ids"]).endswith("p1<|im_end|>\n<|im_start|>assistant\n")
    assert made.work == tmp_path.name


@pytest.mark.parametrize("names", [("prompt", "completion"), ("question", "answer"), None])
def test_a_system_prompt_stands_before_rows_of_every_form(
    tmp_path: Path, names: tuple[str, str] | None
) -> None:
    import json

    from tests.tiny import byte_tokenizer

    def line(number: int) -> dict[str, object]:
        if names is not None:
            return dict(zip(names, (f"p{number}", f"c{number}"), strict=True))
        roles = ("system", "user", "assistant")
        texts = ("its own", f"p{number}", f"c{number}")
        said = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
        return {"messages": said}

    for name in ("train", "test"):
        text = "\n".join(json.dumps(line(number)) for number in range(4))
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    tokenizer = byte_tokenizer()
    plain, made = (make_rows(tmp_path, tokenizer, 4, 1, system) for system in (None, "be brief"))
    assert (plain.work, made.work) == (tmp_path.name, f"{tmp_path.name}, prompted")
    for one, other in zip(plain.train, made.train, strict=True):
        said = tokenizer.decode(other[0])
        assert said.count("be brief") == said.count("<|im_start|>system") == 1
        assert "its own" not in said
        assert "be brief" not in tokenizer.decode(one[0])
        assert [x for x in one[1] if x != -100] == [x for x in other[1] if x != -100]
    assert made.test[0]["reference"] == plain.test[0]["reference"] == "c0"


def test_what_rows_begin_with_in_common_is_left_once() -> None:
    same = list(range(40))
    rows = Rows("alike", [([*same, 50 + n], [-100] * 40 + [50 + n]) for n in range(4)], [])
    assert shared_share(rows, batch=4, steps=1) == (40 + 4) / (4 * 41)
    assert shared_share(rows, batch=1, steps=4) == 1.0
    assert long_system() == long_system()


def test_a_tool_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    for other in OTHERS:
        assert version_of(other, tmp_path) is None
        assert f"{tmp_path / other.key}/bin/pip install" in how_to_install(other, tmp_path)
        assert other.key in MODULES
