"""The same run on a CPU and on a GPU, both in fp32: the same losses, the same adapter.

`make gpu` runs the tests marked gpu. The others see to it that the comparison can tell two runs apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import afina
from tests.tiny import byte_tokenizer, row, tiny_llama

STEPS = 4


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    adapter: dict[str, Tensor]


def trained(device: str, out: Path, *, lr: float = 1e-2) -> Trained:
    """A few steps of LoRA on a tiny model, ragged rows packed."""
    tokenizer = byte_tokenizer()
    rows = [row(tokenizer, "n" * n, str(n % 7) * (1 + n % 5), number=n) for n in range(24)]
    model = tiny_llama(dtype=torch.float32).to(device)
    edit = afina.apply(model, [afina.LoRA(rank=4)])
    run = afina.train(model, tokenizer, rows, edit, out, steps=STEPS, rows_per_step=6, micro_rows=2,
                      lr=lr, device=device, dtype="fp32")  # fmt: skip
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
