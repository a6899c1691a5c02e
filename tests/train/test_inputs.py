"""Entering a model at its lowest trained block: the same losses and gradients, the blocks below run once a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from afina.config import TrainSettings
from afina.errors import ConfigError, RunError, TechniqueError, sized
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.head import head_of
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.entering import Entering
from afina.train.inputs import FOLDER, Store, key_of
from afina.train.lowest import Place, place_of, refuse_too_little_room
from afina.train.metrics import read_metrics
from afina.train.passes import Passes
from afina.train.plan import Plan
from afina.train.report import Silent
from afina.tree import Edit, Seams, Technique
from afina.types import Row
from tests.tiny import tiny_gpt2, tiny_llama
from tests.train.kit import Stop, largest_difference, ragged_rows, run, same, stop_after, weights

HEADER = {"format": "1", "block": "b"}
TOP = LoRA(rank=2, layers="2-3")


def bloom() -> Any:
    """Its blocks give a pair, and its attention cannot be told which row a token is of, so it takes padded batches."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=260, hidden_size=32, n_layer=4, n_head=4, hidden_dropout=0.0)
    return BloomForCausalLM(config).double().eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_llama(num_hidden_layers=4),
    "gpt2": lambda: tiny_gpt2(
        n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0
    ),
    "bloom": bloom,
}


def of(model: Any, technique: Technique = TOP) -> Edit:
    edit = apply(model, [technique], seed=5)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in edit.trainable().items():
            if name.endswith(".b"):
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) * 0.1)
    model.train()
    return edit


def settings(**given: Any) -> TrainSettings:
    return TrainSettings(**{"epochs": 3, "rows_per_step": 4, "cache_inputs_gib": 0.1, **given})


def entering(edit: Edit, rows: Sequence[Row], out: Path, *, packed: bool, shared: bool) -> Entering:
    place = place_of(edit, Plan(settings(), rows, 100), Seams())
    assert place is not None
    passes = Passes(edit.model, packed, shared, 257, head_of(edit.model))
    return Entering(place, passes, Store(out, HEADER, 0))


def learnt(
    made: Entering, rows: Sequence[Row], edit: Edit, *, step: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients; the model's own way for no step."""
    batch = made.passes.batch(rows)
    if step is None:
        losses = made.passes.losses(batch)
    else:
        with made.around(rows, step, 0):
            losses = made.passes.losses(batch)
    losses.sum().backward()
    found = {}
    for name, tensor in edit.trainable().items():
        assert tensor.grad is not None
        found[name] = tensor.grad.clone()
        tensor.grad = None
    return losses.detach(), found


class Count:
    """How often the insides of a block run."""

    def __init__(self, place: Place, index: int) -> None:
        self.calls = 0
        inside = next(iter(list(place.blocks.values())[index].children()))
        inside.register_forward_pre_hook(self)

    def __call__(self, *args: Any) -> None:
        self.calls += 1


WAYS = {"packed": (True, False), "shared": (True, True), "padded": (False, False)}


def alike(rows: Sequence[Row]) -> list[Row]:
    """Rows that begin alike, far enough to be worth sharing."""
    return [Row(tuple(range(20)) + r.tokens, (False,) * 20 + r.trained, r.id) for r in rows]


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, way) for kind in ("llama", "gpt2") for way in WAYS), ("bloom", "padded")],
)
def test_known_rows_give_the_same_losses_and_gradients_bit_for_bit(
    kind: str, way: str, tmp_path: Path
) -> None:
    packed, shared = WAYS[way]
    edit, rows = of(MODELS[kind]()), alike(ragged_rows(4))
    with packing(edit.model, packed):
        made = entering(edit, rows, tmp_path, packed=packed, shared=shared)
        made.prove(rows)
        below, above = Count(made.place, 1), Count(made.place, 2)
        own = learnt(made, rows, edit, step=None)
        first = learnt(made, rows, edit, step=0)
        assert (below.calls, above.calls) == (2, 2)
        again = learnt(made, rows, edit, step=1)
        assert (below.calls, above.calls) == (2, 3)
        for losses, gradients in (first, again):
            assert torch.equal(losses, own[0])
            assert largest_difference(gradients, own[1]) == 0
        # Other neighbours, another order: the same to rounding.
        mixed = [rows[2], rows[0]]
        with_states, without = (learnt(made, mixed, edit, step=s) for s in (2, None))
        assert below.calls == 3
        torch.testing.assert_close(with_states[0], without[0], rtol=0, atol=1e-10)
        assert largest_difference(with_states[1], without[1]) < 1e-9
        # A row that is not known: all of them run.
        learnt(made, [rows[0], *alike(ragged_rows(1, seed=9))], edit, step=3)
        assert below.calls == 4
    assert [p.name for p in sorted(made.store.folder.iterdir())] == [
        "step-000001-000.safetensors", "step-000004-000.safetensors"
    ]  # fmt: skip
    assert list(load_file(made.store.folder / "step-000004-000.safetensors")) == [
        key_of(alike(ragged_rows(1, seed=9))[0])
    ]


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputed_blocks_are_entered_too(recompute: Any, tmp_path: Path) -> None:
    edit, rows = of(MODELS["llama"]()), ragged_rows(4)
    with packing(edit.model, True), Blocks(edit.model, recompute).running():
        made = entering(edit, rows, tmp_path, packed=True, shared=False)
        own = learnt(made, rows, edit, step=0)
        below = Count(made.place, 1)
        again = learnt(made, rows, edit, step=1)
    assert below.calls == 0
    assert torch.equal(own[0], again[0])
    assert largest_difference(own[1], again[1]) == 0


