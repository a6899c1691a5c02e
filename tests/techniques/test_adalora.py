"""AdaLoRA beside PEFT's step by step, its schedule, its cuts in a run, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import AdaLoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from afina.adapters import files
from afina.adapters.fitting import fit
from afina.adapters.merge_changes import changes
from afina.errors import AdapterError, ConfigError, TechniqueError
from afina.table import apply
from afina.techniques.adalora import AdaLoRA, AdaLoRADelta, orthogonality
from afina.techniques.adalora_budget import Schedule, least
from afina.tree import Edit
from tests import battery
from tests.train import kit

SMALL = AdaLoRA(init_rank=4, target_rank=2, tinit=1, tfinal=2, delta_t=2, alpha=60.0)
TOTAL = 9


def deltas(edit: Edit) -> dict[str, AdaLoRADelta]:
    return {n: d for n, d in edit.deltas.items() if isinstance(d, AdaLoRADelta)}


def exact_loss(logits: Tensor, labels: Tensor, *args: Any, **rest: Any) -> Tensor:
    """In fp64, where Transformers' own is in fp32."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pair:
    """The same AdaLoRA here and in PEFT, from the same start, one step at a time."""

    def __init__(self, technique: AdaLoRA = SMALL, *, model: str = "llama") -> None:
        self.model = battery.build(model)
        self.edit = apply(self.model, [technique], seed=3)
        self.seams = self.edit.seams(TOTAL)
        config = AdaLoraConfig(
            init_r=technique.init_rank,
            target_r=technique.target_rank,
            tinit=technique.tinit,
            tfinal=technique.tfinal,
            deltaT=technique.delta_t,
            lora_alpha=technique.alpha,
            total_step=TOTAL,
            orth_reg_weight=technique.orthogonality,
            target_modules=sorted({n.split(".")[-2] for n in self.edit.deltas}),
            task_type="CAUSAL_LM",
            fan_in_fan_out=model == "gpt2",
        )
        with battery.quiet():
            self.peer: Any = get_peft_model(battery.build(model), config)
        for one in (self.model, self.peer.base_model.model):
            one.loss_function = exact_loss
        self.theirs = {
            n.removeprefix("base_model.model."): p for n, p in self.peer.named_parameters()
        }
        with torch.no_grad():
            for name, (mine, other) in self.both().items():
                assert mine.shape == other.shape, name
                other.copy_(mine)

    def both(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (mine, self.theirs[self.of(name)]) for name, mine in self.edit.trainable().items()
        }

    @staticmethod
    def of(name: str) -> str:
        module, _, part = name.rpartition(".adalora.")
        return f"{module}.lora_{part.upper()}.default"

    def step(self, step: int) -> None:
        loss = self.model(input_ids=battery.IDS, labels=battery.TARGETS).loss
        for penalty in self.seams.penalty:
            loss = loss + penalty(step)
        loss.backward()
        other = self.peer(input_ids=battery.IDS, labels=battery.TARGETS).loss
        other.backward()
        battery.close(loss, other)
        for mine, other in self.both().values():
            assert mine.grad is not None
            assert other.grad is not None
            battery.close(mine.grad, other.grad, 1e-9)
        with torch.no_grad():
            for one in (p for pair in self.both().values() for p in pair):
                assert one.grad is not None
                one -= 0.05 * one.grad
        for moved in self.seams.moved:
            moved(step, self.edit.trainable())
        self.peer.base_model.update_and_allocate(step + 1)
        self.model.zero_grad()
        self.peer.zero_grad()
        for after in self.seams.after_step:
            after(step)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_equals_peft_step_by_step(model: str) -> None:
    pair = Pair(model=model)
    patterns: list[Any] = []
    for step in range(TOTAL):
        pair.step(step)
        allocator = pair.peer.base_model.rankallocator
        for name, (mine, other) in pair.both().items():
            battery.close(mine, other)
            place, _, part = name.rpartition(".")
            if step + 1 < TOTAL - 2:
                key = Pair.of(name)
                delta = pair.edit.deltas[place]
                battery.close(delta.get_buffer(f"{part}_mean"), allocator.exp_avg_ipt[key], 1e-12)
                battery.close(delta.get_buffer(f"{part}_spread"), allocator.exp_avg_unc[key], 1e-12)
        pattern = pair.peer.peft_config["default"].rank_pattern
        patterns.append(pattern)
        if pattern:
            for name, delta in deltas(pair.edit).items():
                wanted = pattern[f"{name.removesuffix('.adalora')}.lora_E.default"]
                assert delta.get_buffer("kept").tolist() == wanted
    assert patterns[0] is None
    assert patterns[1] != patterns[-1]  # the cuts went on
    left = sum(int(d.used().sum()) for d in deltas(pair.edit).values())
    assert left == 2 * len(pair.edit.deltas)
    battery.close(battery.logits(pair.model), battery.logits(pair.peer.eval()))
    battery.differs(battery.logits(pair.model), battery.base_logits(model))


