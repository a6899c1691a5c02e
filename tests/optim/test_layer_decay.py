"""Learning rates by layer: known answers, every tensor in its place, and a run that is plain where nothing decays."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from afina.config import TrainSettings
from afina.errors import TechniqueError
from afina.models.forward import packing
from afina.optim.layer_decay import Convention, LayerDecay, scale
from afina.optim.optimisers import Optimiser
from afina.table import apply
from afina.techniques.bitfit import BitFit
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.prompt import PromptTuning
from afina.techniques.trainable_tokens import TrainableTokens
from afina.train.loop import loop
from afina.train.plan import optimiser_of
from afina.tree import Seams, Technique
from tests import battery
from tests.tiny import tiny_llama
from tests.train import kit

# --- the numbers ------------------------------------------------------------------------------------------------

KNOWN: dict[Convention, tuple[float, dict[int, float]]] = {
    "electra": (0.8, {13: 0.04398, 12: 0.054976, 1: 0.64, 0: 1.0}),
    "timm": (0.75, {13: 0.023757, 12: 0.031676, 1: 0.75, 0: 1.0}),
}
"""Of 12 blocks, by how many blocks below the head: embeddings 13, the first block 12, the last 1, the head 0."""


@pytest.mark.parametrize("convention", KNOWN)
def test_the_published_values(convention: Convention) -> None:
    decay, known = KNOWN[convention]
    for below, value in known.items():
        assert scale(below, decay, convention) == pytest.approx(value, rel=5e-5)


@pytest.mark.parametrize("depth", [1, 2, 12, 24])
def test_the_formulas_of_the_two_sources(depth: int) -> None:
    """timm: decay^(layer_max - id), ids from the embeddings' 0; ELECTRA: decay^(n + 2 - depth), the head's n + 2."""
    timm = [0.75 ** (depth + 1 - id) for id in range(depth + 2)]
    assert [scale(depth + 1 - id, 0.75, "timm") for id in range(depth + 2)] == timm
    electra = [0.8 ** (depth + 2 - at) for at in [*range(depth + 1), depth + 2]]
    assert [scale(depth + 1 - id, 0.8, "electra") for id in range(depth + 2)] == electra


def twelve(technique: LayerDecay) -> dict[str, float]:
    """The factors of all tensors of a model of 12 blocks, its head apart."""
    with torch.device("meta"):
        model = battery.llama(num_hidden_layers=12)
    return technique.factors(apply(model, [Full(), technique]))


@pytest.mark.parametrize("convention", KNOWN)
def test_a_model_of_twelve_blocks_has_them(convention: Convention) -> None:
    decay, known = KNOWN[convention]
    found = twelve(LayerDecay(decay=decay, convention=convention))
    places = {
        "model.embed_tokens.weight": 13,
        "model.layers.0.self_attn.q_proj.weight": 12,
        "model.layers.11.mlp.up_proj.weight": 1,
        "model.layers.11.input_layernorm.weight": 1,
        "model.norm.weight": 0,
        "lm_head.weight": 0,
    }
    for name, below in places.items():
        assert found[name] == pytest.approx(known[below], rel=5e-5), name
    assert len(set(found.values())) == 14


def test_no_rate_is_below_the_least() -> None:
    found = twelve(LayerDecay(decay=0.75, min_scale=0.3))
    assert min(found.values()) == 0.3
    assert found["model.layers.11.mlp.up_proj.weight"] == 0.75


# --- places -----------------------------------------------------------------------------------------------------


def at(model: nn.Module, *techniques: Technique, **settings: Any) -> dict[str, float]:
    """Factors with a decay of a half."""
    value = LayerDecay(decay=0.5, **settings)
    return value.factors(apply(model, [*techniques, value]))


def of(found: dict[str, float], part: str) -> set[float]:
    """The factors of the tensors whose names have this in them."""
    some = {value for name, value in found.items() if part in name}
    assert some
    return some


def test_adapters_lie_in_the_block_that_they_change() -> None:
    found = at(battery.build("llama"), LoRA(rank=2))
    assert of(found, "layers.0.") == {0.25}
    assert of(found, "layers.1.self_attn.q_proj.lora.a") == {0.5}
    assert set(found.values()) == {0.25, 0.5}
    number = battery.llama(num_hidden_layers=12)
    assert of(at(number, LoRA(rank=2)), "layers.1.") == {0.5**11}  # and not layers.11's


def test_what_acts_at_the_head_through_a_tied_weight_is_the_heads() -> None:
    untied = at(battery.build("llama"), Full())
    assert of(untied, "embed_tokens") == {0.125}
    tied = at(battery.build("llama_tied"), Full())
    assert of(tied, "embed_tokens") == {1.0}
    assert of(at(battery.build("llama"), TrainableTokens(tokens=(3,))), "rows") == {0.125}
    assert of(at(battery.build("llama_tied"), TrainableTokens(tokens=(3,))), "rows") == {1.0}
    # A change beside a tied embedding is none of the head's.
    low = LoRA(rank=2, target=("embed_tokens", "q_proj"))
    assert of(at(battery.build("llama_tied"), low), "embed_tokens.lora") == {0.125}


def test_gpt2s_names_are_found_by_structure() -> None:
    found = at(battery.build("gpt2"), Full())
    assert of(found, "wpe") == {0.125}
    assert of(found, "wte") == {1.0}  # its head's as well
    assert of(found, "ln_f") == {1.0}
    assert of(found, "h.1.ln_1") == {0.5}


def test_an_encoders_ends() -> None:
    config = BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_labels=3,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    found = at(BertForSequenceClassification(config), Full())
    assert of(found, "embeddings.") == {0.125}  # its norm too
    assert of(found, "pooler") == {1.0}
    assert of(found, "classifier") == {1.0}
    masked = at(battery.build("bert"), Full())
    assert of(masked, "cls.predictions.transform") == {1.0}
    assert of(masked, "word_embeddings") == {1.0}
    assert of(masked, "position_embeddings") == {0.125}
    assert of(at(BertForSequenceClassification(config), BitFit()), "classifier") == {1.0}


def test_each_stack_counts_from_its_own_end() -> None:
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_decoder_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    assert of(at(model, Full()), "shared") == {1.0}  # its head's as well
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found = at(model, Full())
    assert of(found, "encoder.block.2.") == of(found, "decoder.block.1.") == {0.5}
    assert of(found, "encoder.block.0.") == {0.125}
    assert of(found, "decoder.block.0.") == {0.25}
    assert of(found, "final_layer_norm") == of(found, "lm_head") == {1.0}
    assert of(found, "shared") == {0.0625}


def test_a_prompt_learns_at_the_runs_rate_or_as_the_embeddings() -> None:
    assert set(at(battery.build("llama"), PromptTuning(tokens=2)).values()) == {1.0}
    low = at(battery.build("llama"), PromptTuning(tokens=2), new_modules="layer")
    assert set(low.values()) == {0.125}


class Projected(nn.Module):
    """Something between embeddings and blocks that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = battery.llama()
        self.bridge = nn.Linear(4, 4)
        self.config = self.inner.config

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        head = self.inner.get_output_embeddings()
        assert isinstance(head, nn.Module)
        return head


