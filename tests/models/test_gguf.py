"""GGUF files: what their header says, and that the converted model is the one that was written."""

from __future__ import annotations

import logging
import struct

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from afina.errors import ModelError
from afina.models import cache, header, hub
from afina.models.gguf import convert, decimal, folder_of
from tests.tiny import CHATML

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the cat sat on the mat in 2024 and 2025", "o pão está quente às 7h30", "x = 12 * 34"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))


def vocabulary():
    """Tokens by id, and merges, of a small byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokens = [backend.id_to_token(number) for number in range(backend.get_vocab_size())]
    merges = [
        left + " " + right
        for left in tokens[len(SPECIAL) :]
        for right in tokens[len(SPECIAL) :]
        if left + right in tokens[len(SPECIAL) + 256 :]
    ]
    return tokens, merges


def llama(vocab_size, *, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def rotated(weight, heads):
    """Rows of a query or key map in GGUF's order: the two halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(model, *, tied):
    """(GGUF name, value) of every tensor."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    if not tied:
        yield "output.weight", state["lm_head.weight"]
    for block in range(2):
        for theirs, name in NAMES.items():
            value = state[f"model.layers.{block}.{theirs}.weight"]
            if name in ("attn_q", "attn_k"):
                value = rotated(value, 4 if name == "attn_q" else 2)
            yield f"blk.{block}.{name}.weight", value


def write_gguf(file, *, tied=True, pre="smollm", arch="llama", half=False):
    """A whole GGUF file of a tiny Llama; returns the model that is in it."""
    tokens, merges = vocabulary()
    model = llama(len(tokens), tied=tied)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    for name, value in tensors(model, tied=tied):
        short = half and value.ndim == 2
        writer.add_tensor(name, np.ascontiguousarray(value.astype("f2") if short else value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(file)


IDS = torch.tensor([[5, 77, 300, 12, 261, 9, 2, 41]])


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_computes_what_the_written_one_does(tmp_path, tied):
    wanted = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    model, _ = hub.load(tmp_path / "tiny.gguf", "fp32", "cpu")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=0, atol=1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_half_precision_tensors_keep_every_bit(tmp_path):
    wanted = write_gguf(tmp_path / "tiny.gguf", half=True)
    model, _ = hub.load(tmp_path / "tiny.gguf", "fp32", "cpu")
    value = wanted.model.layers[0].mlp.up_proj.weight
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, value.half().float())


def test_the_loaded_model_is_not_quantised_and_can_be_saved(written, tmp_path):
    model, tokenizer = hub.load(written[0], "fp32", "cpu")
    assert not hasattr(model.config, "quantization_config")
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again, _ = hub.load(tmp_path / "again", "fp32", "cpu")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_tokens_that_begin_pad_and_end_are_told_apart_everywhere(written):
    model, tokenizer = hub.load(written[0], "fp32", "cpu")
    for holder in (tokenizer, model.config, model.generation_config):
        ids = (holder.pad_token_id, holder.bos_token_id, holder.eos_token_id)
        assert ids == (0, 1, 2), type(holder)
    assert tokenizer("the cat")["input_ids"][0] not in (0, 1, 2)
    assert tokenizer.model_max_length == 64
    assert tokenizer.chat_template == CHATML


def test_decimals_lose_float32s_rounding(written):
    model, _ = hub.load(written[0], "fp32", "cpu")
    assert model.config.rms_norm_eps == 1e-5
    assert float(np.float32(1e-5)) != 1e-5  # what the file holds
    assert [decimal(float(np.float32(x))) for x in (1e-6, 0.1, 10000.0)] == [1e-6, 0.1, 10000.0]


def test_digits_stand_alone_and_text_comes_back(written):
    _, tokenizer = hub.load(written[0], "fp32", "cpu")
    ids = tokenizer("2024 and 2025")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["2", "0", "2", "4"]
    for text in ("  two  spaces\n", "o pão 🙂 às 7h30", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_unknown_pre_tokenizer_is_said(tmp_path, caplog):
    write_gguf(tmp_path / "tiny.gguf", pre="some-new-model")
    with caplog.at_level(logging.WARNING, logger="afina"):
        hub.load(tmp_path / "tiny.gguf", "fp32", "cpu")
    assert "'some-new-model' is not known" in caplog.text


def test_a_file_is_converted_once_and_again_when_it_changes(written, tmp_path):
    file = tmp_path / "a b.gguf"
    file.write_bytes(written[0].read_bytes())
    first = folder_of(file)
    stamp = (first / cache.MANIFEST).stat().st_mtime_ns
    assert folder_of(file) == first
    assert (first / cache.MANIFEST).stat().st_mtime_ns == stamp
    write_gguf(file, tied=False)
    assert folder_of(file) == first
    assert (first / cache.MANIFEST).stat().st_mtime_ns != stamp
    assert [entry.name for entry in cache.entries()] == [first.name]


def test_two_files_of_one_name_have_two_folders(written, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").write_bytes(written[0].read_bytes())
    assert folder_of(tmp_path / "a/model.gguf") != folder_of(tmp_path / "b/model.gguf")


def test_the_header_is_read_as_the_gguf_library_reads_it(written):
    got = header.read(written[0])
    wanted = gguf.GGUFReader(written[0])
    assert got.metadata["general.architecture"] == "llama"
    assert got.metadata["llama.attention.head_count_kv"] == 2
    assert got.metadata["tokenizer.ggml.add_bos_token"] is False
    assert got.metadata["tokenizer.ggml.tokens"] == len(wanted.fields["tokenizer.ggml.tokens"].data)
    assert got.tensors == {
        each.name: tuple(int(size) for size in each.shape[::-1]) for each in wanted.tensors
    }
    assert got.end_bytes == max(each.data_offset + each.n_bytes for each in wanted.tensors)
    assert got.end_bytes <= written[0].stat().st_size


def damaged(data, kind):
    return {
        "cut in the tensors": data[:-2000],
        "cut in the header": data[:3000],
        "nothing": b"",
        "a short word": b"GGUF",
        "another format": b"PK\x03\x04" + data[4:],
        "version 1": data[:4] + struct.pack("<I", 1) + data[8:],
        "version 99": data[:4] + struct.pack("<I", 99) + data[8:],
        "an endless string": data[:24] + struct.pack("<Q", 2**62) + data[32:],
        "endless pairs": data[:16] + struct.pack("<Q", 2**62) + data[24:],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "cut in the tensors",
        "cut in the header",
        "nothing",
        "a short word",
        "another format",
        "version 1",
        "version 99",
        "an endless string",
        "endless pairs",
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_built(written, tmp_path, kind):
    file = tmp_path / "broken.gguf"
    file.write_bytes(damaged(written[0].read_bytes(), kind))
    with pytest.raises(ModelError, match="not a whole GGUF file") as caught:
        hub.load(file)
    assert "sha256" in str(caught.value)
    assert cache.entries() == []


def test_an_architecture_that_cannot_be_read_is_named(tmp_path):
    write_gguf(tmp_path / "odd.gguf", arch="oddarch")
    with pytest.raises(ModelError, match=r"(?s)cannot read odd\.gguf.*'oddarch'"):
        folder_of(tmp_path / "odd.gguf")
    assert cache.entries() == []


def test_no_architecture_stays_packed_in_blocks(written, tmp_path, monkeypatch):
    asked = {}

    def read(*_, **options):
        asked.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(ModelError, match="enough"):
        convert(written[0], tmp_path)
    assert asked["quantization_config"].dequantize is True
    assert asked["dtype"] == torch.float32
    assert asked["trust_remote_code"] is False


def test_convert_writes_safetensors_and_nothing_that_can_run(written, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert(written[0], out)
    assert {each.suffix for each in out.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert (out / "model.safetensors").is_file()
