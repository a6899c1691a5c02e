"""What the stages of a pipeline hold, tell each other, measure and refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from afina.config import ParallelSettings
from afina.models.forward import packing
from afina.parallel.pipeline import Pipeline
from afina.parallel.processes import Processes
from afina.parallel.runtime import OneProcess
from afina.table import apply
from afina.techniques.bitfit import BitFit
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.p_tuning import PTuning
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.quantize import Quantize
from afina.techniques.trainable_tokens import TrainableTokens
from afina.train.ahead import made
from afina.train.loop import backward, loop
from afina.train.validate import mean_loss
from afina.tree import Technique
from tests.parallel.parity import Case, edited, joined, run, windows, work_of
from tests.parallel.pool import Pool
from tests.tiny import tiny_gpt2, tiny_llama
from tests.train import kit
from tests.train.kit import ragged_rows

pytestmark = pytest.mark.dist

FOUR = (("num_hidden_layers", 4),)
TIED = (*FOUR, ("tie_word_embeddings", True))


TECHNIQUES: dict[str, list[Technique]] = {
    "prompt": [PromptTuning(tokens=3)],
    "prefix": [PrefixTuning(tokens=3)],
    "p_tuning": [PTuning(tokens=3, hidden=8)],
    "tokens": [LoRA(rank=2), TrainableTokens(tokens=(5, 6, 7))],
    "bottleneck": [Bottleneck(width=4)],
    "bitfit": [BitFit()],
    "ia3": [IA3()],
    "upper": [LoRA(rank=2, layers="3")],
    "head": [Full(target=("lm_head",))],
}


def gradients_of(name: str, several: bool, schedule: Any = "1f1b") -> dict[str, torch.Tensor]:
    """Of one window, by what this process holds; beside it the norm of all."""
    mesh = Processes(ParallelSettings(pipeline=2, schedule=schedule)) if several else OneProcess()
    edit = apply(tiny_llama(num_hidden_layers=4, attention_bias=True), TECHNIQUES[name], seed=5)
    with torch.no_grad():
        for number, tensor in enumerate(edit.trainable().values()):
            drawn = torch.Generator().manual_seed(number)
            tensor.add_(torch.randn(tensor.shape, generator=drawn, dtype=tensor.dtype) * 0.1)
    work = work_of(Case(rows_each=2), mesh, edit)
    with packing(edit.model, True):
        backward(work, made(work, mesh.share(ragged_rows(7))), 0)
    mesh.reduce(edit.trainable())
    own = mesh.own(edit.trainable())
    found = {name: p.grad.clone() for name, p in own.items() if p.grad is not None}
    found["norm"] = mesh.norm(own).double()
    work.optimiser.step()
    mesh.end()
    return found


@pytest.mark.parametrize("name", TECHNIQUES)
def test_what_acts_around_the_stack_and_within_blocks(pool: Pool, name: str) -> None:
    expected = gradients_of(name, False)
    found = joined(pool.run(2, gradients_of, name, True))
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9)


def test_a_prefix_whose_weights_have_a_backward_pass_of_their_own(pool: Pool) -> None:
    expected = gradients_of("prefix", False)
    found = joined(pool.run(2, gradients_of, "prefix", True, "zero_bubble"))
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9)


def without_tie_sum(case: Case) -> dict[str, torch.Tensor]:
    """What a process finds of a tied embedding that nobody sums over the stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "add_shared", lambda self, own: None)
        found = run(replace(case, steps=1), ParallelSettings(pipeline=2)).gradients
    return {name: gradient for name, gradient in found.items() if "embed" in name}


def test_a_missing_sum_over_first_and_last_stage_shows(pool: Pool) -> None:
    case, name = Case("full", 2, model=TIED), "model.embed_tokens.weight"
    whole = run(case, None).gradients[name]
    parts = [one[name] for one in pool.run(2, without_tie_sum, case)]
    # Each has its own share of it, which is not all.
    assert all(float((part - whole).abs().max()) > 1e-3 for part in parts)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=0, atol=1e-9)


def bytes_held() -> tuple[int, int, dict[str, bool]]:
    """Bytes of a tiny model before and after it was cut, and of each name whether it is held."""
    mesh = Processes(ParallelSettings(pipeline=2))
    mesh.begin()
    edit = apply(tiny_llama(num_hidden_layers=4), [LoRA(rank=2)], seed=0)
    before = {n: tuple(p.shape) for n, p in edit.model.named_parameters()}
    whole = memory(edit.model)
    mesh.hold(edit.model, edit.trainable())
    assert before == {n: tuple(p.shape) for n, p in edit.model.named_parameters()}
    found = whole, memory(edit.model), {name: mesh.holds(name) for name in before}
    mesh.end()
    return found


def memory(model: nn.Module) -> int:
    """Bytes of the parameters, each piece of memory once."""
    found = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    return sum(found.values())


