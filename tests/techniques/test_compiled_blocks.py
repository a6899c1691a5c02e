"""Every technique of the table in compiled blocks: the losses and gradients of plain ones, within rounding.

The blocks are traced, their graphs made for forward and backward, guarded and called as in a run. Only the last stage,
which writes C++ for a graph, is left out (AFINA_INDUCTOR=1 puts it in, at another half minute a case): what it computes
does not depend on the technique, and `tests/train/test_tuning.py` goes through it. Two windows of rows of other lengths
go through each, so that a graph made for one length serves the other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.head import head_of
from afina.table import TECHNIQUES, apply
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.dora import DoRA
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize
from afina.train.passes import Passes
from afina.tree import Edit, Technique
from afina.types import Row
from tests import battery

pytestmark = pytest.mark.slow

ONE_GPT2 = {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# Of one block each, for tracing costs seconds a block, and blocks that are alike share their graph; but where only some
# have hooks, a graph that knows of none must not serve all.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: battery.llama(num_hidden_layers=1),
    "two llamas": battery.llama,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**{**battery.gpt2().config.to_dict(), **ONE_GPT2})),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            **{**battery.mixtral().config.to_dict(), "num_hidden_layers": 1},
            experts_implementation="eager",
        )
    ),
}

MORE: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "lora at one of two": ("two llamas", (LoRA(rank=2, layers="-1", modules_to_save=("norm",)),)),
    "lora from pissa": ("llama", (LoRA(rank=2, start="pissa"),)),
    "lora on experts": ("mixtral", (LoRA(rank=2, target=("all-linear", "experts")),)),
    "lora on Conv1D": ("gpt2", (LoRA(rank=2),)),
    "dora on Conv1D": ("gpt2", (DoRA(rank=2),)),
    "parallel bottleneck": ("llama", (Bottleneck(kind="parallel", width=4, scaling="learned"),)),
    "pfeiffer bottleneck": ("llama", (Bottleneck(kind="pfeiffer", width=4),)),
    "lora on nf4": ("llama", (Quantize(kind="nf4"), LoRA(rank=2))),
}

WINDOWS = (
    battery.SAMPLE,
    tuple(
        Row(
            tuple((7 * n + 5 * i) % 40 for i in range(9 + 4 * n)),
            (False,) * 2 + (True,) * (7 + 4 * n),
            n,
            "rows",
        )
        for n in range(3)
    ),
)


def cases() -> Iterator[object]:
    for key in TECHNIQUES:
        if key not in battery.WITHOUT_ROWS:
            yield pytest.param("llama", (battery.example(key),), id=key)
    for name, (model, techniques) in MORE.items():
        yield pytest.param(model, techniques, id=name.replace(" ", "_"))


def learnt(model: object, edit: Edit, *, compiled: bool) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each window."""
    found: list[tuple[float, dict[str, Tensor]]] = []
    with packing(model, True), Blocks(model).running() as blocks, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler about its own insides, as in a run
        blocks.compile(compiled)
        passes = Passes(model, True, False, 0, head_of(model))
        for rows in WINDOWS:
            loss = passes.loss(passes.batch(rows))
            loss.backward()
            grads = {n: p.grad.clone() for n, p in edit.trainable().items() if p.grad is not None}
            found.append((loss.item(), grads))
            model.zero_grad()
    return found


@pytest.fixture(autouse=True)
def without_writing_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not os.environ.get("AFINA_INDUCTOR"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("model_name", "techniques"), [*cases()])
def test_compiled_blocks_learn_what_plain_ones_do(
    model_name: str, techniques: tuple[Technique, ...]
) -> None:
    torch.manual_seed(0)
    model = MODELS[model_name]().double().eval()
    edit = apply(model, techniques)
    battery.train(model, edit)
    model.train()
    plain, compiled = (learnt(model, edit, compiled=way) for way in (False, True))
    for (loss, gradients), (wanted, others) in zip(compiled, plain, strict=True):
        assert abs(loss - wanted) < 1e-6 * abs(wanted)
        assert gradients.keys() == others.keys() == edit.trainable().keys()
        for name, gradient in gradients.items():
            assert (gradient - others[name]).norm() <= 1e-5 * others[name].norm(), name
        assert any(gradient.any() for gradient in gradients.values())
    # The two windows differ, so that no graph that remembers the first can pass.
    assert abs(plain[0][0] - plain[1][0]) > 1e-3
