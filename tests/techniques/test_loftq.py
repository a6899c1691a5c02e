"""LoftQ: what rounding took off comes back in A and B; the base stays the rounded one, and is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils.loftq_utils import (
    _low_rank_decomposition,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch import Tensor

import afina
from afina.adapters import files
from afina.adapters.contents import is_exact
from afina.adapters.rounded import read_rounded
from afina.errors import ConfigError, TechniqueError
from afina.ops.loftq import alternate
from afina.ops.packed import dense, pack
from afina.ops.quantise import Scheme
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.lora import LoRA, LoRADelta
from afina.techniques.quantize import Quantize
from tests import battery
from tests.adapters.kit import randomise
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train import kit

SCHEMES = {"nf4": Scheme(), "int8": Scheme("int8", 64, double=False)}


def weight(rows: int = 48, columns: int = 32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns, dtype=torch.float64)


def taken_apart(w: Tensor, rounds: int, *, scheme: str = "nf4", rank: int = 4) -> Any:
    return alternate(
        w, lambda t: pack(t, SCHEMES[scheme], name="w"), dense, rank=rank, rounds=rounds
    )


# --- the mathematics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_round_gives_back_the_largest_directions(scheme: str) -> None:
    """Those of PEFT's own decomposition too."""
    w = weight()
    found = taken_apart(w, 1, scheme=scheme)
    plain = dense(pack(w, SCHEMES[scheme], name="w"))
    assert torch.equal(dense(found.rounded), plain)
    values = torch.linalg.svdvals(w - plain)
    assert abs(found.error - float(values[4:].norm())) < 1e-9
    assert found.error < float(values.norm())
    theirs = _low_rank_decomposition(w - plain, reduced_rank=4)
    battery.close(found.b_OR @ found.a_RI, theirs["L"] @ theirs["R"], 1e-10)
    fewer = taken_apart(w, 1, scheme=scheme, rank=2)
    battery.close(found.b_OR[:, :2] @ found.a_RI[:2], fewer.b_OR @ fewer.a_RI, 1e-10)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(48, 32), (32, 80)])
