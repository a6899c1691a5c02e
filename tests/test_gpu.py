"""The same run on a CPU and on a GPU, both in fp32: the same losses, the same adapter.

`make gpu` runs the tests marked gpu. The others see to it that the comparison can tell two runs apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import afina
from afina.models.offload import Offload
from afina.ops import attention, reference
from afina.ops.layout import with_layout
from afina.ops.loss import linear_cross_entropy
from afina.ops.lowrank import low_rank_add
from afina.ops.ranges import ranges_of
from afina.types import IGNORE, Context
from tests.tiny import byte_tokenizer, row, tiny_llama

STEPS = 4


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    adapter: dict[str, Tensor]


def trained(device: str, out: Path, *, lr: float = 1e-2, **way: Any) -> Trained:
    """A few steps of LoRA on a tiny model, ragged rows packed."""
    tokenizer = byte_tokenizer()
    rows = [row(tokenizer, "n" * n, str(n % 7) * (1 + n % 5), number=n) for n in range(24)]
    model = tiny_llama(dtype=torch.float32).to(device)
    edit = afina.apply(model, [afina.LoRA(rank=4)])
    run = afina.train(model, tokenizer, rows, edit, out, steps=STEPS, rows_per_step=6, micro_rows=2,
                      lr=lr, device=device, dtype="fp32", **way)  # fmt: skip
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    return Trained(losses, load_file(run.weights / "adapter_model.safetensors"))


def furthest(one: Trained, other: Trained) -> float:
    """The largest difference, relative to each tensor's norm, of the losses and of every tensor."""
    assert one.adapter.keys() == other.adapter.keys()
    pairs = [(torch.tensor(one.losses), torch.tensor(other.losses))]
    pairs += [(tensor, other.adapter[name]) for name, tensor in one.adapter.items()]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


