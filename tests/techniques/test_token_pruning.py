"""Token pruning of decoders: kept tokens are computed as if the others were hidden, and nothing looks ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from afina.models.forward import packing
from afina.ops.layout import with_layout
from afina.techniques.pruned_kept import Kept
from afina.techniques.pruned_scores import ByDraw, ByLoss, ByNetwork
from afina.techniques.token_pruning import TokenPruning
from afina.types import Context
from tests import battery
from tests.techniques.pruning_kit import (
    CHOICE,
    ROWS,
    Fixed,
    blocks_of,
    built,
    entry_of,
    fix,
    hidden,
    learnt,
    names,
    pruned,
)
from tests.train.kit import largest_difference

RANDOM = TokenPruning(score="random", layers="0-1")
WAYS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
MODELS = pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "mixtral"])
SCORES = pytest.mark.parametrize("score", ["random", "predictor", "loss"])


def lora(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of LoRA alone."""
    return {name: value for name, value in found.items() if ".lora." in name}


# --- keeping everything is the base ------------------------------------------------------------------------------


@WAYS
@SCORES
@pytest.mark.parametrize("dropped", ["restore", "cut"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_keeping_all_is_the_base_bit_for_bit(
    packed: bool, score: Any, dropped: Any, dtype: torch.dtype
) -> None:
    settings = TokenPruning(keep=1.0, score=score, dropped=dropped, layers="0-1")
    edit = pruned(built("llama", dtype), settings)
    losses, found = learnt(edit, packed=packed)
    with edit.disabled():
        pass
    for name in edit.deltas:
        if name.endswith("token_pruning"):
            edit.deltas[name].enabled = False
    plain, wanted = learnt(edit, packed=packed)
    assert torch.equal(losses, plain)
    assert lora(found).keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    # The predictor learns all the same, through a gate that the value does not know.
    assert {n for n in found if n not in wanted} == set(edit.aiding())


# --- what is kept is computed exactly ------------------------------------------------------------------------------


@WAYS
@MODELS
def test_pruned_blocks_are_whole_ones_with_hidden_keys(packed: bool, name: str) -> None:
    edit = pruned(built(name), RANDOM)
    fix(edit)
    losses, found = learnt(edit, packed=packed)
    model = built(name)
    expected, wanted = hidden(model, names(model))
    # A Llama's norms are in fp32, of the same numbers either way; sums differ in order alone.
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    assert largest_difference(found, wanted) < 1e-8
    whole, _ = hidden(built(name), [])
    assert float((whole - expected).abs().max()) > 1e-2


def test_sdpa_and_eager_and_lines_padded_on_the_left_agree() -> None:
    found: list[Tensor] = []
    for attention, left in (("sdpa", False), ("eager", False), ("sdpa", True), ("eager", True)):
        edit = pruned(built("llama"), RANDOM)
        fix(edit, {number: CHOICE[row.id] for number, row in enumerate(ROWS)})
        edit.model.set_attn_implementation(attention)
        length = max(len(row.tokens) for row in ROWS) + 2
        ids, mask = (torch.zeros(len(ROWS), length, dtype=torch.long) for _ in range(2))
        for number, row in enumerate(ROWS):
            count = len(row.tokens)
            place = slice(length - count, length) if left else slice(0, count)
            ids[number, place], mask[number, place] = torch.tensor(row.tokens), 1
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits = edit.model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        found.append(logits[mask > 0])
        logits[mask > 0].sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in edit.trainable().values())
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-9)
    for eager in found[1::2]:  # its softmax is in fp32
        torch.testing.assert_close(eager, found[0], rtol=0, atol=1e-5)


