"""Loading is all or nothing, on the right base, and says so; in part it applies what fits, and lists what does not."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from afina.adapters import files
from afina.adapters.fingerprint import base_fingerprint
from afina.errors import AdapterError
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.tree import Edit
from tests import battery
from tests.adapters.kit import (
    CONFIG,
    RECORD,
    WEIGHTS,
    edit_config,
    edit_tensors,
    peer,
    refused,
    rename,
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    return battery.llama(**changes).to(dtype).eval()


def trained(model: Any, **settings: Any) -> Edit:
    edit = apply(model, [LoRA(**({"rank": 4, "target": ("q_proj", "v_proj")} | settings))])
    battery.train(model, edit)
    return edit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    edit = trained(llama(), modules_to_save=("lm_head",))
    return files.save(edit, tmp_path / "adapter", base="org/tiny")


# --- the base -----------------------------------------------------------------------------------------------------


def test_all_of_it_is_applied_and_said(folder: Path) -> None:
    edit = files.load(llama(), folder)
    assert edit.notes == [
        f"adapter {folder}: applied 9 of 9 tensors",
        "its base is this model, by fingerprint",
    ]
    assert all(f"note: {note}" in edit.summary() for note in edit.notes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_base_in_another_type_is_the_base(folder: Path, dtype: torch.dtype) -> None:
    assert "its base is this model, by fingerprint" in files.load(llama(dtype), folder).notes


def test_other_weights_of_the_same_shapes_are_refused_by_name(folder: Path) -> None:
    """Names and shapes are all right, and the answers would be garbage."""
    other = llama()
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    other.config._name_or_path = "org/tiny-instruct"
    said = refused(folder, other)
    assert "was made for another base: wanted org/tiny (bf16:" in said
    assert "this is org/tiny-instruct (bf16:" in said
    assert "all its tensors (9) have a place here" in said
    assert base_fingerprint(other, without=("lm_head.weight",)) in said
    assert "--allow-partial" in said


def test_the_tensors_that_the_adapter_brings_are_no_matter(folder: Path) -> None:
    other = llama()
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert "its base is this model, by fingerprint" in files.load(other, folder).notes


def test_an_adapter_without_a_record_says_that_its_base_is_not_known(tmp_path: Path) -> None:
    peer("llama", tmp_path, dtype=torch.float32, target_modules=["q_proj"])
    edit = files.load(llama(), tmp_path)
    assert edit.notes[0] == f"adapter {tmp_path}: applied 4 of 4 tensors"
    assert "no fingerprint of its base" in edit.notes[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a table"),
        ('{"format": 2, "afina": "9.1"}', "written by afina 9.1"),
        ('{"format": 1}', "names no base"),
        ('{"format": 1, "base": {"fingerprint": 3}}', "names no base"),
        ('{"format": 1, "base": {"fingerprint": "x", "trained": "y"}}', "names no base"),
    ],
)
def test_a_record_that_cannot_be_read(folder: Path, text: str, said: str) -> None:
    (folder / RECORD).write_text(text, encoding="utf-8")
    assert said in refused(folder)


# --- the tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(folder: Path, value: float) -> None:
    edit_tensors(folder, lambda t: t[f"{Q}.lora_B.weight"].view(-1)[-1:].fill_(value))
    said = refused(folder)
    assert "NaN or infinity in 1 of 9 tensors" in said
    assert f"{Q}.lora_B.weight" in said


def test_whole_numbers_are_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(16, 4).int()}))
    assert "torch.int32" in refused(folder)


def test_empty_tensors_are_refused_both_ways(folder: Path, tmp_path: Path) -> None:
    """What a sharded model leaves behind when nobody gathers it."""
    edit_tensors(folder, lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(0)}))
    assert "1 empty tensor\n" in refused(folder)
    edit = trained(llama())
    edit.deltas["model.layers.0.self_attn.q_proj.lora"].b = torch.nn.Parameter(torch.ones(0))  # type: ignore[assignment]
    with pytest.raises(AdapterError, match="1 empty tensor\n"):
        files.save(edit, tmp_path / "new", base="tiny")
    assert not (tmp_path / "new").exists()


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Rewrites the header of a safetensors file, its length included."""

    def rewrite(whole: bytes) -> bytes:
        (length,) = struct.unpack("<Q", whole[:8])
        table = json.loads(whole[8 : 8 + length])
        change(table)
        text = json.dumps(table).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    return rewrite


def _grow(table: dict[str, Any]) -> None:
    table[f"{Q}.lora_A.weight"]["shape"] = [8, 16]