@pytest.mark.parametrize("technique", [Full(), LoRA(rank=2, target=("bridge", "q_proj"))])
def test_what_lies_nowhere_is_refused_and_can_be_placed(technique: Technique) -> None:
    with pytest.raises(TechniqueError) as caught:
        at(Projected(), technique)
    assert "layer_decay cannot tell how deep" in str(caught.value)
    assert "bridge" in str(caught.value)
    assert "layer_decay.scales={bridge" in str(caught.value)
    found = at(Projected(), technique, scales={"bridge": 0.3})
    assert of(found, "bridge") == {0.3}
    assert of(found, "layers.1.self_attn.q_proj") == {0.5}


def test_patterns_win_over_layers_and_must_match() -> None:
    chosen = {"q_proj": 2.0, "layers.1.self_attn.q_proj.lora.b": 3.0}
    found = at(battery.build("llama"), LoRA(rank=2), scales=chosen)
    assert of(found, "layers.0.self_attn.q_proj") == {2.0}
    assert of(found, "layers.1.self_attn.q_proj") == {2.0, 3.0}
    assert of(found, "layers.0.self_attn.k_proj") == {0.25}
    with pytest.raises(TechniqueError, match=r"layer_decay\.scales: nothing in this model matches"):
        at(battery.build("llama"), LoRA(rank=2), scales={"q_prpj": 1.0})


def test_a_model_without_blocks_is_refused() -> None:
    flat = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TechniqueError, match="layer_decay counts blocks"):
        apply(flat, [LayerDecay()])


