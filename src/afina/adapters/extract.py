"""A LoRA made of the difference between a model that was trained and the one it was trained from.

    s · B A  ≈  D = W' - W,     of every linear the best approximation of a rank, or the smallest that keeps enough

The two models are read tensor by tensor, so memory holds a few copies of the largest, and the factors. Each of fused
experts has factors of its own, also where files keep them apart. What changed and is no weight of a linear or an expert
(norms, embeddings, biases) has no factors: its module is saved whole beside them, or the extraction is refused, or,
when that was asked for, it is left out and counted.

Legend: W the base's weight, W' the tuned one, D their difference, B A the factors, with scale 1.

Source: as in `resize`; the idea of the verb: mergekit's `extract_lora.py` and kohya's `extract_lora_from_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from afina import seams
from afina.adapters.arithmetic import Place, error_of, kept_of
from afina.adapters.at_hand import AtHand, open_model
from afina.adapters.computed import Computed
from afina.adapters.contents import task_of
from afina.adapters.expert_products import place_of as place_of_expert
from afina.adapters.extract_alike import listed, refuse_unlike, shapes_of
from afina.adapters.outputs import MADE_BY, place_of, refuse_out, tokenizer_in
from afina.adapters.peft_lora import target_modules
from afina.adapters.products import Product
from afina.adapters.result import Result, plain
from afina.adapters.target import resolve_run
from afina.errors import AdapterError, counted
from afina.models.locate import resolve
from afina.ops import svd
from afina.problems import Frozen, name_of, of_kind
from afina.techniques.lora_on_experts import ExpertSite, expert_sites
from afina.tree import seed_of
from afina.tree.fold import tied_groups

Progress = Callable[[str, int, int], None]
Site = seams.MapSite | ExpertSite


class ExtractSettings(Frozen):
    """How a difference becomes an adapter."""

    rank: int | None = Field(default=None, ge=1, description="of every place, at most")
    energy: float | None = Field(
        default=None, gt=0, le=1, description="share of each difference's energy to keep, at least"
    )
    rest: Literal["save", "refuse", "drop"] = Field(
        default="save",
        description="what changed beside the linears: save whole, refuse, or leave out and count",
    )
    overwrite: bool = Field(default=False, description="replace an earlier result of this name")

    @model_validator(mode="after")
    def _check(self) -> ExtractSettings:
        if self.rank is None and self.energy is None:
            raise ValueError("say how large: a rank, or the energy to keep, such as 0.95")
        return self


@torch.no_grad()
def extract(
    tuned: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    settings: ExtractSettings,
    token: str | None = None,
    offline: bool | None = None,
    progress: Progress | None = None,
) -> Computed:
    """Makes an adapter of the difference of two models.

    Args:
        tuned: a run of full fine-tuning, or a model.
        base: the model that it was trained from.
        out: the folder to make.
        settings: the rank, the energy, or both: the smaller rank of the two; and what becomes of the rest.
        token: of the Hub.
        offline: True downloads nothing.
        progress: is told what is done: (word, done, of).

    Returns:
        What was made, read back and fitted to the base.

    Raises:
        AdapterError: the difference is no adapter, or not of these settings; nothing is written.
        ModelError: the two are not one architecture with one set of shapes, or cannot be read; nothing is written.
    """
    settings = of_kind(ExtractSettings, settings)
    place = place_of(out)
    names = [_model(tuned, "the tuned model"), _model(base, "the base")]
    folders = [resolve(name, token=token, offline=offline) for name in names]
    refuse_out(place, folders, overwrite=settings.overwrite)
    new, old = (open_model(n, f) for n, f in zip(names, folders, strict=True))
    added = refuse_unlike(new, old, drops=settings.rest == "drop")
    found = _changed(new, old)
    whole, dropped = _rest(found, new, old, settings)
    dropped |= {name: float(new.read(name).double().norm()) for name in added}
    sites = [site for site in found.sites if not any(_inside(n, _module(site)) for n in whole)]
    others = len(found.rest) + len(added)
    if not sites:
        raise AdapterError(
            "there is no difference in any linear or expert to make factors of",
            got=f"{new.name} and {old.name}"
            + (f"; {counted(others, 'other tensor')} changed" if others else ""),
            wanted="a model that was trained from this base",
        )
    products: dict[str, Product] = {}
    places: list[Place] = []
    for number, site in enumerate(sites):
        for name, change_OI in _differences(site, new, old):
            products[name], row = _factors(name, change_OI, settings)
            places.append(row)
        if progress is not None:
            progress("tensors", number + 1, len(sites))
    told = {
        MADE_BY: "afina extract",
        "of": [{"name": new.name}, {"name": old.name, "weight": -1}],
        **settings.model_dump(mode="json", exclude={"overwrite"}, exclude_none=True),
        "kept": kept_of(places),
        "error": error_of(places),
        "left out": dropped,
    }
    result = Result(
        products=products,
        whole=whole,
        dtype=torch.float32,
        base=old.name,
        revision=None,
        fingerprint=old.fingerprint(sorted(whole)),
        rounded=None,
        task=task_of(old.skeleton, sorted({name.rpartition(".")[0] for name in whole})),
        head={},  # of the base's own files
        targets=tuple(target_modules(old.skeleton, plain(products))),
        conv1d=any(isinstance(site, seams.MapSite) and site.kind == "conv1d" for site in sites),
        told=told,
        tokenizer=tokenizer_in(new.folder),
    )
    notes = [*_said(dropped), *result.write(place, old)]
    return Computed(place, tuple(places), tuple(whole), tuple(dict.fromkeys(notes)), told)


def _model(given: str | Path, what: str) -> str:
    """The name of a whole model.

    Raises:
        AdapterError: it is an adapter.
    """
    target = resolve_run(name_of(given, what, "a run of full fine-tuning, or a model"))
    if target.adapter is None:
        return target.base
    raise AdapterError(
        f"{what} is an adapter already",
        got=target.adapter,
        wanted="a whole model",
        cure="afina resize makes an adapter smaller; afina merge makes a whole model of it",
    )


# --- what changed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Changed:
    """What differs: linears and fused experts by their weight, and every other tensor, a tied one under each name."""

    sites: Sequence[Site]
    rest: Sequence[str]


def _changed(new: AtHand, old: AtHand) -> _Changed:
    """Looks at every tensor, one at a time."""
    linears = {
        f"{s.name}.weight": s for s in seams.map_sites(old.skeleton) if s.kind != "embedding"
    }
    ties = {name: group for group in tied_groups(new.skeleton) for name in group}
    experts = {site.name: site for site in expert_sites(old.skeleton)}
    sites: list[Site] = []
    rest: list[str] = []
    for name in shapes_of(old):
        if torch.equal(*_pair(name, new, old)):
            continue
        if name in linears and name not in ties:
            sites.append(linears[name])
        elif name in experts:
            sites.append(experts[name])
        else:
            rest.append(name)
    return _Changed(sites, rest)


def _pair(name: str, new: AtHand, old: AtHand) -> tuple[Tensor, Tensor]:
    """A tensor of both, in one type that holds either exactly."""
    one, other = new.read(name), old.read(name)
    wide = torch.promote_types(one.dtype, other.dtype)
    return one.to(wide), other.to(wide)


def _rest(
    found: _Changed, new: AtHand, old: AtHand, settings: ExtractSettings
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What is saved whole, by name; and what is left out, with the norm of its change.

    Raises:
        AdapterError: it is to be refused, or cannot be held whole.
    """
    if not found.rest:
        return {}, {}
    if settings.rest == "refuse":
        raise AdapterError(
            f"{counted(len(found.rest), 'tensor')} changed that are no weights of linears",
            got=listed(found.rest),
            cure="save them whole beside the factors: --rest save; or leave them out: --rest drop "
            "(in Python rest='save' or 'drop' in the settings)",
        )
    if settings.rest == "drop":
        sizes = {
            n: (a.double() - b.double()).norm() for n in found.rest for a, b in [_pair(n, new, old)]
        }
        return {}, {name: float(size) for name, size in sizes.items()}
    ties = {name: group for group in tied_groups(old.skeleton) for name in group}
    modules = {tied.rpartition(".")[0] for name in found.rest for tied in ties.get(name, [name])}
    every = shapes_of(old)
    whole = {n: new.read(n) for n in every if n.rpartition(".")[0] in modules}
    torn = [
        n for n in whole if any(not torch.equal(whole[n], new.read(t)) for t in ties.get(n, ()))
    ]
    if torn:
        raise AdapterError(
            "one tensor of the base became several that differ, which no adapter says",
            got=listed(torn),
            cure="untie the base first, and save it, with tie_word_embeddings false in its config.json",
        )
    return whole, {}


