"""What a name resolves to, what is loaded from it, and what is refused with a cure."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors as theirs
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, LlamaConfig, T5Config
from transformers.utils import logging as transformers_logging

from afina.errors import ModelError
from afina.models import hub, locate, remote
from afina.models.hub import load, resolve, task_of
from afina.models.locate import MODEL, TUNED, nearby
from tests.tiny import byte_tokenizer, tiny_llama


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A saved tiny Llama and the model itself."""
    folder = tmp_path_factory.mktemp("causal")
    model = tiny_llama(dtype=torch.float32)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A saved tiny BERT."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=260, intermediate_size=48, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_gives_the_model_that_was_saved(causal):
    folder, wanted = causal
    model, tokenizer = load(folder, "fp32", "cpu")
    assert type(model) is type(wanted)
    assert not model.training
    assert model.name_or_path == str(folder)
    for name, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert tokenizer.pad_token_id == model.config.pad_token_id == 257
    assert tokenizer("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_the_one_asked_for(causal, dtype):
    model, _ = load(str(causal[0]), dtype, "cpu")
    assert {value.dtype for value in model.parameters()} == {dtype}


def test_the_device_decides_when_nobody_else_does(causal, monkeypatch):
    chosen = hub.choose("cpu", "bf16")
    monkeypatch.setattr(hub, "choose", lambda device, dtype: chosen)
    assert load(causal[0], None, "cpu")[0].dtype == torch.bfloat16


def test_an_encoder_is_loaded_as_one(encoder):
    model, _ = load(encoder, "fp32", "cpu")
    out = model(torch.tensor([[1, 2, 3]]))
    assert out.last_hidden_state.shape == (1, 3, 32)
    assert not hasattr(out, "logits")


@pytest.mark.parametrize("which", ["causal", "encoder"])
def test_a_number_of_labels_gives_a_classifier(which, causal, encoder):
    folder = causal[0] if which == "causal" else encoder
    model, _ = load(folder, "fp32", "cpu", num_labels=5)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 5)
    assert model.config.pad_token_id == 257  # how a decoder finds the last token of a row


def test_a_new_head_is_the_same_each_time_and_draws_nothing(encoder):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    first, _ = load(encoder, "fp32", "cpu", num_labels=3)
    assert torch.equal(torch.rand(3), wanted)
    second, _ = load(encoder, "fp32", "cpu", num_labels=3)
    assert torch.equal(first.classifier.weight, second.classifier.weight)
    assert first.classifier.weight.abs().max() > 0


def test_loading_shows_no_bars_and_leaves_the_switch_as_it_was(causal, capfd):
    transformers_logging.enable_progress_bar()
    load(causal[0], "fp32", "cpu")
    assert capfd.readouterr().err == ""
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    ("config", "architecture", "labels", "task"),
    [
        (LlamaConfig(), "LlamaForCausalLM", None, "causal"),
        (GPT2Config(), "GPT2LMHeadModel", None, "causal"),
        (LlamaConfig(), None, None, "causal"),
        (LlamaConfig(), "LlamaForCausalLM", 2, "classification"),
        (BertConfig(), "BertModel", None, "encoder"),
        (BertConfig(), "BertForMaskedLM", None, "encoder"),
        (BertConfig(), "BertForSequenceClassification", None, "classification"),
        (BertConfig(), None, None, "encoder"),
        (LlamaConfig(), "LlamaModel", None, "encoder"),
    ],
)
def test_the_task_is_read_from_the_config(config, architecture, labels, task):
    config.architectures = None if architecture is None else [architecture]
    assert task_of(config, labels) == task


def test_an_encoder_decoder_is_refused():
    config = T5Config()
    config.architectures = ["T5ForConditionalGeneration"]
    with pytest.raises(ModelError, match="causal language models and encoders"):
        task_of(config)


def test_a_model_that_sees_what_it_should_predict_is_refused():
    config = BertConfig()
    config.architectures = ["BertLMHeadModel"]
    with pytest.raises(ModelError, match="sees the tokens that it should predict"):
        task_of(config)
    config.is_decoder = True
    assert task_of(config) == "causal"


