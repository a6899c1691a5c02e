"""What stands in front of rows: prompts and prefixes in batches, caches, recomputation, runs; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import afina
from afina.config import GenerateSettings
from afina.errors import AfinaError, ConfigError, ModelError, TechniqueError
from afina.models.forward import context_of, packing
from afina.models.head import head_of
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.techniques.p_tuning import PTuning
from afina.techniques.prefix import PrefixDelta, PrefixTuning, flat, form_of, unflat
from afina.techniques.prompt import PromptDelta, PromptTuning
from afina.train.metrics import read_metrics
from afina.train.passes import Passes
from afina.tree import Technique, front_of
from tests.battery import IDS, TARGETS, backward, build, close, differs, llama, logits, train
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train import kit

EVERY: dict[str, Technique] = {
    "prompt": PromptTuning(tokens=3),
    "p_tuning": PTuning(tokens=3),
    "prefix": PrefixTuning(tokens=3, start="random"),
}
DECODERS = ("llama", "gpt2", "mixtral")
every = pytest.mark.parametrize("technique", EVERY.values(), ids=EVERY)


def moved(name: str, technique: Technique) -> Any:
    model = build(name)
    train(model, apply(model, [technique]))
    return model


# --- batches ---------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_a_padded_row_is_as_alone(technique: Technique, name: str, left: bool) -> None:
    if name == "bert" and left:
        return  # it learnt its positions from the left
    model = moved(name, technique)
    alone = model(input_ids=IDS[:1, :4]).logits
    pad = torch.zeros(1, 2, dtype=torch.int64)
    parts = (pad, IDS[:1, :4]) if left else (IDS[:1, :4], pad)
    ids = torch.cat((torch.cat(parts, dim=1), IDS[1:]))
    mask = torch.ones_like(ids)
    mask[0, slice(0, 2) if left else slice(4, 6)] = 0
    both = model(input_ids=ids, attention_mask=mask).logits
    close(both[:1, 2:] if left else both[:1, :4], alone)
    close(both[1:], model(input_ids=IDS[1:]).logits)


@every
@pytest.mark.parametrize("name", DECODERS)
def test_cached_steps_are_as_the_whole(technique: Technique, name: str) -> None:
    """Several tokens at a time, with left padding, and positions given as well as found."""
    model = moved(name, technique)
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    whole = model(input_ids=IDS, attention_mask=mask).logits
    first = model(input_ids=IDS[:, :3], attention_mask=mask[:, :3], use_cache=True)
    then = model(input_ids=IDS[:, 3:], attention_mask=mask, cache=first.cache)
    close(torch.cat((first.logits, then.logits), dim=1)[:, 2:], whole[:, 2:])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = model(input_ids=IDS, attention_mask=mask, position_ids=positions).logits
    close(given[:, 2:], whole[:, 2:])
    elsewhere = model(input_ids=IDS, attention_mask=mask, position_ids=positions + 1).logits
    differs(elsewhere[:, 2:], whole[:, 2:])


@every
def test_decoding_that_cuts_its_cache_answers_the_same(technique: Technique) -> None:
    model = moved("llama", technique)
    again = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9, 7]])
    given: Any = {
        "input_ids": again,
        "attention_mask": torch.ones_like(again),
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    plain = model.generate(**given)
    assert torch.equal(model.generate(**given, prompt_lookup_num_tokens=3), plain)
    assert torch.equal(model.generate(**given, num_beams=1, use_cache=False), plain)


@pytest.mark.parametrize("key", ["prompt", "prefix"])
def test_a_window_that_forgets_forgets_the_front_too(key: str) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=5,
        initializer_range=0.3,
    )
    model: Any = MistralForCausalLM(config).double().eval()
    apply(model, [EVERY[key]])
    whole = model(input_ids=IDS).logits
    out = model(input_ids=IDS[:, :1], use_cache=True)
    steps = [out.logits]
    for at in range(1, IDS.shape[1]):
        out = model(input_ids=IDS[:, at : at + 1], cache=out.cache, use_cache=True)
        steps.append(out.logits)
    close(torch.cat(steps, dim=1), whole)


@every
def test_callers_see_as_many_positions_as_they_gave(technique: Technique) -> None:
    model = build("llama")
    model.set_attn_implementation("eager")  # which gives its weights
    apply(model, [technique])
    out = model(input_ids=IDS, output_hidden_states=True, output_attentions=True, labels=TARGETS)
    assert out.logits.shape == (2, 6, 40)
    assert {h.shape for h in out.hidden_states} == {(2, 6, 16)}
    assert {a.shape for a in out.attentions} == {(2, 4, 6, 9)}
    plain = model(input_ids=IDS, return_dict=False)
    assert torch.equal(plain[0], out.logits)
    embedded = model(inputs_embeds=model.get_input_embeddings()(IDS)).logits
    assert torch.equal(embedded, out.logits)


def in_reference(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Attention written out over a prefix and the row's own keys, as the model's only attention."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        own = pairs[module.layer_idx]
        rows, groups = q.shape[0], q.shape[1] // k.shape[1]
        k, v = (
            torch.cat((one.expand(rows, -1, -1, -1), x), dim=2).repeat_interleave(groups, dim=1)
            for one, x in zip(own, (k, v), strict=True)
        )
        scores = q @ k.transpose(2, 3) * scaling
        if getattr(module, "is_causal", False):
            front, length = own[0].shape[1], q.shape[2]
            seen = torch.ones(length, front + length, dtype=torch.bool).tril(front)
            scores = scores.masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("reference_prefix", attend)
    AttentionMaskInterface.register("reference_prefix", lambda *_, **__: None)
    model.set_attn_implementation("reference_prefix")  # type: ignore[operator]


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_a_prefix_is_keys_and_values_before_a_rows_own(name: str) -> None:
    model = build(name)
    edit = apply(model, [EVERY["prefix"]])
    (delta,) = edit.deltas.values()
    assert isinstance(delta, PrefixDelta)
    ours = logits(model)
    slow = build(name)
    in_reference(slow, unflat(delta.weight.detach(), form_of(slow)))
    close(slow(input_ids=IDS, position_ids=torch.arange(3, 9)[None]).logits, ours)
    differs(slow(input_ids=IDS, position_ids=torch.arange(6)[None]).logits, ours)


def test_places_begin_where_the_model_begins_to_count() -> None:
    """RoBERTa numbers a row's first position by its padding's id and one."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        pad_token_id=1,
        num_labels=3,
    )
    model: Any = RobertaForSequenceClassification(config).double().eval()
    edit = apply(model, [PromptTuning(tokens=2, start="text", text_ids=(7, 9))])
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[:, 0] = 2
    found = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    with edit.disabled():
        longer = torch.cat((torch.tensor([[7, 9]] * 2), ids), dim=1)
        whole = model.base_model(input_ids=longer).last_hidden_state
    close(found, whole[:, 2:])


