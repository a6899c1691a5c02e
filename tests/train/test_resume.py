"""Going on: exactly as it would have been, or refused with what differs, or with the changes that were allowed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.data.settings import DataSettings
from afina.errors import RunError
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train import micro, state
from afina.train.metrics import read_metrics
from afina.train.report import Silent
from afina.train.result import Run
from afina.train.state import BASE, Machine, State, differences, roundings
from afina.tree import Seams
from tests.tiny import tiny_llama
from tests.train.kit import Stop, ragged_rows, run, same, stop_after, weights


class Listen(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def heard(self, words: str) -> bool:
        return any(words in text for text in self.said)


def killed(out: Path, after: int, technique: Any = None, **settings: Any) -> None:
    """A run that dies in the step after `after` of them."""
    options = {"seams": stop_after(after), **settings.pop("options", {})}
    with pytest.raises(Stop):
        run(out, technique, options=options, **settings)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_stopped_before_its_first_checkpoint_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the micro-batch that was found: nothing but the steps is lost."""
    # What a pass takes is measured, and other work on the machine must not choose the size.
    monkeypatch.setattr(micro, "free_bytes", lambda device: 2**50)
    settings = {"steps": 3, "save_every": None, "micro_rows": "auto"}
    whole = run(tmp_path / "whole", **settings)
    killed(tmp_path / "run", 1, **settings)
    start = state.from_file(tmp_path / "run/start.json")
    assert (start.step, start.micro_tokens) == (0, 2048)
    heard = Listen()
    rest = run(tmp_path / "run", options={"resume": True, "reporter": heard}, **settings)
    assert heard.heard("before its first checkpoint, and begins again")
    assert same(weights(whole), weights(rest))
    assert [line["step"] for line in read_metrics(rest.folder)] == [1, 2, 3]


def test_a_run_that_began_with_other_weights_does_not_begin_again_with_these(
    tmp_path: Path,
) -> None:
    """As one that started from an adapter and was killed before its first checkpoint."""
    from afina.train.run import train

    def start(values: float, **options: Any) -> Any:
        from afina.train.options import RunOptions

        edit = apply(tiny_llama(), [LoRA(rank=2)], seed=1)
        with torch.no_grad():
            next(iter(edit.trainable().values())).add_(values)
        chosen = RunOptions(reporter=Silent(), base="tiny", **options)
        return train(
            edit.model, None, ragged_rows(4), edit, tmp_path / "run", options=chosen, steps=2
        )

    with pytest.raises(Stop):
        start(0.5, seams=stop_after(1))
    with pytest.raises(RunError, match="the starting weights"):
        start(0.0, resume=True)
    assert start(0.5, resume=True).steps == 2


def test_what_differs_is_said_with_its_value_then_and_now_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    run(tmp_path / "run", steps=2)
    before = contents(tmp_path / "run")
    with pytest.raises(RunError) as caught:
        run(
            tmp_path / "run",
            LoRA(rank=2, alpha=8),
            steps=2,
            lr=5e-3,
            data=ragged_rows(11),
            options={"resume": True},
        )
    got = str(caught.value.got)
    assert "train.lr: 0.01 then, 0.005 now" in got
    assert "techniques.lora.alpha: 32.0 then, 8.0 now" in got
    assert "the training rows: 10 rows (" in got
    assert ") then, 11 rows (" in got
    assert "--allow-changes" in str(caught.value.cure)
    assert contents(tmp_path / "run") == before


def test_allowed_changes_are_said_recorded_and_need_not_be_allowed_again(tmp_path: Path) -> None:
    killed(tmp_path / "run", 2, steps=4, save_every=2)
    heard = Listen()
    allow = {"resume": True, "allow_changes": True, "reporter": heard}
    killed(tmp_path / "run", 2, steps=4, save_every=2, lr=2e-3, options=allow)
    assert heard.heard("warning: resumed with a change, train.lr: 0.01 then, 0.002 now")
    first = (tmp_path / "run/config.yaml").read_text().splitlines()[0]
    assert first == "# step 2: resumed with train.lr: 0.01 then, 0.002 now"
    assert "lr: 0.002" in (tmp_path / "run/config.yaml").read_text()
    # It was killed again before the next checkpoint; the changed settings are now the run's.
    found = run(tmp_path / "run", steps=4, save_every=2, lr=2e-3, options={"resume": True})
    assert [line["step"] for line in read_metrics(found.folder)] == [1, 2, 3, 4]
    from afina.optim.schedules import factor

    rates = [factor(k, total_steps=4, warmup_steps=1, kind="linear") for k in range(4)]
    expected = [rate * lr for rate, lr in zip(rates, (1e-2, 1e-2, 2e-3, 2e-3), strict=True)]
    assert [line["lr"] for line in read_metrics(found.folder)] == expected
    with pytest.raises(RunError, match=r"train\.lr"):
        run(tmp_path / "run", steps=4, save_every=2, options={"resume": True})