def test_tokens_out_of_order_would_give_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the identity above: the same tokens, two of them exchanged, where attention goes by order."""
    edit = pruned(built("llama"), RANDOM)
    right = logits(edit, LONG, packed=False)
    own = Kept.of

    def exchanged(mask_L: Tensor, *args: Any, **kwargs: Any) -> Kept:
        kept = own(mask_L, *args, **kwargs)
        kept.places_N[1:3] = kept.places_N[1:3].flip(0)
        return kept

    monkeypatch.setattr(Kept, "of", staticmethod(exchanged))
    wrong = logits(edit, LONG, packed=False)
    assert float((wrong - right).abs().max()) > 1e-2
    with pytest.raises(ValueError, match="in order"):
        learnt(edit, packed=True)


def test_positions_that_are_not_the_tokens_own_would_give_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit = pruned(built("llama"), RANDOM)
    fix(edit)
    right, _ = learnt(edit, packed=True)
    take = Kept.take

    def first(kept: Kept, x: Tensor) -> Tensor:
        # cos and sin of the first places instead of the kept ones
        return x[:, : len(kept.places_N)] if x.shape[-1] == 4 else take(kept, x)

    monkeypatch.setattr(Kept, "take", first)
    wrong, _ = learnt(edit, packed=True)
    assert float((wrong - right).abs().max()) > 1e-2


@WAYS
def test_bf16_is_near(packed: bool) -> None:
    exact, _ = hidden(built("llama"), ["model.layers.0", "model.layers.1"])
    edit = pruned(built("llama", torch.bfloat16), RANDOM)
    fix(edit)
    losses, found = learnt(edit, packed=packed)
    whole, _ = learnt(
        pruned(built("llama", torch.bfloat16), RANDOM.model_copy(update={"keep": 1.0})), packed=True
    )
    plain, _ = learnt(pruned(built("llama"), RANDOM.model_copy(update={"keep": 1.0})), packed=True)
    own = float((whole.double() - plain).abs().max())
    assert float((losses.double() - exact).abs().max()) < 3 * own + 0.02
    assert all(value.dtype == torch.float32 for value in found.values())


@WAYS
def test_recomputed_blocks_keep_what_they_kept(packed: bool) -> None:
    for settings in (
        RANDOM,
        TokenPruning(layers="0-1"),
        TokenPruning(score="random", dropped="cut"),
    ):
        edit = pruned(built("llama"), settings)
        for block in blocks_of(edit):
            if isinstance(block.by, ByNetwork):
                block.by.threshold.fill_(0.0)
        one = learnt(edit, packed=packed)
        other = learnt(edit, packed=packed, recompute=True)
        assert torch.equal(one[0], other[0])
        assert one[1].keys() == other[1].keys()
        assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def test_a_choice_is_made_once_a_pass() -> None:
    edit = pruned(built("llama"), RANDOM)
    fix(edit)
    asked: list[int] = []
    for block in blocks_of(edit):
        own = block.by.choose  # type: ignore[union-attr]
        block.by.choose = lambda *a, own=own, n=block.number: asked.append(n) or own(*a)  # type: ignore[union-attr, method-assign]
    learnt(edit, packed=True, recompute=True)
    assert asked == [0, 1]


# --- gradients -----------------------------------------------------------------------------------------------------


def test_dropped_tokens_pass_a_block_by_and_give_it_no_gradient() -> None:
    """dh_in = dh_out at dropped places; at the kept ones, and in the block's weights, only theirs."""
    edit = pruned(built("llama"), TokenPruning(score="random", layers="0"))
    fix(edit, {4: (0, 2, 5)})
    model, row = edit.model, ROWS[0]
    states: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any = None) -> None:
            states[name] = args[0] if output is None else output
            states[name].retain_grad()

        return hook

    block = model.get_submodule("model.layers.0")
    block.register_forward_pre_hook(keep("in"))
    block.register_forward_hook(keep("out"))
    # Only the block's own change trains, so what enters it must be told to want a gradient.
    model.model.embed_tokens.register_forward_hook(lambda m, a, y: y.detach().requires_grad_(True))
    learnt_on = torch.tensor(row.tokens)[None]
    fix(edit, {0: (0, 2, 5)})
    model(learnt_on, use_cache=False).logits.square().sum().backward()
    dropped = [1, 3, 4, 6, 7, 8]
    assert torch.equal(states["in"][0, dropped], states["out"][0, dropped])
    given, taken = states["in"].grad, states["out"].grad
    assert given is not None
    assert taken is not None
    assert torch.equal(given[0, dropped], taken[0, dropped])
    assert float((given[0, [0, 2, 5]] - taken[0, [0, 2, 5]]).abs().max()) > 1e-3
    # The block's weights: the gradient of the same loss when what is dropped has no way back through the block.
    found = {n: p.grad.clone() for n, p in edit.trainable().items() if "layers.0" in n}
    model.zero_grad()
    x = states["in"].detach()[:, [0, 2, 5]]
    cos, sin = (part[:, [0, 2, 5]] for part in model.model.rotary_emb(x, torch.arange(9)[None]))
    y = type(block).forward(block, x, position_embeddings=(cos, sin))
    y.backward(taken[:, [0, 2, 5]])
    for name, value in found.items():
        wanted = edit.trainable()[name].grad
        assert wanted is not None
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-10)