def test_a_decoder_that_classifies_reads_the_rows_last_token() -> None:
    config = llama().config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    model: Any = LlamaForSequenceClassification(config).double().eval()
    edit = apply(model, [EVERY["prompt"]])
    close(model(input_ids=IDS).logits[:1], model(input_ids=IDS[:1]).logits)
    padded = torch.cat((IDS[:1], torch.zeros(1, 2, dtype=torch.int64)), dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 2])
    close(model(input_ids=padded, attention_mask=mask).logits, model(input_ids=IDS[:1]).logits)
    edit.undo()


@every
def test_the_loss_without_logits_is_kept(technique: Technique) -> None:
    model = moved("llama", technique)
    assert head_of(model) is not None
    with packing(model, True):
        assert head_of(model) is not None


# --- starts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("key", ["prompt", "prefix"])
def test_a_start_from_a_text_is_that_text_before_the_row(key: str, name: str) -> None:
    """The text again from its beginning where it is shorter than the places, and cut where it is longer."""
    for text, wanted in (((7, 9), (7, 9, 7)), ((7, 9, 4, 5), (7, 9, 4))):
        model = build(name)
        before = torch.cat((torch.tensor([wanted] * 2), IDS), dim=1)
        whole = model(input_ids=before).logits[:, 3:]
        method = type(EVERY[key])
        apply(model, [method(tokens=3, start="text", text_ids=text)])
        close(logits(model), whole)