def test_the_first_line_after_a_change_says_it(tmp_path: Path) -> None:
    killed(tmp_path / "run", 2, steps=4, save_every=2)
    allow = {"resume": True, "allow_changes": True}
    found = run(tmp_path / "run", steps=4, save_every=2, lr=2e-3, options=allow)
    lines = read_metrics(found.folder)
    assert [line.get("changed") for line in lines] == [
        None,
        None,
        {"train.lr": [1e-2, 2e-3]},
        None,
    ]


def test_more_steps_go_on_from_the_finished_run(tmp_path: Path) -> None:
    """With a constant rate the longer run is, bit for bit, the run that was longer from the start."""
    same_rate = {"schedule": "constant", "warmup_steps": 0}
    run(tmp_path / "run", steps=2, **same_rate)
    with pytest.raises(RunError, match=r"train\.steps: 2 then, 4 now"):
        run(tmp_path / "run", steps=4, options={"resume": True}, **same_rate)
    heard = Listen()
    allow = {"resume": True, "allow_changes": True, "reporter": heard}
    more = run(tmp_path / "run", steps=4, options=allow, **same_rate)
    assert heard.heard("laid over 4 steps now, and goes on at step 3")
    whole = run(tmp_path / "whole", steps=4, **same_rate)
    assert same(weights(more), weights(whole))
    assert more.steps == 4


def test_a_finished_run_is_told_to_be_finished_and_nothing_changes(tmp_path: Path) -> None:
    first = run(tmp_path / "run", steps=2, val=ragged_rows(3, seed=3))
    before = contents(tmp_path / "run")
    heard = Listen()
    again = run(
        tmp_path / "run",
        steps=2,
        val=ragged_rows(3, seed=3),
        options={"resume": True, "reporter": heard},
    )
    assert again == first
    assert contents(tmp_path / "run") == before
    assert heard.heard("this run is finished (2 steps), and nothing was changed")
    heard = Listen()
    fewer = {"resume": True, "allow_changes": True, "reporter": heard}
    shorter = run(tmp_path / "run", steps=1, val=ragged_rows(3, seed=3), options=fewer)
    assert shorter == first
    assert contents(tmp_path / "run") == before
    # Nothing goes on, so nothing is said of how it would.
    assert not heard.heard("goes on")
    assert not heard.heard("resumed with")
    assert heard.heard("this run is finished (2 steps), and nothing was changed")


def test_a_run_that_stopped_early_stays_stopped(tmp_path: Path) -> None:
    """Killed between its last checkpoint and its end: the kept weights are put in place, and no step is made."""
    settings: dict[str, Any] = {
        "steps": 12,
        "lr": 3.0,
        "clip": None,
        "eval_every": 1,
        "early_stopping": 2,
        "schedule": "constant",
        "warmup_steps": 0,
        "val": ragged_rows(4, seed=3),
    }
    first = run(tmp_path / "run", **settings)
    assert first.steps < 12
    (tmp_path / "run/result.json").unlink()
    again = run(tmp_path / "run", options={"resume": True}, **settings)
    assert again == first
    # More steps are not what it lacks: it is told to be finished, and what would make it go on.
    heard = Listen()
    before = contents(tmp_path / "run")
    more = {"resume": True, "allow_changes": True, "reporter": heard}
    assert run(tmp_path / "run", options=more, **{**settings, "steps": 20}) == first
    assert contents(tmp_path / "run") == before
    assert heard.heard("the scores stopped improving), and nothing was changed")
    assert heard.heard("--set train.early_stopping=null")
    assert not heard.heard("going on")
    rest = run(tmp_path / "run", options=more, **{**settings, "early_stopping": None})
    assert rest.steps == 12


