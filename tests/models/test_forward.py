"""The way through a model: packed, padded and single rows give one loss and one gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, RobertaConfig, RobertaForCausalLM

from afina.data.packing import collate
from afina.errors import ModelError
from afina.models import forward
from afina.models.generate import generate
from afina.types import IGNORE, Batch, Row
from tests import battery
from tests.tiny import byte_tokenizer


def rows() -> list[Row]:
    """Ragged rows with prompts, one of a single token, one without a label."""
    torch.manual_seed(3)
    sizes = [(6, 3), (11, 7), (1, 1), (4, 0), (9, 9)]
    return [
        Row(
            tokens=tuple(torch.randint(1, battery.VOCABULARY, (n,)).tolist()),
            trained=(False,) * (n - labels) + (True,) * labels,
            id=i,
        )
        for i, (n, labels) in enumerate(sizes)
    ]


def loss_and_gradients(model: Any, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of token losses over the batches, and what it does to every tensor."""
    model.zero_grad()
    total = torch.tensor(0.0, dtype=torch.float64)
    for batch in batches:
        with forward.packing(model, batch.packed):
            logits, targets = forward.trained_logits(model, batch)
            loss = forward.token_losses(logits, targets).sum()
            loss.backward()
        assert len(targets) == batch.trained_tokens
        total += loss.detach().double()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_packed_padded_and_single_rows_agree(name: str) -> None:
    model = battery.build(name)
    wanted, slopes = loss_and_gradients(model, [collate([r], False, 0) for r in rows()])
    ways = {
        "packed": [collate(rows(), True, 0)],
        "packed and padded": [collate(rows(), True, 0, pad_to_multiple=16)],
        "padded": [collate(rows(), False, 0)],
        "in two parts": [collate(rows()[:2], True, 0), collate(rows()[2:], False, 0)],
    }
    for way, batches in ways.items():
        got, gradients = loss_and_gradients(model, batches)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=way)
        assert set(gradients) == set(slopes)
        for name_, slope in slopes.items():
            torch.testing.assert_close(gradients[name_], slope, rtol=1e-10, atol=1e-10, msg=way)


def test_packing_without_its_context_would_not_agree() -> None:
    """The control: the same packed line through the model's own attention has another loss."""
    model = battery.build("llama")
    batch = collate(rows(), True, 0)
    wanted, _ = loss_and_gradients(model, [batch])
    with torch.no_grad():
        leaky = model(input_ids=batch.tokens_BT, position_ids=batch.positions_BT).logits
    trained = batch.targets_BT != IGNORE
    loss = forward.token_losses(leaky[trained], batch.targets_BT[trained]).sum()
    assert (loss - wanted).abs() > 1e-2


@pytest.mark.parametrize("packed", [True, False])
def test_logits_are_those_of_the_trained_positions(packed: bool) -> None:
    model = battery.build("llama")
    batch = collate(rows(), packed, 0)
    with torch.no_grad(), forward.packing(model, packed):
        logits, targets = forward.trained_logits(model, batch)
    each = []
    with torch.no_grad():
        for row in rows():
            full = model(input_ids=torch.tensor([row.tokens])).logits[0]
            each += [full[t - 1] for t in range(1, len(row.tokens)) if row.trained[t]]
    torch.testing.assert_close(logits, torch.stack(each), rtol=0, atol=1e-10)
    labels = [r.tokens[t] for r in rows() for t in range(1, len(r.tokens)) if r.trained[t]]
    assert targets.tolist() == labels


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_without_a_label_has_no_loss_and_no_gradient(packed: bool) -> None:
    model = battery.build("llama")
    loss, gradients = loss_and_gradients(model, [collate([rows()[3]], packed, 0)])
    assert loss == 0
    assert all(not g.any() for g in gradients.values())


