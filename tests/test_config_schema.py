"""The schema accepts what the loader accepts and refuses what it refuses, as far as a schema can say it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afina.cli import main
from afina.config import TrainSettings, dump, load_config, schema
from afina.config.document import read_text
from afina.data.settings import DataSettings
from afina.errors import ConfigError
from afina.table import TECHNIQUES

MADE = schema(techniques=TECHNIQUES, data_settings=DataSettings)

KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}
LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda v, n: v >= n,
    "exclusiveMinimum": lambda v, n: v > n,
    "maximum": lambda v, n: v <= n,
    "exclusiveMaximum": lambda v, n: v < n,
    "minLength": lambda v, n: len(v) >= n,
    "minItems": lambda v, n: len(v) >= n,
    "maxItems": lambda v, n: len(v) <= n,
}
OF = {"minLength": "string", "minItems": "array", "maxItems": "array"}
MEANT = {
    *LIMITS, "$ref", "$defs", "$schema", "type", "enum", "const", "anyOf", "not", "properties", "required",
    "additionalProperties", "items", "prefixItems", "title", "description", "default",
}  # fmt: skip


def accepts(value: Any, part: dict[str, Any]) -> bool:
    """What a schema of these words says about a value (JSON Schema draft 2020-12, the words that occur here)."""
    assert set(part) <= MEANT, set(part) - MEANT
    if "$ref" in part and not accepts(value, MADE["$defs"][part["$ref"].rsplit("/", 1)[-1]]):
        return False
    kinds = part.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(KINDS[kind](value) for kind in kinds):
        return False
    if "enum" in part and value not in part["enum"]:
        return False
    if "const" in part and value != part["const"]:
        return False
    if "anyOf" in part and not any(accepts(value, one) for one in part["anyOf"]):
        return False
    if "not" in part and accepts(value, part["not"]):
        return False
    for word, within in LIMITS.items():
        if word in part and KINDS[OF.get(word, "number")](value) and not within(value, part[word]):
            return False
    if isinstance(value, dict) and not _accepts_object(value, part):
        return False
    return not isinstance(value, list) or _accepts_list(value, part)


def _accepts_object(value: dict[str, Any], part: dict[str, Any]) -> bool:
    own = part.get("properties", {})
    other = part.get("additionalProperties", True)
    return all(name in value for name in part.get("required", [])) and all(
        accepts(item, own[name])
        if name in own
        else (other is True or (isinstance(other, dict) and accepts(item, other)))
        for name, item in value.items()
    )


def _accepts_list(value: list[Any], part: dict[str, Any]) -> bool:
    first = part.get("prefixItems", [])
    rest = part.get("items")
    return all(accepts(item, one) for item, one in zip(value, first, strict=False)) and (
        rest is None or all(accepts(item, rest) for item in value[len(first) :])
    )


def loads(text: str, folder: Path) -> bool:
    """Whether the loader takes a run.yaml."""
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        load_config(techniques=TECHNIQUES, data_settings=DataSettings, yaml_path=file)
    except ConfigError:
        return False
    return True


HEAD = "model: m\ndata: d.jsonl\n"
GOOD = (
    HEAD,
    HEAD + "train:\ntechniques:\neval:\n",
    "model: m\ndata: {source: d.jsonl, columns: {prompt: question}, packing: false}\nval: v.jsonl\nrevision: main\n",
    HEAD + "techniques: [lora, full]\n",
    HEAD
    + "techniques:\n  - lora: {rank: 8, target: attention, layers: '0-3', rank_pattern: {q_proj: 4}}\n",
    HEAD + "techniques:\n  - lora:\n",
    HEAD + "techniques: [{lora: {layers: [0, 1], target: [q_proj, v_proj]}}]\n",
    HEAD
    + "train: {lr: 1e-3, steps: 10, epochs: null, micro_rows: auto, betas: [0.9, 0.95], clip: null}\n",
    HEAD + "train: {tokens_per_step: 4096, micro_tokens: 512, dtype: bf16, best: loss}\n",
    HEAD + "eval: {generate: false, choices: [a, b], answers: {temperature: 0.5, stop: END}}\n",
)
BAD = (
    HEAD + "trian: {lr: 1}\n",
    HEAD + "train: {learning_rate: 1e-3}\n",
    HEAD + "train: {lr: fast}\n",
    HEAD + "train: {lr: -1}\n",
    HEAD + "train: {lr: 'fast'}\n",
    HEAD + "train: {steps: 2.5}\n",
    HEAD + "train: {steps: 0}\n",
    HEAD + "train: {steps: 5, epochs: 2}\n",
    HEAD + "train: {rows_per_step: 4, tokens_per_step: 100}\n",
    HEAD + "train: {schedule: sine}\n",
    HEAD + "train: {seed: true}\n",
    HEAD + "train: 3\n",
    HEAD + "techniques: lora\n",
    HEAD + "techniques: [lroa]\n",
    HEAD + "techniques: [{lora: {rnk: 8}}]\n",
    HEAD + "techniques: [{lora: {rank: 0}}]\n",
    HEAD + "techniques: [{lora: {rank: 8}, full: {}}]\n",
    HEAD + "eval: {answers: {temprature: 0}}\n",
    HEAD + "eval: {answers: {top_p: 0}}\n",
    "model: 3\ndata: d.jsonl\n",
    "model: m\ndata: {source: d.jsonl, pakcing: true}\n",
    "model: m\ndata: {source: d.jsonl, val_fraction: 1.5}\n",
    "model: m\ndata: [d.jsonl]\n",
)
BEYOND = (
    HEAD + "train: {rows_per_step: 4, micro_rows: 8}\n",
    HEAD + "techniques: [lora, lora]\n",
    HEAD + "train: {betas: 0.9}\n",
)
"""What only the loader can refuse, and betas, whose list of one is too short for both."""


def _verdicts(value: Any) -> list[bool]:
    verdicts = [accepts(value, MADE)]
    if importlib.util.find_spec("jsonschema") is None:
        return verdicts
    judge: Any = importlib.import_module("jsonschema")
    return [*verdicts, judge.Draft202012Validator(MADE).is_valid(value)]


@pytest.mark.parametrize("text", GOOD)
def test_what_is_good_is_good_for_both(text: str, tmp_path: Path) -> None:
    assert loads(text, tmp_path)
    assert set(_verdicts(read_text(text, "run.yaml").value)) == {True}


@pytest.mark.parametrize("text", BAD)
def test_what_is_bad_is_bad_for_both(text: str, tmp_path: Path) -> None:
    assert not loads(text, tmp_path)
    assert set(_verdicts(read_text(text, "run.yaml").value)) == {False}


@pytest.mark.parametrize("text", BEYOND)
def test_what_a_schema_cannot_say_the_loader_says(text: str, tmp_path: Path) -> None:
    assert not loads(text, tmp_path)


def test_a_saved_configuration_is_good(tmp_path: Path) -> None:
    for text in GOOD:
        assert loads(text, tmp_path)
        file = tmp_path / "run.yaml"
        made = load_config(techniques=TECHNIQUES, data_settings=DataSettings, yaml_path=file)
        assert set(_verdicts(read_text(dump(made), "config.yaml").value)) == {True}


def test_the_schema_is_one() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="checks the schema's own form")
    jsonschema.Draft202012Validator.check_schema(MADE)


def test_every_setting_is_there_and_explained() -> None:
    assert list(MADE["properties"]) == [
        "model", "revision", "data", "val", "techniques", "train", "eval",
        "parallel",
    ]  # fmt: skip
    assert set(MADE["$defs"]["TrainSettings"]["properties"]) == set(TrainSettings.model_fields)
    assert set(MADE["$defs"]["DataSettings"]["properties"]) == {
        "source", *DataSettings.model_fields,
    }  # fmt: skip
    assert MADE["$defs"]["LoRA"]["properties"]["rank"]["minimum"] == 1
    assert MADE["$defs"]["LoRA"]["properties"]["target"]["default"] == ["all-linear"]
    silent = [
        f"{kind}.{name}"
        for kind, one in MADE["$defs"].items()
        for name, setting in one["properties"].items()
        if "description" not in setting
    ]
    assert silent == []


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == MADE
    file = tmp_path / "run.schema.json"
    assert main(["config-schema", "-o", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == MADE
    assert f"# yaml-language-server: $schema={file}" in capsys.readouterr().err
    file.write_text("mine", encoding="utf-8")
    assert main(["config-schema", "-o", str(file)]) == ConfigError.exit_code
    assert "--force" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "mine"
    assert main(["config-schema", "-o", str(file), "--force"]) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == MADE


def test_the_verb_s_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config-schema", "--help"]) == 0
    said = capsys.readouterr().out
    assert "afina config-schema -o run.schema.json" in said
    assert "# yaml-language-server: $schema=run.schema.json" in said