def test_a_run_killed_after_its_last_step_is_brought_to_its_end(tmp_path: Path) -> None:
    first = run(tmp_path / "run", steps=3, save_every=1)
    (tmp_path / "run/result.json").unlink()
    for steps in (3, 2):
        heard = Listen()
        options = {"resume": True, "allow_changes": True, "reporter": heard}
        assert run(tmp_path / "run", steps=steps, save_every=1, options=options) == first
        assert heard.heard(f"3 steps of {steps} done: the run is brought to its end")
        assert not heard.heard("goes on")
        assert not heard.heard("going on")
        (tmp_path / "run/result.json").unlink()


def test_going_on_from_an_earlier_checkpoint_forgets_the_later_ones(tmp_path: Path) -> None:
    settings = {"steps": 6, "save_every": 2, "keep_last": 3}
    first = run(tmp_path / "run", **settings)
    kept = weights(first)
    heard = Listen()
    options = {"resume_from": "step-000002", "seams": stop_after(3), "reporter": heard}
    with pytest.raises(Stop):
        run(tmp_path / "run", options=options, **settings)
    # Killed before it saved again: it goes on from where it went back to, not from the later past.
    assert heard.heard("going on after step 2 of 6, 8 rows seen")
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002"
    again = run(tmp_path / "run", options={"resume": True}, **settings)
    assert same(weights(again), kept)
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step-*"))
    assert names == ["step-000002", "step-000004", "step-000006"]


def test_a_best_checkpoint_that_is_lost_is_told_and_the_best_is_chosen_anew(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 2, "eval_every": 2, "val": ragged_rows(3, seed=3)}
    killed(tmp_path / "run", 3, **settings)
    found = state.from_file(tmp_path / "run/checkpoints/step-000002/state.json")
    assert found.best_step == 2
    # As if the best were an earlier step whose folder somebody removed.
    other = State(**{**vars(found), "best_step": 1})
    from afina.train import manifest

    folder = tmp_path / "run/checkpoints/step-000002"
    (folder / "state.json").write_text(state.to_text(other))
    (folder / "manifest.json").unlink()
    manifest.write(folder)
    heard = Listen()
    done = run(tmp_path / "run", options={"resume": True, "reporter": heard}, **settings)
    assert heard.heard("the best checkpoint, of step 1, is not whole any more")
    assert done.best_step == 4
    shutil.rmtree(folder, ignore_errors=True)


def test_another_optimiser_starts_anew_and_other_validation_rows_score_anew(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 2, "eval_every": 2}
    killed(tmp_path / "run", 3, val=ragged_rows(3, seed=3), **settings)
    heard = Listen()
    allow = {"resume": True, "allow_changes": True, "reporter": heard}
    done = run(
        tmp_path / "run", optimizer="sgd", val=ragged_rows(3, seed=4), options=allow, **settings
    )
    assert heard.heard("another optimiser cannot take the state of the old one")
    assert heard.heard("the scores so far are of something else")
    assert done.best_step == 4
    kept = load_file(tmp_path / "run/checkpoints/step-000004/optimiser.safetensors")
    assert not [name for name in kept if "exp_avg" in name]


def test_another_optimiser_of_half_precision_weights_goes_on_from_those_that_were_saved(
    tmp_path: Path,
) -> None:
    """Its fp32 masters are of the restored weights: a step too small to change a bit leaves exactly these."""
    half = {"dtype": torch.bfloat16, "initializer_range": 0.05}
    settings = {"steps": 4, "save_every": 2}
    killed(tmp_path / "run", 3, Full(), model=tiny_llama(**half), **settings)
    name = "model/model.safetensors"
    saved = load_file(tmp_path / "run/checkpoints/step-000002" / name)
    base = dict(tiny_llama(**half).named_parameters())
    assert not all(torch.equal(saved[n], base[n]) for n in saved)
    allow = {"resume": True, "allow_changes": True}
    changed = {"optimizer": "sgd", "lr": 1e-12, "options": allow}
    done = run(tmp_path / "run", Full(), model=tiny_llama(**half), **settings, **changed)
    assert same(load_file(done.folder / name), saved)