def copy(folder, target, *without):
    shutil.copytree(folder, target)
    for name in without:
        (target / name).unlink()
    return target


def refused(source, **options):
    with pytest.raises(ModelError) as caught:
        load(source, "fp32", "cpu", **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_never_read(causal, tmp_path, name):
    folder = copy(causal[0], tmp_path / "m", "model.safetensors")
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    text = refused(folder)
    assert "no safetensors weights" in text
    assert name in text
    assert "can run code" in text


def test_safetensors_win_over_a_pickle_beside_them(causal, tmp_path):
    folder = copy(causal[0], tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    model, _ = load(folder, "fp32", "cpu")
    assert torch.equal(model.lm_head.weight, causal[1].lm_head.weight)


def test_code_beside_a_model_is_never_run(causal, tmp_path):
    folder = copy(causal[0], tmp_path / "m")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    text = refused(folder)
    assert "code of its own, which afina never runs" in text
    assert "model type 'evil', with evil.py" in text
    assert not (tmp_path / "pwned").exists()


def test_missing_parts_are_named(causal, tmp_path):
    assert "no weights at all" in refused(copy(causal[0], tmp_path / "w", "model.safetensors"))
    assert "no config.json" in refused(copy(causal[0], tmp_path / "c", "config.json"))
    gone = copy(causal[0], tmp_path / "t", "tokenizer.json", "tokenizer_config.json")
    assert "tokenizer cannot be loaded" in refused(gone)


def test_a_tensor_that_is_missing_or_misshapen_is_never_drawn_at_random(causal, tmp_path):
    folder = copy(causal[0], tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {key: value for key, value in state.items() if key != lost}, folder / "model.safetensors"
    )
    text = refused(folder)
    assert "1 tensor of the model is not in its file" in text
    assert lost in text
    assert lost in refused(folder, num_labels=2)
    save_file(state | {lost: state[lost][:5].clone()}, folder / "model.safetensors")
    assert f"{lost} ((5, 32) where the config says (48, 32))" in refused(folder)


def test_another_number_of_labels_is_a_new_head(encoder, tmp_path):
    first, tokenizer = load(encoder, "fp32", "cpu", num_labels=3)
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path, "fp32", "cpu")
    assert torch.equal(again.classifier.weight, first.classifier.weight)
    other, _ = load(tmp_path, "fp32", "cpu", num_labels=7)
    assert other.classifier.weight.shape == (7, 32)
    assert torch.equal(
        other.bert.embeddings.word_embeddings.weight, first.bert.embeddings.word_embeddings.weight
    )


def test_a_folder_that_is_something_else_says_what(tmp_path):
    adapter, run, empty = (tmp_path / name for name in ("adapter", "run", "empty"))
    for folder in (adapter, run / "adapter", empty):
        folder.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    assert "afina.load_adapter" in refused(adapter)
    assert f"afina chat {run}" in refused(run)
    assert "nothing" in refused(empty)


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "nowhere.gguf", "a/b/c", "~/m"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(remote, "fetch", lambda *_, **__: pytest.fail("asked the Hub"))
    assert "no such file or folder" in refused(name)


def test_a_single_file_must_be_gguf(causal):
    text = refused(causal[0] / "model.safetensors")
    assert f"give the folder: {causal[0]}" in text


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M-Instruct", "minilm", "smolm2-135m"])
def test_a_misspelt_demo_is_answered_with_the_nearest(name):
    text = refused(name)
    assert "unknown demo model" in text
    assert "did you mean" in text


def test_revisions_are_of_hub_ids_only(causal):
    assert "has revisions" in refused(causal[0], revision="main")
    assert "has revisions" in refused("smollm2-135m", revision="main")


def test_a_hub_id_is_fetched_with_its_options_and_checked(causal, tmp_path, monkeypatch):
    asked = {}
    folder = copy(causal[0], tmp_path / "snapshot", "model.safetensors")

    def snapshot(repo, **options):
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    options = {"revision": "v1", "token": "hf_x", "offline": False}
    with pytest.raises(ModelError, match="no weights at all"):
        resolve("owner/name", **options)
    kept = {key: asked[key] for key in ("repo", "revision", "token", "local_files_only")}
    assert kept == {
        "repo": "owner/name",
        "revision": "v1",
        "token": "hf_x",
        "local_files_only": False,
    }
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked["allow_patterns"])
    shutil.copy(causal[0] / "model.safetensors", folder)
    assert resolve("owner/name", **options) == folder


