"""A run's folder: what it holds, that it is never overwritten, and that it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import afina
from afina.adapters import files
from afina.data.settings import DataSettings
from afina.errors import ConfigError, ModelError, RunError
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train import keeper, metrics
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from afina.tree import Seams
from tests.tiny import tiny_gpt2, tiny_llama
from tests.train.kit import Stop, ragged_rows, run, same, stop_after, weights


def test_the_folder_holds_all_that_later_verbs_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "plot_loss", metrics.plot_loss)
    found = run(tmp_path / "run", epochs=2, save_every=2)
    names = {p.relative_to(found.folder).as_posix() for p in found.folder.rglob("*") if p.is_file()}
    assert {
        "config.yaml",
        "data.json",
        "environment.json",
        "metrics.jsonl",
        "loss.png",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/tokenizer.json",
        "adapter/chat_template.jinja",
        "checkpoints/latest",
        "checkpoints/step-000006/state.json",
        "checkpoints/step-000006/optimiser.safetensors",
        "checkpoints/step-000006/random.safetensors",
        "checkpoints/step-000006/manifest.json",
        "start.json",
        "result.json",
        "adapter/afina.json",
        "adapter/README.md",
    } <= names
    assert (found.folder / "checkpoints/latest").read_text() == "step-000006"
    assert not any("tmp" in name for name in names)
    settings = json.loads((found.weights / "adapter_config.json").read_text())
    assert (settings["r"], settings["base_model_name_or_path"]) == (2, "tiny")


def test_every_step_is_written_once_with_its_rows(tmp_path: Path) -> None:
    """Ten rows, four a step: the third window of each epoch is short, and every row is seen once an epoch."""
    lines = read_metrics(run(tmp_path / "run", epochs=2).folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [len(line["rows"]) for line in lines] == [4, 4, 2, 4, 4, 2]
    for epoch in (lines[:3], lines[3:]):
        assert sorted(i for line in epoch for i in line["rows"]) == list(range(10))
    assert [line["rows"] for line in lines[:3]] != [line["rows"] for line in lines[3:]]


@pytest.mark.parametrize("other", [{"micro_rows": 1}, {"micro_rows": 4}, {"micro_tokens": 30}])
def test_the_micro_batch_does_not_change_what_is_learnt(
    tmp_path: Path, other: dict[str, int]
) -> None:
    """Over whole epochs with their short last windows, to 1e-10 in fp64."""
    one = weights(run(tmp_path / "a", epochs=2))
    given = {"micro_rows": None, **other}
    two = weights(run(tmp_path / "b", epochs=2, **given))
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-10


def test_a_micro_batch_found_by_trial_keeps_the_step(tmp_path: Path) -> None:
    one = run(tmp_path / "a", epochs=1)
    two = run(tmp_path / "b", epochs=1, micro_rows="auto")
    a, b = weights(one), weights(two)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-10
    state = json.loads((two.folder / "checkpoints/step-000003/state.json").read_text())
    assert state["micro_tokens"] >= max(len(row.tokens) for row in ragged_rows(10))


def test_packing_does_not_change_what_is_learnt(tmp_path: Path) -> None:
    one = weights(run(tmp_path / "a", epochs=1))
    padded = {"data_settings": DataSettings(packing=False)}
    two = weights(run(tmp_path / "b", epochs=1, options=padded))
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-10


@pytest.mark.parametrize("model", [tiny_llama, tiny_gpt2])
def test_three_and_three_steps_are_six_bit_for_bit(tmp_path: Path, model: Any) -> None:
    """With dropout (the model's own too, in GPT-2), evaluation between and the micro-batch found by trial."""
    settings = {
        "steps": 6,
        "save_every": 3,
        "eval_every": 2,
        "micro_rows": "auto",
        "val": ragged_rows(3, seed=9),
    }
    technique = LoRA(rank=2, dropout=0.3)
    whole = run(tmp_path / "whole", technique, model=model(), **settings)
    with pytest.raises(Stop):
        run(
            tmp_path / "parts",
            technique,
            model=model(),
            options={"seams": stop_after(4)},
            **settings,
        )
    assert len(read_metrics(tmp_path / "parts")) == 4
    rest = run(tmp_path / "parts", technique, model=model(), options={"resume": True}, **settings)
    assert same(weights(whole), weights(rest))
    a, b = (
        load_file(x.folder / "checkpoints/step-000006/optimiser.safetensors") for x in (whole, rest)
    )
    assert same(a, b)
    losses = [[line["loss"] for line in read_metrics(x.folder)] for x in (whole, rest)]
    assert losses[0] == losses[1]
    assert [line["step"] for line in read_metrics(rest.folder)] == [1, 2, 3, 4, 5, 6]


def test_a_resume_that_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=2)
    for changed, named in (
        ({"lr": 5e-3}, "train.lr"),
        ({"data": ragged_rows(11)}, "the training rows"),
        ({"technique": LoRA(rank=2, alpha=8)}, "techniques.lora.alpha"),
        ({"model": tiny_llama(seed=7)}, "the base model's weights"),
        ({"val": ragged_rows(2)}, "the validation rows"),
    ):
        with pytest.raises(RunError, match=named):
            run(tmp_path / "run", options={"resume": True}, **{"steps": 2, **changed})
    with pytest.raises(RunError, match="no run to resume"):
        run(tmp_path / "nothing", options={"resume": True}, steps=2)