def test_more_rounds_are_never_worse_and_some_are_better(
    scheme: str, shape: tuple[int, int]
) -> None:
    w = weight(*shape)
    errors = [taken_apart(w, rounds, scheme=scheme).error for rounds in (1, 2, 3, 5, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_the_rounds_are_those_of_the_paper() -> None:
    """Algorithm 1 written out; and a later round can be worse, so that the nearest must be chosen."""
    w, low, errors = weight(), torch.zeros(48, 32, dtype=torch.float64), []
    for _ in range(20):
        rounded = dense(pack(w - low, SCHEMES["nf4"], name="w"))
        u, s, v = torch.linalg.svd(w - rounded)
        low = u[:, :4] * s[:4] @ v[:4]
        errors.append(float((w - rounded - low).norm()))
    for rounds in (1, 2, 20):
        assert abs(taken_apart(w, rounds).error - min(errors[:rounds])) < 1e-9
    assert errors != sorted(errors, reverse=True)


# --- in a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [LoRA, DoRA])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_starts_nearer_to_the_base_and_off_is_the_rounded_one(name: str, made: Any) -> None:
    whole = battery.build(name, torch.float32)
    rounded = battery.build(name, torch.float32)
    apply(rounded, [Quantize()], undoable=False)
    model = battery.build(name, torch.float32)
    before = battery.picture(model)
    edit = apply(model, [Quantize(loftq_rank=6), made(rank=4, alpha=9, start="loftq")])
    for key, delta in edit.deltas.items():
        assert isinstance(delta, LoRADelta)
        module = key.rpartition(".")[0]
        w, q = (dense(m.get_submodule(module).weight).double() for m in (whole, rounded))
        w, q = (w.t(), q.t()) if delta.transposed else (w, q)
        change = delta.scaling * (delta.b.double() @ delta.a.double())
        values = torch.linalg.svdvals(w - q)
        battery.close((w - q - change).norm(), values[4:].norm(), 1e-5)
    wanted, far, near = (battery.logits(m) for m in (whole, rounded, model))
    assert (near - wanted).norm() < 0.9 * (far - wanted).norm()
    with edit.disabled():
        assert torch.equal(battery.logits(model), far)
    edit.undo()
    battery.same_picture(battery.picture(model), before)


def test_all_that_trains_gets_a_gradient_at_once() -> None:
    model = battery.build("llama")
    edit = apply(model, [Quantize(loftq_rank=3), LoRA(rank=3, start="loftq")])
    assert not edit.silent_at_start()
    battery.backward(model)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in edit.trainable().values())
    for delta in edit.deltas.values():
        delta.reset(0)
    assert edit.silent_at_start()


@pytest.mark.parametrize("rounds", [1, 3])
def test_saved_and_loaded_on_the_same_rounded_base_it_says_the_same(
    rounds: int, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    tiny_llama(dtype=torch.float32, tie_word_embeddings=False).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    how = Quantize(loftq_rank=4, loftq_rounds=rounds)
    model, _ = afina.load(base, quantize=how)
    edit = apply(model, [how, LoRA(rank=4, start="loftq")])
    assert is_exact(edit)
    randomise(model)
    answer = battery.logits(model)
    files.save(edit, tmp_path / "a", base=str(base))
    with edit.disabled():
        rounded = battery.logits(model)
    again = read_rounded(tmp_path / "a")
    assert again is not None
    assert (again.technique.loftq_rank == 0) == (rounds == 1)
    other, _ = afina.load(base, quantize=again)
    assert torch.equal(battery.logits(other), rounded)
    loaded = afina.load_adapter(other, tmp_path / "a")
    assert torch.equal(battery.logits(other), answer)
    assert not any("answers a little otherwise" in note for note in loaded.notes)
    # One round leaves the base that quantize makes by itself, and more do not.
    plain, _ = afina.load(base, quantize=Quantize())
    assert torch.equal(battery.logits(plain), rounded) == (rounds == 1)
    if rounds > 1:
        noted = afina.load_adapter(plain, tmp_path / "a").notes
        assert any("loftq_rounds=3" in note for note in noted)


@pytest.mark.parametrize("rounds", [1, 3])
def test_it_is_a_plain_lora_on_its_rounded_base(rounds: int, tmp_path: Path) -> None:
    """PEFT says the same on those weights; so does the merged model, and no twice the rank is needed."""
    base = tmp_path / "base"
    tiny_llama(dtype=torch.float32, tie_word_embeddings=False).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    how = Quantize(loftq_rank=4, loftq_rounds=rounds)
    model, _ = afina.load(base, dtype="fp32", quantize=how)
    edit = apply(model, [how, LoRA(rank=4, start="loftq", target=("attention",))])
    randomise(model)
    answer = battery.logits(model)
    files.save(edit, tmp_path / "a", base=str(base))
    values = {name: dense(p) for name, p in model.named_parameters() if ".lora." not in name}
    dequantised = tiny_llama(dtype=torch.float32, tie_word_embeddings=False)
    dequantised.load_state_dict(values)
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(dequantised, str(tmp_path / "a"))
    assert peer.peft_config["default"].r == 4
    battery.close(battery.logits(peer.eval()), answer, 1e-4)
    afina.merge(tmp_path / "a", tmp_path / "merged")
    merged, _ = afina.load(tmp_path / "merged", dtype="fp32")
    battery.close(battery.logits(merged), answer, 1e-4)


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 1}
    techniques = [Quantize(loftq_rank=2, loftq_rounds=2), LoRA(rank=2, start="loftq")]
    whole = kit.run(tmp_path / "whole", techniques, **settings)
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "run", techniques, options={"seams": kit.stop_after(2)}, **settings)
    rest = kit.run(tmp_path / "run", techniques, options={"resume": True}, **settings)
    assert kit.same(kit.weights(whole), kit.weights(rest))


def test_the_structure_alone_is_made_without_weights() -> None:
    model = battery.build("llama").to("meta")
    edit = apply(model, [Quantize(loftq_rank=2), LoRA(rank=2, start="loftq")])
    assert {tuple(d.a.shape) for d in edit.deltas.values()} == {(2, 16), (2, 24)}


def test_what_cannot_be_given_back_is_refused_and_the_cure_helps() -> None:
    model = battery.build("llama")
    with pytest.raises(TechniqueError, match="none of these weights is rounded") as caught:
        apply(model, [LoRA(rank=2, start="loftq")])
    assert "quantize.loftq_rank=2" in str(caught.value.cure)
    for kept in (0, 1):
        with pytest.raises(TechniqueError, match="known only while weights are packed") as caught:
            apply(model, [Quantize(loftq_rank=kept), LoRA(rank=2, start="loftq")])
        assert f"kept to rank {kept}" in str(caught.value.got)
    apply(model, [Quantize(loftq_rank=2), LoRA(rank=2, start="loftq")]).undo()
    with pytest.raises(TechniqueError, match="is for linears"):
        apply(
            model, [Quantize(loftq_rank=2), LoRA(rank=2, start="loftq", target=("embed_tokens",))]
        )
    with pytest.raises(ConfigError, match="loftq_rounds needs a loftq_rank"):
        Quantize(loftq_rounds=2)


def test_beside_a_weight_that_is_not_rounded_it_starts_by_default() -> None:
    model = battery.build("llama")
    techniques = [Quantize(loftq_rank=2, exclude=("up_proj",)), LoRA(rank=2, start="loftq")]
    edit = apply(model, techniques)
    for name, delta in edit.deltas.items():
        assert isinstance(delta, LoRADelta)
        assert bool(delta.b.any()) == ("up_proj" not in name)
    assert edit.silent_at_start() == {n + ".a" for n in edit.deltas if "up_proj" in n}
