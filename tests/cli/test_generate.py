"""`afina generate`: the file it writes, whole and only when it may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import afina
from afina import cli
from afina.config import GenerateSettings
from afina.errors import ModelError
from afina.models import generate as generating
from tests.tiny import byte_tokenizer, follow, save_model, save_run, says, tiny_llama

HERE = ["--device", "cpu", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_llama(), byte_tokenizer())


@pytest.fixture(scope="module")
def yes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    return save_model(tmp_path_factory.mktemp("yes"), says(tokenizer, "yes"), tokenizer)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_prompt_gets_a_line_in_its_order(yes: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]
    rows = [{"prompt": "a long prompt"}, {"messages": chat}, "b"]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = tmp_path / "new" / "out.jsonl"
    assert cli.main(["generate", str(yes), str(prompts), "-o", str(out), *HERE]) == 0
    common = {"completion": "yes", "tokens": 3, "stop_reason": "stop"}
    assert lines_of(out) == [
        {"id": 0, "prompt": "a long prompt", **common},
        {"id": 1, "prompt": chat, **common},
        {"id": 2, "prompt": "b", **common},
    ]
    assert list(out.parent.iterdir()) == [out]


def test_flags_reach_the_sampling(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\n\ntwo\n", encoding="utf-8")
    flags = ["--temperature", "0.9", "--top-k", "30", "--top-p", "0.8", "--seed", "4",
             "--max-new-tokens", "7", "--system", "be brief", "--stop", "zz"]  # fmt: skip
    assert cli.main(["generate", str(model), str(prompts), "-o", "-", *flags, *HERE]) == 0
    shown = capsys.readouterr()
    got = [json.loads(line) for line in shown.out.splitlines()]
    loaded, tokenizer = afina.load(model, dtype="fp32", device="cpu")
    settings = GenerateSettings(
        temperature=0.9, top_k=30, top_p=0.8, seed=4, max_new_tokens=7, system="be brief",
        stop=("zz",),
    )  # fmt: skip
    asked = [[{"role": "user", "content": text}] for text in ("one", "two")]
    expected = afina.generate(loaded, tokenizer, asked, settings)
    assert [row["completion"] for row in got] == [answer.text for answer in expected]
    cut = sum(answer.stop_reason == "length" for answer in expected)
    assert (f"{cut} reached the 7 tokens" in shown.err) == (cut > 0)


def test_a_run_answers_with_its_adapter(model: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", model)
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\ntwo\nthree\n", encoding="utf-8")
    answers = {}
    for name in (model, run, run / "adapter"):
        out = tmp_path / f"{name.name}.jsonl"
        words = ["generate", str(name), str(prompts), "-o", str(out), "--max-new-tokens", "12"]
        assert cli.main([*words, *HERE]) == 0
        answers[name] = [row["completion"] for row in lines_of(out)]
    assert answers[run] == answers[run / "adapter"]
    assert answers[run] != answers[model]


def test_a_run_reads_prompts_with_its_columns_and_tools(model: Path, tmp_path: Path) -> None:
    run = save_run(
        tmp_path / "run",
        model,
        settings="data: {source: t.csv, columns: {prompt: ask, completion: reply}}\n",
    )
    prompts, out = tmp_path / "p.csv", tmp_path / "o.jsonl"
    prompts.write_text("ask,reply\none,1\n", encoding="utf-8")
    words = ["generate", str(run), str(prompts), "-o", str(out), "--max-new-tokens", "3", *HERE]
    assert cli.main(words) == 0
    assert [row["prompt"] for row in lines_of(out)] == ["one"]
    assert cli.main(["generate", str(model), *words[2:], "--force"]) == 3


def test_what_cut_an_answer_short_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = follow(tiny_llama(hidden_size=320, max_position_embeddings=64), {}, default=97)
    base = save_model(tmp_path / "m", model, byte_tokenizer(chat=False))
    prompts = tmp_path / "p.txt"
    prompts.write_text("x" * 54 + "\nx\n", encoding="utf-8")
    words = ["generate", str(base), str(prompts), "-o", "-", "--plain", *HERE]
    assert cli.main([*words, "--max-new-tokens", "20"]) == 0
    shown = capsys.readouterr()
    assert [json.loads(line)["tokens"] for line in shown.out.splitlines()] == [10, 20]
    assert (
        "2 answers in -; 1 reached the 20 tokens of --max-new-tokens; "
        "1 reached the end of the model's context\n"
    ) in shown.err


def test_an_output_is_never_replaced_unasked(
    yes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_text("a\n", encoding="utf-8")
    out.write_text("mine", encoding="utf-8")
    words = ["generate", str(yes), str(prompts), "-o", str(out), *HERE]
    assert cli.main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"
    assert cli.main([*words, "--force"]) == 0
    assert lines_of(out)[0]["completion"] == "yes"
    assert cli.main([*words[:4], str(tmp_path), *HERE]) == 2


def test_an_output_that_fails_is_not_begun(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_text("x" * 300 + "\n", encoding="utf-8")  # more than the context
    assert cli.main(["generate", str(model), str(prompts), "-o", str(out), *HERE]) == 4
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "status", "word"),
    [
        (["--temperature", "-1"], 2, "temperature"),
        (["--top-p", "0"], 2, "top_p"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens"),
    ],
)
def test_settings_out_of_range_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    flags: list[str], status: int, word: str,
) -> None:  # fmt: skip
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n", encoding="utf-8")
    words = ["generate", str(model), str(prompts), "-o", str(tmp_path / "o"), *flags]
    assert cli.main(words) == status
    assert word in capsys.readouterr().err


def test_a_model_without_a_template_needs_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(tmp_path / "m", tiny_llama(), byte_tokenizer(chat=False))
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"prompt": "go on"}\n', encoding="utf-8")
    words = ["generate", str(base), str(prompts), "-o", str(out), "--max-new-tokens", "5", *HERE]
    assert cli.main(words) == 4
    assert "--plain" in capsys.readouterr().err
    assert cli.main([*words, "--plain"]) == 0
    loaded, tokenizer = afina.load(base, dtype="fp32", device="cpu")
    expected = afina.generate(loaded, tokenizer, ["go on"], GenerateSettings(max_new_tokens=5))
    assert lines_of(out)[0]["completion"] == expected[0].text
    prompts.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
        ' {"role": "user", "content": "c"}]}\n',
        encoding="utf-8",
    )
    assert cli.main([*words, "--plain", "--force"]) == 3


def test_a_run_trained_without_the_template_is_asked_without_it(
    model: Path, tmp_path: Path
) -> None:
    settings = "data: {source: t.jsonl, template: none}\n"
    run = save_run(tmp_path / "run", model, settings=settings)
    prompts = tmp_path / "p.txt"
    prompts.write_text("go on\n", encoding="utf-8")
    got = {}
    for flag in ("", "--plain", "--chat-template"):
        out = tmp_path / f"o{flag}.jsonl"
        words = ["generate", str(run), str(prompts), "-o", str(out), "--max-new-tokens", "9"]
        assert cli.main([*words, *([flag] if flag else []), *HERE]) == 0
        got[flag] = lines_of(out)[0]["completion"]
    assert got[""] == got["--plain"]
    assert got[""] != got["--chat-template"]


# --- interrupts ------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the model's decoding end with an interrupt at the batch of that number; 0 is never."""

    def at(batch: int) -> None:
        left = [batch]

        def run(job: Any, budget: int) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return whole(job, budget)

        monkeypatch.setattr(generating._Job, "run", run)

    whole = generating._Job.run
    return at


