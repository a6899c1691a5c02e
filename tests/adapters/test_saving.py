"""What is written: the same bytes for the same adapter, checked by reading it, with where it comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

import afina
from afina.adapters import files, writing
from afina.adapters.card import Record
from afina.adapters.fingerprint import base_fingerprint
from afina.adapters.peft_lora import pattern, patterns
from afina.adapters.replace import exchange, replace_folder
from afina.adapters.target import resolve_run
from afina.errors import AdapterError
from afina.models import precision
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.tree import Edit
from tests import battery
from tests.adapters.kit import CONFIG, FILES, RECORD, WEIGHTS
from tests.tiny import byte_tokenizer, save_model, tiny_llama

RECORDED = Record(
    data={"fingerprint": "sha256:12ab", "rows": {"train": 40, "validation": 8}, "dropped": 0},
    settings={"lr": 0.0005, "schedule": "linear"},
    scores={"loss": 0.25, "exact_match": 0.9},
)


def trained(model: str = "llama", **settings: Any) -> Edit:
    edit = apply(battery.build(model, torch.float32), [LoRA(**({"rank": 4} | settings))])
    battery.train(edit.model, edit)
    return edit


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("model", ["llama", "llama_tied", "gpt2", "bert"])
def test_equal_edits_give_equal_bytes(model: str, tmp_path: Path) -> None:
    for name in ("one", "other/place"):
        edit = trained(model, target=("all-linear",), alpha_pattern={"*.0.*": 3.0})
        (tmp_path / name).parent.mkdir(exist_ok=True)
        files.save(edit, tmp_path / name, base="tiny", tokenizer=byte_tokenizer(), record=RECORDED)
    one, other = contents(tmp_path / "one"), contents(tmp_path / "other/place")
    assert one == other
    assert set(one) >= FILES | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    battery.train(edit.model, edit)
    files.save(edit, tmp_path / "one", base="tiny")
    assert contents(tmp_path / "one")[WEIGHTS] != other[WEIGHTS]


SCRIPT = """
import sys
import torch
from afina import LoRA, apply
from afina.adapters import files
from afina.adapters.card import Record
from tests.tiny import byte_tokenizer, tiny_llama
edit = apply(tiny_llama(dtype=torch.float32), [LoRA(rank=2, modules_to_save=("lm_head", "norm"))])
record = Record({"rows": 3}, {"lr": 1e-3}, {"loss": 0.5})
folder = globals().get("folder") or sys.argv[1]
files.save(edit, folder, base="tiny", tokenizer=byte_tokenizer(), record=record)
"""


@pytest.mark.slow
def test_equal_edits_give_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """Hashes of texts, and with them the order of sets, differ between processes."""
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "other")]
    subprocess.run(command, check=True, env=environment)
    exec(SCRIPT, {"folder": str(tmp_path / "one")})
    assert contents(tmp_path / "other") == contents(tmp_path / "one")


def test_lists_and_keys_are_in_order(tmp_path: Path) -> None:
    files.save(trained(modules_to_save=("norm", "lm_head")), tmp_path / "a", base="tiny")
    for name in (CONFIG, RECORD):
        text = (tmp_path / "a" / name).read_text(encoding="utf-8")
        assert list(json.loads(text)) == sorted(json.loads(text))
    config = json.loads((tmp_path / "a" / CONFIG).read_text(encoding="utf-8"))
    for name in ("target_modules", "modules_to_save"):
        assert config[name] == sorted(config[name])
        assert len(config[name]) > 1


@pytest.mark.parametrize("model", ["llama", "llama_tied"])
def test_a_merged_edit_saves_as_the_same_adapter(model: str, tmp_path: Path) -> None:
    edit = trained(model)
    files.save(edit, tmp_path / "one", base="tiny")
    edit.merge()
    before = battery.logits(edit.model)
    files.save(edit, tmp_path / "two", base="tiny")
    assert torch.equal(battery.logits(edit.model), before)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_edit_that_does_not_hold_what_was_trained_is_not_saved(tmp_path: Path) -> None:
    """Undone or disabled, a module that was trained whole has the base's values."""
    edit = trained(modules_to_save=("lm_head",))
    with edit.disabled(), pytest.raises(AdapterError, match="disabled"):
        files.save(edit, tmp_path / "a", base="tiny")
    edit.undo()
    with pytest.raises(AdapterError, match="undone"):
        files.save(edit, tmp_path / "a", base="tiny")
    with torch.device("meta"):
        bare = battery.llama()
    with pytest.raises(AdapterError, match="meta device"):
        files.save(apply(bare, [LoRA(rank=2)]), tmp_path / "a", base="tiny")
    assert list(tmp_path.iterdir()) == []