def test_the_predictors_gradient_is_that_of_a_gate_at_one() -> None:
    edit = pruned(built("llama"), TokenPruning(layers="1"))
    (block,) = blocks_of(edit)
    assert isinstance(block.by, ByNetwork)
    block.by.threshold.fill_(0.0)
    _, found = learnt(edit, packed=True)

    # The same written out: y = x + g · (y - x), with g one in value and the score in gradient.
    def written(y: Tensor, x: Tensor, by: ByNetwork = block.by) -> Tensor:
        score = by.network(x)
        return x + (1 + (score - score.detach()) * 1e-3)[..., None] * (y - x)

    block.by.gated = written  # type: ignore[method-assign]
    _, wanted = learnt(edit, packed=True)
    assert found.keys() == wanted.keys()
    scale = max(float(value.abs().max()) for n, value in wanted.items() if "token_pruning" in n)
    assert scale > 1e-6
    for name in edit.aiding():
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-12 * scale)
    assert largest_difference(lora(found), lora(wanted)) < 1e-12


def test_the_gate_is_no_part_of_the_models_own_gradient() -> None:
    edit = pruned(built("llama"), TokenPruning(layers="0-1"))
    for block in blocks_of(edit):
        assert isinstance(block.by, ByNetwork)
        block.by.threshold.fill_(0.0)
    losses, found = learnt(edit, packed=True)
    for block in blocks_of(edit):
        block.by.gated = lambda y, x: y  # type: ignore[union-attr, method-assign]
    plain, wanted = learnt(edit, packed=True)
    assert torch.equal(losses, plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- nothing looks ahead ---------------------------------------------------------------------------------------------


def ready(score: str, dropped: str = "restore") -> Any:
    """A model whose thresholds keep about half, with its own choice."""
    edit = pruned(built("llama"), TokenPruning(score=score, dropped=dropped, layers="0-1"))  # type: ignore[arg-type]
    entry = entry_of(edit)
    if entry.table is not None:
        draw = torch.Generator().manual_seed(0)
        entry.table.losses_V.copy_(torch.rand(battery.VOCABULARY, generator=draw) * 10)
    for _ in range(2):
        learnt(edit, packed=True)
        for after in edit.seams(10).after_step:
            after(0)
    return edit


def logits(edit: Any, tokens: tuple[int, ...], *, packed: bool = True) -> Tensor:
    """Of one row, as a pass of training makes them."""
    ids = torch.tensor(tokens)[None]
    if not packed:
        return edit.model(ids, use_cache=False).logits[0].detach()
    segments, places = torch.zeros_like(ids), torch.arange(len(tokens))[None]
    context = with_layout(Context(segments, places, step=torch.tensor(1)))
    given = {"position_ids": places, "afina_context": context}
    with packing(edit.model, True):
        return edit.model(ids, **given, use_cache=False).logits[0].detach()


LONG = tuple(
    int(n) for n in torch.randint(0, 40, (24,), generator=torch.Generator().manual_seed(1))
)


@SCORES
@WAYS
def test_later_tokens_change_nothing_before_them(score: str, packed: bool) -> None:
    edit = ready(score)
    before = logits(edit, LONG, packed=packed)
    assert float((before - _whole(edit)).abs().max()) > 1e-3  # something is pruned
    for cut in (3, 11, 20):
        other = LONG[:cut] + tuple((n + 17) % 40 for n in LONG[cut:])
        after = logits(edit, other, packed=packed)
        torch.testing.assert_close(after[:cut], before[:cut], rtol=0, atol=1e-9)
        assert float((after[cut:] - before[cut:]).abs().max()) > 1e-3


def _whole(edit: Any) -> Tensor:
    edit.model.eval()
    found = edit.model(torch.tensor(LONG)[None], use_cache=False).logits[0].detach()
    edit.model.train()
    return found


def test_a_token_more_changes_nothing_before_it_where_each_is_kept_by_itself() -> None:
    for score in ("predictor", "loss"):
        edit = ready(score)
        torch.testing.assert_close(
            logits(edit, LONG[:15]), logits(edit, LONG)[:15], rtol=0, atol=1e-9
        )


class Sums(Fixed):
    """The control: the half of a row that is looked at most, by the column sums of one head's attention."""

    def choose(self, states_LD: Tensor, here: Any) -> Tensor:
        with torch.no_grad():
            scores_LL = torch.corrcoef(states_LD)
            hidden_LL = torch.ones_like(scores_LL).triu(1).bool()
            sums_L = scores_LL.masked_fill(hidden_LL, -torch.inf).softmax(1).sum(0)
        kept = torch.zeros(len(sums_L), dtype=torch.bool)
        kept[sums_L.topk(len(sums_L) // 2).indices] = True
        return kept | here.stays_L


class Ranked(Fixed):
    """A second control: scores of each token's own state, but the best half of the row."""

    def choose(self, states_LD: Tensor, here: Any) -> Tensor:
        scores_L = states_LD.detach()[:, 0]
        kept = torch.zeros(len(scores_L), dtype=torch.bool)
        kept[scores_L.topk(len(scores_L) // 2).indices] = True
        return kept | here.stays_L


@pytest.mark.parametrize("control", [Sums, Ranked])
def test_sums_over_queries_and_ranks_in_a_row_do_look_ahead(control: type[Fixed]) -> None:
    edit = ready("random")
    for block in blocks_of(edit):
        block.by = control({})
    before = logits(edit, LONG)
    worst = 0.0
    for cut in (3, 11, 20):
        other = LONG[:cut] + tuple((n + 17) % 40 for n in LONG[cut:])
        worst = max(worst, float((logits(edit, other)[:cut] - before[:cut]).abs().max()))
    assert worst > 1e-2


# --- drawn, learnt, counted -------------------------------------------------------------------------------------


@WAYS
def test_a_draw_keeps_exactly_its_share_of_each_row_and_the_first_token(packed: bool) -> None:
    edit = pruned(built("llama"), TokenPruning(keep=0.4, score="random", layers="0-1", always=2))
    seen: list[tuple[Any, Tensor]] = []
    for block in blocks_of(edit):
        own = block.by.choose  # type: ignore[union-attr]

        def choose(states: Tensor, here: Any, own: Any = own) -> Tensor:
            seen.append((here, own(states, here)))
            return seen[-1][1]

        block.by.choose = choose  # type: ignore[union-attr, method-assign]
    learnt(edit, packed=packed)
    for here, kept in seen:
        for number, row in enumerate(ROWS):
            mine = here.line.segments_L == number
            assert set(here.line.rows_L[mine].tolist()) == {row.id}
            assert int((kept & mine).sum()) == max(2, -(-len(row.tokens) * 4 // 10))
            assert bool(kept[mine][:2].all())
    assert not torch.equal(seen[0][1], seen[1][1])  # each block draws its own


def test_a_draw_depends_on_seed_step_block_and_row_alone() -> None:
    def drawn(seed: int, step: int, order: slice = slice(None)) -> dict[int, list[int]]:
        by = ByDraw()
        by.reset(seed)
        edit = pruned(built("llama"), RANDOM)
        found: dict[int, list[int]] = {}

        class Watched(Fixed):
            def choose(self, states_LD: Tensor, here: Any) -> Tensor:
                kept = by.choose(states_LD, here)
                for row, place in zip(
                    here.line.rows_L[kept].tolist(), here.line.places_L[kept].tolist(), strict=True
                ):
                    found.setdefault(row, []).append(place)
                return kept

        blocks_of(edit)[0].by = Watched({})
        blocks_of(edit)[1].by = Fixed(CHOICE)
        learnt(edit, ROWS[order], packed=True, step=step)
        return found

    assert drawn(1, 4) == drawn(1, 4)
    assert drawn(1, 4, slice(None, None, -1)) == drawn(1, 4)
    assert drawn(1, 4, slice(1, 3)) == {n: p for n, p in drawn(1, 4).items() if n in (9, 2)}
    assert drawn(1, 5) != drawn(1, 4)
    assert drawn(2, 4) != drawn(1, 4)


@pytest.mark.parametrize("score", ["predictor", "loss"])
@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_thresholds_come_to_keep_the_share(score: Any, keep: float) -> None:
    edit = pruned(built("llama"), TokenPruning(keep=keep, score=score, layers="0-1"))
    generator = torch.Generator().manual_seed(0)
    shares: list[float] = []
    for step in range(12):
        rows = [
            battery._row(n, tuple(torch.randint(0, 40, (60,), generator=generator).tolist()), 1)
            for n in range(6)
        ]
        kept: list[int] = []
        for block in blocks_of(edit):
            own = type(block.by).choose

            def choose(
                states: Tensor, here: Any, own: Any = own, by: Any = block.by, kept: Any = kept
            ) -> Tensor:
                mask = own(by, states, here)
                kept.append(int(mask.sum()))
                return mask

            block.by.choose = choose  # type: ignore[union-attr, method-assign]
        learnt(edit, rows, packed=True, step=step)
        for after in edit.seams(10).after_step:
            after(step)
        shares.append(sum(kept) / len(kept) / 360)
    assert shares[0] == 1.0  # the first step runs whole, and finds the threshold
    assert abs(sum(shares[4:]) / len(shares[4:]) - keep) < 0.05


def test_running_losses_are_those_of_the_method_whatever_the_cut() -> None:
    edit = pruned(built("llama"), TokenPruning(score="loss", layers="0-1", loss_start=7.0))
    entry = entry_of(edit)
    assert entry.table is not None
    seams = edit.seams(10)
    losses = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    row = battery._row(0, (3, 9, 9, 27), 1)
    from afina.data.packing import collate

    batch = collate([row], True, 0)
    assert torch.equal(seams.loss[0](losses, batch, 0), losses)
    seams.after_step[0](0)
    values = entry.table.losses_V
    assert float(values[27]) == pytest.approx(0.995 * 7 + 0.005 * 5)
    # Two losses of one id: as one after the other, up to their order.
    one = 0.995 * (0.995 * 7 + 0.005 * 1) + 0.005 * 2
    two = 0.995 * (0.995 * 7 + 0.005 * 2) + 0.005 * 1
    assert float(values[9]) == pytest.approx((one + two) / 2)
    assert float(values[3]) == 7.0


def test_a_score_by_loss_keeps_ids_that_were_hard() -> None:
    edit = pruned(built("llama"), TokenPruning(score="loss", layers="0-1"))
    entry = entry_of(edit)
    assert entry.table is not None
    entry.table.losses_V.copy_(torch.arange(40) / 10)
    by = blocks_of(edit)[0].by
    assert isinstance(by, ByLoss)
    by.threshold.fill_(2.0)
    seen: list[Tensor] = []
    own = by.choose
    by.choose = lambda states, here: seen.append(own(states, here)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    learnt(edit, packed=True)
    tokens = [t for row in ROWS for t in row.tokens]
    firsts = {0, 9, 13, 20}
    assert seen[0].tolist() == [t >= 20 or n in firsts for n, t in enumerate(tokens)]