def _inside(name: str, module: str) -> bool:
    """Whether a tensor is of that module."""
    return name.rpartition(".")[0] == module


def _said(dropped: Mapping[str, float]) -> list[str]:
    if not dropped:
        return []
    largest = sorted(dropped, key=lambda name: -dropped[name])
    return [f"left out, as asked: {counted(len(dropped), 'tensor')}: {listed(largest)}"]


def _module(site: Site) -> str:
    """The module whose weight it is."""
    return site.module if isinstance(site, ExpertSite) else site.name


def _differences(site: Site, new: AtHand, old: AtHand) -> Iterator[tuple[str, Tensor]]:
    """The change of a linear, or of each expert, by the name of the place: (out, in), in fp64."""
    if isinstance(site, ExpertSite):
        one, other = _pair(site.name, new, old)
        for expert in range(site.experts):
            change = one[expert].double() - other[expert].double()
            yield place_of_expert(site.name, expert), change.t() if site.transposed else change
        return
    one, other = _pair(f"{site.name}.weight", new, old)
    change = one.double() - other.double()
    yield site.name, change.t() if site.kind == "conv1d" else change


def _factors(name: str, change_OI: Tensor, settings: ExtractSettings) -> tuple[Product, Place]:
    """The product for one place; what it keeps is measured on the factors as they will lie in the file."""
    out, into = change_OI.shape
    size = float(change_OI.square().sum())
    if not size:  # an expert to which no token went
        nothing = Product(torch.zeros(out, 1), torch.zeros(1, into))
        return nothing, Place(name, (out, into), 1, 0.0, 1.0, 0.0)
    spectrum = svd.best(change_OI, rank=settings.rank, seed=seed_of(0, name))
    rank = svd.rank_for(spectrum, rank=settings.rank, energy=settings.energy)
    b_OR, a_RI = (factor.float() for factor in svd.factors(spectrum, rank))
    lost = float((change_OI - b_OR.double() @ a_RI.double()).square().sum()) / size
    return Product(b_OR, a_RI), Place(name, (out, into), rank, size, 1 - lost, lost**0.5)