def test_a_used_folder_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    first = run(tmp_path / "run", steps=1)
    kept = weights(first)
    with pytest.raises(RunError, match="in use"):
        run(tmp_path / "run", steps=1, lr=1.0)
    assert same(kept, weights(first))
    second = run(tmp_path / "run", steps=2, options={"overwrite": True})
    assert len(read_metrics(second.folder)) == 2
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "one.png").write_bytes(b"x")
    with pytest.raises(RunError, match="not a run"):
        run(foreign, steps=1, options={"overwrite": True})
    assert (foreign / "one.png").exists()


def test_overwriting_takes_nothing_that_is_not_the_runs(tmp_path: Path) -> None:
    first = run(tmp_path / "run", steps=1)
    (first.folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"not a run[\s\S]*notes.txt"):
        run(tmp_path / "run", steps=1, options={"overwrite": True})
    assert (first.folder / "notes.txt").read_text() == "mine"
    assert weights(first)
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "config.yaml").write_text("model: model\n")
    with pytest.raises(RunError, match="not a run"):
        run(project, steps=1, options={"overwrite": True})
    assert (project / "model").is_dir()


def test_a_mistake_known_beforehand_costs_no_earlier_run(tmp_path: Path) -> None:
    first = run(tmp_path / "run", steps=1)
    kept = weights(first)
    with pytest.raises(ConfigError, match="no such optimiser"):
        run(tmp_path / "run", steps=1, optimizer="foo", options={"overwrite": True})
    assert same(kept, weights(first))
    with pytest.raises(ConfigError, match="no such optimiser"):
        run(tmp_path / "new", steps=1, optimizer="foo")
    assert not (tmp_path / "new").exists()


def test_the_best_scored_weights_are_kept_and_the_run_stops_when_told(tmp_path: Path) -> None:
    """A rate so high that the loss rises after the first evaluation."""
    found = run(
        tmp_path / "run",
        steps=12,
        lr=3.0,
        clip=None,
        eval_every=1,
        early_stopping=3,
        schedule="constant",
        warmup_steps=0,
        val=ragged_rows(4, seed=3),
    )
    lines = read_metrics(found.folder)
    scores = [line["val_loss"] for line in lines]
    best = scores.index(min(scores)) + 1
    assert found.best_step == best
    assert found.steps == best + 3 == len(lines)
    assert found.val_loss == min(scores)
    source = found.folder / f"checkpoints/step-{best:06d}/adapter/adapter_model.safetensors"
    assert same(weights(found), load_file(source))


def test_the_validation_loss_is_that_of_the_kept_weights(tmp_path: Path) -> None:
    val = ragged_rows(4, seed=3)
    found = run(tmp_path / "run", steps=3, val=val)
    model = tiny_llama()
    files.load(model, found.weights)
    losses = []
    for row in val:
        logits = model(torch.tensor([row.tokens])).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(
            logits, torch.tensor(row.tokens[1:]), reduction="none"
        )
        losses += [x for x, kept in zip(each.tolist(), row.trained[1:], strict=True) if kept]
    assert found.val_loss == pytest.approx(sum(losses) / len(losses), abs=1e-9)


