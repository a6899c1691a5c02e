"""Combined adapters on disk: PEFT reads them, and the logits are those of the weighted sum of the changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import afina
from afina.adapters import computed, files
from afina.adapters.combine import CombineSettings, combine
from afina.adapters.sources import read_source
from afina.errors import AdapterError, ConfigError
from tests import battery
from tests.adapters.kit import CONFIG, RECORD, WEIGHTS, build, edit_config, edit_tensors, randomise
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

KINDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "ranks and scales": (
        "llama",
        [
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
        ],
    ),
    "targets": (
        "llama",
        [
            {"r": 3, "target_modules": ["q_proj", "down_proj"]},
            {"r": 5, "target_modules": ["k_proj", "down_proj"], "layers_to_transform": [1]},
        ],
    ),
    "rslora and patterns": (
        "llama",
        [
            {
                "r": 4,
                "use_rslora": True,
                "target_modules": "all-linear",
                "rank_pattern": {"layers.1.mlp.up_proj": 2, "q_proj": 3},
                "alpha_pattern": {r".*\.0\.mlp\..*": 9},
            },
            {"r": 4, "lora_alpha": 1, "target_modules": ["q_proj", "o_proj"]},
        ],
    ),
    "conv1d": (
        "gpt2",
        [
            {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
            {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True},
        ],
    ),
    "embeddings": (
        "llama",
        [
            {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
            {"r": 3, "target_modules": ["embed_tokens", "lm_head"]},
        ],
    ),
    "AdaLoRA": (
        "llama",
        [
            {
                "init_r": 4,
                "target_r": 2,
                "total_step": 9,
                "lora_alpha": 6,
                "target_modules": ["q_proj"],
            },
            {"r": 3, "target_modules": ["q_proj", "o_proj"]},
        ],
    ),
    "more than a matrix has": (
        "llama",
        [{"r": 16, "target_modules": ["k_proj"]}, {"r": 16, "target_modules": ["k_proj"]}],
    ),
}
WEIGHTED = (0.7, -1.3)


def made_by_peft(
    base: str, folder: Path, settings: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Saves a random adapter; returns what it adds to each weight, as PEFT computes it."""
    with battery.quiet():
        model: Any = get_peft_model(
            build(base), (AdaLoraConfig if "init_r" in settings else LoraConfig)(**settings)
        )
        randomise(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    torch.manual_seed(seed)
                    parameter.add_(torch.randn_like(parameter))
        model.save_pretrained(str(folder), save_embedding_layers=False)
    edit_config(folder, base_model_name_or_path="tiny/gone")
    return deltas(
        read_by_peft(base, folder)
    )  # as read: AdaLoRA's divisor was moved above, and is not saved


def deltas(model: Any, adapter: str = "default") -> dict[str, Tensor]:
    """ΔW of each module, as PEFT computes it."""
    return {
        name: module.get_delta_weight(adapter).detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and adapter in module.scaling
    }


def read_by_peft(base: str, folder: Path) -> Any:
    with battery.quiet():
        return PeftModel.from_pretrained(build(base), str(folder))


def weighted(found: list[dict[str, Tensor]], weights: tuple[float, ...]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for one, weight in zip(found, weights, strict=True):
        for name, delta in one.items():
            total[name] = total.get(name, 0) + weight * delta
    return total


def error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Relative, over all modules."""
    assert set(found) == set(wanted)
    off = sum(float((found[n] - wanted[n]).square().sum()) for n in wanted)
    return (off / sum(float(t.square().sum()) for t in wanted.values())) ** 0.5


def two(kind: str, tmp_path: Path) -> tuple[str, dict[Path, float], dict[str, Tensor]]:
    """Two adapters of PEFT, with weights, and the weighted sum of their changes."""
    base, settings = KINDS[kind]
    folders = [tmp_path / "a", tmp_path / "b"]
    found = [
        made_by_peft(base, f, s, n) for n, (f, s) in enumerate(zip(folders, settings, strict=True))
    ]
    return base, dict(zip(folders, WEIGHTED, strict=True)), weighted(found, WEIGHTED)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_exact_sum(kind: str, tmp_path: Path) -> None:
    base, sources, wanted = two(kind, tmp_path)
    made = combine(sources, tmp_path / "c")
    theirs = read_by_peft(base, tmp_path / "c")
    assert error(deltas(theirs), wanted) < 1e-12
    assert (made.kept, made.error) == (1, 0)
    model = build(base)
    files.load(model, tmp_path / "c")
    theirs.eval()
    torch.testing.assert_close(battery.logits(model), battery.logits(theirs), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_svd_that_keeps_all_is_the_sum_on_every_kind_of_map(kind: str, tmp_path: Path) -> None:
    base, sources, wanted = two(kind, tmp_path)
    made = combine(sources, tmp_path / "c", settings=CombineSettings(method="svd", energy=1.0))
    assert error(deltas(read_by_peft(base, tmp_path / "c")), wanted) < 1e-12
    assert made.error < 1e-12


def test_ranks_stay_within_the_matrix(tmp_path: Path) -> None:
    _, sources, _ = two("more than a matrix has", tmp_path)
    made = combine(sources, tmp_path / "c")
    assert {place.rank for place in made.places} == {min(made.places[0].shape)}
    assert made.places[0].rank < 32


def test_what_peft_makes_of_the_same(tmp_path: Path) -> None:
    """Its linear and its default svd, at weights 1 and -1, are far off; cat here is not, nor is its own cat."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    found = [made_by_peft("llama", tmp_path / n, settings, i) for i, n in enumerate("ab")]
    wanted = weighted(found, (1, -1))
    with battery.quiet():
        model: Any = PeftModel.from_pretrained(
            build("llama"), str(tmp_path / "a"), adapter_name="a"
        )
        model.load_adapter(str(tmp_path / "b"), adapter_name="b")
        for how in ("linear", "svd", "cat"):
            model.add_weighted_adapter(["a", "b"], [1.0, -1.0], how, combination_type=how)
    assert error(deltas(model, "linear"), wanted) > 0.5
    assert error(deltas(model, "svd"), wanted) > 0.2
    assert error(deltas(model, "cat"), wanted) < 1e-12
    ours = [(tmp_path / "a", 1.0), (tmp_path / "b", -1.0)]
    combine(ours, tmp_path / "cat")
    assert error(deltas(read_by_peft("llama", tmp_path / "cat")), wanted) < 1e-12
    svd = CombineSettings(method="svd", rank=4)
    made = combine(ours, tmp_path / "svd", settings=svd)
    off = error(deltas(read_by_peft("llama", tmp_path / "svd")), wanted)
    assert off == pytest.approx(error(deltas(model, "svd"), wanted), rel=1e-6)
    assert made.error == pytest.approx(off, rel=1e-6)  # and it is said
    linear = combine(ours, tmp_path / "linear", settings=CombineSettings(method="linear"))
    off = error(deltas(read_by_peft("llama", tmp_path / "linear")), wanted)
    assert off == pytest.approx(error(deltas(model, "linear"), wanted), rel=1e-6)
    assert linear.error == pytest.approx(off, rel=1e-6)


def test_one_adapter_times_one_is_that_adapter(tmp_path: Path) -> None:
    """PEFT's linear, which it takes for a single adapter, keeps use_rslora and scales twice."""
    settings = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]}
    wanted = made_by_peft("llama", tmp_path / "a", settings, 0)
    with battery.quiet():
        model: Any = PeftModel.from_pretrained(
            build("llama"), str(tmp_path / "a"), adapter_name="a"
        )
        model.add_weighted_adapter(["a"], [1.0], "one", combination_type="linear")
    assert error(deltas(model, "one"), wanted) > 0.5
    for method in ("cat", "linear", "svd"):
        rank = {"rank": 4} if method == "svd" else {}
        combine(
            {tmp_path / "a": 1}, tmp_path / method, settings=CombineSettings(method=method, **rank)
        )
        assert error(deltas(read_by_peft("llama", tmp_path / method)), wanted) < 1e-7


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "DoRA is none"),
        ({"lora_bias": True}, "lora_bias|lora_B.bias"),
    ],
)
def test_what_has_no_sum_is_refused_by_name(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with battery.quiet():
        model: Any = get_peft_model(
            build("llama"), LoraConfig(r=2, target_modules=["q_proj"], **settings)
        )
        model.save_pretrained(str(tmp_path / "a"))
    edit_config(tmp_path / "a", base_model_name_or_path="tiny/gone")
    with pytest.raises(AdapterError, match=says):
        combine({tmp_path / "a": 1.0}, tmp_path / "c")


@pytest.mark.parametrize("method", ["ties", "magnitude_prune"])
def test_ties_and_pruning_equal_pefts_where_it_mixes_the_changes(
    method: str, tmp_path: Path
) -> None:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for i, name in enumerate("ab"):
        made_by_peft("llama", tmp_path / name, settings, i)
    with battery.quiet():
        model: Any = PeftModel.from_pretrained(
            build("llama"), str(tmp_path / "a"), adapter_name="a"
        )
        model.load_adapter(str(tmp_path / "b"), adapter_name="b")
        model.add_weighted_adapter(
            ["a", "b"], [0.5, 0.5], "c", combination_type=f"{method}_svd", density=0.4, svd_rank=6
        )
    sources = {tmp_path / "a": 0.5, tmp_path / "b": 0.5}
    how = CombineSettings(method=method, density=0.4, rank=6)  # pyright: ignore[reportArgumentType]
    combine(sources, tmp_path / "c", settings=how)
    assert error(deltas(read_by_peft("llama", tmp_path / "c")), deltas(model, "c")) < 1e-9


def test_dare_is_seeded(tmp_path: Path) -> None:
    _, sources, _ = two("ranks and scales", tmp_path)
    for name, seed in (("c", 1), ("d", 1), ("e", 2)):
        how = CombineSettings(method="dare_linear", density=0.5, rank=4, seed=seed)
        combine(sources, tmp_path / name, settings=how)
    one, same, other = ((tmp_path / n / WEIGHTS).read_bytes() for n in "cde")
    assert one == same
    assert one != other


def test_equal_sums_are_equal_files(tmp_path: Path) -> None:
    _, sources, _ = two("targets", tmp_path)
    for name in ("c", "d"):
        combine(sources, tmp_path / name)
    for file in (CONFIG, WEIGHTS, RECORD, "README.md"):
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "d" / file).read_bytes()