@pytest.fixture
def exact() -> Iterator[None]:
    """Matrix products of CUDA in whole fp32, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
def test_a_run_on_a_gpu_equals_the_run_on_the_cpu(tmp_path: Path) -> None:
    on_cpu, on_gpu = trained("cpu", tmp_path / "cpu"), trained("cuda", tmp_path / "cuda")
    assert len(on_gpu.losses) == STEPS
    assert furthest(on_cpu, on_gpu) < 1e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_on_a_gpu_is_that_of_the_reference(
    window: int | None, softcap: float | None, causal: bool
) -> None:
    segments = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2])
    positions = torch.cat([torch.arange(n) for n in (5, 9, 2)])[None]
    shapes = [(1, heads, 16, 8) for heads in (4, 2, 2)]
    near = {"causal": causal, "window": window, "softcap": softcap}
    wanted = with_gradients(
        lambda q, k, v: reference.attention(q, k, v, segments, **near), shapes, "cpu"
    )
    context = with_layout(Context(segments.cuda(), positions.cuda()))
    found = with_gradients(
        lambda q, k, v: attention.rows_attention(q, k, v, context, **near), shapes, "cuda"
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_our_kernels_on_a_gpu_compute_what_the_reference_does(
    causal: bool, window: int | None, dtype: torch.dtype, within: float
) -> None:
    from afina.ops import kernels

    lengths = (70, 130, 3)
    segments = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    shapes = [(sum(lengths), heads, 64) for heads in (9, 3, 3)]
    near = {"causal": causal, "window": window}

    def slowly(*tensors: Tensor) -> Tensor:
        by_head = [x.transpose(0, 1)[None] for x in tensors]
        return reference.attention(*by_head, segments[None], **near)[0].transpose(0, 1)

    def by_kernels(*tensors: Tensor) -> Tensor:
        ranges = ranges_of(segments.to(tensors[0].device), **near)
        return kernels.attend(*(x.to(dtype) for x in tensors), ranges)[0].to(tensors[0].dtype)

    wanted = with_gradients(slowly, shapes, "cpu")
    for one, other in zip(with_gradients(by_kernels, shapes, "cuda"), wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < within


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attn_on_a_gpu_computes_what_the_reference_does(
    causal: bool, window: int | None
) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    segments = torch.tensor([[n for n, size in enumerate((70, 130, 3)) for _ in range(size)]])
    shapes = [(1, heads, 203, 64) for heads in (9, 3, 3)]
    near = {"causal": causal, "window": window}
    wanted = with_gradients(
        lambda q, k, v: reference.attention(q, k, v, segments, **near), shapes, "cpu"
    )

    def by_flash(*tensors: Tensor) -> Tensor:
        halves = (x.bfloat16() for x in tensors)
        with attention.computed_by("flash", torch.device("cuda")):
            return attention.rows_attention(*halves, context, **near).to(tensors[0].dtype)

    context = with_layout(Context(segments.cuda(), segments.cuda()))
    for one, other in zip(with_gradients(by_flash, shapes, "cuda"), wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < 3e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_loss_on_a_gpu_is_that_of_the_logits(softcap: float | None) -> None:
    targets = torch.tensor([3, 0, 63, IGNORE, 7])

    def written_out(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return reference.token_losses(capped, targets)

    def in_pieces(hidden: Tensor, weight: Tensor) -> Tensor:
        few = 2 * 64 * 4  # two positions a piece
        there = targets.to(hidden.device)
        return linear_cross_entropy(hidden, weight, there, softcap=softcap, piece_bytes=few)

    shapes = [(5, 16), (64, 16)]
    wanted = with_gradients(written_out, shapes, "cpu")
    for one, other in zip(with_gradients(in_pieces, shapes, "cuda"), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
def test_a_low_rank_change_on_a_gpu_is_that_of_the_changed_weight() -> None:
    shapes = [(6, 16), (12, 16), (3, 16), (12, 3)]
    wanted = with_gradients(
        lambda x, w, a, b: reference.low_rank_linear(x, w, a, b, 0.5), shapes, "cpu"
    )
    found = with_gradients(lambda x, w, a, b: low_rank_add(x, x @ w.t(), a, b, 0.5), shapes, "cuda")
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "way",
    [{"recompute": True}, {"recompute": "selective"}, {"compile": True}, {"attention": "triton"}],
)
def test_blocks_run_otherwise_on_a_gpu_learn_the_same(tmp_path: Path, way: dict[str, Any]) -> None:
    plain = trained("cuda", tmp_path / "plain")
    assert furthest(plain, trained("cuda", tmp_path / "other", **way)) < 1e-3


def with_gradients(
    function: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], device: str
) -> list[Tensor]:
    """A function's value and gradients on tensors that are the same on every device: fp64 on a CPU, fp32 elsewhere."""
    draw = torch.Generator().manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.float32
    given = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    for tensor in given:
        tensor.requires_grad_()
    value = function(*given)
    towards = torch.linspace(-1, 1, value.numel()).view(value.shape).to(value)
    found = [value.detach(), *torch.autograd.grad(value, given, towards)]
    return [one.cpu().double() for one in found]


def test_the_comparison_of_operations_sees_a_wrong_one() -> None:
    shapes = [(6, 16), (12, 16), (3, 16), (12, 3)]
    right, wrong = (
        with_gradients(lambda x, w, a, b, s=s: low_rank_add(x, x @ w.t(), a, b, s), shapes, "cpu")
        for s in (0.5, 0.51)
    )
    written_out = with_gradients(
        lambda x, w, a, b: reference.low_rank_linear(x, w, a, b, 0.5), shapes, "cpu"
    )
    for one, other in zip(right, written_out, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # The value, and the gradients of the input and of A and B; that of the weight is the same.
    apart = [
        not torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(right, wrong, strict=True)
    ]
    assert apart == [True, True, False, True, True]


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_come_back_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    kept = trained("cuda", tmp_path / "kept", recompute=recompute)
    monkeypatch.setattr(
        "afina.train.job.offloaded", lambda model, device, *, wanted: Offload(model, device, 1).running()
    )  # fmt: skip
    moved = trained("cuda", tmp_path / "moved", recompute=recompute, offload_activations=True)
    assert furthest(kept, moved) < 1e-5


@pytest.mark.gpu
def test_a_gpu_takes_bf16(tmp_path: Path) -> None:
    from afina.models import precision

    assert precision.choose("cuda").base == torch.bfloat16


def test_equal_runs_compare_as_equal_and_a_one_per_cent_change_of_lr_does_not(
    tmp_path: Path,
) -> None:
    first, second = trained("cpu", tmp_path / "a"), trained("cpu", tmp_path / "b")
    other = trained("cpu", tmp_path / "c", lr=1.01e-2)
    assert furthest(first, second) == 0.0
    assert furthest(first, other) > 2e-3
