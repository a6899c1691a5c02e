"""An adapter's folder read as what it is for arithmetic: a low-rank change for each place, and whole modules.

    ΔW = s · B A

No model is needed for that: names, shapes, ranks and scales are in the folder. What is no sum of products has no place
here, and is refused by name, with the reason.

Legend: B (out × r), A (r × in), s the scale, as the configuration and its patterns say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afina.adapters.card import Base, read_record
from afina.adapters.fitting import KINDS
from afina.adapters.kinds import Config, Kind, Parts, refuse_settings
from afina.adapters.layout import CONFIG, PREFIX, read_config, read_tensors, stacked
from afina.adapters.names import Entry, entries
from afina.adapters.peft_lora import pattern
from afina.adapters.rounded import Rounded, read_rounded
from afina.adapters.target import Target, resolve_run
from afina.errors import AdapterError, counted
from afina.models.locate import TUNED, nearby
from afina.places import exists, local
from afina.problems import name_of
from afina.techniques.adalora import RANK_SHIFT
from afina.techniques.dora import DoRA

WANTED = "a run, a checkpoint or an adapter"

LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
VALUES = ("lora_A", "lora_B", "lora_E")
"""AdaLoRA's: A, B, and the values (r, 1) between them."""

MERGED = ("LORA", "IA3")
"""Kinds that are no sums of products, and of which afina merge makes a model with the tensors of its base."""

INSTEAD = (
    "merge each into a model, and make a LoRA of the difference: afina merge, then afina extract"
)
"""What helps where a change is none that can be added as factors."""


@dataclass(frozen=True)
class Product:
    """s · B A.

    Attributes:
        b_OR: (out, r).
        a_RI: (r, in).
        scale: s.
        embedding: it lies beside an embedding: in is the vocabulary, out the width.
    """

    b_OR: Tensor
    a_RI: Tensor
    scale: float = 1.0
    embedding: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.a_RI.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the change: (out, in)."""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def dense(self) -> Tensor:
        """The change written out, (out, in), in fp64."""
        return self.scale * (self.b_OR.double() @ self.a_RI.double())

    def tensors(self) -> dict[str, Tensor]:
        """A and B by the endings of their keys; the scale must be 1."""
        ends = EMBEDDING if self.embedding else LINEAR
        return dict(zip(ends, (self.a_RI, self.b_OR), strict=True))


@dataclass(frozen=True)
class Source:
    """An adapter on the disk.

    Attributes:
        name: as the user calls it.
        target: where it lies, and its base.
        config: its `adapter_config.json`.
        record: of its base, where afina wrote it.
        rounded: how that base was quantised; None where it was not.
        products: the changes, by module, as the configuration calls these.
        whole: base tensors that it brings whole, by name.
    """

    name: str
    target: Target
    config: Config
    record: Base | None
    rounded: Rounded | None
    products: Mapping[str, Product]
    whole: Mapping[str, Tensor]

    @property
    def folder(self) -> Path:
        """Of the adapter."""
        assert self.target.adapter is not None
        return self.target.adapter

    def renamed(self, names: Mapping[str, str]) -> Source:
        """The same with other names of modules; those without another keep theirs."""
        return replace(self, products={names.get(n, n): p for n, p in self.products.items()})


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
            cure=f"name one of them: {' or '.join(map(str, parts.values()))}",
        )
    kind = refuse_settings(config, KINDS, folder / CONFIG)
    _refuse_other(kind, config, folder)
    found = entries(read_tensors(folder), kind.ending, kind.part)
    places: dict[str, dict[str, Tensor]] = {}
    for entry in found:
        if entry.role == "part":
            places.setdefault(_plain(entry.module), {})[entry.part] = entry.tensor
    products = {n: product_of(n, parts, config, folder) for n, parts in places.items()}
    if not products:
        raise AdapterError("the adapter changes nothing by products", got=folder)
    record, rounded = read_record(folder), read_rounded(folder)
    return Source(str(name), target, config, record, rounded, products, _whole(found))


def _whole(found: list[Entry]) -> dict[str, Tensor]:
    """Tensors that stand whole in the file, but for copies of the base's own."""
    return {f"{_plain(e.module)}.{e.part}": e.tensor for e in found if e.role == "whole"}