FIRST = {(c.model, c.technique.key): c for c in reversed(battery.CASES)}


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda c: c.name)
def test_every_tensor_is_in_exactly_one_group(case: battery.Case) -> None:
    value = LayerDecay(decay=0.5)
    edit = apply(battery.build(case.model), [case.technique, value])
    optimiser = optimiser_of(edit, TrainSettings(steps=1), edit.seams(10))
    members = [id(p) for group in optimiser.inner.param_groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in edit.trainable().values())
    factors, scales = value.factors(edit), edit.lr_scales()
    wanted = {id(p): 1e-3 * factors[n] * scales[n] for n, p in edit.trainable().items()}
    optimiser.set_lr(1e-3)
    for group in optimiser.inner.param_groups:
        assert [wanted[id(p)] for p in group["params"]] == pytest.approx(
            [group["lr"]] * len(group["params"])
        )


# --- in a run ---------------------------------------------------------------------------------------------------


def rates(optimiser: Optimiser) -> list[float]:
    return [group["lr"] for group in optimiser.inner.param_groups]


def test_factors_multiply_with_those_of_lora_plus() -> None:
    plus = LoRA(rank=2, loraplus_ratio=16.0)
    edit = apply(battery.build("llama"), [plus, LayerDecay(decay=0.5)])
    optimiser = optimiser_of(edit, TrainSettings(steps=1), edit.seams(10))
    optimiser.set_lr(1.0)
    assert rates(optimiser) == [0.25, 0.5, 4.0, 8.0]


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_a_schedule_keeps_the_ratios(kind: Any) -> None:
    edit = apply(tiny_llama(), [Full(), LayerDecay(decay=0.5)])
    settings = TrainSettings(steps=10, lr=0.1, schedule=kind)
    optimiser = optimiser_of(edit, settings, edit.seams(10))
    seen: list[list[float]] = []
    note = Seams(before_step=(lambda step, tensors: seen.append(rates(optimiser)),))
    work = kit.work_of(edit, total_steps=10, schedule=kind, lr=0.1, seams=note)
    with packing(edit.model, True):
        list(loop(replace(work, optimiser=optimiser), repeat(kit.ragged_rows(2))))
    assert len(seen) == 10
    for lrs in seen:
        assert [lr / lrs[-1] for lr in lrs] == pytest.approx([0.125, 0.25, 0.5, 1.0], rel=1e-12)
    assert (seen[0][0] == seen[-1][0]) == (kind == "constant")


def test_a_decay_of_one_is_the_plain_run_bit_for_bit(tmp_path: Path) -> None:
    lora = LoRA(rank=2)
    found = {
        name: kit.weights(kit.run(tmp_path / name, [lora, *beside], steps=4))
        for name, beside in {
            "plain": [],
            "one": [LayerDecay(decay=1.0)],
            "less": [LayerDecay(decay=0.5)],
        }.items()
    }
    assert kit.same(found["plain"], found["one"])
    assert not kit.same(found["plain"], found["less"])  # the control: a decay is seen


def test_lower_blocks_move_less() -> None:
    """With plain SGD the steps of two runs differ by the factor and by nothing else."""
    moved: dict[float, dict[str, torch.Tensor]] = {}
    for decay in (1.0, 0.5):
        edit = apply(tiny_llama(), [Full(), LayerDecay(decay=decay)])
        before = {n: p.detach().clone() for n, p in edit.trainable().items()}
        work = kit.work_of(edit, total_steps=1, schedule="constant")
        settings = TrainSettings(steps=1, optimizer="sgd")
        work = replace(work, optimiser=optimiser_of(edit, settings, edit.seams(1)))
        with packing(edit.model, True):
            list(loop(work, repeat(kit.ragged_rows(4))))
        moved[decay] = {n: p.detach() - before[n] for n, p in edit.trainable().items()}
    factors = LayerDecay(decay=0.5).factors(edit)
    for name, change in moved[1.0].items():
        torch.testing.assert_close(moved[0.5][name], change * factors[name], rtol=1e-9, atol=1e-14)


def test_the_lowest_and_the_highest_rate_are_told() -> None:
    edit = apply(tiny_llama(), [Full(), LayerDecay(decay=0.5)])
    optimiser = optimiser_of(edit, TrainSettings(steps=1), edit.seams(1))
    assert optimiser.spread(1e-3) == (
        "learning rates from 0.000125 (model.embed_tokens.weight) to 0.001 (model.norm.weight), in 4 groups"
    )
    plain = apply(tiny_llama(), [Full()])
    assert optimiser_of(plain, TrainSettings(steps=1), Seams()).spread(1e-3) is None
