"""What cannot be shared out is refused, before or when it is tried; and what would be wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from afina.config import ParallelSettings
from afina.errors import AfinaError, ConfigError, RunError, TechniqueError
from afina.parallel import tensor
from afina.parallel.beside import refuse_techniques
from afina.parallel.copies import Copies
from afina.parallel.plan import Plan
from afina.parallel.processes import Processes
from afina.parallel.tensor_calls import Behind
from afina.parallel.tensor_place import Placed, Which, placed
from afina.parallel.tensor_plan import ways_of
from afina.parallel.tensor_sizes import counts_in, counts_of, refuse_size, sizes
from afina.table import apply
from afina.techniques.bottleneck import Bottleneck, BottleneckDelta
from afina.techniques.lora import LoRA
from afina.techniques.sublayers import sublayers
from afina.techniques.trainable_tokens import TrainableTokens
from tests.parallel.parity import Case, edited, run
from tests.parallel.pool import Failed, Pool
from tests.parallel.tensor_kit import FAMILIES, SIZES, check
from tests.tiny import tiny_gpt2, tiny_llama

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
}


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    config = LlamaConfig(**{**SIZES, **SMOLLM2})
    assert sizes(counts_of(config)) == [1, 3]
    with pytest.raises(ConfigError, match="1 or 3") as refused:
        refuse_size(2, counts_of(config))
    assert "9 heads of queries, 3 heads of keys and values" in str(refused.value)
    refuse_size(3, counts_of(config))
    with torch.device("meta"):
        model = tiny_llama(**SMOLLM2)
    assert sizes(counts_in(model, ways_of(model, 2))) == [1, 3]
    # Heads and not numbers: 576 rows of a weight could be cut in two.
    with pytest.raises(ConfigError, match="9 heads of q_proj"):
        refuse_size(2, counts_in(model, ways_of(model, 2)))


def test_experts_are_shared_out_by_their_number() -> None:
    model = FAMILIES["mixtral"](num_local_experts=6, num_attention_heads=4, num_key_value_heads=4)
    assert sizes(counts_of(model.config)) == [1, 2]
    found = placed(model, ways_of(model, 2), Which(1, 2))
    assert found.pieces["model.layers.0.mlp.experts.down_proj"].box[0] == (3, 6)
    assert found.pieces["model.layers.0.mlp.gate.weight"].whole
    with pytest.raises(ConfigError, match="6 experts"):
        refuse_size(4, counts_in(model, ways_of(model, 2)))


def test_ends_are_shared_out_where_they_can_be() -> None:
    ends = {"model.embed_tokens": "vocabulary", "lm_head": "head"}

    def found(model: Any) -> dict[str, str]:
        return {name: way for name, way in ways_of(model, 2).items() if "layers" not in name}

    assert found(tiny_llama()) == found(tiny_llama(tie_word_embeddings=True)) == ends
    for model in (tiny_llama(), tiny_llama(tie_word_embeddings=True)):
        pieces = placed(model, ways_of(model, 2), Which(1, 2)).pieces
        assert all(
            p.box[0] == (130, 260)
            for n, p in pieces.items()
            if "layers" not in n and "norm" not in n
        )
    assert found(tiny_llama(vocab_size=261)) == {}
    tied = tiny_llama(tie_word_embeddings=True)
    del tied._tp_plan["lm_head"]
    assert found(tied) == {}
    loose = tiny_llama()
    del loose._tp_plan["lm_head"]
    assert found(loose) == {"model.embed_tokens": "vocabulary"}
    # What wants whole rows.
    model = tiny_llama()
    apply(model, [TrainableTokens(tokens=(3,))])
    assert found(model) == {}
    model = tiny_llama()
    apply(model, [LoRA(rank=2, target=("embed_tokens", "lm_head"))])
    assert found(model) == ends


def test_models_without_a_plan_and_unknown_strings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="does not say how") as refused:
        ways_of(tiny_gpt2(), 2)
    assert "GPT2LMHeadModel" in str(refused.value)
    model = tiny_llama()
    model._tp_plan["model.layers.*.self_attn.o_proj"] = "rowwise_of_some_kind"
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.o_proj: rowwise_of_some_kind"):
        ways_of(model, 2)
    config = LlamaConfig(**SIZES)
    config.base_model_tp_plan = {"layers.*.self_attn": "local_params"}
    with pytest.raises(ConfigError, match="local_params"):
        counts_of(config)
    model = tiny_llama()
    model._tp_plan["model.norm"] = "colwise"
    with pytest.raises(ConfigError, match=r"model\.norm: LlamaRMSNorm"):
        ways_of(model, 2)


@pytest.mark.parametrize("key", ["token_pruning", "quantize"])
def test_techniques_that_cannot_are_refused_with_the_reason(key: str) -> None:
    refuse_techniques(Plan(tensor=1), [key])
    with pytest.raises(ConfigError, match=f"{key} does not go with parallel.tensor"):
        refuse_techniques(Plan(tensor=2), [key])


def test_children_that_cannot_do_a_part_are_refused() -> None:
    model = tiny_llama()
    apply(model, [Bottleneck()])
    placed(model, ways_of(model, 2), Which(0, 2))
    # Beside a map, and not beside the sublayer that it ends.
    place = next(s for s in sublayers(model) if s.role == "attention")
    model.model.layers[0].self_attn.o_proj.bottleneck = BottleneckDelta(place, Bottleneck())
    with pytest.raises(
        ConfigError, match=r"bottleneck acts at model\.layers\.0\.self_attn\.o_proj"
    ):
        placed(model, ways_of(model, 2), Which(0, 2))
    model = tiny_llama()
    edit = apply(model, [Bottleneck(kind="parallel")])
    delta = next(iter(edit.deltas.values()))
    delta.listens = lambda: (model.model.layers[0].mlp.up_proj,)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="bottleneck reads what a map is given"):
        placed(model, ways_of(model, 2), Which(0, 2))


def test_dropout_beside_shared_experts_is_refused() -> None:
    model = FAMILIES["mixtral"]()
    edit = apply(model, [LoRA(rank=2, target=("experts",), dropout=0.1)])
    found = placed(model, ways_of(model, 2), Which(0, 2))
    name, delta = next(iter(edit.deltas.items()))
    with pytest.raises(TechniqueError, match="dropout"):
        delta.shared_out(found.shares[name])


# --- what would be wrong is seen -------------------------------------------------------------------------------

Change = Callable[[], Any]


def run_with(changes: tuple[Change, ...], case: Case) -> Any:
    """The case in this process, with something changed."""
    for change in changes:
        change().start()
    try:
        return run(case, ParallelSettings(tensor=2))
    finally:
        mock.patch.stopall()


def unsummed() -> Any:
    """Gradients of which each process has a part are not summed."""
    return mock.patch.object(Copies, "reduce", return_value=None)


def behind() -> Any:
    """What adapters add to a sum is added in every process, behind it."""
    register = nn.Module.register_forward_hook

    def first(self: nn.Module, hook: Any, **how: Any) -> Any:
        return register(self, hook, prepend=isinstance(hook, Behind), **how)

    return mock.patch.object(nn.Module, "register_forward_hook", first)


def unguarded() -> Any:
    """Nobody looks whether something acts behind the sum, or whether the model says the same."""
    return mock.patch.object(
        Behind, "__call__", lambda self, module, args, output: self.put_together(output)
    )


def unasked() -> Any:
    return mock.patch.object(tensor, "_answer", return_value=None)


def untold(*names: str) -> Placed:
    """The plan says nothing of norms inside of attention."""
    found = _placed(*names)
    found.partial = {name for name in found.partial if "_norm" not in name}
    return found


_placed = placed


def silent() -> Any:
    return mock.patch.object(tensor, "placed", untold)


@pytest.mark.dist
@pytest.mark.parametrize("changes", [(unsummed,), (behind, unguarded, unasked)])
def test_controls_are_seen(pool: Pool, changes: tuple[Change, ...]) -> None:
    case = Case("lora")
    found = pool.run(2, run_with, changes, case)
    with pytest.raises(AssertionError):
        check(case, found)


@pytest.mark.dist
def test_what_acts_behind_a_sum_is_refused(pool: Pool) -> None:
    with pytest.raises(Failed, match="it would act behind their sum"):
        pool.run(2, run_with, (behind,), Case("lora"))
    with pytest.raises(Failed, match="does not compute the same when its matrices are shared"):
        pool.run(2, run_with, (behind, unguarded), Case("lora"))


@pytest.mark.dist
def test_a_part_of_a_gradient_that_nobody_knows_of_is_refused(pool: Pool) -> None:
    with pytest.raises(Failed, match=r"different gradients.*[^$]*q_norm"):
        pool.run(2, run_with, (silent,), Case("full", family="qwen3"))


def refused(spoil: Callable[[Any], None]) -> str:
    """What is said of a model that was spoilt."""
    edit = edited(Case("lora"))
    spoil(edit.model)
    mesh = Processes(ParallelSettings(tensor=2))
    mesh.begin()
    try:
        mesh.hold(edit.model, edit.trainable())
    except AfinaError as error:
        return str(error)
    raise RunError("it was not refused")


def softens(model: Any) -> None:
    """The inner numbers of the feed-forward are weighed against each other, which no plan tells."""
    model.model.layers[1].mlp.act_fn = nn.Softmax(-1)


def counts_heads(model: Any) -> None:
    """Attention gives as many numbers as the config says."""

    def pad(module: Any, args: Any, output: Any) -> Any:
        return nn.functional.pad(output, (0, 32 - output.shape[-1]))

    model.model.layers[0].self_attn.q_proj.register_forward_hook(pad)


@pytest.mark.dist
@pytest.mark.parametrize("spoil", [softens, counts_heads])
def test_a_model_that_computes_otherwise_is_refused(pool: Pool, spoil: Any) -> None:
    for words in pool.run(2, refused, spoil):
        assert "does not compute the same when its matrices are shared out" in words
