"""The pre-flight as a whole: it leaves nothing behind, and what fails does not hide the rest."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import afina
from afina.config import TrainSettings
from afina.data.settings import DataSettings
from afina.errors import ConfigError, lasting
from afina.reports import packed, settings, space, steps
from afina.reports.checked import Checked
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train import plan
from afina.train.options import RunOptions
from afina.train.preflight import Finding
from afina.types import Row
from demo import calls
from tests.reports.kit import POINTS, Case, model
from tests.tiny import tiny_gpt2


def state(case: Case) -> dict[str, Any]:
    """All that a look may not change."""
    tensors = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
    return {
        "tensors": tensors,
        "buffers": buffers,
        "modes": [module.training for module in case.model.modules()],
        "flags": [parameter.requires_grad for parameter in case.model.parameters()],
        "gradients": [parameter.grad for parameter in case.model.parameters()],
        "attention": case.model.config._attn_implementation,
        "random": torch.random.get_rng_state().tolist(),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    equal = all(
        a[part].keys() == b[part].keys()
        and all(torch.equal(a[part][n], b[part][n]) for n in a[part])
        for part in ("tensors", "buffers")
    )
    rest = ("modes", "flags", "gradients", "attention", "random")
    return equal and all(a[part] == b[part] for part in rest)


@pytest.mark.parametrize("technique", [LoRA(rank=2, dropout=0.1), Full()])
def test_a_look_leaves_nothing_behind(tmp_path: Path, technique: Any) -> None:
    case = Case(tmp_path, technique=technique)
    case.applied()
    before, files = state(case), sorted(tmp_path.iterdir())
    checked = case.check()
    assert checked["first step"].status == "ok"
    assert same(before, state(case))
    assert sorted(tmp_path.iterdir()) == files
    # The control: the first step of a run does change it.
    rows = case.rows()
    afina.train(case.model, case.tokenizer, rows, case.edit, case.out, steps=1, micro_rows=4)
    assert not same(before, state(case))


def test_a_run_after_a_look_is_the_run_without(tmp_path: Path) -> None:
    losses: list[float] = []
    for name, look in (("looked", True), ("not", False)):
        case = Case(tmp_path / name, technique=LoRA(rank=2, dropout=0.2))
        edit = case.applied()
        if look:
            case.check()
        run = afina.train(
            case.model, case.tokenizer, case.data, edit, case.out, steps=3, micro_rows=4
        )
        losses.append(run.loss)
    assert losses[0] == losses[1]


def test_it_is_a_public_name_with_the_arguments_of_train(tmp_path: Path) -> None:
    case = Case(tmp_path)
    checked = afina.check(case.model, case.tokenizer, case.data, case.applied(), steps=3, lr=1.0)
    assert isinstance(checked, Checked)
    assert checked["schedule"].values["steps"] == 3
    assert checked["learning rate"].status == "warning"
    assert checked["folder"].status == "skipped"
    assert not checked.ok
    with pytest.raises(ConfigError, match="stepz"):
        afina.check(case.model, case.tokenizer, case.data, case.applied(), stepz=3)


def test_prepared_rows_need_no_tokenizer(tmp_path: Path) -> None:
    case = Case(tmp_path, val=None)
    case.data, case.tokenizer = case.rows(), None
    checked = case.check()
    skipped = {f.name for f in checked.findings if f.status == "skipped"}
    assert skipped == {"stop token", "template", "overlap"}
    assert checked.exit_code() == 0


def test_a_pad_that_is_the_stop_token_masks_nothing(tmp_path: Path) -> None:
    """Rows padded with the token that ends their answers train as with any other pad."""
    losses: list[Any] = []
    for pad in ("<|im_end|>", "<|pad|>"):
        case = Case(tmp_path, data_settings={"packing": False})
        case.tokenizer.pad_token = pad
        checked = case.check()
        assert checked["stop token"].status == checked["labels"].status == "ok"
        losses.append((checked["start"].values["loss"], checked["first step"].values["losses"]))
    assert losses[0] == losses[1]


def test_rows_with_a_class_cannot_train_yet(tmp_path: Path) -> None:
    case = Case(tmp_path, val=None, data=[{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    checked = case.check()
    assert checked["labels"].status == "error"
    assert "data.format=prompt_completion" in checked["labels"].cure
    assert checked["first step"].status == "skipped"


def test_rows_that_the_model_cannot_read_are_told_and_not_run(tmp_path: Path) -> None:
    """GPT-2 has no position beyond its context: its pass would end in an error of torch."""
    gpt2 = tiny_gpt2(dtype=torch.float32, n_positions=40)
    case = Case(tmp_path, model=gpt2, val=None)
    case.data = [*case.rows(), Row((97,) * 41, (True,) * 41, 40, "a.jsonl:41")]
    checked = case.check()
    assert checked["lengths"].seen == "a.jsonl:41 has 41 tokens, and the model reads 40"
    skipped = [f.name for f in checked.findings if f.status == "skipped"]
    assert skipped == ["overlap", "packing", "start", "first step", "pace"]
    case.data = [Row((97, 260), (False, True), 0)]
    assert "no embedding for" in case.check()["format"].seen


def test_a_model_whose_numbers_are_broken_is_told_at_its_start(tmp_path: Path) -> None:
    case = Case(tmp_path)
    with torch.no_grad():
        case.model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    checked = case.check()
    assert checked["start"].status == "error"
    assert "not a number" in checked["start"].seen
    assert [checked[name].status for name in ("packing", "first step", "pace")] == ["skipped"] * 3
    json.dumps(checked.document(), allow_nan=False)


@pytest.mark.parametrize(
    ("place", "point"),
    [
        ("afina.reports.packed.trained_logits", "packing"),
        ("afina.reports.steps.mean_loss", "start"),
        ("afina.train.passes.Passes.trial", "first step"),
    ],
)
def test_a_device_without_the_memory_is_told_where_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, point: str
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(place, full)
    finding = Case(tmp_path).check()[point]
    assert finding.status == "error"
    assert "the memory of cpu does not hold one pass; the longest row (row:16) has" in finding.seen


def test_unreadable_validation_rows_do_not_hide_the_others(tmp_path: Path) -> None:
    checked = Case(tmp_path, val=str(tmp_path / "none.jsonl")).check()
    assert checked["format"].status == "error"
    assert "none.jsonl" in checked["format"].seen
    looked = ("labels", "stop token", "template", "lengths", "duplicates", "first step")
    assert [checked[name].status for name in looked] == ["ok"] * len(looked)


def test_a_gradient_that_is_not_finite_is_told_at_the_first_step(tmp_path: Path) -> None:
    for policy in ("stop", "skip"):
        case = Case(tmp_path / policy)
        tensor = case.applied().trainable()["model.layers.0.mlp.up_proj.lora.b"]
        tensor.register_hook(lambda gradient: gradient * math.inf)
        case.settings["on_nan"] = policy
        checked = case.check()
        assert checked["start"].status == "ok"
        assert checked["first step"].status == "error", policy
        assert "not finite" in checked["first step"].seen
        assert checked["pace"].status == "skipped"


def test_a_model_worse_than_guessing_is_told(tmp_path: Path) -> None:
    checked = Case(tmp_path, model=model(initializer_range=1.0)).check()
    assert checked["start"].status == "warning"
    assert "worse than guessing" in checked["start"].seen
    values = checked["start"].values
    assert values["base_loss"] > values["chance"] + steps.BEYOND_CHANCE
    assert values["chance"] == pytest.approx(math.log(260))


def test_a_new_adapter_starts_as_its_base(tmp_path: Path) -> None:
    values = Case(tmp_path).check()["start"].values
    assert values["loss"] == values["base_loss"]


def test_the_first_step_is_the_runs(tmp_path: Path) -> None:
    """Its losses and gradient norms are those that the run then has."""
    case = Case(tmp_path, settings={"rows_per_step": 8, "micro_rows": 4, "seed": 3})
    values = case.check()["first step"].values
    run = afina.train(
        case.model,
        case.tokenizer,
        case.data,
        case.applied(),
        case.out,
        settings=TrainSettings(**case.settings),
    )
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert values["losses"] == [line["loss"] for line in lines[:2]]
    assert values["gradient_norms"] == [line["gradient_norm"] for line in lines[:2]]


def test_steps_that_move_nothing_judge_nothing(tmp_path: Path) -> None:
    """The only row with labels comes last, and a part that nothing reaches is found all the same."""
    case = Case(tmp_path, val=None, settings={"rows_per_step": 1, "micro_rows": 1})
    rows = case.rows()[:6]
    silent = [replace(row, trained=(False,) * len(row.tokens)) for row in rows]
    order = list(itertools.islice(plan.windows_from(TrainSettings(**case.settings), rows), 6))
    keep = order[-1][0].id
    case.data = [rows[n] if n == keep else silent[n] for n in range(6)]
    assert case.check()["first step"].values["losses"][0] > 0
    case = replace(case, model=model(), edit=None)
    case.model.model.layers[0].mlp.spare_proj = torch.nn.Linear(32, 32, bias=False)
    assert case.check()["first step"].status == "error"


def test_the_pace_is_that_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks a second at each look: every step takes one, whatever the machine does."""
    clock = itertools.count()
    case = Case(tmp_path, settings={"rows_per_step": 8, "micro_rows": 8, "steps": 50})
    case.applied()
    monkeypatch.setattr("afina.train.loop.time.perf_counter", lambda: float(next(clock)))
    values = case.check()["pace"].values
    second = [len(row.tokens) for row in next(itertools.islice(windows(case), 1, None))]
    assert values["tokens_per_s"] == sum(second)
    mean = 8 * sum(len(row.tokens) for row in case.rows()) / 40
    assert values["seconds_per_step"] == pytest.approx(mean / sum(second))
    assert values["eta_s"] == pytest.approx(50 * values["seconds_per_step"])


