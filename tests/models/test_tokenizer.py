"""Repairs: pad never ends an answer, and numbers are cut as the model has learnt them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from afina.errors import ModelError
from afina.models.tokenizer import CONTROL_BYTES, check_vocabulary, repair_pad, repair_pre
from tests.tiny import byte_tokenizer


def model(*, eos=None, rows=1000):
    """What `repair_pad` sees of a model."""
    embedding = SimpleNamespace(weight=SimpleNamespace(shape=(rows, 4)))
    return SimpleNamespace(
        get_input_embeddings=lambda: embedding,
        config=SimpleNamespace(pad_token_id=None),
        generation_config=SimpleNamespace(eos_token_id=eos, pad_token_id=None),
    )


def words(tokens, **special):
    """A tokenizer of whole words."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_a_good_pad_is_kept_and_the_model_told():
    tokenizer, told = byte_tokenizer(), model()
    repair_pad(told, tokenizer)
    assert tokenizer.pad_token == "<|pad|>"
    assert told.config.pad_token_id == told.generation_config.pad_token_id == 257


@pytest.mark.parametrize("pad", ["</s>", None])
def test_pad_that_ends_answers_or_is_missing_gives_way(pad):
    tokenizer = words(["<unk>", "<s>", "</s>", "<|endoftext|>"], eos_token="</s>", pad_token=pad)
    repair_pad(model(), tokenizer)
    assert tokenizer.pad_token_id == 3


def test_a_pad_behind_the_embedding_gives_way(caplog):
    tokenizer = words(["<unk>", "</s>", "word"], eos_token="</s>", pad_token="<added>")
    assert tokenizer.pad_token_id == 3
    check_vocabulary("here", model(rows=3), tokenizer)
    assert (
        "here: the model has no embedding for 1 added token of its tokenizer: <added>"
        in caplog.text
    )
    repair_pad(model(rows=3), tokenizer)
    assert tokenizer.pad_token == "<unk>"


def test_more_ordinary_tokens_than_the_model_has_is_refused(caplog):
    tokenizer = words(["<unk>", "</s>", "word", "another"], eos_token="</s>")
    with pytest.raises(
        ModelError, match="the tokenizer knows more tokens than the model"
    ) as caught:
        check_vocabulary("here", model(rows=3), tokenizer)
    assert "here: ids up to 3, and 3 rows of the embedding" in str(caught.value)
    check_vocabulary("here", model(rows=4), tokenizer)
    assert not caplog.text


def test_every_stop_token_of_the_generation_config_is_avoided():
    tokenizer = words(
        ["<unk>", "</s>", "<|endoftext|>", "word"], eos_token="</s>", pad_token="<|endoftext|>"
    )
    repair_pad(model(eos=[1, 2]), tokenizer)
    assert tokenizer.pad_token == "<unk>"


def test_the_templates_end_of_turn_is_avoided():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    repair_pad(model(), tokenizer)
    assert tokenizer.pad_token == "<|pad|>"


def test_a_special_token_without_use_comes_before_one_with_use():
    tokenizer = words(["a", "</s>"], eos_token="</s>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<tool>", "<|reserved_special_token_0|>"]}
    )
    repair_pad(model(), tokenizer)
    assert tokenizer.pad_token == "<|reserved_special_token_0|>"


def test_a_byte_vocabulary_gives_a_control_byte_that_changes_no_text(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|end|>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    repair_pad(model(), tokenizer)
    assert tokenizer.pad_token == CONTROL_BYTES[0]
    assert ord(CONTROL_BYTES[0]) - 0x100 == 0x14  # how the byte alphabet spells byte 0x14
    tokenizer.save_pretrained(tmp_path)
    reread = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Ātrā āĀ õÿ", "naïve ção 123", "\x00\x01\n"):
        assert reread(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_when_every_token_ends_answers_there_is_no_pad():
    tokenizer = words(["<unk>", "</s>"], eos_token="</s>")
    with pytest.raises(ModelError, match="no token is left"):
        repair_pad(model(eos=[0, 1]), tokenizer)


def pieces(tokenizer, text):
    return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def plain():
    """What transformers makes of a GGUF file whose pre-tokenizer it does not know."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_numbers_are_cut_digit_by_digit_again():
    tokenizer = plain()
    assert pieces(tokenizer, "in 2024, x²") == ["in", "Ġ2024", ",", "Ġx", "Â²"]  # the fault
    repair_pre(tokenizer, "smollm")
    assert pieces(tokenizer, "in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert pieces(tokenizer, "it's ¾") == ["it", "'s", "Ġ", "Â¾"]


@pytest.mark.parametrize("pre", ["gpt-2", "mpt"])
def test_names_that_mean_gpt2_are_left_in_silence(pre, caplog):
    tokenizer = plain()
    repair_pre(tokenizer, pre)
    assert pieces(tokenizer, "in 2024") == ["in", "Ġ2024"]
    assert caplog.records == []


@pytest.mark.parametrize("pre", ["unheard-of", "default", None])
def test_unknown_names_are_left_with_a_warning(pre, caplog):
    tokenizer = plain()
    with caplog.at_level(logging.WARNING):
        repair_pre(tokenizer, pre)
    assert pieces(tokenizer, "in 2024") == ["in", "Ġ2024"]
    assert repr(pre) in caplog.text


def test_what_transformers_knows_is_left_alone(caplog):
    tokenizer = plain()
    known = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    tokenizer.backend_tokenizer.pre_tokenizer = known
    repair_pre(tokenizer, "qwen2")
    assert pieces(tokenizer, "in 2024") == ["in", "2024"]
    assert caplog.records == []
