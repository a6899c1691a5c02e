"""An adapter's folder read as what it is for arithmetic: a low-rank change for each place, and whole modules.

No model is needed for that: names, shapes, ranks and scales are in the folder. What is no sum of products has no place
here, and is refused by name, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afina.adapters.beside_lora import is_several
from afina.adapters.card import Base, head_of_base, read_record
from afina.adapters.expert_products import numbers, of_experts, renamed, taken_apart
from afina.adapters.fitting import KINDS
from afina.adapters.kinds import Config, Kind, refuse_settings
from afina.adapters.layout import CONFIG, read_config, read_tensors, stacked
from afina.adapters.names import Entry, entries, plain_module
from afina.adapters.peft_tokens import has_tokens
from afina.adapters.products import INSTEAD, Product, product_of
from afina.adapters.rounded import Rounded, read_rounded
from afina.adapters.target import Target, resolve_run
from afina.errors import AdapterError, counted
from afina.models.locate import TUNED, nearby
from afina.places import exists, local
from afina.problems import name_of
from afina.techniques.dora import DoRA

WANTED = "a run, a checkpoint or an adapter"

ADDED = ("LORA", "ADALORA")
"""Kinds that are sums of products."""

MERGED = ("LORA", "IA3")
"""Kinds that are no sums of products, and of which afina merge makes a model with the tensors of its base."""


@dataclass(frozen=True)
class Source:
    """An adapter on the disk.

    Attributes:
        name: as the user calls it.
        target: where it lies, and its base.
        config: its `adapter_config.json`.
        record: of its base, where afina wrote it.
        rounded: how that base was quantised; None where it was not.
        head: of a classifier's base; see `card.head_of_base`.
        products: the changes, by module, as the configuration calls these, and by expert where these are fused.
        whole: base tensors that it brings whole, by name.
    """

    name: str
    target: Target
    config: Config
    record: Base | None
    rounded: Rounded | None
    head: Mapping[str, Any]
    products: Mapping[str, Product]
    whole: Mapping[str, Tensor]

    @property
    def folder(self) -> Path:
        """Of the adapter."""
        assert self.target.adapter is not None
        return self.target.adapter

    def renamed(self, names: Mapping[str, str]) -> Source:
        """The same with other names of modules; those without another keep theirs."""
        return replace(self, products={renamed(n, names): p for n, p in self.products.items()})


def adapter_of(name: Any) -> Target:
    """Where the adapter is that a name means.

    Raises:
        AdapterError: there is none.
        AfinaError: the name is none, or that of a folder which is nothing.
    """
    target = resolve_run(name_of(name, "the adapter", f"the folder of {WANTED}"))
    if target.adapter is not None:
        return target
    if target.run is not None:
        what, cure = "this run trained the model itself, and has no adapter", None
        cure = f"afina extract {target.base} BASE -o OUT makes one of it"
    elif exists(local(target.base)):
        what, cure = "this is a model, without an adapter", "name an adapter's folder"
    else:
        near = nearby(target.base, TUNED)
        what = "there is no run, checkpoint or adapter of this name"
        cure = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"the working directory is {Path.cwd()}"
        )
    raise AdapterError(what, got=target.base, wanted=WANTED, cure=cure)


def read_source(name: Any) -> Source:
    """An adapter's changes.

    Args:
        name: of a run, a checkpoint or an adapter.

    Raises:
        AdapterError: it is not made of low-rank products, or its file and configuration contradict each other.
    """
    target = adapter_of(name)
    folder = target.adapter
    assert folder is not None
    config = read_config(folder)
    parts = stacked(folder, config)
    if parts is not None:
        raise AdapterError(
            "this adapter is several techniques in one, and arithmetic is with one",
            got=f"{folder}: {', '.join(parts)}",
            cure=_parts_for(parts),
        )
    if is_several(config):
        beside = "rows of tokens" if has_tokens(config) else "biases of the base"
        raise AdapterError(
            f"this adapter has {beside} beside its LoRA, and arithmetic is with low-rank changes alone",
            got=folder,
            cure=INSTEAD,
        )
    kind = refuse_settings(config, KINDS, folder / CONFIG)
    _refuse_other(kind, folder)
    found = entries(read_tensors(folder), kind.ending, kind.part)
    places: dict[str, dict[str, Tensor]] = {}
    for entry in found:
        if entry.role == "part":
            places.setdefault(plain_module(entry.module), {})[entry.part] = entry.tensor
    products: dict[str, Product] = {}
    for name, parts in places.items():
        if of_experts(name, config):
            products |= taken_apart(name, parts, config, folder)
        else:
            products[name] = product_of(name, parts, config, folder)
    if not products:
        raise AdapterError("the adapter changes nothing by products", got=folder)
    record, rounded, head = read_record(folder), read_rounded(folder), head_of_base(folder)
    return Source(str(name), target, config, record, rounded, head, products, _whole(found))


def _parts_for(parts: Mapping[str, Path]) -> str:
    """Which parts of an adapter of several techniques can be named."""
    added = [
        str(place)
        for place in parts.values()
        if read_config(place).get("peft_type") in ADDED and not read_config(place).get("use_dora")
    ]
    return f"name the one that is a sum: {' or '.join(added)}" if added else INSTEAD


def _whole(found: list[Entry]) -> dict[str, Tensor]:
    """Tensors that stand whole in the file, but for copies of the base's own."""
    return {f"{plain_module(e.module)}.{e.part}": e.tensor for e in found if e.role == "whole"}


def _refuse_other(kind: Kind, folder: Path) -> None:
    if kind.peft_type in ADDED and kind.technique is not DoRA:
        return
    cure = INSTEAD if kind.peft_type in MERGED else "keep it as it is: it is no change of maps"
    raise AdapterError(
        f"this is arithmetic with one low-rank change a place, and {kind.technique.__name__} is none",
        got=folder,
        wanted="LoRA or AdaLoRA",
        cure=cure,
    )


def stored_type(sources: list[Source]) -> torch.dtype:
    """The type of a result: fp32, or fp64 where a source has that; a coarser one would lose digits."""
    found = [t.dtype for s in sources for p in s.products.values() for t in (p.a_RI, p.b_OR)]
    return torch.float64 if torch.float64 in found else torch.float32


def refuse_other_shapes(sources: list[Source]) -> None:
    """Raises unless each place has one shape in all adapters that have it.

    Raises:
        AdapterError: naming the places.
    """
    first: dict[str, tuple[Source, Product]] = {}
    wrong: list[str] = []
    for source in sources:
        for name, product in source.products.items():
            one, other = first.setdefault(name, (source, product))
            if (other.shape, other.embedding) != (product.shape, product.embedding):
                shapes = f"{other.shape} in {one.name}, {product.shape} in {source.name}"
                wrong.append(f"{name}: {shapes}")
    experts: dict[str, tuple[Source, int]] = {}
    for source in sources:
        for tensor, number in numbers(source.products).items():
            one, other = experts.setdefault(tensor, (source, number))
            if other != number:
                wrong.append(f"{tensor}: {other} experts in {one.name}, {number} in {source.name}")
    if wrong:
        raise AdapterError(
            f"these adapters are of different models: {counted(len(wrong), 'place')} differ in shape",
            got="; ".join(wrong[:4]),
            wanted="adapters of one base",
        )
