"""Processes of which none holds the whole model read their own parts of it, and the run is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.config import ParallelSettings
from afina.data.settings import DataSettings
from afina.models.hub import load
from afina.models.in_parts import load_in_parts
from afina.parallel.processes import Processes
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.prompt import PromptTuning
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from tests.parallel.pool import Pool
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train.kit import ragged_rows

pytestmark = pytest.mark.dist

HOW: dict[str, Any] = {"optimizer": "sgd", "lr": 0.3, "steps": 3, "rows_per_step": 4}
TECHNIQUES: dict[str, Any] = {
    "lora": LoRA(rank=2),
    "pissa": LoRA(rank=2, start="pissa"),
    "dora": DoRA(rank=2),
    "full": Full(),
    "prompt": PromptTuning(tokens=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, in several files."""
    made = tmp_path_factory.mktemp("model")
    tiny_llama(tie_word_embeddings=True).save_pretrained(made, max_shard_size="100KB")
    byte_tokenizer().save_pretrained(made)
    return made


def trained(folder: Path, out: Path, key: str, shared: dict[str, Any] | None) -> None:
    """The run, in this process alone or in parts."""
    options: dict[str, Any] = {"reporter": Silent(), "base": "tiny"}
    if shared is None:
        model, tokenizer = load(folder, "fp64")
    else:
        options["mesh"] = Processes(ParallelSettings(**shared))
        model, tokenizer, options["unread"] = load_in_parts(folder, "fp64")
    edit = apply(model, [TECHNIQUES[key]], seed=0, undoable=False)
    given = RunOptions(**options, data_settings=DataSettings(share_prefixes=False))
    train(model, tokenizer, ragged_rows(10), edit, out, options=given, **HOW)
    if shared is not None:
        options["mesh"].end()


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("lora", 2, {"zero": 3}),
    ("pissa", 3, {"zero": 3}),
    ("full", 2, {"zero": 3}),
    ("prompt", 2, {"zero": 3}),
    ("lora", 2, {"tensor": 2}),
    ("dora", 2, {"tensor": 2}),
    ("full", 2, {"tensor": 2}),
    ("lora", 2, {"pipeline": 2}),
    ("full", 2, {"pipeline": 2}),
    ("lora", 4, {"tensor": 2, "zero": 3}),
    ("lora", 4, {"pipeline": 2, "zero": 2}),
]


@pytest.mark.parametrize(("key", "processes", "shared"), LAYOUTS)
def test_a_run_from_parts_is_that_of_one_process(
    pool: Pool, tmp_path: Path, folder: Path, key: str, processes: int, shared: dict[str, Any]
) -> None:
    alone, out = tmp_path / "alone", tmp_path / "parts"
    trained(folder, alone, key, None)
    pool.run(processes, trained, folder, out, key, shared)
    for name in ("loss", "gradient_norm"):
        found, wanted = ([line[name] for line in read_metrics(p)] for p in (out, alone))
        assert found == [pytest.approx(v, abs=1e-9) for v in wanted]
    file = "model/model" if key == "full" else "adapter/adapter_model"
    found, wanted = (load_file(p / f"{file}.safetensors") for p in (out, alone))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-9)
    # Base and starting weights are known by the same words, whatever the layout.
    told = [json.loads((p / "start.json").read_text())["settings"] for p in (out, alone)]
    for name in ("the base model's weights", "the starting weights"):
        assert told[0][name] == told[1][name]
