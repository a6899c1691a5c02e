"""What a name means to a verb, and prompts from files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from afina.cli.common import Target, read_prompts, resolve_run, table
from afina.errors import AdapterError, ConfigError, DataError, ModelError, RunError


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


ROWS = [
    ("hello", [("user", "hello")]),
    ({"prompt": "p", "completion": "c"}, [("user", "p")]),
    ({"prompt": "p", "system": "s"}, [("system", "s"), ("user", "p")]),
    ({"instruction": "do", "input": "this", "output": "o"}, [("user", "do\n\nthis")]),
    ({"instruction": "do", "input": ""}, [("user", "do")]),
    ({"text": "t"}, [("user", "t")]),
    (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                      {"role": "assistant", "content": "a"}]},
        [("system", "s"), ("user", "u")],
    ),
    (
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
                      {"role": "user", "content": "v"}]},
        [("user", "u"), ("assistant", "a"), ("user", "v")],
    ),
    ({"prompt": [{"role": "user", "content": "u"}]}, [("user", "u")]),
]  # fmt: skip


def turns(prompts: list[list[dict[str, str]]]) -> list[list[tuple[str, str]]]:
    return [[(turn["role"], turn["content"]) for turn in prompt] for prompt in prompts]


def test_prompts_of_json_and_jsonl(tmp_path: Path) -> None:
    lines, whole = tmp_path / "p.jsonl", tmp_path / "p.json"
    lines.write_text("\n\n".join(json.dumps(row) for row, _ in ROWS), encoding="utf-8")
    whole.write_text(json.dumps([row for row, _ in ROWS]), encoding="utf-8")
    wanted = [prompt for _, prompt in ROWS]
    assert turns(read_prompts(str(lines))) == wanted
    assert turns(read_prompts(str(whole))) == wanted


def test_prompts_of_text_are_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "  first \n\nOlá, {não} é JSON\n"
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    wanted = [[("user", "first")], [("user", "Olá, {não} é JSON")]]
    assert turns(read_prompts(str(tmp_path / "p.txt"))) == wanted
    assert turns(read_prompts("-")) == wanted


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.jsonl", '"a"\n{"question": 1}\n', r"p\.jsonl:2: no prompt in this row\n  got:    question"),
        ("p.jsonl", '\n{"a"\n', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', r":1: no prompt"),
        ("p.json", '{"prompt": "a"}', "not a list of prompts\n  got:    dict"),
        ("p.json", '["a", 7]', "row 2: no prompt in this row\n  got:    int"),
        ("p.txt", "\n \n", "There are no prompts"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        read_prompts(str(tmp_path / name))


def test_prompts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(str(tmp_path / "none.txt"))


def test_a_table_is_aligned_without_trailing_spaces() -> None:
    assert table([("a", 1), ("bcd", "")], ("name", "n")) == "name  n\na     1\nbcd"
