"""What a name means to a verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afina.cli.common import Target, resolve_run, table
from afina.cli.loading import Source, load_source, run_settings
from afina.errors import AdapterError, ConfigError, ModelError, RunError


def adapter(folder: Path, **settings: object) -> Path:
    """An adapter's folder with this configuration."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_a_run_is_its_model_and_its_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m  # MODEL\nrevision: v2\n", encoding="utf-8")
    made = adapter(tmp_path / "adapter", base_model_name_or_path="another")
    assert resolve_run(str(tmp_path)) == Target("m", made, tmp_path, "v2")


def test_a_run_of_full_fine_tuning_is_its_own_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n", encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert resolve_run(str(tmp_path)) == Target(str(tmp_path / "model"), None, tmp_path)


def test_a_run_without_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n", encoding="utf-8")
    with pytest.raises(RunError, match="no adapter yet"):
        resolve_run(str(tmp_path))


@pytest.mark.parametrize("text", ["data: d\n", "- a\n", "model: 7\n"])
def test_a_run_without_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match="names no model"):
        resolve_run(str(tmp_path))


def test_a_run_whose_configuration_is_broken_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\na: b: c\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml:2, column 5"):
        resolve_run(str(tmp_path))


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    made = adapter(tmp_path / "a", base_model_name_or_path="m", revision=None)
    assert resolve_run(str(made)) == Target("m", made)


def test_a_base_is_found_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, away = tmp_path / "desk" / "runs" / "r", tmp_path / "away"
    made = adapter(run / "adapter", base_model_name_or_path="m")
    (run / "config.yaml").write_text("model: m\ndata: d\n", encoding="utf-8")
    for folder in (tmp_path / "desk" / "m", away):
        folder.mkdir()
    monkeypatch.chdir(away)
    assert resolve_run(str(run)).base == "m"  # a folder that is no model is not taken
    (tmp_path / "desk" / "m" / "config.json").write_text("{}", encoding="utf-8")
    there = str(tmp_path / "desk" / "m")
    assert resolve_run("../desk/runs/r").base == resolve_run(str(made)).base == there
    monkeypatch.chdir(tmp_path / "desk")
    assert resolve_run("runs/r").base == "m"


def test_a_base_that_is_nowhere_is_said_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path / "r" / "adapter", base_model_name_or_path="models/of/m")
    (tmp_path / "r" / "config.yaml").write_text("model: models/of/m\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="the base of r, 'models/of/m', is not found from") as got:
        load_source(Source("r", device="cpu"))
    assert f"no such folder in {tmp_path}" in str(got.value)
    settings = Path("r", "config.yaml")
    assert got.value.cure == (
        f"work in the folder that holds models/of/m, or correct model in {settings}"
    )


def test_a_base_that_is_gone_from_its_own_place_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    adapter(tmp_path / "a", base_model_name_or_path=str(gone))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="is not found from here") as got:
        load_source(Source("a", device="cpu"))
    settings = Path("a", "adapter_config.json")
    correct = f"or correct base_model_name_or_path in {settings}"
    assert got.value.cure == f"put the model back there, {correct}"
    assert got.value.got == "no such file or folder"


@pytest.mark.parametrize("within", ["adapter", "checkpoints/step-000002/adapter"])
def test_an_adapter_in_a_run_knows_its_run(tmp_path: Path, within: str) -> None:
    made = adapter(tmp_path / within, base_model_name_or_path="m")
    assert resolve_run(str(made)) == Target("m", made)
    (tmp_path / "config.yaml").write_text("model: m\n", encoding="utf-8")  # of something else
    assert resolve_run(str(made)) == Target("m", made)
    (tmp_path / "config.yaml").write_text(
        "model: m\ndata: {source: d, template: none}\n", encoding="utf-8"
    )
    assert resolve_run(str(made)) == Target("m", made, tmp_path)
    assert run_settings(resolve_run(str(made)))["data"]["template"] == "none"
    if within != "adapter":
        assert resolve_run(str(made.parent)) == Target("m", made, tmp_path)


def test_an_adapter_without_base_is_refused(tmp_path: Path) -> None:
    made = adapter(tmp_path / "a", base_model_name_or_path=None)
    with pytest.raises(AdapterError, match="base_model_name_or_path"):
        resolve_run(str(made))


def test_a_model_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_run("smollm2-135m") == Target("smollm2-135m")
    assert resolve_run("org/name") == Target("org/name")
    assert resolve_run(str(tmp_path)) == Target(str(tmp_path))
    assert resolve_run("m.gguf") == Target("m.gguf")


def test_a_folder_of_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a run, nor an adapter, nor a model"):
        resolve_run(str(tmp_path))


def test_a_table_is_aligned_without_trailing_spaces() -> None:
    assert table([("a", 1), ("bcd", "")], ("name", "n")) == "name  n\na     1\nbcd"


def test_an_adapter_that_peft_saved_under_a_name_is_found_by_the_error(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        resolve_run(str(tmp_path))
    assert caught.value.cure == f"name the adapter in it: {tmp_path / 'a'} or {tmp_path / 'b'}"


def test_what_a_folder_is_instead_is_said(tmp_path: Path) -> None:
    """Weights without their configuration are no data."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ModelError, match="neither a run") as caught:
        resolve_run(str(tmp_path))
    assert str(caught.value.cure).startswith("copy config.json of the original model too")
    (tmp_path / "model.safetensors").rename(tmp_path / "rows.jsonl")
    with pytest.raises(ModelError, match="this looks like data"):
        resolve_run(str(tmp_path))
    with pytest.raises(ConfigError, match="the model needs a name"):
        resolve_run("")