def test_full_fine_tuning_leaves_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = tiny_llama(dtype=torch.float32, tie_word_embeddings=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found = run(tmp_path / "run", Full(layers="-1"), model=model, steps=2)
    again = LlamaForCausalLM.from_pretrained(found.folder / "model").eval()
    ids = torch.arange(9)[None]
    assert torch.equal(model.eval()(ids).logits, again(ids).logits)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.startswith("model.layers.1.")}


def test_a_checkpoint_of_a_whole_model_draws_no_bar_through_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        run(tmp_path / "run", Full(), steps=1)
        assert logging.is_progress_bar_enabled()
    finally:
        if not shown:
            logging.disable_progress_bar()
    said = capsys.readouterr()
    assert "shards" not in said.out + said.err


def test_full_fine_tuning_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 2}
    half = {"dtype": torch.bfloat16}
    whole = run(tmp_path / "whole", Full(), model=tiny_llama(**half), **settings)
    with pytest.raises(Stop):
        run(
            tmp_path / "parts",
            Full(),
            model=tiny_llama(**half),
            options={"seams": stop_after(2)},
            **settings,
        )
    rest = run(
        tmp_path / "parts", Full(), model=tiny_llama(**half), options={"resume": True}, **settings
    )
    assert same(*(load_file(x.weights / "model.safetensors") for x in (whole, rest)))


def test_the_optimiser_is_the_one_named(tmp_path: Path) -> None:
    """One SGD step moves each tensor by -lr times its gradient."""
    seen: dict[str, torch.Tensor] = {}

    def look(step: int, tensors: dict[str, Any]) -> None:
        seen.update({n: t.grad.clone() for n, t in tensors.items()})

    model = tiny_llama()
    edit = apply(model, [LoRA(rank=2, loraplus_ratio=4.0)], seed=1)
    before = {n: t.detach().clone() for n, t in edit.trainable().items()}
    options = RunOptions(reporter=Silent(), seams=Seams(before_step=(look,)))
    train(
        model,
        None,
        ragged_rows(4),
        edit,
        tmp_path / "run",
        options=options,
        optimizer="SGD",
        steps=1,
        lr=0.1,
        clip=None,
        warmup_steps=0,
    )
    for name, tensor in edit.trainable().items():
        rate = 0.4 if name.endswith(".b") else 0.1
        torch.testing.assert_close(tensor.detach(), before[name] - rate * seen[name])


def test_tokens_per_step_bounds_the_window(tmp_path: Path) -> None:
    found = run(tmp_path / "run", rows_per_step=None, tokens_per_step=30, micro_rows=None, epochs=1)
    lines = read_metrics(found.folder)
    assert all(line["tokens"] <= 30 for line in lines)
    assert sorted(i for line in lines for i in line["rows"]) == list(range(10))


def test_a_half_precision_base_trains_an_fp32_adapter(tmp_path: Path) -> None:
    tame = {"initializer_range": 0.05}
    wide = run(tmp_path / "a", model=tiny_llama(dtype=torch.float32, **tame), epochs=1)
    half = run(tmp_path / "b", model=tiny_llama(dtype=torch.bfloat16, **tame), epochs=1)
    assert {t.dtype for t in weights(half).values()} == {torch.float32}
    assert half.loss == pytest.approx(wide.loss, rel=0.02)


def test_tensorboard_events_are_written_when_asked(tmp_path: Path) -> None:
    found = run(tmp_path / "run", steps=1, tensorboard=True)
    assert list((found.folder / "tensorboard").glob("events*"))
    assert not (run(tmp_path / "other", steps=1).folder / "tensorboard").exists()


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 260}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=16))
    with pytest.raises(ModelError, match="causal"):
        run(tmp_path / "run", model=bert, steps=1)
    model = tiny_llama()
    with pytest.raises(RunError, match="nothing would train"):
        train(model, None, ragged_rows(2), afina.Edit(model, []), tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="learning_rate"):
        run(tmp_path / "run", learning_rate=1.0)
    assert not (tmp_path / "run").exists()


def test_the_room_is_the_function() -> None:
    """`afina.train(...)` works though `afina.train` is also a package."""
    import afina.train.loop

    model = tiny_llama()
    assert callable(afina.train)
    with pytest.raises(RunError, match="nothing would train"):
        afina.train(model, None, [], afina.Edit(model, []), "never-made")


