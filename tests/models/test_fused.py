"""Blocks as one operation beside the model's own: losses and gradients, and when they are not taken."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import afina
from afina.data.settings import DataSettings
from afina.models import fused
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.ops import native
from afina.ops.packed import PackedWeight, dense
from afina.train.passes import passes_of
from afina.train.report import Lines
from afina.tree import Edit
from afina.types import Row
from tests.train import kit

pytestmark = pytest.mark.usefixtures("multiplies")
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason=f"no kernels here: {native.missing()}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}


def made(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(bias, std=0.1)
    # Rounded, so that the model in fp64 is the same model.
    return model.to(torch.bfloat16).to(dtype).train()


def lora(model: Any, **settings: Any) -> Edit:
    edit = afina.apply(model, [afina.LoRA(rank=5, **settings)], seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in edit.trainable().items():
        if name.endswith("b"):
            drawn = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data.copy_(drawn)
    return edit


def rows() -> list[Row]:
    found: list[Row] = []
    for number, length in enumerate((9, 30, 17, 41)):
        tokens = (*range(1, 8), *((5 * i + 7 * number) % 90 for i in range(length)))
        found.append(Row(tokens, (False,) * 7 + (True,) * length, number))
    return found


def passed(
    model: Any, edit: Edit, recompute: bool = False
) -> tuple[float, dict[str, Tensor], str | None]:
    for parameter in edit.trainable().values():
        parameter.grad = None
    with packing(model, True), Blocks(model, recompute).running() as blocks:
        passes, _ = passes_of(model, edit, DataSettings())
        loss = passes.loss(passes.batch(rows()))
        loss.backward()
    slopes = {n: p.grad.double() for n, p in edit.trainable().items() if p.grad is not None}
    assert len(slopes) == len(edit.trainable())
    return float(loss.detach()), slopes, blocks.unfused


def error(mine: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    a, b = (torch.cat([x[n].flatten() for n in right]) for x in (mine, right))
    return float((a - b).norm() / b.norm())


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("target", [None, ("q_proj", "down_proj")])
def test_losses_and_gradients_are_those_of_the_model(
    kind: str, target: tuple[str, ...] | None
) -> None:
    chosen = {} if target is None else {"target": target}
    model = made(kind)
    edit = lora(model, **chosen)
    loss, slopes, why = passed(model, edit)
    assert why is None
    with native.off():
        plain_loss, plain, why = passed(model, edit)
    assert why is not None
    exact_model = made(kind, torch.float64)
    exact_edit = lora(exact_model, **chosen)
    exact_loss, exact, _ = passed(exact_model, exact_edit)
    assert abs(loss - exact_loss) < 2e-3 * exact_loss
    # No further from the truth than the model's own way in bf16, and rounding is all that is between.
    assert error(slopes, exact) < max(1.2 * error(plain, exact), 5e-3)
    assert error(slopes, exact) < 0.05
    assert abs(plain_loss - exact_loss) < 5e-3 * exact_loss
    wrong = {n: s if "v_proj" in n or "q_proj" in n else 1.2 * s for n, s in slopes.items()}
    assert error(wrong, exact) > 0.05


def dora(model: Any) -> Edit:
    edit = afina.apply(model, [afina.DoRA(rank=5)], seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in edit.trainable().items():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(".b"):
            parameter.data.copy_(drawn * 0.05)
        elif name.endswith(".m"):
            parameter.data.mul_((1 + drawn * 0.2).to(parameter.dtype))
    return edit


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_lengths_of_rows_train(kind: str) -> None:
    """DoRA: each kind of tensor of each map, against the model's own way in fp64."""
    model, exact_model = made(kind), made(kind, torch.float64)
    edit, exact_edit = dora(model), dora(exact_model)
    loss, slopes, why = passed(model, edit)
    assert why is None
    exact_loss, exact, _ = passed(exact_model, exact_edit)
    assert abs(loss - exact_loss) < 2e-3 * exact_loss
    ends = {".".join(name.split(".")[-4:]) for name in exact}
    assert len(ends) == 7 * 3
    with native.off():
        plain_loss, plain, why = passed(model, edit)
    assert why is not None
    assert abs(plain_loss - exact_loss) < 5e-3 * exact_loss
    for end in ends:
        right = {n: s for n, s in exact.items() if n.endswith(end)}
        assert error(slopes, right) < max(1.3 * error(plain, right), 0.03), end
        assert error(slopes, right) < 0.06, end
    # Without what lengths do to it, a gradient is far off.
    wrong = {n: s * 1.2 if n.endswith(".m") else s for n, s in slopes.items()}
    assert error(wrong, {n: s for n, s in exact.items() if n.endswith(".m")}) > 0.1
    again = passed(model, edit, recompute=True)
    assert again[0] == loss
    assert all(torch.equal(again[1][n], slopes[n]) for n in slopes)