def words_of(model: Path, folder: Path, *more: str) -> list[str]:
    prompts = folder / "p.txt"
    prompts.write_text("one\nthe second\nthe third prompt\nfour\n", encoding="utf-8")
    flags = ["--batch-rows", "1", "--max-new-tokens", "6", "--temperature", "0.8", *HERE]
    return ["generate", str(model), str(prompts), "-o", str(folder / "out.jsonl"), *flags, *more]


def test_an_interrupt_keeps_what_is_done_and_the_same_command_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted: Any
) -> None:
    words, out, part = (
        words_of(model, tmp_path),
        tmp_path / "out.jsonl",
        tmp_path / "out.jsonl.part",
    )
    assert cli.main(words) == 0
    whole = out.read_bytes()
    out.unlink()
    assert not part.exists()
    interrupted(3)
    assert cli.main(words) == 130
    assert f"2 of 4 answers are kept in {part}: the same command goes on" in capsys.readouterr().err
    assert not out.exists()
    assert [row["id"] for row in lines_of(part)[1:]] == [2, 1]  # the longest prompts come first
    with part.open("a") as torn:
        torn.write('{"id": 0, "te')  # as a kill while a line is written
    interrupted(2)  # the batches that are made are those left
    assert cli.main(words) == 130
    assert "going on with 2 answers of an interrupted run" in capsys.readouterr().err
    assert len(lines_of(part)) == 4
    interrupted(0)
    assert cli.main(words) == 0
    assert out.read_bytes() == whole
    assert not part.exists()


