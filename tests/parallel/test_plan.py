"""What a plan says beforehand is what real processes hold and the published figures; what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from afina.cli import main
from afina.config import ParallelSettings
from afina.errors import ConfigError, sized
from afina.models.forward import packing
from afina.parallel.layouts import layouts
from afina.parallel.plan import Plan, plan_of, refuse_alone
from afina.parallel.portion import Portion
from afina.parallel.predict import Size, formula, predicted
from afina.parallel.processes import Processes
from afina.parallel.refusals import Facts, explained, facts_of, refuse
from afina.parallel.step_traffic import step_traffic
from afina.parallel.tensor_traffic import Pass
from afina.parallel.traffic import counts, sent
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.loop import loop
from afina.tree import Seams
from tests.parallel.parity import Case, edited, windows, work_of
from tests.parallel.pool import Pool
from tests.tiny import byte_tokenizer, save_model, tiny_llama

BILLION = 1e9


# --- figures that were published -------------------------------------------------------------------------------


def test_the_figures_of_the_zero_paper() -> None:
    # 7.5 billion parameters, all trained, 2 bytes of weight and of gradient, 12 of Adam's state, 64 processes.
    found = [formula(z, 0, 7.5e9, 2, Size(2, 2, 12), 64).total / BILLION for z in range(4)]
    assert [f"{one:.3g}" for one in found] == ["120", "31.4", "16.6", "1.88"]


def eight_billion() -> Any:
    """Llama 3.1 8B's shapes, in bf16 and without a weight, with LoRA of rank 16 on all linears."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return apply(model, [LoRA(rank=16)], undoable=False)


def test_stages_one_and_two_hardly_help_lora_and_three_does() -> None:
    edit = eight_billion()
    trains = edit.trainable()
    assert sum(p.numel() for p in trains.values()) == 41_943_040
    found = [predicted(Plan(shard=8, zero=z), edit.model, trains, 2) for z in (0, 1, 2, 3)]
    kept = [(one.total - one.gathered) / BILLION for one in found]
    every = sum(p.numel() for p in edit.model.parameters()) - 41_943_040
    stated = [formula(z, every, 41_943_040, 2, Size(4, 4, 8), 8).total / BILLION for z in range(4)]
    assert kept == pytest.approx(stated, rel=1e-9)
    # The published form has adapters in half precision, with an fp32 master.
    mixed = [formula(z, every, 41_943_040, 2, Size(2, 2, 12), 8).total / BILLION for z in range(4)]
    assert [f"{one:.1f}" for one in mixed] == ["16.7", "16.3", "16.2", "2.1"]


# --- what real processes hold ----------------------------------------------------------------------------------

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"zero": 1}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}],
    4: [
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "zero": 1},
        {"pipeline": 2, "zero": 2},
        {"zero": 2, "replicate": 2},
        {"pipeline": 2, "schedule": "interleaved"},
    ],
    8: [{"tensor": 2, "pipeline": 2, "zero": 1}, {"zero": 3}],
}
CASES = [
    Case(technique, 1, rows=8, steps=1, optimizer="adamw", model=(("num_hidden_layers", 4), *tied))
    for technique in ("lora", "full")
    for tied in ((), (("tie_word_embeddings", True),))
]


def held(case: Case, settings: ParallelSettings) -> tuple[int, int, int]:
    """Bytes of weights, gradients (when tensors move) and the optimiser's state that this process has."""
    mesh, edit = Processes(settings), edited(case)
    work = work_of(case, mesh, edit)
    gradients = 0

    def look(step: int, own: Any) -> None:
        nonlocal gradients
        gradients = sum(p.grad.nbytes for p in own.values() if p.grad is not None)

    with packing(edit.model, True):
        list(loop(replace(work, seams=Seams(before_step=(look,))), iter(windows(case))))
    here = [p for name, p in edit.model.named_parameters() if mesh.holds(name)]
    local = [getattr(p.detach(), "_local_tensor", p.detach()) for p in here]
    kept = work.optimiser.state_tensors().items()
    state = sum(t.nbytes for name, t in kept if not name.endswith(".step"))
    return sum(t.numel() * t.element_size() for t in local), gradients, state