def test_another_smoothing_is_seen() -> None:
    pair = Pair(SMALL.model_copy(update={"beta1": 0.6}))
    pair.step(0)
    name = next(iter(pair.edit.trainable()))
    place, _, part = name.rpartition(".")
    mine = pair.edit.deltas[place].get_buffer(f"{part}_mean")
    theirs = pair.peer.base_model.rankallocator.exp_avg_ipt[Pair.of(name)]
    assert not torch.allclose(mine, theirs, rtol=1e-3, atol=0)


def test_the_budget_is_a_function_of_the_step() -> None:
    plan = Schedule(first=120, last=40, tinit=10, tfinal=30, delta_t=5, total_steps=100)
    assert [plan.budget(n) for n in (0, 10, 40, 70, 71, 100)] == [120, 120, 50, 40, 40, 40]
    assert [n for n in range(1, 101) if plan.cuts(n)] == [*range(15, 70, 5), 70]
    even = Schedule(120, 40, 0, 0, 7, 20)
    assert [n for n in range(1, 21) if even.cuts(n)] == [7, 14, 20]
    every = [plan.budget(n) for n in range(101)]
    assert every == sorted(every, reverse=True)


def test_of_equal_scores_just_as_many_go_as_shall() -> None:
    scores = torch.tensor([2.0, 0.0, 0.0, 0.0, 1.0])
    assert least(scores, 2).tolist() == [False, True, True, False, False]
    assert not least(scores, 0).any()


def test_orthogonality_is_the_mean_of_norms() -> None:
    near = torch.eye(3, 5, dtype=torch.float64)
    far = 2 * near
    assert orthogonality([near @ near.t()]) == 0
    assert orthogonality([near @ near.t(), far @ far.t()]) == pytest.approx(3 * 3**0.5 / 2)
    skew = torch.tensor([[1.0, 1.0], [0.0, 1.0]], requires_grad=True)
    orthogonality([skew @ skew.t()]).backward()
    assert skew.grad is not None
    assert skew.grad.isfinite().all()


def test_a_run_cuts_by_itself_and_says_what_is_left(tmp_path: Path) -> None:
    lines: list[str] = []
    reporter = kit.Silent()
    reporter.say = lines.append  # type: ignore[method-assign]
    technique = AdaLoRA(init_rank=3, target_rank=1, alpha=60.0)
    run = kit.run(tmp_path / "run", technique, steps=10, options={"reporter": reporter})
    config = json.loads((run.weights / "adapter_config.json").read_text(encoding="utf-8"))
    kept = config["rank_pattern"]
    assert sum(map(sum, kept.values())) == 14  # one of each of the 14 maps, on average
    assert all(len(flags) == 3 for flags in kept.values())
    assert (config["tinit"], config["tfinal"], config["total_step"]) == (1, 3, 10)
    (told,) = [
        line for line in lines if "14 directions left in 14 modules, 1.00 on average" in line
    ]
    queries = [sum(flags) for name, flags in kept.items() if "q_proj" in name]
    assert f"q_proj {sum(queries) / 2:.2f}, " in told


def test_without_cuts_nothing_is_said_of_them() -> None:
    model = battery.build("llama")
    edit = apply(model, [SMALL])
    assert edit.outcome() == []
    assert "left in" not in edit.summary()