def test_a_change_that_the_weights_cannot_follow_is_refused_even_when_allowed(
    tmp_path: Path,
) -> None:
    killed(tmp_path / "run", 2, steps=3, save_every=1)
    allow = {"resume": True, "allow_changes": True}
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match="its weights would have no place") as caught:
        run(tmp_path / "run", LoRA(rank=3), steps=3, save_every=1, options=allow)
    assert caught.value.got == "techniques.lora.rank: 2 then, 3 now"
    assert "(2, 48); now it is (3, 48)" in str(caught.value.wanted)
    with pytest.raises(RunError, match="its weights would have no place") as caught:
        run(tmp_path / "run", LoRA(rank=2, target=("q_proj",)), steps=3, options=allow)
    assert "techniques.lora.target: ['all-linear'] then, ['q_proj'] now" in str(caught.value.got)
    assert contents(tmp_path / "run") == before
    # The control: what the same weights can follow goes on.
    assert run(tmp_path / "run", LoRA(rank=2, alpha=8), steps=3, options=allow).steps == 3


def test_another_technique_is_told_as_that_and_is_no_change_to_allow(tmp_path: Path) -> None:
    """And not as another base, whose weights are then counted otherwise; a run of an older afina has no such entry."""
    killed(tmp_path / "run", 2, steps=3, save_every=1)
    for allow in (False, True):
        options = {"resume": True, "allow_changes": allow}
        for old in (False, True):
            if old:
                forget(tmp_path / "run/checkpoints/step-000002", state.TECHNIQUES)
            with pytest.raises(RunError, match="what trains is not what trained") as caught:
                run(tmp_path / "run", Full(), steps=3, save_every=1, options=options)
            assert str(caught.value.got) == "the techniques: lora then, full now"
    assert run(tmp_path / "run", steps=3, save_every=1, options={"resume": True}).steps == 3


def forget(folder: Path, name: str) -> None:
    """Makes a checkpoint one that does not know a setting, and is whole."""
    from afina.train import manifest

    found = state.from_file(folder / "state.json")
    found.settings.pop(name, None)
    (folder / "state.json").write_text(state.to_text(found))
    manifest.write(folder)