def all_held(cases: list[Case], layouts: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [held(case, ParallelSettings(**layout)) for layout in layouts for case in cases]


@pytest.mark.dist
@pytest.mark.parametrize("processes", LAYOUTS)
def test_each_process_holds_what_was_said(pool: Pool, processes: int) -> None:
    cases = CASES if processes < 8 else CASES[-1:]
    found = pool.run(processes, all_held, cases, LAYOUTS[processes])
    for rank, mine in enumerate(found):
        expected: list[tuple[float, float, float]] = []
        for layout in LAYOUTS[processes]:
            plan = plan_of(ParallelSettings(**layout), processes)
            for case in cases:
                edit = edited(case)
                said = predicted(plan, edit.model, edit.trainable(), 2, rank)
                # With zero 1 whole gradients are shared out before tensors move; see test_bytes.
                gradients = said.state / 2 if plan.zero == 1 else said.gradients
                expected.append((said.weights, gradients, said.state))
        assert mine == expected, (rank, LAYOUTS[processes])


PAGE: list[tuple[str, int, dict[str, Any]]] = [
    ("one process", 1, {}),
    ("2, zero 0", 2, {}),
    ("2, zero 1", 2, {"zero": 1}),
    ("2, zero 2", 2, {"zero": 2}),
    ("2, zero 3", 2, {"zero": 3}),
    ("2, tensor 2", 2, {"tensor": 2}),
    ("2, pipeline 2", 2, {"pipeline": 2}),
    ("4, tensor 2, pipeline 2", 4, {"tensor": 2, "pipeline": 2}),
    ("8, zero 3", 8, {"zero": 3}),
]
"""The layouts of the table in docs/parallel.md; the process that holds most is shown."""


def test_the_table_of_the_page_is_what_is_held() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    for name, processes, layout in PAGE:
        plan = plan_of(ParallelSettings(**layout), processes)
        for case in (CASES[0], CASES[2]):
            edit = edited(case)
            every = [predicted(plan, edit.model, edit.trainable(), 2, r) for r in range(processes)]
            most = max(every, key=lambda one: one.total - one.gathered)
            cells = f"{most.weights:,} | {most.gradients:,} | {most.state:,}"
            assert f"| {name} | {case.technique} | {cells} |" in text


SENT: list[tuple[str, int, dict[str, Any]]] = [
    ("2 processes, `zero=0`", 2, {}),
    ("2 processes, `zero=1`", 2, {"zero": 1}),
    ("2 processes, `zero=2`", 2, {"zero": 2}),
    ("2 processes, `zero=3`", 2, {"zero": 3}),
    ("3 processes, `tensor=3`", 3, {"tensor": 3}),
    ("2 processes, `pipeline=2`", 2, {"pipeline": 2}),
]


def test_the_messages_of_the_page_are_those_that_are_stated() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    edits: list[Any] = []
    for technique in (LoRA(rank=16), Full()):
        with torch.device("meta"):
            edits.append(apply(LlamaForCausalLM(config), [technique], undoable=False))
    for name, processes, layout in SENT:
        plan, cells = plan_of(ParallelSettings(**layout), processes), ""
        for edit in edits:
            portions = [Portion(plan, r, edit.model, edit.trainable()) for r in range(processes)]
            said = [step_traffic(one, [Pass(2048, 2048)] * 8) for one in portions]
            most = max(said, key=sent)
            cells += f" | {sum(counts(most).values()):,} | {sized(sent(most))}"
        assert f"| {name}{cells} |" in text


# --- refusals --------------------------------------------------------------------------------------------------

SMOL = Facts("llama", 30, 576, {"heads of queries": 9, "heads of keys and values": 3}, False, True)


@pytest.mark.parametrize(
    ("plan", "facts", "what", "valid"),
    [
        (Plan(tensor=2), SMOL, "parallel.tensor does not divide", "1, 3"),
        (Plan(tensor=2), replace(SMOL, tensor_plan=False), "does not say how", "1"),
        (Plan(pipeline=31), SMOL, "more stages than the model has blocks", "at most 30"),
        (Plan(pipeline=16, schedule="interleaved"), SMOL, "more stages", "at most 15"),
        (Plan(pipeline=2), replace(SMOL, encoder_decoder=True), "this model has two", "1"),
        (Plan(shard=2, zero=3), replace(SMOL, packed=True), "packed weights", "zero 0 to 2"),
        (Plan(schedule="gpipe"), SMOL, "parallel.schedule would do nothing", None),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    plan: Plan, facts: Facts, what: str, valid: str | None
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        refuse(plan, facts)
    assert valid is None or valid in str(caught.value.wanted)


@pytest.mark.parametrize("plan", [Plan(), Plan(tensor=3), Plan(pipeline=30), Plan(shard=2, zero=3)])
def test_what_can_be_is_not_refused(plan: Plan) -> None:
    assert list(explained(plan, SMOL)) == []


def test_facts_are_the_configs() -> None:
    facts = facts_of(tiny_llama().config)
    assert (facts.family, facts.layers, facts.width) == ("llama", 2, 32)
    assert facts.counts == {
        "heads of queries": 4,
        "heads of keys and values": 2,
        "intermediate_size": 48,
    }
    assert facts.tensor_plan


def test_degrees_that_make_up_no_number_of_processes() -> None:
    with pytest.raises(ConfigError, match="does not divide the number of processes"):
        plan_of(ParallelSettings(tensor=2), 3)
    with pytest.raises(ConfigError, match=r"parallel\.replicate does not divide"):
        plan_of(ParallelSettings(zero=1, replicate=3), 4)
    with pytest.raises(ConfigError, match="would do nothing: with parallel"):
        plan_of(ParallelSettings(replicate=2), 4)


def test_settings_of_several_processes_are_refused_to_one() -> None:
    refuse_alone(ParallelSettings(timeout_s=5))
    with pytest.raises(ConfigError, match="would do nothing in one") as caught:
        refuse_alone(ParallelSettings(tensor=2, zero=1))
    assert "--nproc 2" in caught.value.cure


def test_layouts_are_those_that_the_model_takes() -> None:
    found = layouts(6, SMOL)
    assert {(p.tensor, p.pipeline) for p in found} == {
        (1, 1),
        (3, 1),
        (1, 2),
        (1, 3),
        (1, 6),
        (3, 2),
    }
    assert all(plan.processes == 6 for plan in found)
    assert [p.zero for p in found if p.data == 6] == [0, 1, 2, 3]


# --- the verb --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Wide, so that what trains is little beside the weights.
    model = tiny_llama(dtype=torch.float32, hidden_size=256, intermediate_size=512)
    return save_model(tmp_path / "tiny", model, byte_tokenizer())


def test_the_verb_prints_a_table_and_says_what_hardly_helps(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "tiny", "--parallel", "--nproc", "4", "--rank", "1", "--json", "plan.json"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "4 x data, zero 3" in said
    assert "zero 1 hardly helps" in said
    assert "zero 3, parallel.tensor and parallel.pipeline share the weights out" in said
    told = json.loads(Path("plan.json").read_text())
    by_zero = {row["zero"]: row for row in told["layouts"] if row["shard"] == 4}
    assert by_zero[3]["bytes"]["weights"] < by_zero[0]["bytes"]["weights"] / 3.5
    assert by_zero[1]["collectives"]["reduce_scatter"] == 1
    pipelined = next(r for r in told["layouts"] if r["pipeline"] == 2 and r["tensor"] == 1)
    # (p - 1) / (m + p - 1) of the step, with 8 micro-batches
    assert pipelined["waits"] == pytest.approx(1 / 9)


def test_full_fine_tuning_is_told_nothing_of_that(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny", "--parallel", "--nproc", "4", "--technique", "full"]) == 0
    assert "hardly" not in capsys.readouterr().out


def test_a_layout_that_is_asked_for_and_cannot_be_is_an_error(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "tiny", "--parallel", "--nproc", "8", "--set", "parallel.tensor=8"]
    assert main(asked) == ConfigError.exit_code
    assert "does not divide what it shares out" in capsys.readouterr().err
    assert main(["plan", "tiny"]) == ConfigError.exit_code


def test_train_refuses_a_plan_before_weights_are_read(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **rest: Any) -> Any:
        raise AssertionError("weights are read, or processes started")

    monkeypatch.setattr("afina.models.hub.load", read)
    monkeypatch.setattr("afina.parallel.launch.Launcher.run", read)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["train", "tiny", "rows.jsonl", "-o", "run"]
    assert main([*words, "--nproc", "4", "--set", "parallel.tensor=4"]) == ConfigError.exit_code
    assert "does not divide what it shares out" in capsys.readouterr().err
    assert main([*words, "--set", "parallel.zero=2"]) == ConfigError.exit_code
    assert "would do nothing in one" in capsys.readouterr().err
    assert main([*words, "--hosts", "2"]) == ConfigError.exit_code
    assert "--nproc" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_run_of_several_goes_on_in_one_unless_this_call_says_otherwise(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    words = ["train", "tiny", "rows.jsonl", "-o", "run", "--steps", "1", "--rows-per-step", "2"]
    assert main(words) == 0
    file = Path("run/config.yaml")
    text = file.read_text()
    assert text.count("zero: 0") == text.count("tensor: 1") == 1
    file.write_text(text.replace("zero: 0", "zero: 1").replace("tensor: 1", "tensor: 2"))
    more = ["train", "--resume", "--allow-changes", "-o", "run"]
    assert main([*more, "--steps", "3", "--set", "parallel.tensor=2"]) == ConfigError.exit_code
    assert "would do nothing in one" in capsys.readouterr().err
    assert main([*more, "--steps", "2"]) == 0
    assert "going on after step 1 of 2" in capsys.readouterr().err
