"""The demo model after conversion, against what llama.cpp made of the same file (`bench/llamacpp.py --write`)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

from afina.models.hub import load

DATA = Path(__file__).parent / "data"
TOKENS = json.loads((DATA / "tokens.json").read_text("utf-8"))["strings"]
PERPLEXITY = json.loads((DATA / "perplexity.json").read_text("utf-8"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo():
    """The model in fp32 and its tokenizer; fetched if need be."""
    return load("smollm2-135m", "fp32", "cpu")


def differing(tokenizer):
    """The texts that `tokenizer` reads otherwise than llama.cpp does."""
    options = {"add_special_tokens": False}
    return [
        each["text"]
        for each in TOKENS
        if tokenizer(each["text"], **options)["input_ids"] != each["special"]
        or tokenizer(each["text"], split_special_tokens=True, **options)["input_ids"]
        != each.get("plain", each["special"])
    ]


def test_every_text_has_llama_cpps_tokens(demo):
    assert len(TOKENS) >= 200
    assert sum("plain" in each for each in TOKENS) >= 10  # texts that hold marks, read both ways
    assert differing(demo[1]) == []


def test_without_the_repair_numbers_would_differ(demo, tmp_path):
    demo[1].save_pretrained(tmp_path)
    broken = type(demo[1]).from_pretrained(tmp_path)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    broken.backend_tokenizer.pre_tokenizer = plain
    assert {" 5 6  7", "½ of ¾", "a  1b"} <= set(differing(broken))
    assert "Hello, world!" not in differing(broken)


def test_every_text_comes_back_from_its_tokens(demo):
    for each in TOKENS:
        assert demo[1].decode(each["special"]) == each["text"]


def test_perplexity_is_llama_cpps_within_one_per_cent(demo):
    model, tokenizer = demo
    text = (DATA / "english.txt").read_text("utf-8")
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    assert ids.numel() == PERPLEXITY["tokens"] >= 1000
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert math.exp(loss) == pytest.approx(PERPLEXITY["perplexity"], rel=0.01)


def test_the_tied_head_is_one_tensor_and_the_ids_agree(demo):
    model, tokenizer = demo
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for holder in (tokenizer, model.config, model.generation_config):
        assert (holder.pad_token_id, holder.bos_token_id, holder.eos_token_id) == (0, 1, 2)
    assert not hasattr(model.config, "quantization_config")


def test_the_sentence_encoder_knows_what_is_alike():
    model, tokenizer = load("minilm-l6-v2", "fp32", "cpu")
    texts = ["a cat sleeps on the mat", "the kitten is napping on a rug", "shares fell on Monday"]
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states_BTD = model(**rows).last_hidden_state
    kept_BT1 = rows["attention_mask"][..., None]
    means_BD = torch.nn.functional.normalize((states_BTD * kept_BT1).sum(1) / kept_BT1.sum(1))
    alike = means_BD @ means_BD.T
    assert alike[0, 1] > 0.5
    assert alike[0, 2] < 0.2