@pytest.mark.parametrize("stop", [2, 5, 8])
def test_resumed_in_mid_run_it_is_the_same_run(tmp_path: Path, stop: int) -> None:
    technique = AdaLoRA(init_rank=3, target_rank=1, tinit=1, tfinal=3, delta_t=2, alpha=60.0)
    whole = kit.run(tmp_path / "whole", technique, steps=10)
    options = {"seams": kit.stop_after(stop + 1)}
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "parts", technique, steps=10, save_every=stop, options=options)
    again = kit.run(
        tmp_path / "parts", technique, steps=10, save_every=stop, options={"resume": True}
    )
    one, other = (load_file(r.weights / "adapter_model.safetensors") for r in (whole, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_that_is_left_out_does_not_lose_the_last_cut() -> None:
    pair = Pair(SMALL.model_copy(update={"delta_t": 5}))
    for step in range(TOTAL - 3):
        pair.step(step)
    before = sum(int(d.used().sum()) for d in deltas(pair.edit).values())
    for after in pair.seams.after_step:  # the tensors did not move at this one
        after(TOTAL - 3)
    left = sum(int(d.used().sum()) for d in deltas(pair.edit).values())
    assert left == 2 * len(pair.edit.deltas) < before


@pytest.mark.parametrize(("tinit", "tfinal"), [(3, 6), (9, 0), (0, 9), (20, 20)])
def test_a_schedule_that_cannot_end_is_refused_before_training(
    tmp_path: Path, tinit: int, tfinal: int
) -> None:
    technique = AdaLoRA(init_rank=3, target_rank=1, tinit=tinit, tfinal=tfinal)
    with pytest.raises(TechniqueError, match="the run is over before") as caught:
        kit.run(tmp_path / "run", technique, steps=9)
    assert "adalora.tfinal" in str(caught.value.cure)
    assert not (tmp_path / "run").exists()


def cut_pair() -> Pair:
    pair = Pair()
    for step in range(TOTAL):
        pair.step(step)
    return pair


def test_what_was_cut_is_not_in_the_file_and_peft_reads_it(tmp_path: Path) -> None:
    pair = cut_pair()
    first, *_ = deltas(pair.edit).values()
    with torch.no_grad():  # a module that has nothing left
        first.keep(torch.zeros(4, dtype=torch.bool))
    files.save(pair.edit, tmp_path / "here", base="tiny")
    saved = load_file(tmp_path / "here" / "adapter_model.safetensors")
    sizes = {len(t) for name, t in saved.items() if name.endswith("lora_A")}
    assert len(sizes) > 1
    other = battery.build("llama")
    loaded = files.load(other, tmp_path / "here")
    left = sum(bool(delta.used().any()) for delta in deltas(pair.edit).values())
    assert len(loaded.deltas) == left < len(pair.edit.deltas)
    battery.close(battery.logits(other), battery.logits(pair.model))
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(battery.build("llama"), str(tmp_path / "here"))
    battery.close(battery.logits(peer.eval()), battery.logits(pair.model))
    files.save(loaded, tmp_path / "again", base="tiny")
    battery.close(battery.logits(other), battery.logits(pair.model))
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], saved[name]) for name in saved)


@pytest.mark.parametrize("emptied", [False, True])
def test_what_peft_cut_is_read_here(tmp_path: Path, emptied: bool) -> None:
    pair = cut_pair()
    if emptied:
        pattern = pair.peer.peft_config["default"].rank_pattern
        key = next(iter(pattern))
        pattern[key] = [False] * 4
        with torch.no_grad():
            pair.theirs[key].zero_()
    answer = battery.logits(pair.peer.eval())
    with battery.quiet():
        pair.peer.save_pretrained(str(tmp_path / "there"))
    model = battery.build("llama")
    edit = files.load(model, tmp_path / "there")
    battery.close(battery.logits(model), answer)
    battery.differs(battery.logits(model), battery.base_logits("llama"))
    kept = pair.peer.peft_config["default"].rank_pattern.values()
    assert len(edit.deltas) == sum(any(flags) for flags in kept)
    ranks = {delta.rank for delta in deltas(edit).values()}
    assert len(ranks) > 1
    edit.merge()
    battery.close(battery.logits(model), answer, 1e-6)


