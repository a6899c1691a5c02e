"""The battery: every technique through the same checks. A new technique is one line in ROWS.

Each check is a function of a case; it asserts, and says nothing where the case does not claim what it judges.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from afina import seams
from afina.adapters import files
from afina.config import EvalSettings, RunConfig, TrainSettings, as_given, dump, load_config
from afina.data.settings import DataSettings
from afina.errors import TechniqueError
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.head import head_of
from afina.ops import reference
from afina.table import CLASHES, TECHNIQUES, apply
from afina.techniques.adalora import AdaLoRA
from afina.techniques.bitfit import BitFit
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA, LoRADelta
from afina.techniques.p_tuning import PTuning
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.trainable_tokens import TrainableTokens
from afina.train.passes import Passes, unshared
from afina.tree import Edit, Technique
from afina.types import Row

VOCABULARY = 40
IDS = torch.tensor([[1, 7, 3, 22, 9, 4], [5, 2, 31, 8, 8, 11]])
TARGETS = torch.tensor([[7, 3, 22, 9, 4, 30], [2, 31, 8, 8, 11, 1]])

WITHOUT_ROWS = (
    "quantize",
    "layer_decay",
    "gradient_noise",
    "curriculum",
    "reversible",
    "token_pruning",
)
"""Keys of techniques that train nothing by themselves, and so have no row in this battery but tests of their own."""

NOT_PACKED = ("bert",)
"""Models that predict no next tokens, so that rows are not packed for them."""


def _row(number: int, tokens: tuple[int, ...], trained_from: int) -> Row:
    return Row(tokens, tuple(i >= trained_from for i in range(len(tokens))), number, "rows")


# Two begin alike, and one is the beginning of another.
SAMPLE = (
    _row(0, (3, 9, 27, 14, 8, 31), 3),
    _row(1, (3, 9, 27, 5, 17), 2),
    _row(2, (12, 33, 4), 1),
    _row(3, (12, 33, 4, 21, 30, 2, 19), 4),
)

# --- tiny models: two blocks, width 16, weights large enough that a wrong change shows -------------------------------


def llama(*, tied: bool = False, **changes: Any) -> LlamaForCausalLM:
    """Two blocks with grouped queries; the head tied to the embedding or not."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def llama_tied() -> LlamaForCausalLM:
    return llama(tied=True)


def gpt2() -> GPT2LMHeadModel:
    """Maps stored as `Conv1D`, learnt positions, a tied head."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends))


def bert() -> BertForMaskedLM:
    """Attention both ways, a tied head inside a prediction module."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            initializer_range=0.3,
        )
    )


