"""Token pruning of encoders against the same done slowly; padded, recomputed, beside LoRA, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import afina
from afina.errors import TechniqueError
from afina.models.blocks import Blocks
from afina.ops import interface
from afina.techniques import encoder_choice
from afina.techniques.encoder_blocks import EncoderBlock
from afina.techniques.encoder_rows import Columns, short_mask
from afina.techniques.token_pruning import TokenPruning
from afina.tree import Around
from afina.types import Context
from tests import battery
from tests.techniques import encoder_kit as kit

WAYS = {"fuse": "attention", "cut": "attention", "merge": "similarity"}
FUSES = [
    {"score": "attention"},
    {"score": "attention", "dropped": "cut"},
    {"score": "similarity"},
    {"score": "learned", "threshold_start": 0.95},
]


def pruned(model: Any, **settings: Any) -> afina.Edit:
    return afina.apply(model, [TokenPruning(**settings)])


def logits(model: Any, **given: Tensor) -> Tensor:
    return model(**(given or kit.inputs())).logits


def gradients(model: Any) -> dict[str, Tensor]:
    """By name of the base's own tensors."""
    named = {n: p for n, p in model.named_parameters() if "token_pruning" not in n}
    return {n: p.grad.clone() for n, p in named.items() if p.grad is not None}