def test_ranks_that_the_file_does_not_have_are_refused(tmp_path: Path) -> None:
    files.save(cut_pair().edit, tmp_path / "a", base="tiny")
    place = tmp_path / "a" / "adapter_config.json"
    config = json.loads(place.read_text(encoding="utf-8"))
    for wrong in (None, {key: [True] * 4 for key in config["rank_pattern"]}):
        place.write_text(json.dumps(config | {"rank_pattern": wrong}), encoding="utf-8")
        with pytest.raises(AdapterError, match="differ"):
            files.load(battery.build("llama"), tmp_path / "a")
    for odd in ({"model.layers.0.self_attn.q_proj.lora_E": 3}, {"x.lora_E": [1, 0]}):
        place.write_text(json.dumps(config | {"rank_pattern": odd}), encoding="utf-8")
        with pytest.raises(AdapterError, match="which directions"):
            files.load(battery.build("llama"), tmp_path / "a")


@pytest.mark.parametrize("total", [TOTAL, 2])
def test_an_adapter_that_was_cut_trains_on(tmp_path: Path, total: int) -> None:
    """In a run that is too short for the cuts of the first one too."""
    files.save(cut_pair().edit, tmp_path / "a", base="tiny")
    model = battery.build("llama")
    edit = files.load(model, tmp_path / "a")
    seams = edit.seams(total)
    before = sum(d.rank for d in deltas(edit).values())
    for step in range(total):
        battery.backward(model)
        for moved in seams.moved:
            moved(step, edit.trainable())
        for after in seams.after_step:
            after(step)
    assert sum(int(d.used().sum()) for d in deltas(edit).values()) == before


def test_one_that_was_not_cut_starts_a_run_of_any_length(tmp_path: Path) -> None:
    """The steps in its file are those of the run before."""
    technique = SMALL.model_copy(update={"tinit": 200, "tfinal": 300})
    model = battery.build("llama")
    longer = apply(model, [technique])
    longer.seams(1000)
    battery.train(model, longer)
    files.save(longer, tmp_path / "a", base="tiny")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["tinit"], config["tfinal"], config["rank_pattern"]) == (200, 300, None)
    edit = files.load(battery.build("llama"), tmp_path / "a")
    edit.seams(10)
    (schedule,) = {delta.schedule for delta in deltas(edit).values()}
    assert (schedule.tinit, schedule.tfinal, schedule.total_steps) == (1, 3, 10)
    assert schedule.first > schedule.last


def test_values_are_written_into_what_was_cut() -> None:
    """Into the directions that are left, and nowhere else."""
    pair = cut_pair()
    before = battery.logits(pair.model)
    kept = {key: tensor.detach().clone() for key, tensor in files.peft_tensors(pair.edit).items()}
    unused = {name: d.a[~d.used()].clone() for name, d in deltas(pair.edit).items()}
    with torch.no_grad():
        for delta in deltas(pair.edit).values():
            for parameter in (delta.a, delta.b, delta.e):
                parameter.mul_(2)
    battery.differs(battery.logits(pair.model), before)
    files.restore(pair.edit, kept)
    assert torch.equal(battery.logits(pair.model), before)
    for name, delta in deltas(pair.edit).items():
        assert torch.equal(delta.a[~delta.used()], unused[name] * 2)


def test_refusals() -> None:
    model = battery.build("llama")
    with pytest.raises(TechniqueError, match="embedding"):
        apply(model, [AdaLoRA(target=("embed_tokens",), init_rank=4, target_rank=2)])
    with pytest.raises(TechniqueError, match="init_rank exceeds"):
        apply(model, [AdaLoRA(init_rank=30)])
    for wrong in ({"target_rank": 13}, {"rank_pattern": {"q_proj": 13}}, {"beta1": 1.0}):
        with pytest.raises(ConfigError):
            AdaLoRA(**wrong)


def test_what_was_cut_is_folded_without_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.save(cut_pair().edit, tmp_path / "a", base="tiny")
    edit = files.load(battery.build("llama"), tmp_path / "a")
    fitted = fit(battery.build("llama"), tmp_path / "a")
    empty = AdaLoRADelta.to_empty

    def garbage(delta: AdaLoRADelta, **more: Any) -> AdaLoRADelta:
        empty(delta, **more)
        delta.get_buffer("kept").fill_(False)
        return delta

    monkeypatch.setattr(AdaLoRADelta, "to_empty", garbage)
    made = changes(battery.build("llama").to("meta"), fitted.techniques, fitted.tensors)
    assert {f"{name}.adalora" for name in made.deltas} == edit.deltas.keys()
    for name, (delta,) in made.deltas.items():
        assert torch.equal(delta.weight_delta(), edit.deltas[f"{name}.adalora"].weight_delta())