def test_offline_says_how_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    text = refused("owner/name", offline=True, revision="v2")
    assert "no such folder or file here" in text
    assert "owner/name at v2" in text
    assert "afina models get owner/name" in text


ANSWER: Any = SimpleNamespace(headers={}, request=None)


def response(kind):
    return kind("said the Hub", response=ANSWER)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: response(theirs.GatedRepoError), ["gated", "hf auth login"]),
        (lambda: response(theirs.RepositoryNotFoundError), ["no such model", "or it is private"]),
        (lambda: response(theirs.RevisionNotFoundError), ["no such revision", "o/n at v9"]),
        (lambda: response(theirs.HfHubHTTPError), ["did not give such a model", "said the Hub"]),
        (lambda: theirs.OfflineModeIsEnabled("off"), ["offline mode", "HF_HUB_OFFLINE"]),
        (lambda: theirs.HFValidationError("bad id"), ["did not give", "bad id"]),
        (lambda: OSError("disk full"), ["did not give", "disk full"]),
    ],
)
def test_every_failure_of_the_hub_has_its_cure(error, words, monkeypatch):
    raised = error()

    def snapshot(*_, **__):
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    text = refused("o/n", revision="v9", offline=False)
    for word in [*words, "cure:"]:
        assert word in text


def test_no_network_is_not_called_offline_mode(monkeypatch):
    def snapshot(*_, **__):
        raise theirs.LocalEntryNotFoundError("cannot reach it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert "check the network" in refused("o/n", offline=False)
    assert "where offline mode looks" in refused("o/n", offline=True)


NEAR = [
    ("runs/cals-001", TUNED, ["runs/calls-001"]),
    ("rnus/calls-001", TUNED, ["runs/calls-001"]),
    ("runs/calls-001/adaptr", TUNED, ["runs/calls-001/adapter"]),
    ("runs/calls-01", MODEL, []),
    ("models/smoll", MODEL, ["models/small"]),
    ("models/small.ggf", MODEL, ["models/small", "models/small.gguf"]),
    ("models/smoll", TUNED, []),
    ("models/small", MODEL, []),
    ("owner/calls-001", TUNED, []),
    ("runs/something-else", TUNED, []),
    ("models/small.gguf/x", MODEL, []),
    ("a\0b", TUNED, []),
]


@pytest.mark.parametrize(("name", "marks", "found"), NEAR)
def test_a_slip_is_answered_with_what_lies_here(name, marks, found, tmp_path, monkeypatch):
    for path in ("runs/calls-001/config.yaml", "runs/calls-001/adapter/adapter_config.json",
                 "runs/calls-002.txt", "models/small/config.json", "models/small.gguf",
                 "models/smalls/nothing"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    assert sorted(nearby(name, marks)) == found
    assert sorted(nearby(str(tmp_path / name), marks)) == [str(tmp_path / one) for one in found]
    if found and marks == MODEL:
        said = refused(name, offline=True)
        assert "did you mean models/small" in said
        assert "where offline mode looks" in said
        assert "did you mean models/small" in refused(f"./{name}")


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path, monkeypatch):
    (tmp_path / "one.gguf").touch()
    monkeypatch.setattr(
        locate, "gguf", SimpleNamespace(folder_of=lambda file: file.with_suffix(""))
    )
    assert resolve(tmp_path) == tmp_path / "one"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelError, match=r"(?s)2 GGUF files.*name one: .*one\.gguf"):
        resolve(tmp_path)