def test_settings_that_change_nothing_learnt_may_differ_and_are_recorded(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", steps=4)
    killed(tmp_path / "run", 2, steps=4, save_every=2)
    heard = Listen()
    rest = run(tmp_path / "run", steps=4, save_every=1, options={"resume": True, "reporter": heard})
    assert heard.heard("train.save_every: 2 then, 1 now; nothing that is learnt changes with it")
    assert same(weights(whole), weights(rest))
    assert "save_every: 1" in (tmp_path / "run/config.yaml").read_text()


def test_the_number_of_threads_is_the_one_of_then(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(step: int) -> None:
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    killed(tmp_path / "run", 1, steps=2, save_every=1, threads=3)
    assert torch.get_num_threads() == before
    run(
        tmp_path / "run",
        steps=2,
        save_every=1,
        options={"resume": True, "seams": Seams(after_step=(look,))},
    )
    assert seen == [3]
    assert torch.get_num_threads() == before
    with pytest.raises(RunError, match=r"train\.threads: 3 then, 2 now"):
        run(tmp_path / "run", steps=2, save_every=1, threads=2, options={"resume": True})


def test_another_dtype_or_device_is_a_change_and_another_version_a_warning() -> None:
    here = Machine("cpu", "float32", 2, False, "2.13", "5.24", "AVX2")
    then = State(3, machine=here, settings={BASE: "bf16:1+signs:2"})
    for field, value in (("dtype", "bfloat16"), ("device", "cuda"), ("compiled", True)):
        other = State(0, machine=Machine(**{**vars(here), field: value}), settings=then.settings)
        (found,) = differences(then, other)
        assert found.name == f"train.{field.removesuffix('d')}"
        assert roundings(then, other) == []
    newer = State(0, machine=Machine(**{**vars(here), "torch": "2.14"}), settings=then.settings)
    assert differences(then, newer) == []
    assert [str(x) for x in roundings(then, newer)] == ["torch: 2.13 then, 2.14 now"]
    # The same base in fp16 has another fingerprint, and is still the same base.
    half = State(0, machine=here, settings={BASE: "fp16:9+signs:2"})
    assert differences(then, half) == []
    assert differences(then, State(0, machine=here, settings={BASE: "fp16:9+signs:3"}))


def test_a_setting_that_an_older_version_did_not_have_had_its_default(tmp_path: Path) -> None:
    here = Machine("cpu", "float32", 2, False, "2.13", "5.24", "AVX2")
    then = State(3, machine=here, settings={})
    assert differences(then, State(0, machine=here, settings={"train.on_nan": "stop"})) == []
    (found,) = differences(then, State(0, machine=here, settings={"train.on_nan": "skip"}))
    assert str(found) == "train.on_nan: stop then, skip now"


def test_another_working_directory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data by a relative name, started in one folder and resumed in another, from Python."""
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "one/rows.jsonl").write_text(text)
    settings = {"steps": 4, "save_every": 2, "val": ragged_rows(2)}
    monkeypatch.chdir(tmp_path / "one")
    whole = run(Path("whole"), data="rows.jsonl", **settings)
    expected = weights(whole)
    killed(Path("run"), 3, data="rows.jsonl", **settings)
    written = (tmp_path / "one/run/config.yaml").read_text()
    assert f"source: {tmp_path / 'one/rows.jsonl'}" in written
    monkeypatch.chdir(tmp_path / "other")
    out = Path(os.path.relpath(tmp_path / "one/run"))
    rest = run(out, data="../one/rows.jsonl", options={"resume": True}, **settings)
    assert same(weights(rest), expected)


TOKENS = {"rows_per_step": None, "tokens_per_step": 40, "micro_rows": None, "micro_tokens": 18}
ROWS = {"rows_per_step": 3, "micro_rows": 1, "keep_last": 1}


@pytest.mark.parametrize(
    ("sizes", "packed", "optimizer"),
    [(TOKENS, True, "adamw"), (ROWS, False, "nadam"), (TOKENS, False, "sgd")],
)
def test_four_and_three_steps_are_seven_bit_for_bit(
    tmp_path: Path, sizes: dict[str, Any], packed: bool, optimizer: str
) -> None:
    """With dropout, accumulation, evaluation between, windows of tokens over the end of an epoch."""
    settings = {
        "steps": 7,
        "save_every": 4,
        "eval_every": 3,
        "optimizer": optimizer,
        "schedule": "cosine",
        "val": ragged_rows(3, seed=9),
        **sizes,
    }
    data = {"data_settings": DataSettings(packing=packed)}
    technique = LoRA(rank=2, dropout=0.3)
    whole = run(tmp_path / "whole", technique, options=data, **settings)
    killed(tmp_path / "run", 5, technique, options=data, **settings)
    rest = run(tmp_path / "run", technique, options={**data, "resume": True}, **settings)
    assert same(weights(whole), weights(rest))
    pairs = [
        [(x["step"], x["loss"], x["gradient_norm"], x["rows"], x.get("val_loss")) for x in lines]
        for lines in map(read_metrics, (whole.folder, rest.folder))
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("packed", [True, False])
def test_full_fine_tuning_goes_on_bit_for_bit_too(tmp_path: Path, packed: bool) -> None:
    settings = {
        "steps": 4,
        "save_every": 2,
        "eval_every": 1,
        "val": ragged_rows(3, seed=3),
        "micro_rows": 3,
    }
    data = {"data_settings": DataSettings(packing=packed)}
    tied = {"tie_word_embeddings": True, "attention_dropout": 0.2}
    whole = run(tmp_path / "whole", Full(), model=tiny_llama(**tied), options=data, **settings)
    killed(tmp_path / "run", 3, Full(), model=tiny_llama(**tied), options=data, **settings)
    rest = run(
        tmp_path / "run",
        Full(),
        model=tiny_llama(**tied),
        options={**data, "resume": True},
        **settings,
    )
    names = ("checkpoints/step-000004/model/model.safetensors", "model/model.safetensors")
    for name in names:
        assert same(load_file(whole.folder / name), load_file(rest.folder / name))
    one, two = (
        [(x["step"], x["loss"], x["val_loss"]) for x in read_metrics(r.folder)]
        for r in (whole, rest)
    )
    assert one == two


def test_the_card_of_the_adapter_says_data_settings_and_scores(tmp_path: Path) -> None:
    found = run(tmp_path / "run", steps=3, eval_every=1, val=ragged_rows(3, seed=3))
    record = json.loads((found.weights / "afina.json").read_text())
    assert record["scores"] == {"loss": found.val_loss}
    assert record["data"]["rows"] == 10
    assert record["data"]["validation_rows"] == 3
    from afina.data.report import fingerprint

    assert record["data"]["fingerprint"] == fingerprint(ragged_rows(10))
    assert record["settings"]["train.lr"] == 1e-2
    card = (found.weights / "README.md").read_text()
    assert "| train.lr | 0.01 |" in card
    assert fingerprint(ragged_rows(10)) in card
    # Equal runs in other folders leave equal files, whatever the threads.
    again = run(tmp_path / "other", steps=3, eval_every=1, val=ragged_rows(3, seed=3), threads=1)
    assert (again.weights / "afina.json").read_bytes() == (
        found.weights / "afina.json"
    ).read_bytes()


def test_a_run_whose_optimiser_was_forgotten_ends_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of every test here that compares the end of two runs."""
    from afina.optim.optimisers import Optimiser

    whole = run(tmp_path / "whole", steps=4, save_every=2)
    killed(tmp_path / "run", 3, steps=4, save_every=2)
    monkeypatch.setattr(Optimiser, "load_state_tensors", lambda self, kept: None)
    rest = run(tmp_path / "run", steps=4, save_every=2, options={"resume": True})
    assert not same(weights(whole), weights(rest))


def test_checkpoints_that_are_gone_are_missed_and_the_figures_are_kept(tmp_path: Path) -> None:
    """A control to the run that begins again because it was stopped before it saved one."""
    settings = {"steps": 6, "save_every": 2}
    killed(tmp_path / "run", 4, **settings)
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match="the checkpoints of this run are gone") as caught:
        run(tmp_path / "run", options={"resume": True}, **settings)
    assert "figures of 4 steps" in str(caught.value.got)
    assert contents(tmp_path / "run") == before


HOSTILE = (b"", b"\x00" * 40, b"\xff\xfe{", b"[]", b'{"step": "x"}', b"3\n4\n")


@pytest.mark.parametrize(
    "name",
    ["checkpoints/latest", "start.json", "result.json", "metrics.jsonl"]
    + [
        f"checkpoints/step-000002/{file}"
        for file in ("state.json", "manifest.json", "optimiser.safetensors", "random.safetensors")
    ],
)
def test_whatever_a_file_of_the_folder_holds_the_run_goes_on_or_says_why_not(
    tmp_path: Path, name: str
) -> None:
    """Never a traceback; and what cannot go on is as it was."""
    settings = {"steps": 3, "save_every": 2}
    killed(tmp_path / "whole", 2, **settings)

    def attempt(out: Path) -> tuple[Run | None, str]:
        try:
            return run(out, options={"resume": True}, **settings), ""
        except RunError as error:
            return None, str(error)

    for number, hostile in enumerate(HOSTILE):
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", out)
        (out / name).write_bytes(hostile)
        before = contents(out)
        done, refusal = attempt(out)
        if name.startswith("checkpoints/step"):
            assert done is None
        if done is None:
            assert str(out) in refusal
            assert contents(out) == before, hostile
            continue
        assert done.steps == 3
        lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] in ([3], [1, 2, 3])


def test_figures_that_are_missing_are_told(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 2}
    killed(tmp_path / "run", 3, **settings)
    path = tmp_path / "run/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    heard = Listen()
    run(tmp_path / "run", options={"resume": True, "reporter": heard}, **settings)
    assert heard.heard("metrics.jsonl has no figures for 1 of the first 2 steps")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"steps": 4, "save_every": 2, "tensorboard": True}
    killed(tmp_path / "run", 3, **settings)
    run(tmp_path / "run", options={"resume": True}, **settings)
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    found = [(event.step, round(event.value, 4)) for event in events.Scalars("loss")]
    assert found == [
        (line["step"], round(line["loss"], 4)) for line in read_metrics(tmp_path / "run")
    ]