def _swap(table: dict[str, Any]) -> None:
    for name in (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"):
        table[name]["data_offsets"] = table[f"{Q}.lora_A.weight"]["data_offsets"]


def _beyond(table: dict[str, Any]) -> None:
    start, end = table[f"{Q}.lora_A.weight"]["data_offsets"]
    table[f"{Q}.lora_A.weight"]["data_offsets"] = [start + 1_000_000, end + 1_000_000]


def _narrow(table: dict[str, Any]) -> None:
    table[f"{Q}.lora_A.weight"]["dtype"] = "F16"


def _unknown(table: dict[str, Any]) -> None:
    table[f"{Q}.lora_A.weight"]["dtype"] = "F31"


def _forget(table: dict[str, Any]) -> None:
    del table[f"{Q}.lora_A.weight"]


def _negative(table: dict[str, Any]) -> None:
    table[f"{Q}.lora_A.weight"]["shape"] = [-4, -16]


def _huge(table: dict[str, Any]) -> None:
    table[f"{Q}.lora_A.weight"]["shape"] = [2**40, 2**40]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda b: b[:-1],
    "cut in the header": lambda b: b[:100],
    "empty": lambda b: b"",
    "text": lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    "a longer file": lambda b: b + b"\0" * 16,
    "a header longer than the file": lambda b: struct.pack("<Q", 2**40) + b[8:],
    "a header of one byte": lambda b: struct.pack("<Q", 1) + b[8:],
    "a header that is no JSON": lambda b: b[:8] + b"\xff" * 40 + b[48:],
    "another shape": header(_grow),
    "two tensors in one place": header(_swap),
    "a tensor beyond the end": header(_beyond),
    "another type": header(_narrow),
    "an unknown type": header(_unknown),
    "bytes of nobody": header(_forget),
    "a negative shape": header(_negative),
    "a shape that overflows": header(_huge),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_about_itself(folder: Path, lie: str) -> None:
    (folder / WEIGHTS).write_bytes(LIES[lie]((folder / WEIGHTS).read_bytes()))
    assert "damaged" in refused(folder)


def test_the_rewriting_of_a_header_alone_does_no_harm(folder: Path) -> None:
    """The control of the lies."""
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(header(lambda table: None)(whole))
    files.load(llama(), folder)


def test_a_folder_in_place_of_the_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert "damaged" in refused(folder)


class Trap:
    """Says when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("opened"),)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"])
def test_a_pickle_is_not_opened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / WEIGHTS).unlink()
    torch.save({"a": Trap()}, folder / name)  # noqa: TID251 - the trap must be a real one
    said = refused(folder)
    assert f"{name}, a pickle" in said
    assert not Path("opened").exists()
    torch.load(folder / name, weights_only=False)  # noqa: TID251 - the control: the trap works
    assert Path("opened").exists()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_types_stay_and_what_is_rounded_is_said(
    folder: Path, stored: torch.dtype, base: torch.dtype
) -> None:
    """The base keeps its type and the adapter trains on in fp32, whatever the file has."""
    edit_tensors(folder, lambda t: t.update({k: v.to(stored) for k, v in t.items()}))
    model = llama(base)
    edit = files.load(model, folder)
    added = {id(p) for delta in edit.deltas.values() for p in delta.parameters()}
    assert {p.dtype for p in model.parameters() if id(p) not in added} == {base}
    assert {p.dtype for p in model.parameters() if id(p) in added} == {torch.float32}
    # Of what the folder's fixture holds, fp64 adds no digit and the two short types lose none to fp32.
    exact = base is torch.float32 or stored is base
    said = [note for note in edit.notes if "rounded" in note]
    assert (said == []) == exact
    if said:
        assert said[0].startswith("rounded to this model's type, by at most ")
        assert said[0].endswith(
            ": 1 tensor that the file has in "
            f"{str(stored).removeprefix('torch.')} (base_model.model.lm_head.weight)"
        )
    for key, tensor in load_file(folder / WEIGHTS).items():
        assert torch.equal(files.peft_tensors(edit)[key], tensor.to(files.peft_tensors(edit)[key]))


# --- settings that are no settings --------------------------------------------------------------------------------

JUNK = (
    None,
    3,
    -1,
    0,
    2.5,
    "x",
    "(",
    True,
    [],
    [3],
    [None],
    ["x"],
    [["x"]],
    {},
    {"x": "y"},
    {"(": 1},
)
KEYS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save",
    "layers_to_transform", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "peft_type",
    "init_lora_weights", "use_dora", "base_model_name_or_path", "task_type",
)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"lora_alpha": NaN', "NaN is no number"),
        ('"lora_alpha": Infinity', "Infinity is no number"),
        ('"lora_alpha": 1e999', "1e999 is no number"),
        ('"r": 4, "r": 8', "given twice: r"),
        ('"x": ' + "[" * 100_000, "recursion"),
    ],
    ids=["nan", "inf", "overflow", "twice", "deep"],
)
def test_json_that_readers_take_in_different_ways(folder: Path, line: str, said: str) -> None:
    text = (folder / CONFIG).read_text(encoding="utf-8").replace("{", "{" + line + ",", 1)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    assert said in refused(folder)


@pytest.mark.parametrize("key", KEYS)
def test_junk_in_the_configuration_is_an_error_or_no_matter(folder: Path, key: str) -> None:
    good = (folder / CONFIG).read_text(encoding="utf-8")
    outcomes = set()
    for junk in JUNK:
        (folder / CONFIG).write_text(good, encoding="utf-8")
        edit_config(folder, **{key: junk})
        try:
            files.load(llama(), folder)
            outcomes.add("loaded")
        except AdapterError:
            outcomes.add("refused")
    free = key in ("base_model_name_or_path", "task_type")
    assert outcomes == {"loaded"} if free else "refused" in outcomes


# --- in part ------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[[Path], Any], set[str], int]] = {
    "a module that the model has not": (
        lambda f: rename(f, lambda k: k.replace("layers.1.self_attn.v", "layers.7.self_attn.v")),
        {"layers.7.self_attn.v_proj.lora_A.weight", "layers.1.self_attn.v_proj"},
        7,
    ),
    "another shape": (
        lambda f: edit_tensors(f, lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 9)})),
        {"layers.0.self_attn.q_proj.lora_A.weight: shape (4, 9)"},
        7,
    ),
    "half a change": (
        lambda f: edit_tensors(f, lambda t: t.pop(f"{Q}.lora_A.weight")),
        {"layers.0.self_attn.q_proj.lora_A.weight: the file lacks it"},
        7,
    ),
    "a whole module of another size": (
        lambda f: edit_tensors(
            f, lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(44, 16)})
        ),
        {"lm_head.weight: shape (44, 16)", "model.resize_token_embeddings(44)"},
        8,
    ),
    "a tensor that the configuration does not name": (
        lambda f: edit_config(f, target_modules=["q_proj"]),
        {"layers.0.self_attn.v_proj.lora_A.weight: adapter_config.json does not name this place"},
        5,
    ),
    "a base tensor that the configuration does not name": (
        lambda f: edit_tensors(
            f, lambda t: t.update({"base_model.model.model.norm.weight": torch.ones(16)})
        ),
        {"model.norm.weight: modules_to_save in adapter_config.json does not name it"},
        9,
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_what_does_not_fit_is_listed_and_the_rest_can_be_applied(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, listed, applied = PARTS[case]
    damage(folder)
    said = refused(folder)
    assert all(part in said for part in listed), said
    assert caplog.records == []
    model = llama()
    edit = files.load(model, folder, allow_partial=True)
    total = len(load_file(folder / WEIGHTS))
    assert edit.notes[0] == f"adapter {folder}: applied {applied} of {total} tensors"
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "IN PART" in warning.getMessage()
    for place in (warning.getMessage(), "\n".join(edit.notes)):
        assert all(part in place for part in listed), place
    assert len(files.peft_tensors(edit)) == applied
    for key, tensor in files.peft_tensors(edit).items():
        assert torch.equal(tensor, load_file(folder / WEIGHTS)[key])
    edit.undo()
    assert torch.equal(battery.logits(model), battery.logits(llama()))


def test_another_base_can_be_insisted_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = llama()
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    edit = files.load(other, folder, allow_partial=True)
    assert edit.notes[0].endswith("applied 9 of 9 tensors")
    assert "another base" in caplog.text
    assert any(note.startswith("other base: wanted org/tiny") for note in edit.notes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: edit_tensors(f, lambda t: t[f"{Q}.lora_B.weight"].fill_(float("nan"))),
        lambda f: (f / WEIGHTS).write_bytes(b"half"),
        lambda f: edit_config(f, use_dora=True),
        lambda f: edit_config(f, r="gone"),
        lambda f: edit_config(f, r=8),
        lambda f: rename(f, lambda k: k.replace("self_attn", "elsewhere")),
    ],
    ids=["nan", "damaged", "variant", "no rank", "another rank", "nothing fits"],
)
def test_what_cannot_be_insisted_on(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder)
    with pytest.raises(AdapterError):
        files.load(llama(), folder, allow_partial=True)


def test_a_long_list_is_cut_and_counted(folder: Path) -> None:
    said = refused(folder, battery.build("gpt2", torch.float32))
    assert "… and" in said
    assert said.count("the model has no such place") == 8


def test_a_tensor_under_two_spellings(folder: Path) -> None:
    whole = load_file(folder / WEIGHTS)
    whole[f"{Q}.lora_A.default.weight"] = whole[f"{Q}.lora_A.weight"].clone()
    save_file(whole, folder / WEIGHTS)
    assert "two tensors of the file have one place" in refused(folder)
