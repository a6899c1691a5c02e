"""What is compiled is kept beside the cached models, unless the user says where; the environment is then as before."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from afina.cli import compiled, main
from afina.train import run
from tests.tiny import byte_tokenizer, save_model, tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, and no word of the user's about compiled code."""
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    return tmp_path / "cache"


def train(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the variable says while `afina train` trains."""
    seen: list[str | None] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append(os.environ.get(compiled.VARIABLE))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", note)
    model = save_model(place / "tiny", tiny_llama(), byte_tokenizer())
    (place / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    assert main(["train", str(model), str(place / "rows.jsonl"), "-o", str(place / "run")]) == 130
    return seen


def test_a_run_keeps_what_it_compiles_beside_the_models(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path, monkeypatch) == [str(cache / "compiled")]
    assert compiled.VARIABLE not in os.environ
    assert not cache.exists()  # nothing was compiled, so nothing is made


def test_where_the_user_says_it_is_kept_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = str(tmp_path / "mine")
    monkeypatch.setenv(compiled.VARIABLE, mine)
    assert train(tmp_path, monkeypatch) == [mine]
    assert os.environ[compiled.VARIABLE] == mine
    assert compiled.folder() == Path(mine)


def test_an_empty_variable_says_nothing_and_stays(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "")
    assert train(tmp_path, monkeypatch) == [str(cache / "compiled")]
    assert os.environ[compiled.VARIABLE] == ""


def test_where_nothing_can_be_written_torch_keeps_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "file" / "cache"))
    assert train(tmp_path, monkeypatch) == [None]
    closed = tmp_path / "closed"
    closed.mkdir(mode=stat.S_IRUSR)
    if not os.access(closed, os.W_OK):  # root may write everywhere
        monkeypatch.setenv("AFINA_CACHE", str(closed / "cache"))
        assert train(tmp_path / "closed-run", monkeypatch) == [None]


def test_the_place_that_torch_sets_by_itself_is_not_the_users(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cache_dir_utils.default_cache_dir()
    monkeypatch.setenv(compiled.VARIABLE, own)
    assert compiled.folder() == cache / "compiled"
    assert train(tmp_path, monkeypatch) == [str(cache / "compiled")]
    assert os.environ[compiled.VARIABLE] == own


def test_it_is_told(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled"] == str(cache / "compiled")


IN_A_PROCESS = """
import os
import sys
from contextlib import contextmanager

from afina.cli import compiled, main

kept = compiled.kept

@contextmanager
def watched():
    print(os.environ.get(compiled.VARIABLE))
    with kept():
        print(os.environ.get(compiled.VARIABLE))
        yield

compiled.kept = watched
sys.exit(main(["train", "no-such-model", "no-such-data", "-o", "run", "--offline"]))
"""


def test_a_process_sets_it_over_what_torch_sets(tmp_path: Path, cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 4, done.stderr
    before, within = done.stdout.split()
    # torch sets it to a folder of its own when something has imported its compiler.
    assert before == "None" or Path(before).name.startswith("torchinductor_")
    assert within == str(cache / "compiled")


@pytest.mark.slow
def test_what_was_compiled_is_found_again(cache: Path) -> None:
    from torch._dynamo.utils import counters

    def compiled_once() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        with compiled.kept():
            made = torch.compile(lambda x: (x * 3).sin() + 1)  # pyright: ignore[reportUnknownMemberType]
            made(torch.ones(7))
        found = counters["inductor"]
        return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]

    assert compiled_once() == (1, 0)
    there = {path for path in cache.rglob("*") if path.is_file()}
    assert there
    assert compiled_once() == (0, 1)
