"""`afina combine`, `resize`, `extract` and `inspect`: what they print, their exit status, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from afina import cli
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    base = save_model(folder / "base", tiny_llama(), byte_tokenizer())
    for seed, name in enumerate(("a", "b")):
        save_run(folder / name, base, seed=seed)
    tuned = tiny_llama()
    with torch.no_grad():
        for block in tuned.model.layers:
            block.self_attn.q_proj.weight.add_(0.1)
    save_model(folder / "tuned", tuned, byte_tokenizer())
    return folder


Capture = pytest.CaptureFixture[str]


def test_combine(home: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "c"
    words = ["combine", f"{home}/a:0.7", f"{home}/b:-0.3", "-o", str(out)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"+0.7 x {home}/a\n-0.3 x {home}/b\n")
    assert "its base is this model, by fingerprint\n" in said
    assert "14 places: 14 of rank 8\nexact: nothing of the changes was cut\n" in said
    assert said.endswith(f"written and read back: {out}\n")
    assert cli.main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    record = tmp_path / "record.json"
    again = [*words, "--overwrite", "--method", "svd", "--rank", "2", "--json", str(record)]
    assert cli.main(again) == 0
    said = capsys.readouterr().out
    assert "14 places: 14 of rank 2\nkept " in said
    told = json.loads(record.read_text())
    assert told["method"] == "svd"
    assert 0 < told["kept"] < 1
    assert told["error"] ** 2 == pytest.approx(1 - told["kept"])
    assert len(told["places"]) == 14


def test_weights_and_names(home: Path, tmp_path: Path, capsys: Capture) -> None:
    odd = tmp_path / "a:1.5"
    odd.symlink_to(home / "a")
    assert cli.main(["combine", str(odd), f"{home}/b", "-o", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.startswith(f"+1 x {odd}\n+1 x {home}/b\n")
    for word, says in (("x", "is no number"), ("0", "and not 0"), ("nan", "and not 0")):
        assert cli.main(["combine", f"{home}/a:{word}", "-o", str(tmp_path / "d")]) == 2
        assert says in capsys.readouterr().err
    assert cli.main(["combine", f"{home}/aa:1", "-o", str(tmp_path / "d")]) == 6
    assert "did you mean" in capsys.readouterr().err
    assert cli.main(["combine", "-o", str(tmp_path / "d")]) == 2
    assert not (tmp_path / "d").exists()


def test_resize(home: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "small"
    assert cli.main(["resize", f"{home}/a", "-o", str(out), "--rank", "2", "--json", "-"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert {place["rank"] for place in told["places"]} == {2}
    assert "14 places: 14 of rank 2\nkept " in shown.err
    assert cli.main(["resize", f"{home}/a", "-o", str(tmp_path / "x")]) == 2
    assert "say how small" in capsys.readouterr().err
    assert cli.main(["resize", f"{home}/a", "-o", str(tmp_path / "x"), "--energy", "2"]) == 2
    assert cli.main(["resize", f"{home}/base", "-o", str(tmp_path / "x"), "--rank", "2"]) == 6
    assert not (tmp_path / "x").exists()


def test_extract(home: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "lora"
    words = ["extract", f"{home}/tuned", f"{home}/base", "-o", str(out)]
    assert cli.main([*words, "--energy", "0.99"]) == 0
    said = capsys.readouterr().out
    assert "2 places: 2 of rank 1\nexact: nothing of the changes was cut\n" in said
    assert cli.main([*words, "--energy", "0.99", "--rest", "keep", "--overwrite"]) == 2
    assert "rest" in capsys.readouterr().err
    assert cli.main(["extract", f"{home}/a", f"{home}/base", "-o", str(out), "--rank", "2"]) == 6
    assert "afina resize" in capsys.readouterr().err


def test_inspect(home: Path, tmp_path: Path, capsys: Capture) -> None:
    picture, record = tmp_path / "a.png", tmp_path / "a.json"
    words = ["inspect", f"{home}/a", "--plot", str(picture), "--json", str(record)]
    assert cli.main([*words, "--strict"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{home}/a/adapter: lora\n")
    assert "ranks: 4 (14)" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(record.read_text())["places"]) == 14
    assert cli.main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main(["inspect", f"{home}/a", "--most", "2"]) == 0
    assert "… and 12 more" in capsys.readouterr().out
    inside = f"{home}/a/adapter/adapter_config.json"
    assert cli.main(["inspect", f"{home}/a", "--json", inside, "--overwrite"]) == 2
    assert "something that is read" in capsys.readouterr().err


def test_strange_adapters(home: Path, tmp_path: Path, capsys: Capture) -> None:
    from safetensors.torch import load_file, save_file

    run = save_run(tmp_path / "run", home / "base")
    file = run / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)].fill_(float("nan"))
    save_file(tensors, file)
    assert cli.main(["inspect", str(run)]) == 0
    assert "STRANGE: 1" in capsys.readouterr().out
    assert cli.main(["inspect", str(run), "--strict"]) == 6
    assert "NaN" in capsys.readouterr().err
    for verb in (["combine", str(run)], ["resize", str(run), "--rank", "2"]):
        assert cli.main([*verb, "-o", str(tmp_path / "out")]) == 6
        assert "NaN" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