def test_a_text_needs_a_tokenizer_or_its_tokens() -> None:
    technique = PromptTuning(tokens=4, start="text", text="ab")
    with pytest.raises(TechniqueError, match="no tokenizer is there") as caught:
        apply(tiny_llama(), [technique])
    assert "tokenizer=tokenizer" in str(caught.value)
    tokenizer = byte_tokenizer()
    model = tiny_llama()
    edit = afina.apply(model, [technique], tokenizer=tokenizer)
    (delta,) = edit.deltas.values()
    assert isinstance(delta, PromptDelta)
    ids = tokenizer("ab")["input_ids"] * 2
    assert torch.equal(delta.weight, model.model.embed_tokens.weight[torch.tensor(ids)])
    with pytest.raises(TechniqueError, match="has no tokens"):
        apply(tiny_llama(), [PromptTuning(start="text", text="")], tokenizer=tokenizer)
    with pytest.raises(TechniqueError, match="no embedding for"):
        apply(tiny_llama(), [PromptTuning(start="text", text_ids=(5, 260))])


@pytest.mark.parametrize("method", [PromptTuning, PrefixTuning])
def test_settings_that_contradict_each_other_are_refused(method: Any) -> None:
    with pytest.raises(ConfigError, match="start=text needs text"):
        method(start="text")
    with pytest.raises(ConfigError, match="text needs start=text"):
        method(text="a")
    with pytest.raises(ConfigError, match="starts at random"):
        PrefixTuning(projection=True, start="vocabulary")


def test_a_random_prompt_has_the_spread_of_the_embedding() -> None:
    model = tiny_llama()
    edit = apply(model, [PromptTuning(tokens=200, start="random")])
    (delta,) = edit.deltas.values()
    assert isinstance(delta, PromptDelta)
    spread = model.model.embed_tokens.weight.std()
    assert abs(delta.weight.std() - spread) < 0.05 * spread
    assert not (delta.weight[:, None] == model.model.embed_tokens.weight).all(-1).any()


def test_a_prefix_lies_flat_layer_by_layer_keys_first() -> None:
    form = form_of(llama())
    pairs = unflat(torch.arange(2 * 2 * 2 * 2 * 4).double().view(2, -1), form)
    assert pairs[1][0][0, 0].tolist() == [16, 17, 18, 19]  # layer 1, keys, head 0, place 0
    assert pairs[0][1][1, 1].tolist() == [44, 45, 46, 47]  # layer 0, values, head 1, place 1
    assert torch.equal(flat(pairs), torch.arange(64).double().view(2, -1))


# --- recomputation, runs --------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("name", DECODERS)
def test_transformers_own_checkpointing_gives_the_same_gradients(
    technique: Technique, name: str
) -> None:
    found: list[dict[str, Tensor]] = []
    for again in (False, True):
        model = build(name).train()
        edit = apply(model, [technique])
        if again:
            model.activation_checkpointing_enable()
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        backward(model)
        found.append({n: p.grad for n, p in edit.trainable().items()})
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert any(bool(g.any()) for g in found[0].values())


@pytest.mark.parametrize(
    "technique",
    [
        PromptTuning(tokens=3),
        PTuning(tokens=3),
        PTuning(tokens=3, network="lstm", hidden=4, dropout=0.3),
        PrefixTuning(tokens=3),
        PrefixTuning(tokens=3, projection=True),
    ],
    ids=["prompt", "p_tuning", "lstm", "prefix", "projected"],
)
def test_resumed_in_mid_run_it_is_the_same_run(technique: Technique, tmp_path: Path) -> None:
    whole = kit.run(tmp_path / "whole", technique, steps=4)
    options = {"seams": kit.stop_after(3)}
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "parts", technique, steps=4, save_every=2, options=options)
    again = kit.run(tmp_path / "parts", technique, steps=4, save_every=2, options={"resume": True})
    one, other = (load_file(r.weights / "adapter_model.safetensors") for r in (whole, again))
    assert list(one) == ["prompt_embeddings"]
    assert torch.equal(one["prompt_embeddings"], other["prompt_embeddings"])
    started = apply(tiny_llama(), [technique], seed=1)
    with torch.no_grad():
        model = tiny_llama()
        loaded = afina.load_adapter(model, whole.weights)
    assert list(loaded.trainable()) == [f"model.{technique.key}.weight"]
    assert set(started.trainable()) >= set(loaded.trainable())


