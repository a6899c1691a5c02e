"""Processes of which none holds the whole model read their own parts of it, and the run is that of one process."""

from __future__ import annotations

import functools
import io
import json
import weakref
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from afina.cli import main
from afina.config import ParallelSettings
from afina.data.settings import DataSettings
from afina.models import hub
from afina.models.hub import load
from afina.models.in_parts import load_in_parts
from afina.parallel.processes import Processes
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.prompt import PromptTuning
from afina.train.filling import Filling
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from afina.tree.twin import twin_of
from tests.parallel.pool import Pool
from tests.tiny import byte_tokenizer, save_model, tiny_llama
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


def _verb(words: list[str], *, whole: bool) -> tuple[int, str]:
    """`afina train` as this process of several; `whole` says whether the model may be read whole."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        if not whole:
            patch.setattr(hub, "_model", _refused)
        return main(words), said.getvalue()


def _refused(*_: Any) -> None:
    raise AssertionError("the model was read whole")


@pytest.mark.parametrize(
    ("more", "whole"),
    [
        ((), None),
        (("--technique", "prefix"), "prefix starts from a pass of the whole model"),
    ],
)
def test_the_verb_reads_parts_where_it_can_and_says_where_not(
    pool: Pool, tmp_path: Path, more: tuple[str, ...], whole: str | None
) -> None:
    save_model(tmp_path / "tiny", tiny_llama(dtype=torch.float32), byte_tokenizer())
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sets = ["train.compile=false", "parallel.zero=3", "train.micro_rows=2", "train.dtype=fp32"]
    words = ["train", str(tmp_path / "tiny"), str(data), "-o", str(tmp_path / "run"), *more]
    words += ["--steps", "2", *(word for one in sets for word in ("--set", one))]
    done = pool.run(2, functools.partial(_verb, whole=whole is not None), words)
    assert [code for code, _ in done] == [0, 0], done[0][1]
    told = "each process reads the model whole"
    assert (told in done[0][1]) == (whole is not None)
    if whole is not None:
        assert f"{told}: {whole}" in done[0][1]
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()


class Ledger(TorchDispatchMode):
    """Bytes of tensors on the CPU that somebody still has, inside the block; of a file that is mapped there are none.

    Attributes:
        most: at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._there: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            if local.device.type == "cpu":
                self._note(local.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key and key not in self._there:
            self._there[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._there.pop(key)


def _peak(folder: Path, shared: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that a process has at most while it takes its part of a model; its share; the largest tensor."""
    mesh = Processes(ParallelSettings(**shared))
    mesh.begin()
    with Ledger() as ledger:
        model, _, unread = load_in_parts(folder, "fp32")
        edit = apply(model, [LoRA(rank=2)], seed=0, undoable=False)
        filling = Filling(edit, twin_of(edit), unread, 0)
        mesh.hold(model, edit.trainable(), filling.fill)
        parts = mesh.parts(model)
    share = sum(lot.tensor.numel() * 4 for lot in parts.values())
    largest = max(p.numel() * 4 for p in load(folder, "fp32")[0].parameters())
    mesh.end()
    return ledger.most, share, largest


@pytest.mark.parametrize("shared", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}])
def test_no_process_has_more_in_memory_than_its_share_and_a_tensor(
    pool: Pool, tmp_path: Path, shared: dict[str, Any]
) -> None:
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=24, hidden_size=64)
    save_model(tmp_path, model, byte_tokenizer())
    whole = sum(p.numel() * 4 for p in model.parameters())
    for most, share, largest in pool.run(2, _peak, tmp_path, shared):
        assert share < 0.65 * whole
        # The rest is what buffers, children and headers take; a second copy of anything would be more.
        most_allowed = share + largest + whole // 20
        assert share <= most <= most_allowed < 0.75 * whole