def test_rows_may_be_dictionaries_and_shared_ones_are_named(tmp_path: Path) -> None:
    said: list[str] = []

    class Listen(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(6)]
    found = run(
        tmp_path / "run",
        data=rows,
        val=[rows[2], {"prompt": "new", "completion": "9"}],
        steps=1,
        options={"reporter": Listen()},
    )
    assert any("6 of 6 kept" in text for text in said)
    assert any("1 validation row also among the training rows" in text for text in said)
    account = json.loads((found.folder / "data.json").read_text())
    assert account["rows"] == {"train": 6, "validation": 2}
    assert [source["role"] for source in account["sources"]] == ["train", "val"]


def test_scores_beyond_the_loss_choose_the_best_with_packing_on(tmp_path: Path) -> None:
    """Generation inside the validation of a packed run takes the model's own attention."""

    def answers(model: Any, rows: Any) -> dict[str, float]:
        ids = torch.tensor([row.tokens[:3] for row in rows])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
        assert made.shape == (len(rows), 5)
        step = len(read_metrics(tmp_path / "run")) + 1
        return {"exact_match": 0.9 if step == 2 else 0.1}

    found = run(
        tmp_path / "run",
        steps=4,
        eval_every=1,
        best="exact_match",
        val=ragged_rows(3, seed=3),
        options={"evaluate": answers},
    )
    assert found.best_step == 2
    assert found.scores["exact_match"] == 0.9
    assert found.val_loss == found.scores["loss"]


def test_a_stopped_run_is_saved_between_steps_and_goes_on(tmp_path: Path) -> None:
    """SIGINT in the third of six steps: that step is finished and saved, and the rest is bit for bit."""
    import os
    import signal

    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    whole = run(tmp_path / "whole", steps=6)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", steps=6, options={"seams": Seams(after_step=(interrupt,))})
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "parts/checkpoints/latest").read_text() == "step-000003"
    rest = run(tmp_path / "parts", steps=6, options={"resume": True})
    assert same(weights(whole), weights(rest))


def test_two_processes_are_kept_out_of_one_folder(tmp_path: Path) -> None:
    """What another process meets while a run goes on, also when it says overwrite or resume."""
    from afina.train.folder import claimed, refuse_busy

    def intrude(step: int) -> None:
        for way in ({"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}):
            with pytest.raises(RunError, match="another process"), claimed(tmp_path / "run", **way):
                pass

    def ask(step: int) -> None:
        with pytest.raises(RunError, match="another process"):
            refuse_busy(tmp_path / "run")

    found = run(tmp_path / "run", steps=2, options={"seams": Seams(after_step=(intrude, ask))})
    refuse_busy(tmp_path / "run")
    assert len(read_metrics(found.folder)) == 2
    with claimed(tmp_path / "run", overwrite=False, resume=True):
        pass


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"early_stopping": 2}, "train.early_stopping would do nothing"),
        ({"eval_every": 2}, "train.eval_every would do nothing"),
        ({"early_stopping": 2, "val": ragged_rows(2)}, "only evaluation is at the end"),
        ({"data": []}, "not data"),
        ({"data": None}, "not data"),
        ({"data": ragged_rows(2, untrained=(0, 1))}, "not one token"),
        ({"val": ragged_rows(2, untrained=(0, 1))}, "not one token of the validation"),
        ({"data": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]}, "have classes"),
    ],
)
def test_what_would_train_or_do_nothing_is_refused(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(afina.AfinaError, match=named):
        run(tmp_path / "run", steps=2, **given)
    assert not (tmp_path / "run").exists()


def test_an_edit_that_is_undone_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = tiny_llama(), tiny_llama()
    edit = apply(model, [LoRA(rank=2)])
    with pytest.raises(RunError, match="another model"):
        train(other, None, ragged_rows(2), edit, tmp_path / "run", steps=1)
    edit.undo()
    with pytest.raises(RunError, match="undone"):
        train(model, None, ragged_rows(2), edit, tmp_path / "run", steps=1)


def test_a_folder_that_cannot_be_made_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="lies in a file"):
        run(tmp_path / "file" / "run", steps=1)