def test_a_network_of_another_form_does_not_go_on(tmp_path: Path) -> None:
    options = {"seams": kit.stop_after(3)}
    with pytest.raises(kit.Stop):
        kit.run(tmp_path, PTuning(tokens=3), steps=4, save_every=2, options=options)
    other = PTuning(tokens=3, network="lstm")
    again = {"resume": True, "allow_changes": True}
    with pytest.raises(AfinaError) as caught:
        kit.run(tmp_path, other, steps=4, save_every=2, options=again)
    assert "p_tuning" in str(caught.value)


@every
def test_a_run_learns(technique: Technique, tmp_path: Path) -> None:
    found = kit.run(tmp_path / "run", technique, steps=12, lr=1e-1, rows_per_step=10)
    lines = [line["loss"] for line in read_metrics(found.folder)]
    assert lines[-1] < 0.9 * lines[0]


def test_micro_batches_count_the_places_in_front() -> None:
    model = tiny_llama()
    rows = kit.ragged_rows(6)
    apply(model, [PromptTuning(tokens=20)])
    for shared in (False, True):
        passes = Passes(model, True, shared, 257, None)
        tokens = sum(len(row.tokens) for row in rows)
        assert passes.tokens(rows) == tokens + (20 if shared else 6 * 20)
        batch = passes.batch(rows)
        assert batch.tokens_BT.shape[1] == passes.tokens(rows)
        assert batch.real_tokens == tokens
        assert batch.trained_tokens == sum(row.trained_tokens for row in rows)
        cut = passes.cut(rows, rows_each=None, tokens_each=70)
        assert sorted(row.id for part in cut for row in part) == [row.id for row in rows]
        assert all(row in rows for part in cut for row in part)
        assert all(passes.tokens(part) <= 70 for part in cut)
        assert len(cut) > 1
    assert Passes(model, False, False, 257, None).tokens(rows) == tokens


@every
def test_the_context_is_shorter_by_the_places(technique: Technique) -> None:
    model = build("llama")
    assert context_of(model) == 64
    edit = apply(model, [technique])
    assert (front_of(model), context_of(model)) == (3, 61)
    with edit.disabled():
        assert (front_of(model), context_of(model)) == (0, 64)
    edit.undo()
    assert context_of(model) == 64