def test_wrong_states_do_not_go_unnoticed(tmp_path: Path) -> None:
    """The control: what is read is what is used."""
    edit, rows = of(MODELS["llama"]()), ragged_rows(3)
    with packing(edit.model, True):
        made = entering(edit, rows, tmp_path, packed=True, shared=False)
        own, _ = learnt(made, rows, edit, step=0)
        [file] = made.store.folder.iterdir()
        save_file({k: v + 1e-3 for k, v in load_file(file).items()}, file, metadata=HEADER)
        other, _ = learnt(made, rows, edit, step=1)
    assert float((own - other).abs().max()) > 1e-5


# --- what it is not for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("technique", "given", "words"),
    [
        (LoRA(rank=2), {}, "the lowest block trains"),
        (LoRA(rank=2, target=("lm_head",)), {}, "no block trains"),
        (TOP, {"epochs": 1}, "the run sees each row once"),
        (TOP, {"epochs": None, "steps": 3}, "the run sees each row once"),
        (TOP, {"cache_inputs_gib": 1e-6}, "take more than that"),
    ],
)
def test_what_would_do_nothing_or_take_too_much_is_refused(
    technique: Technique, given: dict[str, Any], words: str
) -> None:
    edit, rows = of(MODELS["llama"](), technique), ragged_rows(12)
    chosen = settings(**given)
    total = chosen.steps or 3 * int(chosen.epochs or 0)
    with pytest.raises(ConfigError, match=words) as caught:
        place_of(edit, Plan(chosen, rows, total), Seams())
    assert "leave train.cache_inputs_gib out" in str(caught.value.cure)


def test_the_advised_limit_is_enough() -> None:
    edit, rows = of(MODELS["llama"]()), ragged_rows(12)
    with pytest.raises(ConfigError) as caught:
        place_of(edit, Plan(settings(cache_inputs_gib=1e-9), rows, 9), Seams())
    advised = float(str(caught.value.cure).split("=")[1].split(";")[0])
    place = place_of(edit, Plan(settings(cache_inputs_gib=advised), rows, 9), Seams())
    assert place is not None
    tokens = sum(len(row.tokens) for row in rows)
    assert (place.name, place.first, place.needed_bytes) == ("model.layers.2", 2, tokens * 32 * 8)
    twice = place_of(edit, Plan(settings(), [*rows, *rows], 99), Seams())
    assert twice is not None
    assert twice.needed_bytes == place.needed_bytes  # equal rows are there once
    assert place_of(edit, Plan(settings(cache_inputs_gib=None), rows, 9), Seams()) is None


