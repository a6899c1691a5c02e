"""Quantisation: the frozen base's weights in 4 or 8 bits, under every other method.

    nf4:   w' = level[c] · a     16 levels, 4 bits a weight
    int8:  w' = c · s            255 levels, 8 bits a weight

The weights of the chosen linears are rounded, block by block of 64 neighbours, and kept packed; each product computes
them back and forgets them again, forward and backward. What trains beside them stays in fp32, so a low-rank change
learns to make up for the rounding too (QLoRA). The base of such a run is the *rounded* one: `edit.disabled()` shows it,
and an adapter is merged into it, computed back to 16 or 32 bits.

To save memory the model must never be whole: `afina.load(NAME, quantize=afina.Quantize())` packs each weight as it is
read, and `afina train` does so by itself. On a model that is loaded already, `apply` keeps the originals for `undo`,
unless it is called with `undoable=False`.

What rounding takes off can be given back in part by the low-rank change that trains beside it (LoftQ): with
`loftq_rank` the best factors of that rank are found while a weight is packed, and `lora.start=loftq` begins with them.
With more rounds than one the weights are rounded anew with that part taken out, which leaves still less; so they are
other rounded weights, found again wherever the base is loaded for the adapter.

Legend: w' a weight as it is computed with, c its code, a or s the scale of its block.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314, section 3 and
appendix E; its settings (all linears, blocks of 64, scales quantised too) are the defaults. The mathematics is in
`ops/quantise.py`. LoftQ: Li et al. 2023, arXiv 2310.08659, algorithm 1, in `ops/loftq.py`.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError, counted, sized
from afina.ops.loftq import alternate
from afina.ops.packed import PackedWeight, dense, pack, stored_bytes
from afina.ops.quantise import Kind, Scheme
from afina.tree import Edit, Technique, match, seed_of
from afina.tree.fold import names_of

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Quantize(Technique):
    """Frozen weights in few bits: nf4 takes about an eighth of fp32's memory, int8 about a quarter.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something.
    """

    key: ClassVar[str] = "quantize"

    kind: Kind = Field(default="nf4", description="nf4 (4 bits a weight) or int8 (8 bits)")
    block: int = Field(
        default=64, ge=2, le=4096, multiple_of=2, description="neighbouring weights with one scale"
    )
    double_quant: bool | None = Field(
        default=None,
        description="keep the scales in 8 bits too, 4.13 bits a weight instead of 4.5; default: for nf4 alone",
    )
    compute_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="type of the products; default: that of what comes in"
    )
    target: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="patterns of linears, or all-linear (those of the blocks); never embeddings or the head",
    )
    exclude: tuple[str, ...] = Field(
        default=(), description="patterns of targets to leave as they are"
    )
    loftq_rank: int = Field(
        default=0,
        ge=0,
        description="rank of what rounding took off, kept for lora.start=loftq; 0 keeps nothing",
    )
    loftq_rounds: int = Field(
        default=1,
        ge=1,
        le=100,
        description="times that weights are rounded with that part taken out (the paper has 5); the nearest counts",
    )

    @model_validator(mode="after")
    def _check(self) -> Quantize:
        if self.double_quant and self.kind != "nf4":
            raise ValueError("double_quant is of nf4: it would cost int8 its precision")
        if self.loftq_rounds > 1 and not self.loftq_rank:
            raise ValueError(
                "loftq_rounds needs a loftq_rank: without a part to take out, each round is the first"
            )
        return self

    @property
    def scheme(self) -> Scheme:
        """How each weight is kept."""
        double = self.kind == "nf4" if self.double_quant is None else self.double_quant
        return Scheme(self.kind, self.block, double)

    @property
    def rounding(self) -> Quantize:
        """This value without what leaves the rounded weights as they are: what one round keeps is beside them."""
        return self if self.loftq_rounds > 1 else self.model_copy(update={"loftq_rank": 0})

    @property
    def settings(self) -> str:
        """What makes the rounded weights, as text, which each packed weight keeps."""
        return json.dumps(self.rounding.model_dump(mode="json"), sort_keys=True)

    @property
    def call(self) -> str:
        """This value as it is written in Python."""
        own = self.model_dump(exclude_defaults=True)
        return f"afina.Quantize({', '.join(f'{name}={value!r}' for name, value in own.items())})"

    def weights(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the weights that are packed, on the meta device too.

        Raises:
            TechniqueError: a pattern matches nothing, or the head.
        """
        return tuple(f"{site.name}.weight" for site in self.sites(model))

    def packed(self, weight: Tensor, name: str) -> nn.Parameter:
        """What takes the place of the weight of that name."""
        rank = min(self.loftq_rank, *weight.shape)
        if not rank:
            return self._packed(weight, name)
        wide = torch.promote_types(weight.dtype, torch.float32)
        if weight.is_meta:
            made = self._packed(weight, name)
            b, a = (weight.new_empty(s) for s in ((len(weight), rank), (rank, weight.shape[1])))
        else:
            found = alternate(
                weight,
                lambda target: self._packed(weight, name, target),
                dense,
                rank=rank,
                rounds=self.loftq_rounds,
                seed=seed_of(0, name),
            )
            made, b, a = found.rounded, found.b_OR, found.a_RI
        assert isinstance(made, PackedWeight)
        made.remember(b.to(wide), a.to(wide))
        return cast("nn.Parameter", made)

    def _packed(self, weight: Tensor, name: str, instead: Tensor | None = None) -> nn.Parameter:
        compute = COMPUTE[self.compute_dtype] if self.compute_dtype else None
        return pack(
            weight,
            self.scheme,
            name=name,
            compute=compute,
            settings=self.settings,
            instead=instead,
        )

    def sites(self, model: nn.Module) -> list[seams.MapSite]:
        """The maps whose weights are packed."""
        sites = [site for site in seams.map_sites(model) if site.kind != "embedding"]
        inside = {site.name for site in sites if site.block is not None}
        if "all-linear" in self.target:
            seams.require_stack(model, "quantize.target: all-linear")
        patterns = [pattern for pattern in self.target if pattern != "all-linear"]
        chosen = set(match([s.name for s in sites], patterns, setting="quantize.target"))
        chosen |= inside if "all-linear" in self.target else set()
        chosen -= set(match(chosen, self.exclude, setting="quantize.exclude"))
        head = seams.head(model).name
        if head in chosen:
            raise TechniqueError(
                "the head is not quantised: its rounding would go into every answer, and its loss reads it as it is",
                got=head,
                cure="leave it out of quantize.target",
            )
        # Two names of one tensor stay one tensor.
        named = [s for s in sites if s.name in chosen]
        found = [s for s in named if len(names_of(model, s.module.get_parameter("weight"))) == 1]
        if not found:
            raise TechniqueError(
                "quantize: nothing is left to quantise",
                got=f"target {self.target}, exclude {self.exclude}",
                cure="widen target, or exclude less",
            )
        return found

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`. Of a model that was loaded so, everything stays as it is.

        Raises:
            TechniqueError: when a pattern matches nothing, a weight is not finite, or the model is quantised otherwise.
        """
        with Edit(model, [self]).whole() as edit:
            before = found_in(model)
            if before is None:
                for name in self.weights(model):
                    made = self.packed(model.get_parameter(name), name)
                    edit.replace(name, made)
            elif before != self.rounding:
                raise TechniqueError(
                    "the model is quantised already, in another way",
                    got=before.settings,
                    wanted=self.settings,
                    cure="load it again, unquantised or in this way",
                )
        edit.notes.append(told(model))
        experts = seams.expert_modules(model)
        if experts and "all-linear" in self.target:
            edit.warnings.append(
                f"{counted(len(experts), 'group')} of fused experts ({experts[0]}, …) stay as they are: they are "
                "tensors and not linears, and most of such a model's memory"
            )
        return edit


# --- what is quantised in a model --------------------------------------------------------------------------------


def found_in(model: nn.Module) -> Quantize | None:
    """How a model's weights were quantised; None where none is."""
    for parameter in model.parameters():
        if isinstance(parameter, PackedWeight) and parameter.settings:
            settings: dict[str, Any] = json.loads(parameter.settings)
            return Quantize.model_validate(settings)
    return None


def told(model: nn.Module) -> str:
    """What is quantised, and what that saves, in one line."""
    packed = [p for p in model.parameters() if isinstance(p, PackedWeight)]
    now = sum(stored_bytes(p) for p in packed)
    then = sum(p.numel() * p.element_size() for p in packed)
    kinds = " and ".join(sorted({p.scheme.kind for p in packed}))
    return f"{counted(len(packed), 'weight')} in {kinds}: {sized(now)} instead of {sized(then)}"