def test_the_step_has_the_threads_of_the_run(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    met: set[int] = set()
    case = Case(tmp_path, settings={"rows_per_step": 8, "threads": before + 1})
    case.model.register_forward_pre_hook(
        lambda module, args: met.add(torch.get_num_threads()) if module.training else None
    )
    assert case.check()["first step"].status == "ok"
    assert met == {before + 1}
    assert torch.get_num_threads() == before


def windows(case: Case) -> Iterator[list[Row]]:
    return plan.windows_from(TrainSettings(**case.settings), case.rows())


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7320, "2 h 2 min"), (90_000, "1 d 1 h")],
)
def test_durations_are_in_words(seconds: float, said: str) -> None:
    assert lasting(seconds) == said


# --- packing -----------------------------------------------------------------------------------------------------


def test_packing_that_is_off_is_not_looked_at(tmp_path: Path) -> None:
    checked = Case(tmp_path, data_settings={"packing": False}).check()
    assert checked["packing"].status == "skipped"
    assert checked["first step"].status == "ok"


def test_learnt_positions_are_kept_apart_too(tmp_path: Path) -> None:
    """GPT-2 looks its positions up, and they restart in each row."""
    gpt2 = tiny_gpt2(dtype=torch.float32, n_positions=256, initializer_range=0.05)
    checked = Case(tmp_path, model=gpt2).check()
    assert checked["packing"].status == "ok"
    assert checked["packing"].values["relative_error"] < 1e-5