def test_what_differs_every_time_is_refused() -> None:
    rows = ragged_rows(12)
    dropping = of(tiny_gpt2(n_layer=4, embd_pdrop=0.1, resid_pdrop=0.0, attn_pdrop=0.0))
    with pytest.raises(TechniqueError, match="drops something in training"):
        place_of(dropping, Plan(settings(), rows, 9), Seams())
    seams = Seams(on_batch=(lambda batch, step: batch,))
    with pytest.raises(TechniqueError, match="changes batches"):
        place_of(of(MODELS["llama"]()), Plan(settings(), rows, 9), seams)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_trains_is_seen_where_its_states_enter(
    tied: bool, tmp_path: Path
) -> None:
    whole = "lm_head" if tied else "embed_tokens"
    model = tiny_llama(num_hidden_layers=4, tie_word_embeddings=tied)
    edit = of(model, LoRA(rank=2, layers="2-3", modules_to_save=(whole,)))
    rows = ragged_rows(3)
    with packing(edit.model, True):
        made = entering(edit, rows, tmp_path, packed=True, shared=False)
        with pytest.raises(TechniqueError, match=r"something below model\.layers\.2 trains"):
            made.prove(rows)


def test_a_head_that_trains_is_above() -> None:
    model = tiny_llama(num_hidden_layers=4)
    edit = of(model, LoRA(rank=2, layers="3", modules_to_save=("lm_head",)))
    place = place_of(edit, Plan(settings(), ragged_rows(12), 9), Seams())
    assert place is not None
    assert place.first == 3
    edit = of(tiny_llama(num_hidden_layers=4), Full(layers="1-3"))
    place = place_of(edit, Plan(settings(), ragged_rows(12), 9), Seams())
    assert place is not None
    assert place.first == 1


def test_blocks_that_hand_on_more_are_found_out(tmp_path: Path) -> None:
    edit, rows = of(MODELS["llama"]()), ragged_rows(3)
    layers: Any = edit.model.model.layers  # pyright: ignore[reportAttributeAccessIssue]
    aside: list[Tensor] = []

    def put(module: Any, args: Any, output: Tensor) -> None:
        aside.append(output)

    def take(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + (aside.pop() if aside else 0)

    layers[0].register_forward_hook(put)
    layers[3].register_forward_hook(take)
    with packing(edit.model, True):
        made = entering(edit, rows, tmp_path, packed=True, shared=False)
        with pytest.raises(TechniqueError, match="hand on more"):
            made.prove(rows)


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place({}, 1, 5 * 2**40)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 2**40}))
    with pytest.raises(RunError, match="too little room") as caught:
        refuse_too_little_room(place, tmp_path / "run")
    assert "5.0 TiB" in str(caught.value) or "5,120" in str(caught.value)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 6 * 2**40}))
    refuse_too_little_room(place, tmp_path / "run")


# --- on the disk ---------------------------------------------------------------------------------------------------


def states(rows: Sequence[Row], value: float = 1.0) -> dict[str, Tensor]:
    return {key_of(row): torch.full((len(row.tokens), 2), value) for row in rows}


def test_states_are_found_again_by_their_tokens(tmp_path: Path) -> None:
    rows = ragged_rows(5)
    store = Store(tmp_path, HEADER, 0)
    store.add(states(rows[:2]), 1, 0)
    store.add(states(rows[1:3], 2.0), 2, 0)  # what is there stays
    again = Store(tmp_path, HEADER, 2)
    keys = [key_of(row) for row in rows]
    assert [key in again for key in keys] == [True, True, True, False, False]
    found = again.read(keys[:3])
    assert [float(x.mean()) for x in found] == [1.0, 1.0, 2.0]
    assert [len(x) for x in found] == [len(row.tokens) for row in rows[:3]]
    other = Row(rows[0].tokens, (False,) * len(rows[0].tokens), 99, "elsewhere")
    assert key_of(other) == keys[0]
    assert key_of(Row(rows[0].tokens[:-1], (), 0)) != keys[0]