def _plain(module: str) -> str:
    """The name of a module without what PEFT sets before it."""
    while module.startswith(PREFIX):
        module = module.removeprefix(PREFIX)
    return module


def _refuse_other(kind: Kind, config: Config, folder: Path) -> None:
    what = kind.technique.__name__
    if kind.peft_type in ("LORA", "ADALORA") and kind.technique is not DoRA:
        if not config.get("target_parameters"):
            return
        what = "LoRA on fused experts, a product for each expert,"
    raise AdapterError(
        f"this is arithmetic with one low-rank change a place, and {what} is none",
        got=folder,
        wanted="LoRA or AdaLoRA",
        cure=INSTEAD if kind.peft_type in MERGED else "keep it as it is: it is no change of maps",
    )


def of_experts(name: str, config: Config) -> bool:
    """Whether a place is of fused experts, whose A and B hold one product for each of them."""
    targets = config.get("target_parameters")
    holders = [str(t).rpartition(".")[0] for t in targets] if isinstance(targets, list) else []
    plain = name.replace(".base_layer", "")
    return any(plain == holder or plain.endswith(f".{holder}") for holder in holders)


def product_of(name: str, parts: Parts, config: Config, folder: Path) -> Product:
    """The change of one place.

    Args:
        name: of the module, as the configuration calls it.
        parts: its tensors, by the endings of their keys.
        config: the adapter's.
        folder: the adapter's, for errors.

    Raises:
        AdapterError: a tensor is lacking or has a shape that fits nothing, or rank or alpha are in doubt.
    """
    ends = next((e for e in (LINEAR, EMBEDDING, VALUES) if set(e) == set(parts)), None)
    if ends is None:
        raise AdapterError(
            "a place of the adapter is no product of A and B alone",
            got=f"{folder}: {name} with {', '.join(sorted(parts))}",
            wanted=" and ".join(LINEAR),
            cure=INSTEAD,
        )
    a_RI, b_OR = parts[ends[0]], parts[ends[1]]
    if a_RI.dim() != 2 or b_OR.dim() != 2 or a_RI.shape[0] != b_OR.shape[1]:
        raise AdapterError(
            "the factors of one place do not fit each other",
            got=f"{folder}: {name}, A {tuple(a_RI.shape)}, B {tuple(b_OR.shape)}",
            wanted="A (r, in) and B (out, r)",
        )
    rank = a_RI.shape[0]
    if rank == 0:
        raise AdapterError("the factors of one place are empty", got=f"{folder}: {name}")
    if ends == VALUES:
        alpha, first = (_number(config.get(key), key, folder) for key in ("lora_alpha", "init_r"))
        return Product(b_OR, a_RI * parts[VALUES[2]], alpha / (first + RANK_SHIFT))
    alpha = _alpha(name, rank, config, folder)
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Product(b_OR, a_RI, scale, ends == EMBEDDING)


def _alpha(name: str, rank: int, config: Config, folder: Path) -> float:
    try:
        ranks = pattern(config.get("rank_pattern"), name, config.get("r"))
        alphas = pattern(config.get("alpha_pattern"), name, config.get("lora_alpha"))
    except (re.error, AttributeError) as error:  # no table, or no expressions in it
        raise AdapterError(
            "the patterns of ranks or alphas are none", got=f"{folder / CONFIG}: {error}"
        ) from None
    if rank not in ranks:
        raise AdapterError(
            "a rank in the file and in the configuration differ",
            got=f"{folder}: {name}, file {rank}, configuration {' or '.join(map(str, ranks))}",
        )
    if len(alphas) > 1:
        raise AdapterError(
            "several patterns of alpha_pattern name one place",
            got=f"{folder}: {name}, {' or '.join(map(str, alphas))}",
            cure="the first counted in training, and PEFT sorts them when it saves: keep the one that counted",
        )
    return _number(alphas[0], "an alpha", folder)


def _number(value: Any, what: str, folder: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(f"{what} is no number", got=f"{folder / CONFIG}: {value!r}")
    return float(value)


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
    if wrong:
        raise AdapterError(
            f"these adapters are of different models: {counted(len(wrong), 'place')} differ in shape",
            got="; ".join(wrong[:4]),
            wanted="adapters of one base",
        )