def test_a_few_rows_are_run_that_fit_into_one_pass() -> None:
    def rows(*lengths: int) -> list[Row]:
        return [Row((1,) * n, (True,) * n, number) for number, n in enumerate(lengths)]

    assert [row.id for row in packed.some_rows(rows(5, 6, 7, 8, 9))] == [0, 1, 2, 3]
    assert [row.id for row in packed.some_rows(rows(5, 3000, 7))] == [0, 2]
    assert [row.id for row in packed.some_rows(rows(3000, 2500, 2600))] == [1, 2]
    assert [row.id for row in packed.some_rows(rows(5))] == [0]


# --- settings ----------------------------------------------------------------------------------------------------
def test_settings_without_effect_are_told_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, quick=True)
    case.settings["early_stopping"] = 2
    case.data_settings = {"split": "test"}
    finding = case.check()["settings"]
    assert (finding.status, finding.seen) == ("error", "2 settings cannot be used")
    told = "\n".join(finding.details)
    assert "train.early_stopping would do nothing" in told
    assert "data.split would do nothing: it is for a data set of the hub" in told


def test_a_run_refuses_what_the_point_refuses(tmp_path: Path) -> None:
    case = Case(tmp_path)
    idle = RunOptions(data_settings=DataSettings(split="test"))
    with pytest.raises(ConfigError, match=r"data\.split would do nothing"):
        afina.train(
            case.model, case.tokenizer, case.data, case.applied(), case.out, steps=1, options=idle
        )
    assert not case.out.exists()
    case.data = [Row((1, 2, 3), (False, True, True), 0)]
    case.data_settings = {"columns": {"prompt": "q"}}
    case.val, case.quick = None, True
    assert case.check()["settings"].seen.startswith("data.columns would do nothing: it is for data")