def test_what_is_of_later_steps_or_of_another_base_or_not_whole_is_removed(tmp_path: Path) -> None:
    rows = ragged_rows(6)
    store = Store(tmp_path, HEADER, 0)
    for step in range(1, 5):
        store.add(states([rows[step]]), step, 0)
    (store.folder / ".step-000009-000.safetensors.1.tmp").write_text("half")
    damaged = store.folder / "step-000002-000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    back = Store(tmp_path, HEADER, 3)
    assert [key_of(row) in back for row in rows] == [False, True, False, True, False, False]
    assert [p.name[8:11] for p in sorted(back.folder.iterdir())] == ["001", "003"]
    other = Store(tmp_path, {**HEADER, "block": "c"}, 3)
    assert key_of(rows[1]) not in other
    assert list(other.folder.iterdir()) == []
    other.remove()
    assert not (tmp_path / FOLDER).exists()


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, HEADER, 0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("afina.train.inputs.durable.sync", full)
    with pytest.raises(RunError, match="states of step 1 could not be written: there is no room"):
        store.add(states(ragged_rows(1)), 1, 0)
    assert list(store.folder.iterdir()) == []
    assert key_of(ragged_rows(1)[0]) not in store


# --- in a run ------------------------------------------------------------------------------------------------------


class Told(Silent):
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def trained(out: Path, *, cached: bool, options: dict[str, Any] | None = None, **more: Any) -> Any:
    limit = 0.1 if cached else None
    model = more.pop("model", None) or tiny_llama(num_hidden_layers=4)
    whole: dict[str, Any] = {"epochs": 3, "save_every": 2, "val": ragged_rows(3, seed=7), **more}
    return run(out, TOP, model=model, options=options, cache_inputs_gib=limit, **whole)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out)]


def test_a_run_learns_the_same_and_leaves_no_states(tmp_path: Path) -> None:
    told = Told()
    model = tiny_llama(num_hidden_layers=4)
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: calls.append(1) if torch.is_grad_enabled() else None
    )
    mine = trained(tmp_path / "mine", cached=True, model=model, options={"reporter": told})
    plain = trained(tmp_path / "plain", cached=False)
    assert losses(tmp_path / "mine") == pytest.approx(losses(tmp_path / "plain"), abs=1e-9)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(mine)[name], value, rtol=1e-5, atol=1e-7)
    # Ten rows, four a step, two a micro-batch: five passes in the first epoch, and those that try things out before.
    before = len(calls) - 5
    assert before <= 3
    assert not (tmp_path / "mine" / FOLDER).exists()
    tokens = sum(len(row.tokens) for row in ragged_rows(10))
    [line] = [line for line in told.lines if "what enters model.layers.2" in line]
    assert sized(tokens * 32 * 8) in line
    assert "0.1 GiB are granted" in line


@pytest.mark.slow
def test_compiled_blocks_are_entered_too(tmp_path: Path) -> None:
    for cached in (True, False):
        torch._dynamo.reset()
        model = tiny_llama(num_hidden_layers=4, dtype=torch.float32)
        trained(tmp_path / str(cached), cached=cached, model=model, compile=True)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-4)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_goes_on_bit_for_bit(stop: int, tmp_path: Path) -> None:
    rows = [*ragged_rows(9), ragged_rows(9)[0]]  # one is there twice
    whole = trained(tmp_path / "whole", cached=True, share=False, data=rows)
    with pytest.raises(Stop):
        trained(tmp_path / "parts", cached=True, share=False, data=rows,
                options={"seams": stop_after(stop)})  # fmt: skip
    left = sorted(path.name for path in (tmp_path / "parts" / FOLDER).iterdir())
    assert left
    assert len(left) >= stop
    again = trained(tmp_path / "parts", cached=True, share=False, data=rows,
                    options={"resume": True})  # fmt: skip
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same(weights(whole), weights(again))
    assert not (tmp_path / "parts" / FOLDER).exists()


def test_what_cannot_be_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    for technique, more in ((LoRA(rank=2), {}), (TOP, {"cache_inputs_gib": 1e-7})):
        with pytest.raises(ConfigError, match="cache_inputs_gib"):
            run(tmp_path / "run", technique, model=tiny_llama(num_hidden_layers=4), epochs=2,
                **{"cache_inputs_gib": 1.0, **more})  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_folder_with_states_is_a_runs_and_may_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        trained(tmp_path / "run", cached=True, options={"seams": stop_after(1)})
    assert (tmp_path / "run" / FOLDER).exists()
    trained(tmp_path / "run", cached=False, options={"overwrite": True}, epochs=1)
    assert not (tmp_path / "run" / FOLDER).exists()