def all_train(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


# --- the same slowly -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["bert", "tags"])
@pytest.mark.parametrize("layers", [None, "1-3"])
def test_outputs_and_gradients_are_those_of_the_slow_way(
    way: str, kind: str, layers: str | None
) -> None:
    model, given = kit.build(kind), kit.inputs()
    slow = copy.deepcopy(model)
    entered = [1, 2, 3]  # the quarters of four blocks are all but the first too
    pruned(model, score=WAYS[way], dropped=way, keep=0.4, layers=layers)
    all_train(model)
    found = logits(model)
    total = torch.zeros(())
    for row, count in enumerate(kit.COUNTS):
        wanted = kit.slow_logits(slow, given["input_ids"][row, :count], way, 0.4, entered)
        mine = found[row, :count][None] if kind == "tags" else found[row][None]
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
        total = total + (wanted.sin()).sum()
    counted = given["attention_mask"].bool() if kind == "tags" else torch.ones(3).bool()
    found.sin()[counted].sum().backward()
    total.backward()
    mine, theirs = gradients(model), gradients(slow)
    assert set(mine) == set(theirs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings", FUSES)
@pytest.mark.parametrize("kind", kit.KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_padded_row_is_what_it_is_alone(
    kind: str, settings: dict[str, Any], attention: str
) -> None:
    if settings["score"] == "learned" and kind in ("tags", "distilbert"):
        return  # refused, see below
    model, given = kit.build(kind), kit.inputs()
    model.set_attn_implementation(attention)
    near = 1e-6 if (kind, attention) == ("modernbert", "eager") else 1e-11  # its softmax is in fp32
    base = logits(model)
    pruned(model, **settings)
    found = logits(model)
    assert not torch.allclose(found[0], base[0])  # it prunes
    for row, count in enumerate(kit.COUNTS):
        alone = logits(model, input_ids=given["input_ids"][row : row + 1, :count])[0]
        mine = found[row, :count] if found.dim() == 3 else found[row]
        torch.testing.assert_close(mine, alone, rtol=0, atol=near)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("settings", FUSES[:3])
def test_padding_on_the_left_changes_no_row(settings: dict[str, Any]) -> None:
    model = kit.build("tags")
    # Positions would differ, so there are none.
    model.bert.embeddings.position_embeddings.weight.data.zero_()
    pruned(model, **settings)
    right, left = kit.inputs(), kit.inputs(left=True)
    for row, count in enumerate(kit.COUNTS):
        left["input_ids"][row, kit.T - count :] = right["input_ids"][row, :count]
    mine, other = logits(model, **left), logits(model, **right)
    for row, count in enumerate(kit.COUNTS):
        torch.testing.assert_close(mine[row, -count:], other[row, :count], rtol=0, atol=1e-11)


class Hides(Around):
    """The whole block, in which the keys of some tokens are hidden and those tokens stay as they are."""

    def __init__(self, kept_BT: Tensor) -> None:
        super().__init__()
        self.kept_BT = kept_BT

    def around(self, call: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[1] & self.kept_BT[:, None, None]
        y = call(args[0], mask, *args[2:], **kwargs)
        return torch.where(self.kept_BT[..., None], y, args[0])


def test_a_shorter_row_is_the_whole_one_with_keys_hidden() -> None:
    model = kit.build("tags")
    whole = copy.deepcopy(model)
    edit = pruned(model, score="attention", dropped="cut", keep=0.5, layers=(2,))
    seen: list[Any] = []
    handle = model.bert.encoder.register_forward_pre_hook(
        lambda m, a, k: seen.append(k["afina_journey"]), with_kwargs=True
    )
    all_train(model)
    found = logits(model)
    handle.remove()
    columns = seen[0].given[2]
    kept = torch.zeros(3, kit.T, dtype=torch.bool)
    for row in range(3):
        kept[row, columns.place_BR[row][columns.real_BR[row]]] = True
    assert kept.sum(1).tolist() == [6, 4, 2]
    for number in (2, 3):
        block = whole.bert.encoder.layer[number]
        block.add_module("hides", Hides(kept))
        block.hides.hooks(block, "hides")
    wanted = logits(whole)
    there = kit.inputs()["attention_mask"].bool()
    torch.testing.assert_close(found[there], wanted[there], rtol=0, atol=1e-12)
    found[there].sin().sum().backward()
    wanted[there].sin().sum().backward()
    mine = gradients(model)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-12)
    edit.undo()


def test_unsorted_columns_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the identity above fails where a token's state goes to another token's place."""
    model = kit.build("tags")
    pruned(model, score="attention", dropped="cut", keep=0.5, layers=(3,))
    right = logits(model)
    own = encoder_choice._written

    def turned(place: Tensor, real: Tensor, places: int) -> Tensor:
        return own(place.flip(1), real.flip(1), places)

    monkeypatch.setattr(encoder_choice, "_written", turned)
    assert (logits(model)[0] - right[0]).abs().max() > 0.01


# --- the baseline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["attention", "similarity", "random"])
@pytest.mark.parametrize("training", [False, True])
def test_all_kept_is_the_baseline_bit_for_bit(score: str, training: bool) -> None:
    model = kit.build("bert").train(training)
    before = logits(model)
    edit = pruned(model, score=score, keep=1.0)
    assert torch.equal(logits(model), before)
    edit.undo()
    edit = pruned(model, score=score, keep=0.4)
    with edit.disabled():
        assert torch.equal(logits(model), before)
    edit.undo()
    assert torch.equal(logits(model), before)
    assert not any("token_pruning" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("score", ["attention", "similarity"])
def test_it_acts_in_evaluation_as_in_training(score: str) -> None:
    model = kit.build("bert")
    pruned(model, score=score, keep=0.5)
    assert torch.equal(logits(model), logits(model.train()))


def test_a_random_draw_acts_in_training_alone_and_lets_others_pass() -> None:
    model = kit.build("tags")
    before = logits(model)
    pruned(model, score="random", keep=0.5, layers=(3,))
    assert torch.equal(logits(model), before)
    model.train()
    torch.manual_seed(3)
    states = model(**kit.inputs(), output_hidden_states=True).hidden_states
    same = (states[-1] == states[-2]).all(-1)[0]
    assert same.sum() == 6
    assert not same[0]
    torch.manual_seed(3)
    again = model(**kit.inputs(), output_hidden_states=True).hidden_states
    assert torch.equal(states[-1], again[-1])


def test_blocks_are_given_fewer_tokens() -> None:
    model = kit.build("bert")
    pruned(model, keep=0.5, layers=(1, 3))
    widths: list[int] = []
    for block in model.bert.encoder.layer:
        block.intermediate.register_forward_hook(lambda m, a, y: widths.append(a[0].shape[1]))
    model(input_ids=kit.inputs()["input_ids"][:1])
    # 12, then 12 · √0.5 rounded up and the fused one, then half and the fused one.
    assert widths == [12, 10, 10, 7]


@pytest.mark.parametrize("settings", [*FUSES, {"score": "random"}])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_recomputed_blocks_find_what_was_chosen(kind: str, settings: dict[str, Any]) -> None:
    drops = {"attention_dropout": 0.2, "mlp_dropout": 0.2}
    if kind == "bert":
        drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}
    model = kit.build(kind, **drops)
    pruned(model, keep=0.5, **settings)
    all_train(model.train())
    found: list[dict[str, Tensor]] = []
    for recompute in (False, True):
        with Blocks(model, recompute).running():
            torch.manual_seed(5)
            logits(model).sin().sum().backward()
        found.append(gradients(model))
        model.zero_grad()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-11)


def test_choices_are_made_once_where_blocks_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.build("bert")
    pruned(model, keep=0.5, layers="1-3")
    all_train(model)
    times: list[int] = []
    own = EncoderBlock._decide
    monkeypatch.setattr(
        EncoderBlock, "_decide", lambda self, *a: times.append(self.number) or own(self, *a)
    )
    with Blocks(model, True).running():
        logits(model).sum().backward()
    assert times == [0, 1, 2]


def test_compiled_blocks_compute_the_same() -> None:
    model = kit.build("bert")
    pruned(model, keep=0.5)
    before = logits(model)
    blocks = Blocks(model, False)
    with blocks.running():
        blocks.compile(True)
        torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12)


def test_beside_lora_the_base_gets_no_gradient_and_a_copy_acts_by_itself() -> None:
    model = kit.build("bert")
    edit = afina.apply(model, [TokenPruning(keep=0.5), afina.LoRA(rank=2)])
    logits(model).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(edit.trainable())
    other = copy.deepcopy(model)
    before = logits(other)
    edit.undo()
    assert torch.equal(logits(other), before)


def test_places_in_front_of_rows_are_kept() -> None:
    model = kit.build("tags")
    afina.apply(model, [TokenPruning(keep=0.3, dropped="cut"), afina.PromptTuning(tokens=3)])
    journeys: list[Any] = []
    model.bert.encoder.register_forward_pre_hook(
        lambda m, a, k: journeys.append(k["afina_journey"]), with_kwargs=True
    )
    logits(model)
    assert journeys[0].protected == 4
    assert journeys[0].given[3].place_BR[0, :4].tolist() == [0, 1, 2, 3]


# --- thresholds ----------------------------------------------------------------------------------------------------


def test_thresholds_are_learnt_softly_and_drop_at_inference() -> None:
    model = kit.build("bert")
    slow = copy.deepcopy(model)
    edit = pruned(model, score="learned", threshold_start=0.9, temperature=0.2, layers=(2,))
    (name,) = edit.trainable()
    assert name == "bert.encoder.layer.1.token_pruning.threshold"
    ids = kit.inputs()["input_ids"][:1]
    model.train()
    found = model(input_ids=ids).logits
    # By hand: behind block 1 each state times its factor.
    x = slow.bert.embeddings(input_ids=ids)
    factor = torch.ones(kit.T)
    for number, block in enumerate(slow.bert.encoder.layer):
        before, x = x, block(x)
        if number == 1:
            mass = kit._mass(block, before)
            factor = torch.sigmoid((mass - 0.9) / 0.2)
            factor[0] = 1
            x = x * factor[:, None]
    wanted = slow.classifier(slow.bert.pooler(x))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    seams = edit.seams(10)
    price = seams.penalty[0](0)
    torch.testing.assert_close(price, 0.1 * factor.mean(), rtol=0, atol=1e-12)
    (found.sum() + price).backward()
    assert edit.trainable()[name].grad is not None
    assert float(seams.penalty[0](0)) == 0  # counted once
    model.eval()
    widths: list[int] = []
    block = model.get_submodule("bert.encoder.layer.2.intermediate")
    block.register_forward_hook(lambda m, a, y: widths.append(a[0].shape[1]))
    model(input_ids=ids)
    assert widths == [int(mass[1:].ge(0.9).sum()) + 1]


def test_the_gradient_of_a_threshold_is_that_of_differences() -> None:
    model = kit.build("bert")
    edit = pruned(model, score="learned", threshold_start=0.9, temperature=0.5)
    model.train()
    tensors = edit.trainable()
    logits(model).sin().sum().backward()
    for parameter in tensors.values():
        ends: list[float] = []
        for step in (1e-6, -2e-6):
            parameter.data += step
            ends.append(logits(model).sin().sum().item())
        parameter.data += 1e-6
        assert parameter.grad is not None
        assert parameter.grad.item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_thresholds_rise_evenly_to_the_last() -> None:
    edit = pruned(kit.build("bert"), score="learned", threshold_start=0.3)
    found = [p.item() for p in edit.trainable().values()]
    assert found == pytest.approx([0.1, 0.2, 0.3])


def test_a_ramp_comes_down_to_what_is_kept_and_evaluation_has_the_end() -> None:
    model = kit.build("bert")
    edit = afina.apply(model, [TokenPruning(keep=0.4, ramp=0.5), afina.LoRA(rank=2)])
    change = edit.seams(10).on_batch[0]
    widths: list[int] = []
    model.bert.encoder.layer[3].intermediate.register_forward_hook(
        lambda m, a, y: widths.append(a[0].shape[1])
    )
    ids = torch.randint(1, 60, (1, 20))
    model.train()
    for step in (0, 2, 5, 9):
        change(None, step)  # type: ignore[arg-type]
        model(input_ids=ids)
    model.eval()
    change(None, 0)  # type: ignore[arg-type]
    model(input_ids=ids)
    assert widths == [20, 17, 9, 9, 9]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": "0-1"}, "in front of the first block"),
        ({"layers": "7"}, "no such block"),
        ({"score": "predictor"}, "not pruned so"),
        ({"score": "loss"}, "not pruned so"),
        ({"score": "attention", "dropped": "merge"}, "cannot become"),
        ({"score": "similarity", "dropped": "fuse"}, "cannot become"),
        ({"score": "random", "dropped": "cut"}, "cannot become"),
        ({"dropped": "restore", "score": "attention"}, "cannot become"),
        ({"granularity": 8}, "would do nothing"),
        ({"score": "learned", "ramp": 0.5}, "would do nothing"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    model = kit.build("bert")
    with pytest.raises(TechniqueError, match=words):
        pruned(model, **settings)
    assert not any("token_pruning" in name for name, _ in model.named_modules())


def test_what_is_dropped_says_the_score() -> None:
    edit = pruned(kit.build("bert"), dropped="merge")
    stages = [d.stage for d in edit.deltas.values() if isinstance(d, EncoderBlock) and d.stage]
    assert {stage.score for stage in stages} == {"similarity"}


@pytest.mark.parametrize("score", ["attention", "similarity"])
def test_a_causal_model_is_refused_with_the_reason(score: str) -> None:
    with pytest.raises(TechniqueError, match="tell of the future"):
        pruned(battery.build("llama"), score=score)


def test_thresholds_are_refused_where_tokens_are_classified() -> None:
    with pytest.raises(TechniqueError, match="classes of tokens"):
        pruned(kit.build("tags"), score="learned")


def test_a_prefix_is_refused() -> None:
    model = kit.build("bert")
    afina.apply(model, [TokenPruning(keep=0.5), afina.PrefixTuning(tokens=2)])
    with pytest.raises(TechniqueError, match="prompt or p_tuning"):
        logits(model)


BESIDE: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2},
    "dora": {"rank": 2},
    "adalora": {"init_rank": 3, "target_rank": 2},
    "trainable_tokens": {"tokens": (3, 4)},
    "prompt": {"tokens": 2},
    "p_tuning": {"tokens": 2},
    "bitfit": {},
    "ia3": {},
    "bottleneck": {"width": 3},
    "full": {},
}


@pytest.mark.parametrize("key", BESIDE)
@pytest.mark.parametrize("score", ["attention", "similarity"])
def test_beside_every_method_a_padded_row_is_what_it_is_alone(key: str, score: str) -> None:
    model, given = kit.build("bert"), kit.inputs()
    other = afina.table.TECHNIQUES[key](**BESIDE[key])
    edit = afina.apply(model, [other, TokenPruning(score=score, keep=0.5)])  # type: ignore[arg-type]
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=drawn) / 8)
    found = logits(model)
    for row, count in enumerate(kit.COUNTS):
        alone = {name: x[row : row + 1, :count] for name, x in given.items()}
        torch.testing.assert_close(found[row], logits(model, **alone)[0], rtol=0, atol=1e-11)
    found.sin().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in edit.trainable().values())


def test_packed_rows_are_refused() -> None:
    model = battery.build("bert")
    pruned(model, keep=0.5)
    ids = torch.tensor([[3, 4, 5, 6]])
    context = Context(torch.zeros_like(ids), torch.arange(4)[None])
    with interface.rows(model), pytest.raises(TechniqueError, match=r"data\.packing=false"):
        model(input_ids=ids, afina_context=context)


# --- masks ---------------------------------------------------------------------------------------------------------


def test_flash_attention_is_given_a_mask_of_its_kind() -> None:
    real = torch.tensor([[True, True, False]])
    place = torch.tensor([[0, 2, 0]])
    columns = Columns(place, place, real, torch.tensor([[0, -1, 1]]))
    rows = torch.zeros(1, 3, 4)
    found = short_mask(torch.ones(1, 3), columns, rows, flat=True)
    assert found is not None
    assert found.tolist() == [[1, 1, 0]]
    merged = Columns(place, place, real, columns.column_BS, torch.tensor([[2.0, 1.0, 0.0]]))
    with pytest.raises(TechniqueError, match="attn_implementation"):
        short_mask(torch.ones(1, 3), merged, rows, flat=True)
    term = short_mask(None, merged, rows, flat=False)
    assert term is not None
    assert term[0, 0, 0, 0].item() == pytest.approx(math.log(2))
    assert term[0, 0, 0, 2] == torch.finfo(rows.dtype).min


def test_under_a_window_columns_see_by_their_positions() -> None:
    steps = torch.arange(6)
    window = ((steps[:, None] - steps).abs() < 3)[None, None]
    place = torch.tensor([[0, 2, 5]])
    columns = Columns(place, place, torch.tensor([[True] * 3]), torch.zeros(1, 6).long())
    found = short_mask(window, columns, torch.zeros(1, 6, 4), flat=False)
    assert found is not None
    wanted = [[True, True, False], [True, True, False], [False, False, True]]
    assert found[0, 0].tolist() == wanted


def test_what_a_block_is_given_and_nobody_knows_is_refused() -> None:
    model = kit.build("bert")
    pruned(model, keep=0.5)
    for block in model.bert.encoder.layer:
        block.register_forward_pre_hook(
            lambda m, a, k: (a, {**k, "strange": torch.zeros(3, kit.T)}), with_kwargs=True
        )
    with pytest.raises(TechniqueError, match="may go by token"):
        logits(model)