def test_data_that_cannot_be_read_hides_no_idle_setting(tmp_path: Path) -> None:
    case = Case(tmp_path, quick=True, data=[{"x": 1}])
    case.data_settings = {"txt": "paragraph"}
    checked = case.check()
    assert checked["format"].status == "error"
    assert checked["settings"].seen == "data.txt would do nothing: it is for a .txt file"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "adamv"}, "torch.optim has no such optimiser"),
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "train.betas would do nothing"),
    ],
)
def test_an_optimiser_is_asked_before_the_run(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    case = Case(tmp_path, quick=True)
    case.settings |= given
    finding = case.check()["settings"]
    assert (finding.status, said in finding.seen) == ("error", True)


ROWS = [Row((1,) * 10, (False,) * 5 + (True,) * 5, number) for number in range(40)]


@pytest.mark.parametrize(
    ("given", "keys", "status", "size"),
    [
        ({"rows_per_step": 32}, ["lora"], "ok", 32),
        ({"rows_per_step": 33}, ["lora"], "warning", 33),
        ({"rows_per_step": 33}, ["full"], "ok", 33),
        ({"tokens_per_step": 330}, ["lora"], "warning", 33),
        ({"tokens_per_step": 320}, ["lora"], "ok", 32),
        ({"rows_per_step": 500}, ["full"], "ok", 40),
    ],
)
def test_large_steps(given: dict[str, int], keys: list[str], status: str, size: int) -> None:
    finding = settings.batch(ROWS, TrainSettings(**given), keys)
    assert (finding.status, finding.values["rows_per_step"]) == (status, size)


@pytest.mark.parametrize(
    ("lr", "keys", "optimizer", "status"),
    [
        (TrainSettings().lr, ["lora"], "adamw", "ok"),
        (TrainSettings().lr, ["full"], "adamw", "warning"),
        (5e-5, ["full"], "adamw", "ok"),
        (2e-6, ["lora"], "adamw", "warning"),
        (1e-2, ["lora"], "Adam", "warning"),
        (1e-2, ["lora"], "sgd", "ok"),
    ],
)
def test_unusual_rates(lr: float, keys: list[str], optimizer: str, status: str) -> None:
    given = TrainSettings(lr=lr, optimizer=optimizer)
    assert settings.rate(given, keys).status == status


@pytest.mark.parametrize(
    ("seen", "total", "warmup", "status", "said"),
    [
        (40, 5, 1, "ok", "1 pass over 40 rows"),
        (400, 50, 2, "ok", "10 passes"),
        (401, 51, 2, "warning", "by heart"),
        (8, 1, 1, "note", "32 rows never seen"),
        (39, 1, 1, "note", "1 row never seen"),
        (40, 5, 5, "warning", "the learning rate never falls"),
    ],
)
def test_passes_and_warm_up(seen: float, total: int, warmup: int, status: str, said: str) -> None:
    finding = settings.schedule(ROWS, seen, total, warmup)
    assert (finding.status, said in finding.seen) == (status, True)


def test_what_an_adapter_can_hold() -> None:
    tokens = 40 * 5
    assert settings.capacity(ROWS, tokens, ["lora"]).status == "ok"
    assert settings.capacity(ROWS, tokens - 1, ["lora"]).status == "note"
    assert settings.capacity(ROWS, 10, ["full"]).status == "ok"


# --- disk --------------------------------------------------------------------------------------------------------


def test_the_estimate_of_a_checkpoint_is_near_the_real_one(tmp_path: Path) -> None:
    case = Case(tmp_path, technique=LoRA(rank=16), val=None)
    need = case.check()["disk"].values
    afina.train(case.model, case.tokenizer, case.data, case.applied(), case.out, steps=1)
    (folder,) = (case.out / "checkpoints").glob("step-*")
    real = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    # Headers and the small files beside are not counted.
    assert need["checkpoint_bytes"] < real < need["checkpoint_bytes"] + 2**16


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**given: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("afina.reports.space.tempfile.TemporaryFile", refused)
    finding = space.output(tmp_path / "run", resume=False, overwrite=False)
    assert finding.status == "error"
    assert finding.seen == f"nothing can be made in {tmp_path} (Read-only file system)"
    assert space.output(None, resume=False, overwrite=False).status == "skipped"


def test_a_folder_that_holds_what_the_run_is_made_from_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    reads = {"the model": tmp_path / "run"}
    finding = space.output(tmp_path / "run", resume=False, overwrite=False, reads=reads)
    assert finding.status == "error"
    assert "the model lies in the folder of the run" in finding.seen
    assert (
        space.output(tmp_path / "other", resume=False, overwrite=False, reads=reads).status == "ok"
    )


def test_the_disk_of_a_folder_that_is_not_there_yet_is_asked(tmp_path: Path) -> None:
    assert space.existing(tmp_path / "a" / "b") == tmp_path
    finding = space.disk(
        apply(model(), [LoRA()]),
        TrainSettings(save_every=1, keep_last=None),
        10**12,
        tmp_path / "a",
    )
    assert finding.status == "error"
    assert finding.values["checkpoints"] == 10**12


# --- the report --------------------------------------------------------------------------------------------------


def test_the_report_says_what_to_do_below_each_finding() -> None:
    checked = Checked(
        (
            Finding("a", "ok", "fine"),
            Finding("long name", "warning", "bad", "mend it", ("more",)),
            Finding("c", "error", "worse"),
        )
    )
    assert str(checked).splitlines() == [
        "ok       a          fine",
        "warning  long name  bad",
        "                    more",
        "                    do: mend it",
        "error    c          worse",
        "1 error, 1 warning, 1 ok",
    ]
    assert checked["c"].seen == "worse"


def test_a_name_that_is_no_point_is_told_with_those_that_are() -> None:
    checked = Checked((Finding("pace", "ok", "fast"), Finding("stop token", "ok", "learnt")))
    with pytest.raises(ConfigError, match=r"(?s)'pase'.*wanted: pace, stop token\n.*'pace'"):
        checked["pase"]
    with pytest.raises(ConfigError, match=r"(?s)got:    0\n  wanted: pace, stop token$"):
        list(checked)  # type: ignore[call-overload]


def test_numbers_that_json_does_not_have_are_words() -> None:
    checked = Checked((Finding("a", "error", "bad", values={"x": [math.inf, 1.5], "y": math.nan}),))
    (finding,) = json.loads(json.dumps(checked.document(), allow_nan=False))["findings"]
    assert finding["values"] == {"x": ["inf", 1.5], "y": "nan"}


def test_quick_leaves_out_what_runs_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, quick=True)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was run")

    case.model.register_forward_pre_hook(never)
    checked = case.check()
    assert [f.name for f in checked.findings] == list(POINTS)
    left_out = [f.name for f in checked.findings if f.status == "skipped"]
    assert left_out == ["packing", "start", "first step", "pace"]