def test_what_a_stage_does_not_hold_takes_no_memory(pool: Pool) -> None:
    model = tiny_llama(num_hidden_layers=4)
    edit = apply(model, [LoRA(rank=2)], seed=0)
    sizes = {n: p.numel() * p.element_size() for n, p in edit.model.named_parameters()}
    found = pool.run(2, bytes_held)
    for place, (before, after, held) in enumerate(found):
        assert before == sum(sizes.values())
        mine = {name for name, here in held.items() if here}
        ends = ("embed_tokens",) if place == 0 else ("model.norm", "lm_head")
        blocks = ("layers.0.", "layers.1.") if place == 0 else ("layers.2.", "layers.3.")
        assert mine == {n for n in sizes if any(part in n for part in (*ends, *blocks))}
        gone = [n for n in sizes if n not in mine]
        assert after == sum(sizes[n] for n in mine) + 8 * len(gone)


def losses_of(several: bool, schedule: Any, packed: bool) -> tuple[float, float]:
    """The validation loss, before and after a step."""
    settings = ParallelSettings(pipeline=2, schedule=schedule)
    mesh = Processes(settings) if several else OneProcess()
    edit = edited(Case(model=FOUR))
    work = work_of(Case(rows_each=2, packed=packed), mesh, edit)
    rows, found = ragged_rows(9, seed=3), []
    with packing(edit.model, packed):
        for step in range(2):
            mine = work.cut(mesh.share(rows))
            found.append(mean_loss(edit.model, mine, work.passes, mesh))
            if not step:
                next(loop(work, iter(windows(Case()))))
    mesh.end()
    return found[0], found[1]


@pytest.mark.parametrize(("schedule", "packed"), [("1f1b", True), ("interleaved", False)])
def test_validation_is_that_of_one_process(pool: Pool, schedule: Any, packed: bool) -> None:
    expected = losses_of(False, schedule, packed)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    for found in pool.run(2, losses_of, True, schedule, packed):
        assert found == pytest.approx(expected, abs=1e-9)


def finished(out: Path, several: bool) -> float:
    """The loss of a run in two processes, by whose trials its micro-batches are found; validated as it goes."""
    mesh = Processes(ParallelSettings(pipeline=2)) if several else OneProcess()
    how: dict[str, Any] = {"steps": 3, "eval_every": 1, "val": ragged_rows(5, seed=9)}
    options = {"mesh": mesh} if several else {}
    model = tiny_llama(num_hidden_layers=4)
    found = kit.run(out, model=model, options=options, micro_rows="auto", **how)
    mesh.end()
    return found.scores["loss"]


def test_a_run_gives_an_adapter_for_one_process(pool: Pool, tmp_path: Path) -> None:
    expected = finished(tmp_path / "alone", False)
    assert pool.run(2, finished, tmp_path / "two", True) == [pytest.approx(expected, abs=1e-9)] * 2
    mine, other = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("two", "alone")
    )
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-9)


def names_held(device: str) -> set[str]:
    """What this process holds of a model that lies on a device."""
    mesh = Processes(ParallelSettings(pipeline=2))
    mesh.begin()
    with torch.device(device):
        model = tiny_gpt2(n_layer=4)
    edit = apply(model, [PrefixTuning(tokens=3, start="zero")], seed=0)
    mesh.hold(edit.model, edit.trainable())
    found = {name for name, _ in model.named_parameters(remove_duplicate=False) if mesh.holds(name)}
    mesh.end()
    return found


def test_a_model_without_values_is_cut_alike(pool: Pool) -> None:
    first, last = pool.run(2, names_held, "cpu")
    assert pool.run(2, names_held, "meta") == [first, last]
    both = {"transformer.wte.weight", "lm_head.weight", "transformer.prefix.weight"}
    assert first & last == both
    assert "transformer.wpe.weight" in first - last
    assert "transformer.ln_f.weight" in last - first


def of_window(model: Any, techniques: list[Technique], rows: Any, several: bool) -> Any:
    """Gradients of a padded window, two rows a micro-batch, by what this process holds; and the loss."""
    mesh = Processes(ParallelSettings(pipeline=2)) if several else OneProcess()
    edit = apply(model, techniques, seed=5)
    case = Case(rows_each=2, packed=False)
    work = work_of(case, mesh, edit)
    loss = backward(work, made(work, mesh.share(rows)), 0).loss
    mesh.reduce(edit.trainable())
    own = mesh.own(edit.trainable())
    found = {name: p.grad.clone() for name, p in own.items() if p.grad is not None}
    mesh.end()
    return {**found, "loss": torch.tensor(loss)}


def classified(several: bool) -> Any:
    """Of an encoder that gives rows classes; the last micro-batch has one row less than the others."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = BertConfig(vocab_size=260, num_hidden_layers=4, num_labels=3, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = BertForSequenceClassification(config).double().eval()
    rows = [replace(row, label=row.id % 3) for row in ragged_rows(7)]
    return of_window(model, [Full()], rows, several)


def on_packed_weights(several: bool) -> Any:
    """Of LoRA on weights in few bits."""
    model = tiny_llama(num_hidden_layers=4, hidden_size=64)
    return of_window(model, [Quantize(kind="int8"), LoRA(rank=2)], ragged_rows(7), several)


@pytest.mark.parametrize(("what", "within"), [(classified, 1e-9), (on_packed_weights, 1e-9)])
def test_classifiers_and_packed_weights(pool: Pool, what: Any, within: float) -> None:
    expected, found = what(False), joined(pool.run(2, what, True))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=within)
