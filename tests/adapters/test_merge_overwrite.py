"""Overwriting an earlier merge takes what that merge wrote, and nothing that anybody else put there or still needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import afina
from afina.adapters import merge_record
from afina.adapters.merge import MergeSettings
from afina.errors import ConfigError
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

FIRST = MergeSettings(verify=False)
AGAIN = MergeSettings(verify=False, overwrite=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose adapter was merged into "out"."""
    small = tiny_llama(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    base = save_model(tmp_path / "base", small, byte_tokenizer())
    made = save_run(tmp_path / "run", base)
    afina.merge(made, tmp_path / "out", settings=FIRST)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in merge_record.files_in(folder)}


def refused(says: str, run: Path, out: Path, **options: Path) -> None:
    before = contents(out) if out.is_dir() else out.read_bytes()
    with pytest.raises(ConfigError, match=says):
        afina.merge(run, out, settings=AGAIN, **options)
    assert (contents(out) if out.is_dir() else out.read_bytes()) == before


def test_the_record_names_every_file(run: Path) -> None:
    out = run.parent / "out"
    record = json.loads((out / "merge.json").read_text())
    assert {*record["files"], "merge.json", "UNVERIFIED.md"} == set(merge_record.files_in(out))
    stamp = (out / "model.safetensors").stat().st_ino
    afina.merge(run, out, settings=AGAIN)
    assert (out / "model.safetensors").stat().st_ino != stamp


@pytest.mark.parametrize("name", ["notes.txt", "deep/er/letter.md", ".hidden", "other.json"])
def test_what_somebody_put_beside_it_stays(run: Path, name: str) -> None:
    mine = run.parent / "out" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("dear")
    refused(f"did not write.*\n.*with {name}\n.*move it away", run, run.parent / "out")
    mine.unlink()
    afina.merge(run, run.parent / "out", settings=AGAIN)


@pytest.mark.parametrize("record", ["{", "[]", '{"format": 1}'])
def test_a_record_without_the_files_frees_none(run: Path, record: str) -> None:
    (run.parent / "out/merge.json").write_text(record)
    refused("does not say which of its files", run, run.parent / "out")


def test_the_base_is_not_overwritten_by_what_it_becomes(run: Path) -> None:
    """A run on a merged model, merged into that model's own folder."""
    out = run.parent / "out"
    second = save_run(run.parent / "second", out)
    refused("take the place of what it is made from", second, out)
    refused("take the place of what it is made from", run, out, base=out)
    afina.merge(second, run.parent / "another", settings=FIRST)


def test_a_link_is_followed(run: Path) -> None:
    link = run.parent / "link"
    link.symlink_to("out")
    afina.merge(run, link, settings=AGAIN)
    assert link.is_symlink()
    (run.parent / "out/mine").write_text("dear")
    refused("with mine", run, link)