@every
def test_generate_answers_a_batch_as_each_alone(technique: Technique) -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    apply(model, [technique])
    settings = GenerateSettings(max_new_tokens=6, batch_rows=3)
    prompts = ["a", "bcd", "efghij"]
    together = afina.generate(model, tokenizer, prompts, settings)
    alone = [afina.generate(model, tokenizer, [one], settings)[0] for one in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("key", EVERY)
def test_beside_lora_both_act(key: str) -> None:
    model = build("llama")
    edit = apply(model, [LoRA(rank=2), EVERY[key]])
    train(model, edit, steps=3)
    both = logits(model)
    for technique in edit.techniques:
        (*deltas,) = edit.deltas_of(technique).values()
        for delta in deltas:
            delta.enabled = False
        differs(logits(model), both)
        for delta in deltas:
            delta.enabled = True
    assert torch.equal(logits(model), both)


# --- what is refused ------------------------------------------------------------------------------------------------


@every
def test_models_of_two_stacks_and_models_without_a_head_are_refused(technique: Technique) -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(TechniqueError, match="encoder and a decoder"):
        apply(t5, [technique])
    bare = BertModel(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(TechniqueError, match="a model with a head"):
        apply(bare, [technique])


@every
def test_merging_is_refused(technique: Technique) -> None:
    model = build("llama")
    edit = apply(model, [technique])
    before = logits(model)
    with pytest.raises(TechniqueError, match="cannot be merged"):
        edit.merge()
    assert torch.equal(logits(model), before)


@every
def test_a_mask_of_other_dimensions_is_refused(technique: Technique) -> None:
    model = build("llama")
    apply(model, [technique])
    with pytest.raises(ModelError, match="need attention_mask with one number a token"):
        model(input_ids=IDS, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ModelError, match="of a fixed size") as caught:
        model.generate(input_ids=IDS, max_new_tokens=2, cache_implementation="static")
    assert "'dynamic'" in str(caught.value.cure)


@every
def test_a_cache_without_the_places_is_refused(technique: Technique) -> None:
    model = build("llama")
    edit = apply(model, [technique])
    with edit.disabled():
        bare = model(input_ids=IDS[:, :3], use_cache=True).cache
    with pytest.raises(ModelError, match="the places in front left out"):
        model(input_ids=IDS[:, 3:], attention_mask=torch.ones_like(IDS), cache=bare)


def test_a_prefix_that_does_not_arrive_is_an_error() -> None:
    model = build("llama")
    edit = apply(model, [EVERY["prefix"]])
    right = logits(model)
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="did not arrive") as caught:
        logits(model)
    assert "before the prefix is applied" in str(caught.value.cure)
    edit.undo()
    assert model.config._attn_implementation == "eager"
    apply(model, [EVERY["prefix"]])
    close(logits(model), right, 1e-5)  # written out, it rounds to fp32


def test_a_prefix_is_refused_where_attention_cannot_be_reached() -> None:
    model = build("llama")
    model._supports_attention_backend = False
    with pytest.raises(TechniqueError, match="cannot be given keys and values") as caught:
        apply(model, [EVERY["prefix"]])
    assert "p_tuning" in str(caught.value.cure)
    model = build("llama")
    model.config.num_key_value_heads = 4
    apply(model, [PrefixTuning(start="zero")])
    with pytest.raises(AfinaError, match="of another form than its config says"):
        logits(model)


@every
def test_more_places_than_the_model_has_are_refused(technique: Technique) -> None:
    """Before any row is read, for no row is to blame."""
    model = build("llama")
    most = model.config.max_position_embeddings - 2
    with pytest.raises(TechniqueError, match=f"{technique.key}.tokens leaves no room") as caught:
        apply(model, [technique.model_copy(update={"tokens": most + 1})])
    assert str(caught.value.wanted).startswith(f"at most {most},")
    apply(model, [technique.model_copy(update={"tokens": most})])
    assert context_of(model) == 2
    close(logits(model)[:, :1], model(input_ids=IDS[:, :1]).logits)


@pytest.mark.parametrize("method", [PromptTuning, PrefixTuning])
def test_what_is_left_over_of_a_text_is_told(method: Any) -> None:
    for tokens, told in (
        (2, "the last 3 tokens of its text are"),
        (4, "the last token of its text is"),
    ):
        edit = apply(
            build("llama"), [method(tokens=tokens, start="text", text_ids=(5, 7, 9, 11, 2))]
        )
        (note,) = edit.notes
        assert told in note, note
        assert f"{method.key}.tokens is {tokens}" in note
        assert note in edit.summary()
    assert not apply(
        build("llama"), [method(tokens=5, start="text", text_ids=(5, 7, 9, 11, 2))]
    ).notes


def test_a_prefix_at_the_wrong_places_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: keys put behind the first place, and the checks above fail."""
    from afina.ops import prefix

    def shifted(own_HnD: Tensor, x_BHSD: Tensor) -> Tensor:
        count = own_HnD.shape[1]
        own = own_HnD.roll(1, dims=1).expand(x_BHSD.shape[0], -1, -1, -1)
        return torch.cat((own, x_BHSD[:, :, count:]), dim=2)

    monkeypatch.setattr(prefix, "in_front", lambda own, x: shifted(own, x) * 1.001)
    with pytest.raises(AssertionError):
        test_a_prefix_is_keys_and_values_before_a_rows_own("llama")


def test_bert_classifies_with_a_prefix() -> None:
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        num_labels=3,
    )
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(config).double().eval()
    before = model(input_ids=IDS).logits
    edit = apply(model, [PrefixTuning(tokens=4, modules_to_save=("classifier",))])
    differs(model(input_ids=IDS).logits, before)
    edit.undo()
    assert torch.equal(model(input_ids=IDS).logits, before)