# --- read back ------------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Any] = {
    "a tensor less": lambda t: t.pop(min(t)),
    "a tensor more": lambda t: t.update(more=torch.ones(1)),
    "another value": lambda t: t[min(t)].view(-1)[0].add_(1e-3),
    "another type": lambda t: t.update({min(t): t[min(t)].half()}),
    "another shape": lambda t: t.update({min(t): t[min(t)].t().contiguous()}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_reads_back_otherwise_is_not_put_in_place(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = trained()
    files.save(edit, tmp_path / "a", base="tiny")
    before = contents(tmp_path / "a")

    def damaged(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        tensors = {k: v.clone() for k, v in tensors.items()}
        DAMAGE[damage](tensors)
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(writing, "save_file", damaged)
    for folder in ("a", "new"):
        with pytest.raises(AdapterError, match="not the one in memory"):
            files.save(edit, tmp_path / folder, base="tiny")
    assert contents(tmp_path / "a") == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_written(value: float, tmp_path: Path) -> None:
    edit = trained()
    with torch.no_grad():
        edit.trainable()["model.layers.1.mlp.up_proj.lora.b"][3, 1] = value
    with pytest.raises(AdapterError, match=r"NaN or infinity in 1 of 28 tensors") as caught:
        files.save(edit, tmp_path / "a", base="tiny")
    assert "layers.1.mlp.up_proj.lora_B" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_what_somebody_laid_into_the_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """The files that a save writes are replaced, a tokenizer that goes along no more is gone."""
    if not links:

        def refused(*_: object, **__: object) -> None:
            raise OSError("no links here")

        monkeypatch.setattr(os, "link", refused)
    edit, folder = trained(), tmp_path / "adapter"
    files.save(edit, folder, base="tiny", tokenizer=byte_tokenizer())
    before = contents(folder)
    (folder / "notes.txt").write_text("dear")
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/letter.md").write_text("sir")
    (folder / "link").symlink_to("notes.txt")
    battery.train(edit.model, edit)
    files.save(edit, folder, base="tiny")
    assert {path.name for path in folder.iterdir()} == {*FILES, "notes.txt", "deep", "link"}
    assert (folder / WEIGHTS).read_bytes() != before[WEIGHTS]
    assert (folder / "notes.txt").read_text() == (folder / "link").read_text() == "dear"
    assert (folder / "link").is_symlink()
    assert (folder / "deep/er/letter.md").read_text() == "sir"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_temporary_folder_that_a_killed_save_left_is_no_hindrance(tmp_path: Path) -> None:
    left = tmp_path / f".a.{os.getpid()}.tmp"
    left.mkdir()
    (left / "half.txt").write_text("half", encoding="utf-8")
    files.save(trained(), tmp_path / "a", base="tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert set(contents(tmp_path / "a")) == FILES


# --- in place of an older one -----------------------------------------------------------------------------------------


def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name, encoding="utf-8")
    return tmp_path / "new", tmp_path / "old"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_takes_the_place_of_an_older_one(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = two_folders(tmp_path)
    if not at_once:
        monkeypatch.setattr("afina.adapters.replace.exchange", lambda *_: False)
    replace_folder(new, old)
    assert [p.name for p in old.iterdir()] == ["new.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


@pytest.mark.skipif(sys.platform != "linux", reason="the step exists on Linux alone")
def test_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    new, old = two_folders(tmp_path)
    assert exchange(new, old)
    assert (new / "old.txt").exists()
    assert (old / "new.txt").exists()
    assert not exchange(new, tmp_path / "nowhere")


# --- where it comes from ----------------------------------------------------------------------------------------------


def test_the_record(tmp_path: Path) -> None:
    edit = trained(modules_to_save=("lm_head",))
    files.save(edit, tmp_path / "a", base="some/base", record=RECORDED)
    found = json.loads((tmp_path / "a" / RECORD).read_text(encoding="utf-8"))
    assert found == {
        "format": 1,
        "afina": afina.__version__,
        "base": {
            "name": "some/base",
            "revision": None,
            "fingerprint": base_fingerprint(edit.model, edit),
            "trained": ["lm_head.weight"],
        },
        "techniques": [{"lora": json.loads(edit.techniques[0].model_dump_json())}],
        "data": dict(RECORDED.data),
        "settings": dict(RECORDED.settings),
        "scores": dict(RECORDED.scores),
    }


def test_a_score_that_is_no_number_is_recorded_as_it_is(tmp_path: Path) -> None:
    record = Record(scores={"loss": float("nan")}, settings={"folder": Path("x"), "betas": (0.9,)})
    files.save(trained(), tmp_path / "a", base="tiny", record=record)
    found = json.loads((tmp_path / "a" / RECORD).read_text(encoding="utf-8"))
    assert found["scores"] == {"loss": "nan"}
    assert found["settings"] == {"folder": "x", "betas": [0.9]}


def test_the_model_card(tmp_path: Path) -> None:
    edit = trained()
    files.save(edit, tmp_path / "a", base="some/base", record=RECORDED)
    text = (tmp_path / "a/README.md").read_text(encoding="utf-8")
    numbers = sum(p.numel() for p in edit.trainable().values())
    for line in (
        "tags: [afina, lora]",
        "base_model: some/base",
        f"| its fingerprint | {base_fingerprint(edit.model, edit)} |",
        f"| tensors | 28 with {numbers:,} numbers |",
        "| lora.rank | 4 |",
        "| rows.train | 40 |",
        "| fingerprint | sha256:12ab |",
        "| lr | 0.0005 |",
        "| exact_match | 0.9 |",
        "afina chat FOLDER",
        "model, tokenizer = afina.load('some/base')",
        "edit = afina.load_adapter(model, FOLDER)  # an error when anything does not fit",
        "model = PeftModel.from_pretrained(base, FOLDER)",
    ):
        assert line in text.splitlines(), line


def test_the_base_s_revision_goes_with_the_adapter(tmp_path: Path) -> None:
    folder = files.save(trained(), tmp_path / "a", base="some/base", record=Record(revision="v2"))
    assert json.loads((folder / CONFIG).read_text(encoding="utf-8"))["revision"] == "v2"
    assert json.loads((folder / RECORD).read_text(encoding="utf-8"))["base"]["revision"] == "v2"
    assert resolve_run(str(folder)).revision == "v2"
    assert PeftConfig.from_pretrained(str(folder)).revision == "v2"
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert "| its revision | v2 |" in lines
    assert "model, tokenizer = afina.load('some/base', revision='v2')" in lines
    assert "base = AutoModelForCausalLM.from_pretrained('some/base', revision='v2')" in lines


def test_the_model_card_of_a_base_on_this_disk_names_none_of_the_hub(tmp_path: Path) -> None:
    files.save(trained(), tmp_path / "a", base="/models/tiny|1")
    text = (tmp_path / "a/README.md").read_text(encoding="utf-8")
    assert "base_model:" not in text
    assert "| base model | /models/tiny\\|1 |" in text.splitlines()
    assert "Not recorded." in text


def test_the_model_card_of_a_demo_model_says_where_transformers_finds_it(tmp_path: Path) -> None:
    files.save(trained(), tmp_path / "a", base="smollm2-135m")
    text = (tmp_path / "a/README.md").read_text(encoding="utf-8")
    assert "`BASE` is the folder that `afina models get smollm2-135m` prints." in text
    assert "base = AutoModelForCausalLM.from_pretrained(BASE)" in text.splitlines()
    assert "model, tokenizer = afina.load('smollm2-135m')" in text.splitlines()


def test_the_model_card_s_lines_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, with afina; and PEFT takes the folder with the files that are none of its own."""
    monkeypatch.setattr(precision, "fast_bf16", lambda: None)  # the lines load in fp32 everywhere
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    model, tokenizer = afina.load(base, dtype="fp32", device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=2)])
    battery.train(model, edit)
    folder = files.save(edit, tmp_path / "a", base=str(base), tokenizer=tokenizer)
    text = (folder / "README.md").read_text(encoding="utf-8")
    for block in [part.split("```")[0] for part in text.split("```python\n")[1:]]:
        found: dict[str, Any] = {"FOLDER": folder}
        with battery.quiet():
            exec(compile(block, "README.md", "exec"), found)
        ids = {"input_ids": battery.IDS}
        with torch.no_grad():
            battery.close(found["model"](**ids).logits.float(), model(**ids).logits, 1e-5)
    assert PeftConfig.from_pretrained(str(folder)).base_model_name_or_path == str(base)


# --- patterns ---------------------------------------------------------------------------------------------------------


def test_a_name_that_ends_like_a_longer_one_keeps_its_own_rank() -> None:
    """PEFT takes `layers.0.q` for the end of `more.layers.0.q`, and sorts the patterns that it is given."""
    values = {"layers.0.q": 2, "more.layers.0.q": 4, "x.more.layers.0.q": 3, "layers.1.q": 4}
    written = patterns(values, 4)
    assert set(written) == {"^layers.0.q", "x.more.layers.0.q"}
    for order in (sorted(written), sorted(written, reverse=True)):
        table = {key: written[key] for key in order}
        assert {n: pattern(table, n, 4) for n in values} == {n: [v] for n, v in values.items()}
        assert {n: table.get(get_pattern_key(order, n), 4) for n in values} == values
    # The control: bare names read otherwise.
    bare = {n: v for n, v in values.items() if v != 4}
    assert {n: bare.get(get_pattern_key(sorted(bare), n), 4) for n in values} != values


def test_what_is_in_the_file_is_what_is_in_memory(tmp_path: Path) -> None:
    edit = trained(modules_to_save=("lm_head",))
    files.save(edit, tmp_path / "a", base="tiny")
    written, mine = load_file(tmp_path / "a" / WEIGHTS), files.peft_tensors(edit)
    assert set(written) == set(mine)
    assert all(torch.equal(written[key], mine[key]) for key in mine)