# --- with the base at hand ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two runs on it."""
    folder = tmp_path_factory.mktemp("home")
    base = save_model(folder / "base", tiny_llama(), byte_tokenizer())
    for seed, name in enumerate(("a", "b")):
        save_run(folder / name, base, seed=seed)
    return folder


def test_runs_are_fitted_to_their_base(home: Path, tmp_path: Path) -> None:
    made = combine({home / "a": 0.5, home / "b": 2.0}, tmp_path / "c")
    assert "its base is this model, by fingerprint" in made.notes
    model, _ = afina.load(home / "base", dtype="fp32", device="cpu")
    edit = afina.load_adapter(model, tmp_path / "c")
    assert "its base is this model, by fingerprint" in edit.notes
    ours = {n: p.dense() for n, p in read_source(tmp_path / "c").products.items()}
    parts = [{n: p.dense() for n, p in read_source(home / x).products.items()} for x in "ab"]
    assert error(ours, weighted(parts, (0.5, 2.0))) < 1e-6
    config = json.loads((tmp_path / "c" / CONFIG).read_text())
    assert (
        config["target_modules"]
        == json.loads((home / "a/adapter" / CONFIG).read_text())["target_modules"]
    )
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (8, 8, {})
    assert (tmp_path / "c/tokenizer.json").is_file()
    told = json.loads((tmp_path / "c" / RECORD).read_text())
    assert told["settings"]["made by"] == "afina combine"
    assert [one["weight"] for one in told["settings"]["of"]] == [0.5, 2.0]