def test_token_losses_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.bfloat16)
    losses = forward.token_losses(logits, torch.tensor([0, 1]))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([0.6931472, 2.1269280])
    wide = forward.token_losses(logits.double(), torch.tensor([IGNORE, 1]))
    assert wide.dtype == torch.float64
    assert wide.tolist() == pytest.approx([0.0, 2.1269280110429727], abs=1e-12)


def test_a_model_that_cannot_keep_rows_apart_is_refused() -> None:
    with (
        pytest.raises(ModelError, match="packing=false"),
        forward.packing(torch.nn.Linear(2, 2), True),
    ):
        pass


def test_a_batch_moves_whole() -> None:
    row = Row(tokens=(1, 2), trained=(False, True), id=7, label=3)
    batch = collate([row], False, 0)
    moved = forward.to_device(batch, torch.device("meta"))
    assert all(v.is_meta for v in vars(moved).values() if isinstance(v, Tensor))
    assert moved.labels_B is not None
    assert (moved.rows, moved.packed, moved.trained_tokens) == ((7,), False, 1)


@pytest.mark.slow
def test_smollm2_in_fp32() -> None:
    """The same agreement on a real model, within fp32's rounding."""
    from afina.models import cache, hub

    if cache.find("smollm2-135m") is None:
        pytest.skip("the demo model is not in the cache: `afina models get smollm2-135m`")

    model, tokenizer = hub.load("smollm2-135m", dtype=torch.float32)
    texts = ["The sea was calm and the boat was late.", "Two rows are enough."]
    some = [
        Row(tuple(ids), (False, *(True,) * (len(ids) - 1)), id=i)
        for i, ids in enumerate(tokenizer(texts)["input_ids"])
    ]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    watched = model.get_submodule("model.layers.0.self_attn.q_proj").get_parameter("weight")
    watched.requires_grad_(True)
    single, one = loss_and_gradients(model, [collate([r], False, 0) for r in some])
    packed, other = loss_and_gradients(model, [collate(some, True, 0)])
    torch.testing.assert_close(packed, single, rtol=1e-4, atol=0)
    (name,) = one
    assert (one[name] - other[name]).norm() <= 1e-4 * one[name].norm()


def roberta() -> Any:
    """A decoder that keeps position 1 for padding and begins its rows at 2, as RoBERTa's kin."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 260, "num_attention_heads": 4, "max_position_embeddings": 34}
    config = RobertaConfig(is_decoder=True, pad_token_id=1, initializer_range=0.5, **sizes)
    return RobertaForCausalLM(config).double().eval()


def test_positions_that_do_not_begin_at_nought_are_never_packed() -> None:
    model = roberta()
    row = Row(tokens=(7, 8, 9, 10), trained=(False, True, True, True), id=0)
    single = forward.trained_logits(model, collate([row], False, 1))[0]
    alone = model(torch.tensor([row.tokens])).logits[0, :3]
    torch.testing.assert_close(single, alone)
    # What packing would have given, had it not been refused.
    numbered = model(torch.tensor([row.tokens]), position_ids=torch.arange(4)[None]).logits[0, :3]
    assert (numbered - alone).abs().max() > 0.1
    with (
        pytest.raises(ModelError, match="cannot keep packed rows apart"),
        forward.packing(model, True),
    ):
        pass
    with pytest.raises(ModelError, match="wrong positions when it generates"):
        generate(model, byte_tokenizer(), ["a"])


def test_the_context_is_what_positions_are_left() -> None:
    model = roberta()
    assert forward.context_of(model) == 32
    model(torch.full((1, 32), 7))
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(torch.full((1, 33), 7))
    assert (
        forward.context_of(battery.build("llama"))
        == battery.build("llama").config.max_position_embeddings
    )
    assert forward.context_of(torch.nn.Linear(2, 2)) is None


def test_a_model_without_logits_has_no_loss() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=40, num_hidden_layers=1, **sizes))
    row = Row(tokens=(7, 8), trained=(False, True), id=0)
    with pytest.raises(ModelError, match=r"predicts no tokens(.*\n)*.*BertModel"):
        forward.trained_logits(model, collate([row], False, 0))