# --- a real model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_is_sound_on_a_real_model(tmp_path: Path) -> None:
    loaded, tokenizer = afina.load("smollm2-135m", dtype="fp32", device="cpu")
    train, test = calls.write(tmp_path, train=24, test=4)
    edit = afina.apply(loaded, [LoRA(rank=8)])
    before = loaded.get_input_embeddings().weight.sum(), loaded.lm_head.weight.sum()
    checked = afina.check(
        loaded, tokenizer, train, edit, tmp_path / "run", val=test, rows_per_step=4, micro_rows=4
    )
    assert {f.name: f.status for f in checked.findings} == dict.fromkeys(POINTS, "ok")
    assert checked["stop token"].values["stop_tokens"] == ["<|im_end|>"]
    assert checked["first step"].values["tensors"] == 2 * 7 * 30
    start = checked["start"].values
    assert start["loss"] == start["base_loss"] < 4 < start["chance"]
    assert checked["packing"].values["relative_error"] < 1e-5
    assert not any(bool(p.any()) for n, p in edit.trainable().items() if n.endswith(".b"))
    assert before == (loaded.get_input_embeddings().weight.sum(), loaded.lm_head.weight.sum())
    # What is wrong with the data is found on the real template and vocabulary too.
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    spoilt = [*rows, rows[0]]
    quick = afina.check(loaded, tokenizer, spoilt, edit, val=[rows[1]], quick=True)
    assert (quick["duplicates"].status, quick["overlap"].status) == ("warning", "warning")
