"""A model that is built without values and filled afterwards is the one that is loaded whole, down to the last bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModel, PreTrainedTokenizerFast

from afina.adapters.fingerprint import base_fingerprint
from afina.models.hub import load
from afina.models.in_parts import NotInPartsError, load_in_parts
from afina.parallel.parts import materialise, parts_of, placed
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.prefix import PrefixTuning
from afina.train.filling import Filling, refuse_whole_start
from afina.train.state import of_digests, starting_weights
from afina.tree import Edit, Technique
from afina.tree.twin import twin_of
from tests import battery
from tests.tiny import byte_tokenizer, tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with one of the battery's models, in fp32."""

    @functools.cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        model = battery.build(name, torch.float32)
        if name == "bert":  # whose files are of the encoder
            torch.manual_seed(0)
            model = AutoModel.from_config(model.config)
        model.save_pretrained(folder, max_shard_size="20KB")
        _small_tokenizer().save_pretrained(folder)
        return folder

    return made


def _small_tokenizer() -> Any:
    """One for the battery's few tokens."""
    words = {f"w{number}": number for number in range(battery.VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", pad_token="w2")


def filled(folder: Path, techniques: list[Technique], dtype: str = "fp32") -> tuple[Edit, Filling]:
    model, _, unread = load_in_parts(folder, dtype)
    edit = apply(model, techniques, seed=4, undoable=False)
    filling = Filling(edit, twin_of(edit), unread, 4)
    places = placed(model, lambda name: True)
    materialise(model, places, CPU)
    filling.fill(parts_of(model, places), CPU)
    filling.digest_in_place(0, 1)
    return edit, filling


def refuse_other(edit: Edit, whole: Edit) -> None:
    """Asserts that two edited models are the same in every tensor, and in what their parts note."""
    for kind in ("named_parameters", "named_buffers"):
        found: dict[str, Any] = dict(getattr(edit.model, kind)(remove_duplicate=False))
        wanted: dict[str, Any] = dict(getattr(whole.model, kind)(remove_duplicate=False))
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert not tensor.is_meta, name
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name
            assert tensor.requires_grad == wanted[name].requires_grad, name
    assert edit.trainable().keys() == whole.trainable().keys()
    assert {id(p) for p in edit.in_place.values()} <= {id(p) for p in edit.model.parameters()}
    for name, delta in edit.deltas.items():
        for one, other in zip(delta.modules(), whole.deltas[name].modules(), strict=True):
            assert _noted(one) == _noted(other), name


def _noted(module: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {n: v for n, v in vars(module).items() if isinstance(v, plain) and n != "training"}


IN_FRONT = ("prompt", "prefix", "p_tuning")
"""Keys of techniques that an encoder does not take."""

KINDS = [
    case
    for case in battery.CASES
    if case.model in ("llama", "llama_tied")
    or (case.model == "bert" and case.technique.key not in IN_FRONT)
]


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_every_technique_starts_as_in_one_process(folder_of: Any, case: Any) -> None:
    folder = folder_of(case.model)
    model, _ = load(folder, "fp32")
    if refuse_whole_start(model, [case.technique]):
        pytest.skip("it starts from a pass of the whole model")
    whole = apply(model, [case.technique], seed=4, undoable=False)
    edit, filling = filled(folder, [case.technique])
    refuse_other(edit, whole)
    assert of_digests(filling.digests) == starting_weights(whole)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_models_answer_as_those_that_were_loaded_whole(
    folder_of: Any, name: str, dtype: str
) -> None:
    folder = folder_of(name)
    model, tokenizer = load(folder, dtype)
    empty, same_tokenizer, unread = load_in_parts(folder, dtype)
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert empty.config.to_dict() == model.config.to_dict()
    assert tokenizer.get_vocab() == same_tokenizer.get_vocab()
    assert base_fingerprint(empty, read=unread.read) == base_fingerprint(model)
    edit, _ = filled(folder, [Full()], dtype)
    ids = torch.tensor([[5, 9, 3, 7]])
    assert torch.equal(edit.model(ids)[0], model(ids)[0])


def test_a_part_of_a_tensor_is_read_in_the_models_dtype(folder_of: Any) -> None:
    model, _ = load(folder_of("llama"), "bf16")
    _, _, unread = load_in_parts(folder_of("llama"), "bf16")
    name = "model.layers.1.mlp.down_proj.weight"
    weight = model.get_parameter(name)
    assert torch.equal(unread.read(name), weight)
    assert torch.equal(unread.read(name, ((3, 9), (2, 11))), weight[3:9, 2:11])
    assert unread.read(name, ((0, 2), (0, 1))).dtype == torch.bfloat16


def test_what_is_not_there_name_for_name_is_told(folder_of: Any, tmp_path: Path) -> None:
    with pytest.raises(NotInPartsError, match=r"converted|its files have"):
        load_in_parts(folder_of("mixtral"), "fp32")
    with pytest.raises(NotInPartsError, match="its files have no"):
        load_in_parts(folder_of("llama"), "fp32", task="classification", num_labels=3)
    model = tiny_llama(dtype=torch.float32)
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), "more": torch.zeros(1)})
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NotInPartsError, match="its files have more too"):
        load_in_parts(tmp_path, "fp32")


def test_a_start_that_takes_the_whole_model_is_named() -> None:
    model = tiny_llama()
    assert refuse_whole_start(model, [LoRA(rank=2, start="pissa"), DoRA(rank=2)]) is None
    assert refuse_whole_start(model, [PrefixTuning(tokens=2, start="zero")]) is None
    told = refuse_whole_start(model, [LoRA(rank=2), PrefixTuning(tokens=2)])
    assert told == "prefix starts from a pass of the whole model"