def test_unfinished_answers_of_another_command_are_not_replaced_unasked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted: Any
) -> None:
    words, part = words_of(model, tmp_path), tmp_path / "out.jsonl.part"
    interrupted(2)
    assert cli.main(words) == 130
    kept = part.read_bytes()
    assert cli.main([*words, "--seed", "1"]) == 2
    assert "unfinished answers of another command are in the way" in capsys.readouterr().err
    assert part.read_bytes() == kept
    interrupted(0)
    assert cli.main([*words, "--seed", "1", "--force"]) == 0
    assert len(lines_of(tmp_path / "out.jsonl")) == 4
    (tmp_path / "out.jsonl").unlink()
    for foreign in ("not of ours\n", '{"answers": 1}\n', "{}"):
        part.write_text(foreign, encoding="utf-8")
        for force in ([], ["--force"]):
            capsys.readouterr()
            assert cli.main([*words, *force]) == 2
            assert "a file that is no unfinished answers" in capsys.readouterr().err
            assert part.read_text(encoding="utf-8") == foreign
    for torn in ("", '{"answ', '{"answers of": "'):  # what a crash leaves of the first line
        part.write_text(torn, encoding="utf-8")
        assert cli.main([*words, "--force"]) == 0
        assert not part.exists()


def test_another_adapter_is_another_command(
    model: Path, tmp_path: Path, interrupted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", model)
    interrupted(2)
    assert cli.main(words_of(run, tmp_path)) == 130
    again = save_run(tmp_path / "again", model, seed=1)
    (run / "adapter" / "adapter_model.safetensors").write_bytes(
        (again / "adapter" / "adapter_model.safetensors").read_bytes()
    )
    interrupted(0)
    assert cli.main(words_of(run, tmp_path)) == 2
    assert "unfinished answers of another command" in capsys.readouterr().err


def test_an_interrupt_before_the_first_answer_leaves_nothing(
    model: Path, tmp_path: Path, interrupted: Any
) -> None:
    interrupted(1)
    assert cli.main(words_of(model, tmp_path)) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]


def test_an_interrupt_on_the_standard_output_writes_what_is_done(
    model: Path, tmp_path: Path, interrupted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(3)
    words = words_of(model, tmp_path, "-o", "-")
    assert cli.main(words) == 130
    shown = capsys.readouterr()
    assert [json.loads(line)["id"] for line in shown.out.splitlines()] == [1, 2]
    assert "2 of 4 answers were made, and are written" in shown.err


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|far|>"]})
    base = save_model(tmp_path / "m", tiny_llama(), tokenizer)
    loaded, tokenizer = afina.load(base, dtype="fp32", device="cpu")
    for ask, name in (
        (afina.generate, "prompt 1"),
        (lambda *given: next(generating.stream(given[0], given[1], given[2][0])), "the prompt"),
    ):
        with pytest.raises(
            ModelError, match=rf"{name} has a token that the model has no embedding for"
        ) as caught:
            ask(loaded, tokenizer, ["a<|far|>"])
        assert caught.value.got == "'<|far|>', id 260"
    with pytest.raises(ModelError, match="prompt 2 has a token") as caught:
        afina.generate(loaded, tokenizer, ["a", [1, -1]])
    assert (caught.value.got, caught.value.wanted) == ("id -1", "ids from 0 to 259")


@pytest.mark.parametrize(
    ("name", "rows", "place", "says"),
    [
        ("p.txt", ["a", "", "x" * 300], "p.txt:3", "fills the model's whole context"),
        ("p.jsonl", [{"prompt": "a"}, {"prompt": "x" * 300}], "p.jsonl:2", "fills the model's"),
        ("p.jsonl", [{"prompt": "a"}, {"prompt": "b<|far|>"}], "p.jsonl:2", "no embedding for"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_named_by_file_and_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    rows: list[Any],
    place: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|far|>"]})
    small = tiny_llama(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    save_model(Path("m"), small, tokenizer)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).write_text("\n".join(lines), encoding="utf-8")
    assert cli.main(["generate", "m", name, "-o", "out.jsonl", *HERE]) == 4
    said = capsys.readouterr().err
    assert f"the prompt at {place} " in said
    assert says in said
    assert [path.name for path in tmp_path.glob("out*")] == []


def test_a_prompt_that_the_template_refuses_is_named_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    small = tiny_llama(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    save_model(Path("m"), small, tokenizer)
    rows = [{"prompt": "a"}, {"prompt": "b", "system": "s"}]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert cli.main(["generate", "m", "p.jsonl", "-o", "-", *HERE]) == 4
    assert "error: p.jsonl:2: the chat template refuses these messages" in capsys.readouterr().err