def test_without_the_base_it_is_the_same(home: Path, tmp_path: Path) -> None:
    here = combine({home / "a": 0.5, home / "b": 2.0}, tmp_path / "c")
    moved = tmp_path / "moved"
    for name in "ab":
        (moved / name).mkdir(parents=True)
        for file in (home / name / "adapter").iterdir():
            (moved / name / file.name).write_bytes(file.read_bytes())
        edit_config(moved / name, base_model_name_or_path="nowhere/gone")
    gone = combine({moved / "a": 0.5, moved / "b": 2.0}, tmp_path / "d")
    assert any("is not at hand" in note for note in gone.notes)
    assert (tmp_path / "c" / WEIGHTS).read_bytes() == (tmp_path / "d" / WEIGHTS).read_bytes()
    records = [json.loads((tmp_path / n / RECORD).read_text())["base"]["fingerprint"] for n in "cd"]
    assert records[0] == records[1] is not None
    assert here.places == gone.places


def test_adapters_of_different_bases_are_refused(home: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "base", tiny_llama(seed=7), byte_tokenizer())
    save_run(tmp_path / "b", other)
    with pytest.raises(AdapterError, match="made for different bases"):
        combine({home / "a": 1.0, tmp_path / "b": 1.0}, tmp_path / "c")
    with pytest.raises(AdapterError, match="made for different bases"):
        combine({home / "a": 1.0, tmp_path / "b": 1.0}, tmp_path / "c", base=home / "base")
    for run in (home / "a", tmp_path / "b"):
        wrong = other if run == home / "a" else home / "base"
        with pytest.raises(AdapterError, match="made for another base"):
            combine({run: 1.0}, tmp_path / "c", base=wrong)
    (tmp_path / "b/adapter" / RECORD).unlink()  # as if PEFT had written it: then the name decides
    with pytest.raises(AdapterError, match="made for different bases"):
        combine({home / "a": 1.0, tmp_path / "b": 1.0}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_whole_modules_are_added_as_changes(home: Path, tmp_path: Path) -> None:
    model, _ = afina.load(home / "base", dtype="fp32", device="cpu")
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    brought: list[Tensor] = []
    for seed, name in enumerate("ab"):
        edit = afina.apply(
            model, [afina.LoRA(rank=2, target=("q_proj",), modules_to_save=("norm",))]
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            model.model.norm.weight.add_(torch.randn(32))
        brought.append(model.model.norm.weight.detach().clone())
        files.save(edit, tmp_path / name, base=str(home / "base"))
        edit.undo()
    sources = {tmp_path / "a": 0.7, tmp_path / "b": -0.2}
    combine(sources, tmp_path / "c")
    norm = own["model.norm.weight"]
    wanted = norm + 0.7 * (brought[0] - norm) - 0.2 * (brought[1] - norm)
    found = load_file(tmp_path / "c" / WEIGHTS)["base_model.model.model.norm.weight"]
    torch.testing.assert_close(found, wanted)
    assert json.loads((tmp_path / "c" / CONFIG).read_text())["modules_to_save"] == ["model.norm"]
    edit = afina.load_adapter(model, tmp_path / "c")
    torch.testing.assert_close(model.model.norm.weight, wanted)
    edit.undo()
    for name in "ab":
        edit_config(tmp_path / name, base_model_name_or_path="nowhere/gone")
    with pytest.raises(AdapterError, match=r"combined as changes.*\n.*is not at hand"):
        combine(sources, tmp_path / "d")
    combine(sources, tmp_path / "d", base=home / "base")
    assert torch.equal(
        load_file(tmp_path / "d" / WEIGHTS)["base_model.model.model.norm.weight"], found
    )


# --- refusals -----------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_unasked(home: Path, tmp_path: Path) -> None:
    again = CombineSettings(overwrite=True)
    combine({home / "a": 1.0}, tmp_path / "c")
    (tmp_path / "c/letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="the output exists"):
        combine({home / "b": 1.0}, tmp_path / "c")
    combine({home / "b": 1.0}, tmp_path / "c", settings=again)
    assert (tmp_path / "c/letter.txt").read_text() == "dear"
    for out in (home / "a/adapter", home / "b", home / "base"):  # a trained adapter, a run, a model
        with pytest.raises(ConfigError, match=r"never overwritten|take the place"):
            combine({tmp_path / "c": 1.0}, out, settings=again)
    for out in (tmp_path / "c", tmp_path):
        with pytest.raises(ConfigError, match="take the place of what it is made from"):
            combine({tmp_path / "c": 1.0}, out, settings=again)
    with pytest.raises(ConfigError, match="is a file"):
        combine({home / "b": 1.0}, tmp_path / "c" / WEIGHTS / "in")


def test_a_failure_leaves_what_was_there(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from afina.adapters import writing

    def damaged(*_: object) -> dict[str, Tensor]:
        return {}

    combine({home / "a": 1.0}, tmp_path / "c")
    before = (tmp_path / "c" / WEIGHTS).read_bytes()
    monkeypatch.setattr(writing, "read_tensors", damaged)
    with pytest.raises(AdapterError, match="is not the one in memory"):
        combine({home / "b": 1.0}, tmp_path / "c", settings=CombineSettings(overwrite=True))
    assert (tmp_path / "c" / WEIGHTS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "svd"}, "svd needs a rank"),
        ({"method": "ties"}, "ties needs a density"),
        ({"rank": 4}, "cat cuts nothing"),
        ({"method": "linear", "energy": 0.5}, "linear cuts nothing"),
        ({"method": "svd", "rank": 2, "density": 0.5}, "svd keeps every value"),
        ({"method": "svd", "rank": 0}, "rank"),
        ({"method": "mean"}, "method"),
        ({"method": "svd", "energy": 1.5}, "energy"),
    ],
)
def test_settings_without_effect_or_sense(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CombineSettings(**settings)


@pytest.mark.parametrize(
    "sources",
    [
        [],
        {},
        None,
        "runs/a",
        [("a",)],
        ["a:1"],
        {"a": True},
        {"a": "1"},
        {"a": 0},
        {"a": float("nan")},
    ],
)
def test_sources_that_are_none(sources: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        combine(sources, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_adapters_that_are_none(home: Path, tmp_path: Path) -> None:
    refused = {
        "nowhere": "no run, checkpoint or adapter",
        str(home / "base"): "a model, without an adapter",
    }
    for name, says in refused.items():
        with pytest.raises(AdapterError, match=says):
            combine({name: 1.0}, tmp_path / "c")


def test_files_that_contradict_themselves(tmp_path: Path) -> None:
    settings = {"r": 4, "target_modules": ["q_proj"]}
    made_by_peft("llama", tmp_path / "a", settings, 0)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for says, change in {
        "differ": lambda: edit_config(tmp_path / "a", r=5),
        "several patterns": lambda: edit_config(
            tmp_path / "a", r=4, alpha_pattern={"q_proj": 3, "self_attn.q_proj": 4}
        ),
        "do not fit each other": lambda: (
            edit_config(tmp_path / "a", alpha_pattern={}),
            edit_tensors(tmp_path / "a", lambda t: t.update({key: t[key][:3].clone()})),
        ),
        "no product of A and B alone": lambda: edit_tensors(tmp_path / "a", lambda t: t.pop(key)),
    }.items():
        change()
        with pytest.raises(AdapterError, match=says):
            combine({tmp_path / "a": 1.0}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_cancels_is_told_and_what_does_not_is_not(tmp_path: Path) -> None:
    _, sources, _ = two("ranks and scales", tmp_path)
    a, b = sources
    note = "the weights cancel the changes: the result changes nothing"
    for method in (CombineSettings(), CombineSettings(method="svd", rank=4)):
        settings = method.model_copy(update={"overwrite": True})
        same = combine([(a, 1.0), (a, -1.0)], tmp_path / "c", settings=settings)
        assert note in same.notes
        assert note not in combine([(a, 1.0), (b, -1.0)], tmp_path / "c", settings=settings).notes


def test_what_never_was_anything_does_not_cancel(tmp_path: Path) -> None:
    made_by_peft("llama", tmp_path / "a", {"r": 2, "target_modules": ["q_proj"]}, 0)

    def untrained(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            if "lora_B" in key:
                tensors[key].zero_()

    edit_tensors(tmp_path / "a", untrained)
    assert not any(
        "cancel" in note for note in combine({tmp_path / "a": 1.0}, tmp_path / "c").notes
    )


def test_energy_of_cross_terms_is_not_called_kept(tmp_path: Path) -> None:
    settings = {"r": 4, "target_modules": ["q_proj"]}
    for number, name in enumerate("ab"):
        made_by_peft("llama", tmp_path / name, settings, number)
    ways: dict[str, str] = {}
    for method, more in (("linear", {}), ("svd", {"rank": 2})):
        how = CombineSettings(method=method, **more)
        made = combine({tmp_path / "a": 1.0, tmp_path / "b": 1.0}, tmp_path / method, settings=how)
        ways[method] = "\n".join(computed.lines(made))
    assert "kept" not in ways["linear"]
    assert "off by" in ways["linear"]
    assert "kept" in ways["svd"]


def test_linear_needs_one_rank(tmp_path: Path) -> None:
    _, sources, _ = two("ranks and scales", tmp_path)
    with pytest.raises(AdapterError, match="must have one rank"):
        combine(sources, tmp_path / "c", settings=CombineSettings(method="linear"))


def test_a_combined_adapter_can_be_merged(home: Path, tmp_path: Path) -> None:
    combine({home / "a": 0.5, home / "b": -0.2}, tmp_path / "c")
    settings = afina.MergeSettings(max_new_tokens=2, device="cpu")
    merged = afina.merge(tmp_path / "c", tmp_path / "model", settings=settings)
    assert merged.verified


def test_what_the_base_was_rounded_to_stays_recorded(home: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        model, _ = afina.load(home / "base", dtype="fp32", device="cpu")
        edit = afina.apply(model, [afina.Quantize(kind="int8"), afina.LoRA(rank=2)])
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in edit.trainable().values():
                parameter.add_(torch.randn_like(parameter))
        files.save(edit, tmp_path / name, base=str(home / "base"))
    made = combine({tmp_path / "a": 1.0, tmp_path / "b": 0.5}, tmp_path / "c")
    assert "its base is this model, by fingerprint" in made.notes
    one, other = (json.loads((tmp_path / n / RECORD).read_text()) for n in "ac")
    assert one["base"] == other["base"]
    assert [list(t) for t in other["techniques"]] == [["quantize"], ["lora"]]
    model, _ = afina.load(home / "base", dtype="fp32", device="cpu")
    afina.apply(model, [afina.Quantize(kind="int8")])
    edit = afina.load_adapter(model, tmp_path / "c")
    assert any("fingerprint" in note for note in edit.notes)
    with pytest.raises(AdapterError, match="different weights of one base"):
        combine({tmp_path / "a": 1.0, home / "b": 1.0}, tmp_path / "d")