def mixtral() -> MixtralForCausalLM:
    """Experts fused into tensors of three dimensions, and a router."""
    eager: dict[str, Any] = {"experts_implementation": "eager"}  # the fused kernels have no fp64
    return MixtralForCausalLM(
        MixtralConfig(
            **eager,
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama_tied": llama_tied,
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
}


@cache
def _first(model: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return MODELS[model]().to(dtype).eval()


def build(model: str, dtype: torch.dtype = torch.float64) -> Any:
    """The tiny model of that name, the same at every call, without dropout."""
    return copy.deepcopy(_first(model, dtype))


@cache
def base_logits(model: str) -> Tensor:
    """What the unchanged model answers to IDS."""
    return logits(build(model))


# --- the table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A technique on a model, and what is claimed of the two.

    Attributes:
        identity: the changed model starts as the base, bit for bit.
        folds: it can be merged into the weights.
        peft: the layout of PEFT holds it.
        gone: a value of the same technique that matches nothing.
    """

    model: str
    technique: Technique
    identity: bool = True
    folds: bool = False
    peft: bool = False
    gone: Technique | None = None

    @property
    def name(self) -> str:
        told = {k: v for k, v in self.technique if k in self.technique.model_fields_set}
        return f"{self.technique.key}-{self.model}-" + ",".join(f"{k}={v}" for k, v in told.items())


EVERY = tuple(MODELS)
LOST_LORA = LoRA(target=("q_prpj",))
LOST_BITFIT = BitFit(target=("q_prpj",))
LOST_BOTTLENECK = Bottleneck(modules_to_save=("q_prpj",))
LOST_DORA = DoRA(target=("q_prpj",))
LOST_IA3 = IA3(target=("q_prpj",))
LOST_ADALORA = AdaLoRA(target=("q_prpj",))
LOST_PREFIX = PrefixTuning(modules_to_save=("q_prpj",))
LOST_PROMPT = PromptTuning(modules_to_save=("q_prpj",))
LOST_P_TUNING = PTuning(modules_to_save=("q_prpj",))
LOST_TOKENS = TrainableTokens(tokens=(3,), modules_to_save=("q_prpj",))
LOST_FULL = Full(target=("q_prpj",))

# (technique, models, what is claimed)
ROWS: tuple[tuple[Technique, tuple[str, ...], dict[str, Any]], ...] = (
    (LoRA(rank=4), EVERY, {"folds": True, "peft": True, "gone": LOST_LORA}),
    (LoRA(rank=4, target=("attention",)), ("llama", "gpt2", "bert"), {"folds": True, "peft": True}),
    (
        LoRA(
            rank=2,
            alpha=3.0,
            rslora=True,
            rank_pattern={"q_proj": 3},
            alpha_pattern={"layers.1.mlp.up_proj": 5.5},
            exclude=("gate_proj",),
        ),
        ("llama", "llama_tied"),
        {"folds": True, "peft": True},
    ),
    (
        LoRA(rank=3, target=("all-linear", "embed_tokens")),
        ("llama", "mixtral"),
        {"folds": True, "peft": True},
    ),
    (
        LoRA(rank=3, target=("all-linear", "experts")),
        ("mixtral",),
        {"folds": True, "peft": True},
    ),
    (LoRA(rank=2, target=("down_proj",)), ("mixtral",), {"folds": True, "peft": True}),
    (LoRA(rank=3, target=("lm_head", "q_proj")), ("llama",), {"folds": True, "peft": True}),
    # Where the head shares the embedding, the change beside the embedding is none of the head's: nothing to fold.
    (LoRA(rank=3, target=("wte", "c_attn")), ("gpt2",), {"peft": True}),
    (LoRA(rank=3, target=("word_embeddings", "query")), ("bert",), {}),
    (LoRA(rank=4, layers="-1"), ("llama_tied", "gpt2", "bert"), {"folds": True, "peft": True}),
    (LoRA(rank=4, modules_to_save=("lm_head",)), ("llama", "llama_tied"), {"peft": True}),
    (LoRA(rank=4, modules_to_save=("ln_f", "wpe")), ("gpt2",), {"peft": True}),
    (LoRA(rank=4, dropout=0.3, loraplus_ratio=16.0), ("llama",), {"folds": True, "peft": True}),
    (LoRA(rank=4, start="pissa"), ("llama", "gpt2", "bert"), {"folds": True}),
    (LoRA(rank=3, start="olora", rslora=True), ("llama", "mixtral"), {"folds": True}),
    (DoRA(rank=3, start="pissa"), ("llama",), {"folds": True}),
    (DoRA(rank=4), EVERY, {"folds": True, "peft": True, "gone": LOST_DORA}),
    (
        DoRA(rank=3, alpha=5.0, rslora=True, rank_pattern={"q_proj": 2}, modules_to_save=("norm",)),
        ("llama",),
        {"folds": True, "peft": True},
    ),
    (DoRA(rank=3, target=("q_proj", "embed_tokens")), ("llama",), {"folds": True, "peft": True}),
    (DoRA(rank=4, dropout=0.3, target=("mlp.up_proj",)), ("llama",), {"folds": True}),
    (BitFit(), ("llama", "llama_tied", "gpt2", "bert"), {"folds": True, "gone": LOST_BITFIT}),
    # No setting of Mixtral's gives its maps a bias: nothing to merge into.
    (BitFit(), ("mixtral",), {}),
    (BitFit(target=("q_proj", "mlp.up_proj"), layers="0"), ("llama",), {"folds": True}),
    (BitFit(target=("norms",)), ("gpt2",), {"folds": True}),
    (Bottleneck(reduction_factor=2), EVERY, {"gone": LOST_BOTTLENECK}),
    (Bottleneck(kind="pfeiffer", width=6, scaling="learned", exclude="0"), ("gpt2", "bert"), {}),
    (Bottleneck(kind="parallel", width=8, non_linearity="gelu"), ("llama_tied", "bert"), {}),
    (
        Bottleneck(kind="scaled_parallel", width=6, dropout=0.2, modules_to_save=("norm",)),
        ("mixtral",),
        {},
    ),
    (IA3(), EVERY, {"folds": True, "peft": True, "gone": LOST_IA3}),
    (
        IA3(target=("all-linear",), exclude=("o_proj",), layers="-1", modules_to_save=("norm",)),
        ("llama",),
        {"peft": True},
    ),
    (IA3(target=(), feedforward=("mlp.c_proj",)), ("gpt2",), {"folds": True, "peft": True}),
    # Its P and Q begin small: a large scale makes a few steps count.
    (
        AdaLoRA(init_rank=4, target_rank=2, alpha=800.0),
        EVERY,
        {"folds": True, "peft": True, "gone": LOST_ADALORA},
    ),
    (
        AdaLoRA(init_rank=3, target_rank=2, alpha=600.0, dropout=0.3, modules_to_save=("norm",)),
        ("llama",),
        {"folds": True, "peft": True},
    ),
    (PromptTuning(tokens=2), EVERY, {"identity": False, "gone": LOST_PROMPT}),
    # So many that rows share them. (A Llama's norms round to fp32 between what is shared and what is not.)
    (PromptTuning(tokens=17, start="random"), ("gpt2",), {"identity": False}),
    (
        PromptTuning(tokens=4, start="text", text_ids=(3, 9), modules_to_save=("lm_head",)),
        ("llama",),
        {"identity": False},
    ),
    (PrefixTuning(tokens=2), EVERY, {"identity": False, "gone": LOST_PREFIX}),
    (PrefixTuning(tokens=17, start="zero"), ("gpt2",), {"identity": False}),
    (
        PrefixTuning(tokens=3, start="random", modules_to_save=("norm",)),
        ("llama", "mixtral"),
        {"identity": False},
    ),
    (PrefixTuning(tokens=3, projection=True, hidden=5), ("llama", "bert"), {"identity": False}),
    (PTuning(tokens=3), EVERY, {"identity": False, "gone": LOST_P_TUNING}),
    (PTuning(tokens=4, network="lstm", hidden=5), ("llama", "bert"), {"identity": False}),
    (PTuning(tokens=3, network="none"), ("gpt2",), {"identity": False}),
    (
        TrainableTokens(tokens=(31, 3, 9, 22)),
        ("llama", "llama_tied", "gpt2", "mixtral"),
        {"folds": True, "peft": True, "gone": LOST_TOKENS},
    ),
    # PEFT leaves the bias of a tied head out.
    (TrainableTokens(tokens=(8, 2)), ("bert",), {"folds": True}),
    (Full(), EVERY, {"gone": LOST_FULL}),
    (Full(layers="-1", exclude=("mlp",)), ("llama_tied",), {}),
)

CASES: tuple[Case, ...] = tuple(
    Case(model, technique, **claims) for technique, models, claims in ROWS for model in models
)


# --- tools -----------------------------------------------------------------------------------------------------


def logits(model: Any) -> Tensor:
    """The model's answer to IDS."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


def backward(model: Any) -> float:
    """One loss over IDS and its gradients; returns the loss."""
    model.zero_grad()
    loss = F.cross_entropy(model(input_ids=IDS).logits.flatten(0, 1).double(), TARGETS.flatten())
    loss.backward()
    return loss.item()


def train(model: Any, edit: Edit, steps: int = 2) -> None:
    """A few plain steps, so that every trainable tensor has moved."""
    for _ in range(steps):
        backward(model)
        with torch.no_grad():
            for parameter in edit.trainable().values():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    model.zero_grad()


def edited(case: Case, *, moved: bool = False, seed: int = 0) -> tuple[Any, Edit]:
    """The case's model with its technique on; `moved` trains it a little."""
    model = build(case.model)
    edit = apply(model, [case.technique], seed=seed)
    if moved:
        train(model, edit)
    return model, edit


def picture(model: nn.Module) -> dict[str, Any]:
    """All that undo must bring back: tensors with their identity and flag, modules, children, hooks."""
    return {
        "tensors": {
            n: (id(p), p.requires_grad, p.detach().clone())
            for n, p in model.named_parameters(remove_duplicate=False)
        },
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modules": {n: (id(m), tuple(m._modules)) for n, m in model.named_modules()},
        "hooks": {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for n, m in model.named_modules()
        },
        "training": {n: m.training for n, m in model.named_modules()},
    }


def same_picture(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Asserts that two pictures are equal, tensors bitwise."""
    for part in ("modules", "hooks", "training"):
        assert one[part] == other[part], part
    for part in ("tensors", "buffers"):
        assert list(one[part]) == list(other[part])
    for name, (identity, flag, value) in one["tensors"].items():
        assert (identity, flag) == other["tensors"][name][:2], name
        assert torch.equal(value, other["tensors"][name][2]), name
    for name, value in one["buffers"].items():
        assert torch.equal(value, other["buffers"][name]), name


def fold(edit: Edit) -> None:
    """Takes the edit off and leaves its change in the base's weights."""
    edit.merge()
    edit.keep()


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns of many things that these cases do on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def close(one: Tensor, other: Tensor, within: float = 1e-10) -> None:
    """Asserts that the largest difference is at most `within` of the largest value."""
    assert one.shape == other.shape
    assert (one - other).abs().max() <= within * max(1.0, other.abs().max().item())


def differs(one: Tensor, other: Tensor) -> None:
    """Asserts that the change is one that a check could see."""
    assert (one - other).abs().max() > 1e-3


# --- checks ----------------------------------------------------------------------------------------------------


def starts_as_the_base(case: Case) -> None:
    if not case.identity:
        return
    for dtype in (torch.float64, torch.bfloat16):
        model = build(case.model, dtype)
        before = logits(model)
        apply(model, [case.technique])
        assert torch.equal(logits(model), before)


def what_is_declared_trains_and_nothing_else(case: Case) -> None:
    model, edit = edited(case)
    trainable = edit.trainable()
    flagged = {id(p) for p in model.parameters() if p.requires_grad}
    assert flagged == {id(p) for p in trainable.values()}
    backward(model)
    held = {id(p) for p in model.parameters() if p.grad is not None}
    assert held <= flagged
    silent = {n for n, p in trainable.items() if p.grad is None or not p.grad.any()}
    assert silent == set(edit.silent_at_start())
    train(model, edit, steps=1)
    backward(model)
    assert all(p.grad is not None and p.grad.any() for p in trainable.values())


def undo_restores(case: Case) -> None:
    model = build(case.model)
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    before, answer = picture(model), logits(model)
    edit = apply(model, [case.technique])
    train(model, edit)
    differs(logits(model), answer)
    edit.undo()
    same_picture(picture(model), before)
    assert torch.equal(logits(model), answer)
    edit.undo()
    same_picture(picture(model), before)


def names_stay(case: Case) -> None:
    model = build(case.model)
    before = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    order = list(model.state_dict())
    edit = apply(model, [case.technique])
    train(model, edit)
    after = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    assert {n: after[n] for n in before} == before
    assert [n for n in model.state_dict() if n in set(order)] == order
    new = {n for n in after if n not in before}
    assert new == {n for n in edit.trainable() if n not in edit.in_place}
    model.tie_weights()
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == after


def model_saves_under_its_own_names(case: Case) -> None:
    model, edit = edited(case, moved=True)
    own = {n for n, _ in build(case.model).named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, dtype=torch.float64)
    values = dict(model.named_parameters())
    assert {n for n, _ in again.named_parameters()} == own
    assert all(torch.equal(p, values[n]) for n, p in again.named_parameters())
    edit.undo()


def folds(case: Case) -> None:
    if not case.folds:
        return
    model, edit = edited(case, moved=True)
    base, changed = base_logits(case.model), logits(model)
    fold(edit)
    differs(changed, base)
    # A change is fp32 by contract, so fp64 logits agree to fp32's rounding.
    close(logits(model), changed, 1e-5)


def saves_and_loads(case: Case) -> None:
    if not case.peft:
        return
    model, edit = edited(case, moved=True)
    with tempfile.TemporaryDirectory() as folder:
        files.save(edit, Path(folder) / "adapter", base="tiny")
        other = build(case.model)
        loaded = files.load(other, Path(folder) / "adapter")
    differs(logits(other), base_logits(case.model))
    assert torch.equal(logits(other), logits(model))
    assert list(loaded.trainable()) == list(edit.trainable())
    loaded.undo()
    same = dict(build(case.model).named_parameters())
    assert all(torch.equal(p, same[n]) for n, p in other.named_parameters())


def peft_agrees(case: Case) -> None:
    """PEFT and this library make the same of one adapter: written here and read there, and the reverse."""
    if not case.peft:
        return
    model, edit = edited(case, moved=True)
    with tempfile.TemporaryDirectory() as folder, quiet():
        here, there = Path(folder) / "here", Path(folder) / "there"
        files.save(edit, here, base="tiny")
        peer: Any = PeftModel.from_pretrained(build(case.model), str(here), is_trainable=True)
        same_logits_and_gradients(peer.eval(), model, edit)
        with torch.no_grad():
            for name, parameter in peer.named_parameters():
                # Whole modules stay, for PEFT holds a tied pair twice and would tear it.
                if _trains(name, parameter) and "modules_to_save" not in name:
                    parameter.mul_(-1.3)
        peer.save_pretrained(str(there))
        other = build(case.model)
        loaded = files.load(other, there)
    differs(logits(other), logits(model))
    same_logits_and_gradients(peer, other, loaded)


def same_logits_and_gradients(
    peer: Any, model: Any, edit: Edit, *, values: float = 1e-10, slopes: float = 1e-9
) -> None:
    """Asserts that a model of PEFT's and one with an edit agree, in what they say and in how they would learn."""
    close(logits(peer), logits(model), values)
    backward(model)
    backward(peer)
    theirs: dict[int, Tensor] = {}
    places = {k: id(p) for k, p in files.peft_tensors(edit).items()}
    for name, parameter in peer.named_parameters():
        if _trains(name, parameter):
            key = name.replace(".default", "").replace(".modules_to_save", "")
            key = key.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            # PEFT copies both ends of a tie; the one tensor here gets the sum.
            theirs[places[key]] = theirs.get(places[key], torch.tensor(0.0)) + parameter.grad
    assert set(theirs) == set(places.values())
    for name, parameter in edit.trainable().items():
        assert parameter.grad is not None, name
        close(theirs[id(parameter)], parameter.grad, slopes)


def _trains(name: str, parameter: Tensor) -> bool:
    """Whether a tensor of PEFT's trains. It marks AdaLoRA's count of directions too, though it is none of its own."""
    return parameter.requires_grad and "ranknum" not in name


def works_on_meta(case: Case) -> None:
    _, real = edited(case)
    with torch.device("meta"):
        model = MODELS[case.model]().to(torch.float64)
    before = [n for n, _ in model.named_parameters()]
    edit = apply(model, [case.technique])
    assert {n: p.shape for n, p in edit.trainable().items()} == {
        n: p.shape for n, p in real.trainable().items()
    }
    assert all(p.is_meta for p in edit.trainable().values())
    assert edit.summary() == real.summary()
    edit.undo()
    assert [n for n, _ in model.named_parameters()] == before


def bf16_is_near(case: Case) -> None:
    """The technique adds no more error than the base in bf16 has without it."""
    model, edit = edited(case, moved=True)
    exact = logits(model)
    half = build(case.model, torch.bfloat16)
    own = (logits(half).double() - base_logits(case.model)).abs().max()
    other = apply(half, [case.technique])
    with torch.no_grad():
        for name, parameter in other.trainable().items():
            parameter.copy_(edit.trainable()[name])
        for name, kept in other.state().items():
            kept.copy_(edit.state()[name])
    error = (logits(half).double() - exact).abs().max()
    assert error <= 3 * own + 0.02
    assert all(
        other.trainable()[n].dtype == torch.float32
        for n in other.trainable()
        if n not in other.in_place
    )


def settings_survive_yaml(case: Case) -> None:
    config = RunConfig(
        model="m",
        source="d.jsonl",
        val=None,
        revision=None,
        data=DataSettings(),
        techniques=(case.technique,),
        train=TrainSettings(steps=1),
        eval=EvalSettings(),
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump(as_given(config, (case.technique.key,), "here")), encoding="utf-8")
        read = load_config(techniques=TECHNIQUES, data_settings=DataSettings, yaml_path=file)
    assert read.config.techniques == (case.technique,)


def matching_nothing_is_an_error(case: Case) -> None:
    if case.gone is None:
        return
    model = build(case.model)
    before = picture(model)
    with pytest.raises(TechniqueError) as caught:
        apply(model, [case.gone])
    assert "q_prpj" in str(caught.value)
    assert "cure:" in str(caught.value)
    if case.model != "gpt2" and case.model != "bert":
        assert "q_proj" in str(caught.value.wanted)
    same_picture(picture(model), before)


def _started(delta: LoRADelta, weight_OI: Tensor) -> Tensor:
    """The weight, less what the change starts from: what the papers of other starts train beside."""
    if delta.a0 is None or delta.b0 is None:
        return weight_OI
    return weight_OI - delta.scaling * (delta.b0 @ delta.a0)


def equals_the_reference(case: Case) -> None:
    """Each changed map against the mathematics written out, values and gradients."""
    model, edit = edited(case, moved=True)
    maps = {site.name: site for site in seams.map_sites(model)}
    for name, delta in edit.deltas.items():
        if type(delta) is not LoRADelta:
            continue  # those of other techniques are in the tests of their own
        site = maps[name.rsplit(".", 1)[0]]
        torch.manual_seed(1)
        weight = site.module.get_parameter("weight").detach()
        weight_OI = weight.t() if site.kind in ("conv1d", "embedding") else weight
        ids = torch.randint(0, site.in_features, (5,))
        x = torch.randn(5, site.in_features, dtype=torch.float64)
        if site.kind == "embedding":
            x = F.one_hot(ids, site.in_features).double()
        x.requires_grad_(True)
        pairs = [(delta.a, delta.b)]
        pairs.append(tuple(p.detach().clone().requires_grad_(True) for p in pairs[0]))  # type: ignore[arg-type]
        bias = getattr(site.module, "bias", None)
        fast = site.module(ids if site.kind == "embedding" else x)
        slow = reference.low_rank_linear(x, _started(delta, weight_OI), *pairs[1], delta.scaling)
        close(fast, slow if bias is None else slow + bias.detach())
        seed = torch.randn_like(slow)
        wanted = torch.autograd.grad(slow, (*pairs[1], x), seed)
        inputs = pairs[0] if site.kind == "embedding" else (*pairs[0], x)
        for got, true in zip(torch.autograd.grad(fast, inputs, seed), wanted, strict=False):
            close(got, true)


def a_copy_uses_its_own_children(case: Case) -> None:
    model, edit = edited(case, moved=True)
    before = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), before)
    with torch.no_grad():
        for name in edit.trainable():
            dict(twin.named_parameters(remove_duplicate=False))[name].mul_(1.5)
    differs(logits(twin), before)
    assert torch.equal(logits(model), before)
    edit.undo()
    assert torch.equal(logits(model), base_logits(case.model))
    differs(logits(twin), logits(model))


def disabled_is_the_base(case: Case) -> None:
    model, edit = edited(case, moved=True)
    changed = logits(model)
    with edit.disabled():
        assert torch.equal(logits(model), base_logits(case.model))
        with edit.disabled():
            pass
        assert torch.equal(logits(model), base_logits(case.model))
    assert torch.equal(logits(model), changed)


def seeds_fix_the_start(case: Case) -> None:
    by_weight = getattr(case.technique, "start", None) in ("pissa", "olora")
    values = [
        {n: p.detach().clone() for n, p in edited(case, seed=s)[1].trainable().items()}
        for s in (0, 0, 1)
    ]
    assert all(torch.equal(values[0][n], values[1][n]) for n in values[0])
    children = [n for n in values[0] if values[0][n].any() and n.endswith((".a", ".b"))]
    assert all(torch.equal(values[0][n], values[2][n]) == by_weight for n in children)


def packed_is_as_apart(case: Case) -> None:
    """Rows end to end, and those with their beginnings shared, learn what rows one by one learn."""
    if case.model in NOT_PACKED:
        return
    model, edit = edited(case, moved=True)
    model.train()
    if unshared(model, edit, by_row=False) is not None:
        return  # dropout draws otherwise where tokens lie otherwise
    apart = learnt(model, edit, packed=False, shared=False)
    for shared in (False, True):
        loss, gradients = learnt(model, edit, packed=True, shared=shared)
        assert abs(loss - apart[0]) < 1e-9
        assert gradients.keys() == apart[1].keys()
        for name, gradient in gradients.items():
            close(gradient, apart[1][name], 1e-8)


def learnt(
    model: Any, edit: Edit, *, packed: bool, shared: bool, recompute: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of SAMPLE on one way through the model."""
    with packing(model, packed), Blocks(model, recompute).running():
        passes = Passes(model, packed, shared, 0, head_of(model))
        torch.manual_seed(3)
        loss = passes.loss(passes.batch(SAMPLE))
        loss.backward()
    found = {n: p.grad.clone() for n, p in edit.trainable().items() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def recomputed_is_as_kept(case: Case) -> None:
    """Blocks that run again in backward give the same gradients, dropout drawn again too."""
    if case.model in NOT_PACKED:
        return
    model, edit = edited(case, moved=True)
    model.train()
    one, other = (
        learnt(model, edit, packed=True, shared=False, recompute=again) for again in (False, True)
    )
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def example(key: str) -> Technique:
    """A value of the technique `key`: that of its first row, or its defaults."""
    found = (case.technique for case in CASES if case.technique.key == key)
    return next(found, None) or TECHNIQUES[key]()


def clashing_pairs_are_refused(case: Case) -> None:
    others = [pair for pair in CLASHES if case.technique.key in pair]
    model = build(case.model)
    before = picture(model)
    for pair in others:
        partner = next(key for key in pair if key != case.technique.key)
        with pytest.raises(TechniqueError, match="cannot be combined"):
            apply(model, [case.technique, example(partner)])
        same_picture(picture(model), before)


CHECKS: tuple[Callable[[Case], None], ...] = (
    starts_as_the_base,
    what_is_declared_trains_and_nothing_else,
    undo_restores,
    names_stay,
    model_saves_under_its_own_names,
    folds,
    saves_and_loads,
    peft_agrees,
    works_on_meta,
    bf16_is_near,
    settings_survive_yaml,
    matching_nothing_is_an_error,
    equals_the_reference,
    a_copy_uses_its_own_children,
    disabled_is_the_base,
    seeds_fix_the_start,
    packed_is_as_apart,
    recomputed_is_as_kept,
    clashing_pairs_are_refused,
)
