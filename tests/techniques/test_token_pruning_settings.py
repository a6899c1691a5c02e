"""Every setting of token pruning in decoders: what is kept, where and when; and what is refused, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForSequenceClassification, MistralConfig, MistralForCausalLM

from afina.errors import ConfigError, ModelError, TechniqueError
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.pruned_blocks import CutBlock
from afina.techniques.pruned_scores import ByNetwork
from afina.techniques.token_pruning import TokenPruning
from tests import battery
from tests.techniques.pruning_kit import (
    ROWS,
    blocks_of,
    built,
    entry_of,
    gradients,
    learnt,
    pruned,
)

RANDOM = TokenPruning(score="random", layers="0-1")


def kept(edit: Any, *, packed: bool = True, step: int = 0) -> dict[int, dict[int, list[int]]]:
    """Block -> row -> the places that it keeps of the row."""
    found: dict[int, dict[int, list[int]]] = {}
    own = {block.number: block.by for block in blocks_of(edit) if block.by is not None}
    before = {number: by.choose for number, by in own.items()}

    def watched(number: int) -> Any:
        def choose(states: Tensor, here: Any) -> Tensor:
            mask = before[number](states, here)
            rows: dict[int, list[int]] = {}
            pairs = zip(
                here.line.rows_L[mask].tolist(), here.line.places_L[mask].tolist(), strict=True
            )
            for row, place in pairs:
                rows.setdefault(row, []).append(place)
            found[number] = rows
            return mask

        return choose

    for number, by in own.items():
        by.choose = watched(number)  # type: ignore[method-assign]
    learnt(edit, packed=packed, step=step)
    for by in own.values():
        del by.choose
    return found


def counts(edit: Any, **how: Any) -> list[int]:
    """Tokens that the first block keeps of each row of 9, 4, 7 and 6."""
    found = kept(edit, **how)[0]
    return [len(found[row.id]) for row in ROWS]


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_keep_always_and_granularity_say_how_many() -> None:
    assert counts(pruned(built("llama"), RANDOM)) == [5, 2, 4, 3]
    assert counts(pruned(built("llama"), RANDOM.model_copy(update={"keep": 0.2}))) == [2, 1, 2, 2]
    assert counts(pruned(built("llama"), RANDOM.model_copy(update={"always": 4}))) == [5, 4, 4, 4]
    assert counts(pruned(built("llama"), RANDOM.model_copy(update={"granularity": 2}))) == [
        4,
        2,
        2,
        2,
    ]


def test_a_ramp_goes_evenly_from_one_share_to_the_other() -> None:
    down = pruned(built("llama"), RANDOM.model_copy(update={"ramp": 0.4}))
    entry = entry_of(down)
    assert [entry.kept(step) for step in range(6)] == pytest.approx(
        [1, 0.875, 0.75, 0.625, 0.5, 0.5]
    )
    assert counts(down, step=2) == [7, 3, 6, 5]
    # Random-LTD: from few tokens to all.
    up = pruned(
        built("llama"),
        TokenPruning(score="random", keep=1.0, ramp=0.5, ramp_from=0.25, layers="0-1"),
    )
    assert [entry_of(up).kept(step) for step in range(7)] == pytest.approx(
        [0.25, 0.4, 0.55, 0.7, 0.85, 1, 1]
    )
    assert counts(up, step=1) == [4, 2, 3, 3]
    assert entry_of(up).kept(400) == 1.0


def test_blocks_are_all_but_the_first_and_the_last_or_those_that_are_named() -> None:
    deep = {"num_hidden_layers": 6}
    for settings, wanted in (
        (TokenPruning(score="random"), [1, 2, 3, 4]),
        (TokenPruning(score="random", layers="0,-1"), [0, 5]),
        (TokenPruning(score="random", dropped="cut"), [1, 2, 3, 4, 5]),
        (TokenPruning(score="random", dropped="cut", layers="3"), [3, 4, 5]),
    ):
        edit = apply(battery.llama(**deep), [LoRA(rank=2), settings])
        assert [block.number for block in blocks_of(edit)] == wanted
    assert [b.number for b in blocks_of(edit) if b.by is not None] == [3]
    assert [b.last for b in blocks_of(edit) if isinstance(b, CutBlock)] == [False, False, True]


def test_a_predictor_is_as_wide_as_is_said_and_of_auto() -> None:
    edit = pruned(built("llama"), TokenPruning(predictor_width=3))
    (block,) = blocks_of(edit)
    assert isinstance(block.by, ByNetwork)
    assert {n.rpartition(".")[2]: tuple(p.shape) for n, p in edit.aiding().items()} == {
        "down": (3, 16), "down_bias": (3,), "up": (3,),
    }  # fmt: skip
    assert pruned(built("llama"), TokenPruning()).aiding()


def test_running_losses_start_and_fade_as_is_said() -> None:
    edit = pruned(built("llama"), TokenPruning(score="loss", loss_start=3.0, loss_decay=0.5))
    table = entry_of(edit).table
    assert table is not None
    assert bool((table.losses_V == 3.0).all())
    assert table.decay == 0.5


def test_evaluation_runs_whole() -> None:
    edit = pruned(built("llama"), RANDOM)
    ids = torch.tensor(ROWS[0].tokens)[None]
    edit.model.eval()
    answer = edit.model(ids).logits.detach()
    edit.model.train()
    assert float((edit.model(ids, use_cache=False).logits.detach() - answer).abs().max()) > 1e-3
    for name in edit.deltas:
        if "token_pruning" in name:
            edit.deltas[name].enabled = False
    edit.model.eval()
    assert torch.equal(edit.model(ids).logits, answer)


# --- beside others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "front", [PromptTuning(tokens=3), PrefixTuning(tokens=3)], ids=lambda t: t.key
)
def test_places_in_front_are_kept_and_count_apart(packed: bool, front: Any) -> None:
    edit = apply(built("llama"), [front, RANDOM], seed=3)
    found = kept(edit, packed=packed)[0]
    for row in ROWS:
        assert found[row.id][:4] == [0, 1, 2, 3]  # the three places and the row's own first token
        assert len(found[row.id]) == 3 + -(-len(row.tokens) // 2)


@pytest.mark.parametrize(
    "front", [PromptTuning(tokens=3), PrefixTuning(tokens=3)], ids=lambda t: t.key
)
def test_packed_rows_behind_places_are_what_padded_ones_are(front: Any) -> None:
    results: list[Any] = []
    for packed in (True, False):
        edit = apply(built("llama"), [front, RANDOM], seed=3)
        results.append(learnt(edit, packed=packed))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-6)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [RANDOM, TokenPruning(score="random", dropped="cut")], ids=["restore", "cut"]
)
def test_packed_rows_are_what_padded_ones_are(settings: TokenPruning) -> None:
    results = [learnt(pruned(built("gpt2"), settings), packed=packed) for packed in (True, False)]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-9)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=0, atol=1e-9)


def test_experts_are_not_asked_about_dropped_tokens() -> None:
    edit = pruned(built("mixtral"), TokenPruning(score="random", layers="0-1"))
    asked: list[int] = []
    for number in range(2):
        gate = edit.model.get_submodule(f"model.layers.{number}.mlp.gate")
        gate.register_forward_hook(
            lambda m, args, y: asked.append(args[0].reshape(-1, 16).shape[0])
        )
    learnt(edit, packed=True)
    # The head is tried on five tokens first; then the two blocks of the pass.
    assert asked[-2:] == [14, 14]
    assert sum(len(row.tokens) for row in ROWS) == 26


def test_a_cut_keeps_what_trains_and_loses_nothing_of_its_labels() -> None:
    settings = TokenPruning(score="random", dropped="cut", keep=0.1, layers="0")
    edit = pruned(built("llama"), settings)
    found = kept(edit)[0]
    for row in ROWS:
        # Place i predicts token i + 1, whether or not that one is kept.
        predicting = [i for i in range(len(row.tokens) - 1) if row.trained[i + 1]]
        assert found[row.id] == sorted({0, *predicting})
    losses, _ = learnt(edit, packed=True)
    # The same by hand: the kept tokens with their own positions, through both blocks.
    lines: list[Tensor] = []
    for name, delta in edit.deltas.items():
        delta.enabled = not name.endswith("token_pruning")
    for row in ROWS:
        places = torch.tensor(found[row.id])
        ids = torch.tensor(row.tokens)[places][None]
        # The mask says that a gap in the positions begins no new row.
        given = {"position_ids": places[None], "attention_mask": torch.ones_like(ids)}
        logits = edit.model(ids, **given, use_cache=False).logits[0].detach()
        for at, place in enumerate(places.tolist()):
            if place + 1 < len(row.tokens) and row.trained[place + 1]:
                lines.append(-logits[at].log_softmax(-1)[row.tokens[place + 1]])
    torch.testing.assert_close(losses, torch.stack(lines), rtol=0, atol=1e-9)


def test_a_cut_in_stages_keeps_its_share_of_what_is_left() -> None:
    rows = [battery._row(0, tuple(range(30)), 29)]
    settings = TokenPruning(score="random", dropped="cut", layers="0-1")
    edit = pruned(built("llama"), settings)
    before = [len(r.tokens) for r in rows]
    found: list[int] = []
    for block in blocks_of(edit):
        own = block.by.choose  # type: ignore[union-attr]
        block.by.choose = lambda *a, own=own: found.append(int((m := own(*a)).sum())) or m  # type: ignore[union-attr, method-assign]
    learnt(edit, rows, packed=True)
    assert before == [30]
    assert found == [15, 8]
    learnt(edit, rows, packed=False)
    assert found[2:] == [15, 8]


def test_a_cut_outside_of_a_run_runs_whole() -> None:
    """Nobody says there which tokens have a loss."""
    edit = pruned(built("llama"), TokenPruning(score="random", dropped="cut"))
    ids = torch.tensor(ROWS[0].tokens)[None]
    mine = edit.model(ids, use_cache=False).logits
    edit.model.eval()
    assert torch.equal(mine, edit.model(ids, use_cache=False).logits)


def test_a_classifier_of_rows_keeps_their_last_token() -> None:
    config = battery.llama().config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).double().train()
    edit = apply(model, [LoRA(rank=2), TokenPruning(score="random", keep=0.2, layers="0-1")])
    lasts: list[list[int]] = []
    for block in blocks_of(edit):
        own = block.by.choose  # type: ignore[union-attr]

        def choose(states: Tensor, here: Any, own: Any = own) -> Tensor:
            mask = own(states, here)
            lasts.append(mask.view(here.line.shape)[:, 4].tolist())
            return mask

        block.by.choose = choose  # type: ignore[union-attr, method-assign]
    ids = torch.tensor([[3, 9, 27, 14, 8, 0, 0], [12, 33, 4, 21, 7, 0, 0]])
    model(ids, attention_mask=(ids > 0).long(), use_cache=False)
    assert lasts == [[True, True], [True, True]]


def test_a_cache_of_some_of_the_tokens_is_neither_given_nor_taken() -> None:
    edit = pruned(built("llama"), RANDOM)
    model, ids = edit.model, torch.tensor(ROWS[0].tokens)[None]
    assert model(ids, use_cache=True).cache is None
    model.eval()
    cache = model(ids, use_cache=True).cache
    model(ids[:, :1], cache=cache)
    model.train()
    with pytest.raises(ModelError, match="no use for a cache"):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ModelError, match="no use for a cache"):
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)


# --- windows ---------------------------------------------------------------------------------------------------------


def mistral(window: int) -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=window, initializer_range=0.3,
        )
    ).double().train()  # fmt: skip


def test_a_block_that_sees_a_window_runs_whole_where_rows_are_longer() -> None:
    settings = TokenPruning(score="random", layers="0-1")
    for window, whole in ((9, False), (8, True)):
        edit = pruned(mistral(window), settings)
        assert any("see a window" in warning for warning in edit.warnings)
        losses, _ = learnt(edit, packed=True)
        edit.undo()
        plain = pruned(mistral(window), settings.model_copy(update={"keep": 1.0}))
        base, _ = learnt(plain, packed=True)
        assert torch.equal(losses, base) == whole


def test_a_cut_is_refused_where_blocks_see_a_window() -> None:
    with pytest.raises(TechniqueError, match="reach further back"):
        apply(mistral(8), [LoRA(rank=2), TokenPruning(dropped="cut")])


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"score": "attention"}, "tell of the future"),
        ({"score": "similarity"}, "tell of the future"),
        ({"score": "learned"}, "tell of the future"),
        ({"dropped": "fuse"}, "tell those before it"),
        ({"dropped": "merge"}, "tell those before it"),
        ({"granularity": 4}, "granularity would do nothing"),
        ({"score": "random", "predictor_width": 4}, "predictor_width would do nothing"),
        ({"loss_start": 1.0}, "loss_start would do nothing"),
        ({"loss_decay": 0.5, "score": "random"}, "loss_decay would do nothing"),
        ({"temperature": 1.0}, "temperature would do nothing"),
        ({"ramp_from": 0.5}, "there is no ramp"),
        ({"layers": "7"}, "no such block"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_is_as_it_was(
    settings: dict[str, Any], words: str
) -> None:
    model = battery.build("llama")
    before = battery.picture(model)
    with pytest.raises(TechniqueError, match=words):
        apply(model, [LoRA(rank=2), TokenPruning(**settings)])
    battery.same_picture(battery.picture(model), before)


def test_a_score_by_loss_is_refused_for_classifiers() -> None:
    config = battery.llama().config
    config.num_labels, config.pad_token_id = 3, 0
    with pytest.raises(TechniqueError, match="gives classes"):
        apply(LlamaForSequenceClassification(config), [LoRA(rank=2), TokenPruning(score="loss")])


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": 0.0},
        {"keep": 1.1},
        {"always": 0},
        {"ramp": 2.0},
        {"layers": "3-1"},
        {"score": "best"},
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TokenPruning(**settings)


def test_undo_and_copies_leave_nothing_and_share_nothing() -> None:
    import copy

    model = battery.build("llama")
    before = battery.picture(model)
    edit = apply(model, [LoRA(rank=2), TokenPruning()])
    twin = copy.deepcopy(model)
    edit.undo()
    battery.same_picture(battery.picture(model), before)
    twin.train()
    for name, module in twin.named_modules():
        if name.endswith("token_pruning.by"):
            module.threshold.fill_(0.0)  # type: ignore[union-attr, operator]
    answer = twin(battery.IDS, use_cache=False).logits.detach()
    twin.eval()
    assert float((answer - battery.logits(twin)).abs().max()) > 1e-3


def test_gradients_reach_everything_that_trains() -> None:
    for score in ("random", "predictor", "loss"):
        edit = pruned(built("llama"), TokenPruning(score=score, layers="0-1"))
        learnt_on, found = learnt(edit, packed=True)
        assert bool(torch.isfinite(learnt_on).all())
        assert found.keys() == edit.trainable().keys()
        assert all(bool(value.any()) for value in found.values())
        assert not gradients(edit)