def moved(model: Any, technique: Any) -> Edit:
    """What the technique adds, after a step of some length from its start."""
    edit = afina.apply(model, [technique], seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in edit.trainable().values():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(drawn.to(parameter.dtype) * 0.05)
    return edit


@needs_kernels
@pytest.mark.parametrize(
    "technique",
    [
        afina.LoRA(rank=5, start="pissa"),
        afina.LoRA(rank=5, start="olora"),
        afina.DoRA(rank=5, start="pissa"),
        afina.AdaLoRA(init_rank=5, target_rank=4),
    ],
    ids=["pissa", "olora", "dora of pissa", "adalora"],
)
def test_paths_that_are_made_of_other_tensors(technique: Any) -> None:
    """[A - A0; A0] and [B, B - B0] of a start that reads the weight, and diag(e) A: what trains lies behind them."""
    model, exact_model = made("llama"), made("llama", torch.float64)
    edit, exact_edit = moved(model, technique), moved(exact_model, technique)
    for name, parameter in exact_edit.trainable().items():
        assert torch.allclose(parameter.float(), edit.trainable()[name].float(), atol=1e-3), name
    loss, slopes, why = passed(model, edit)
    assert why is None
    exact_loss, exact, _ = passed(exact_model, exact_edit)
    assert abs(loss - exact_loss) < 2e-3 * exact_loss
    with native.off():
        _, plain, why = passed(model, edit)
    assert why is not None
    for end in {name.rpartition(".")[2] for name in exact}:
        right = {n: s for n, s in exact.items() if n.endswith(f".{end}")}
        assert error(slopes, right) < max(1.3 * error(plain, right), 0.02), end
        assert error(slopes, right) < 0.05, end
        wrong = {n: s * 1.2 if "v_proj" in n else s for n, s in slopes.items()}
        assert error(wrong, right) > error(slopes, right), end
    again = passed(model, edit, recompute=True)
    assert again[0] == loss
    assert all(torch.equal(again[1][n], slopes[n]) for n in slopes)


@needs_kernels
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    "technique", [afina.LoRA(rank=5), afina.DoRA(rank=5)], ids=["lora", "dora"]
)
def test_quantised_weights_stay_in_few_bits(
    kind: Any, technique: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss and gradients as of a model whose weights are the values of the codes."""

    def quantised(dtype: torch.dtype) -> tuple[Any, Edit]:
        model = made("llama")
        edit = afina.apply(model, [afina.Quantize(kind=kind), technique], seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in edit.trainable().items():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".b"):
                parameter.data.copy_(drawn * 0.05)
            elif name.endswith(".m"):
                parameter.data.mul_(1 + drawn * 0.2)
        if dtype == torch.bfloat16:
            return model, edit
        exact = made("llama", torch.float64)
        base = {n: p for n, p in model.named_parameters() if n in dict(exact.named_parameters())}
        exact.load_state_dict({n: dense(p).double() for n, p in base.items()})
        exact_edit = afina.apply(exact, [technique], seed=0)
        for name, parameter in exact_edit.trainable().items():
            parameter.data.copy_(edit.trainable()[name].double())
        return exact, exact_edit

    exact_loss, exact, _ = passed(*quantised(torch.float64))
    model, edit = quantised(torch.bfloat16)
    with native.off():
        _, plain, why = passed(model, edit)
    assert why is not None
    passed(model, edit)  # what a method keeps of the weights is found
    monkeypatch.setattr(PackedWeight, "unpacked", None)
    loss, slopes, why = passed(model, edit)
    assert why is None
    assert abs(loss - exact_loss) < 2e-3 * exact_loss
    assert error(slopes, exact) < max(1.2 * error(plain, exact), 5e-3)
    assert error(slopes, exact) < 0.05
    again = passed(model, edit, recompute=True)
    assert again[0] == loss


@needs_kernels
def test_quantised_weights_beside_paths_that_drop() -> None:
    """Outside of fused blocks the kernels' products take the change in place."""
    found: list[tuple[float, dict[str, Tensor]]] = []
    for plain in (False, True):
        model = made("llama")
        edit = afina.apply(model, [afina.Quantize(), afina.LoRA(rank=5, dropout=0.5)], seed=0)
        torch.manual_seed(3)
        with native.off(wanted=plain):
            loss, slopes, why = passed(model, edit)
        assert why is not None
        found.append((loss, slopes))
    (loss, slopes), (wanted, right) = found
    assert abs(loss - wanted) < 2e-3 * wanted
    assert error(slopes, right) < 0.05


@needs_kernels
def test_quantised_weights_that_are_not_taken() -> None:
    taken = [afina.Quantize(), afina.LoRA(rank=5)]
    wide = [afina.Quantize(compute_dtype="fp32"), afina.LoRA(rank=5)]
    small = [afina.Quantize(block=16), afina.LoRA(rank=5)]
    lengths = [afina.Quantize(), afina.DoRA(rank=5)]
    for techniques, why in (
        (taken, None),
        (wide, "its quantised weights are not for the kernels"),
        (small, "its quantised weights are not for the kernels"),
        (lengths, None),
    ):
        model = made("llama")
        afina.apply(model, techniques, seed=0)
        assert fused.reason(model.model.layers[0]) == why


@needs_kernels
def test_lengths_that_are_not_taken() -> None:
    model = made("llama")
    block = model.model.layers[0]
    edit = dora(model)
    assert fused.reason(block) is None
    m = block.self_attn.q_proj.dora.m
    kept = m.detach().clone()
    with torch.no_grad():
        m[3] = 0
    assert fused.reason(block) == "a row of it has the length 0"
    with torch.no_grad():
        m.copy_(kept)
    edit.scale(0.5)
    assert "adds more than a low-rank product" in (fused.reason(block) or "")
    edit.scale(1.0)
    assert fused.reason(block) is None
    block.mlp.gate_proj.weight.requires_grad_(True)
    assert fused.reason(block) == "its rows have lengths"


@needs_kernels
def test_kept_squares_follow_the_weight() -> None:
    """The norms of rows are those of the weight as it is now."""
    model = made("llama")
    edit = dora(model)
    linear = model.model.layers[1].mlp.up_proj
    delta = linear.dora
    for _ in range(2):
        _, found = delta.lengths(linear)
        a, b = (factor.detach().double() for factor in (delta.a, delta.b))
        wanted = (linear.weight.double() + delta.scaling * b @ a).norm(dim=1)
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=2e-3, atol=0)
        with torch.no_grad():
            linear.weight.mul_(1.5)
    edit.undo()


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_its_own_weights_train(kind: str) -> None:
    """All of them, biases and norms among them: each kind of tensor by itself."""
    found: dict[str, tuple[float, dict[str, Tensor]]] = {}
    for name, dtype in (("fused", torch.bfloat16), ("exact", torch.float64)):
        model = made(kind, dtype)
        loss, slopes, why = passed(model, afina.apply(model, [afina.Full()], seed=0))
        assert (why is None) == (name == "fused")
        found[name] = loss, slopes
    (loss, slopes), (exact_loss, exact) = found["fused"], found["exact"]
    assert abs(loss - exact_loss) < 2e-3 * exact_loss
    ends = {n.rpartition("layers.")[2].partition(".")[2] or n for n in exact}
    assert len(ends) > 9
    for end in ends:
        right = {n: s for n, s in exact.items() if n.endswith(end)}
        assert error(slopes, right) < 0.05, end


@needs_kernels
def test_recomputed_blocks_are_the_same_bit_for_bit() -> None:
    model = made("llama")
    edit = lora(model)
    kept, again = passed(model, edit), passed(model, edit, recompute=True)
    assert kept[0] == again[0]
    assert all(torch.equal(kept[1][n], again[1][n]) for n in kept[1])


@needs_kernels
def test_what_is_not_taken() -> None:
    model = made("llama")
    block = model.model.layers[0]
    edit = lora(model)
    assert fused.reason(block) is None
    hook = block.mlp.register_forward_hook(lambda *_: None)
    assert fused.reason(block) == "something else acts inside it"
    hook.remove()
    with edit.disabled():
        assert fused.reason(block) is None
        assert fused.block_of(block).learnt == []
    edit.undo()
    edit = lora(model, dropout=0.1)
    assert "adds more than a low-rank product" in (fused.reason(block) or "")
    edit.undo()
    model.float()
    assert fused.reason(block) == "its weights are not in bf16 on the CPU"


@needs_kernels
def test_a_run_without_them(tmp_path: Path) -> None:
    """`train.kernels=false`: the log says nothing of them, the numbers are near, and a resumed run tells of it."""
    said, weights = {True: io.StringIO(), False: io.StringIO()}, {}

    def trained(kernels: bool, out: str, steps: int, resume: bool = False) -> Any:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 260})).to(torch.bfloat16)
        options = {"reporter": Lines(said[kernels]), "resume": resume, "allow_changes": resume}
        how = {"steps": steps, "kernels": kernels, "micro_rows": 4, "save_every": 2}
        return kit.run(tmp_path / out, model=model, options=options, **how)

    for kernels in (True, False):
        weights[kernels] = kit.weights(trained(kernels, str(kernels), 2))
    words = "each block is computed as one operation"
    assert words in said[True].getvalue()
    assert words not in said[False].getvalue()
    assert "kernels in C++" not in said[False].getvalue()
    assert not kit.same(weights[True], weights[False])
    apart = [(weights[True][n] - w).norm() / w.norm() for n, w in weights[False].items()]
    assert max(apart) < 0.2
    said[False].truncate(0)
    trained(False, "True", 4, resume=True)
    assert "kernels: True then, False now" in said[False].getvalue()
    assert words not in said[False].getvalue()


def test_without_kernels_the_reason_is_said() -> None:
    with native.off():
        assert fused.reason(made("llama").model.layers[0]) == "switched off"
