"""How a model's own plan says that its matrices are shared out.

Transformers has the plan as strings, by the name of a module: `model.layers.*.self_attn.q_proj: colwise`. Each string
that is known here is one `Way`; another is refused by name, and so is a model without a plan.

| way | string | weight (out, in) | what enters | what leaves |
|---|---|---|---|---|
| columns | colwise | cut along out | whole | a part of the numbers |
| columns_joined | colwise_gather_output | cut along out | whole | whole |
| rows | rowwise | cut along in | a part of the numbers | whole, a sum over the parts |
| rows_split | rowwise_split_input | cut along in | whole | whole, a sum over the parts |
| experts | moe_tp_experts | whole experts | whole | whole, a sum over the parts |
| inside | replicated_with_grad_allreduce | whole | a part of the heads | a part of the heads |
| vocabulary | embedding_rowwise | some tokens' rows | whole | whole, a sum over the parts |
| head | colwise_gather_output | some tokens' rows | whole | whole; the loss makes no whole logits |
| whole | replicate | whole | whole | whole |

Fused experts are shared out by their number, where Transformers cuts each of them: a part is then one box of the
tensor, and every expert is one process's.

Input embedding and head are shared out by tokens, or held whole by every process: where the plan does not say it of
both ends of a tied weight, where the vocabulary does not divide, or where something acts there that wants whole rows
(trainable_tokens).

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3; the strings are those of Transformers 5.24
(`distributed/tensor_parallel.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from torch import nn

from afina import seams
from afina.errors import ConfigError
from afina.ops.packed import PackedWeight
from afina.tree import Delta

Way = Literal[
    "columns",
    "columns_joined",
    "rows",
    "rows_split",
    "experts",
    "inside",
    "vocabulary",
    "head",
    "whole",
]

WAYS: Mapping[str, Way] = {
    "colwise": "columns",
    "colwise_gather_output": "columns_joined",
    "colwise_rep": "columns_joined",
    "rowwise": "rows",
    "rowwise_split_input": "rows_split",
    "rowwise_rep": "rows_split",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "inside",
    "embedding_rowwise": "vocabulary",
    "replicate": "whole",
}
"""A string of Transformers -> the way; those that say the same are there too."""

OF_EXPERTS = ("packed_colwise", "colwise", "rowwise", "packed_rowwise")
"""What is said of the tensors of a module of experts, which are shared out together."""


def ways_of(model: nn.Module, parts: int) -> dict[str, Way]:
    """The way of every module that a model's plan names; of the ends, if they are shared out.

    Args:
        model: of Transformers, on any device.
        parts: processes that share each matrix.

    Raises:
        ConfigError: it has no plan, or one with a string that is not known, or for what is no linear.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise refused_without(type(model).__name__)
    modules = {n: m for n, m in _own(model) if n}
    tensors = [n for n, _ in model.named_parameters()]
    experts = [n for n, style in _matched(plan, modules) if WAYS.get(style) == "experts"]
    found: dict[str, Way] = {}
    for name, style in _matched(plan, [*modules, *tensors]):
        if style in OF_EXPERTS and any(name.startswith(f"{e}.") for e in experts):
            continue
        way = WAYS.get(style)
        if way is None or name not in modules:
            raise refused_unknown(name, style)
        found[name] = way
    head = seams.head(model).name
    ends: dict[str, Way] = {seams.input_embedding(model): "vocabulary"}
    ends |= {} if head is None else {head: "columns_joined"}
    inner: dict[str, Way] = {n: way for n, way in found.items() if n not in ends}
    for name, way in inner.items():
        _refuse_other_kinds(name, modules[name], way)
    said = {name for name, way in ends.items() if found.get(name) == way}
    return inner | _ends(model, said, parts)


def _ends(model: nn.Module, said: set[str], parts: int) -> dict[str, Way]:
    """The ways of embedding and head, where they can be shared out.

    Args:
        model: see `ways_of`.
        said: the names of those that the plan shares out.
        parts: see `ways_of`.
    """
    embedding, head = seams.input_embedding(model), seams.head(model)
    if head.tied and not {embedding, head.name} <= said:
        return {}
    wanted: dict[str, Way] = {embedding: "vocabulary"}
    if head.name is not None:
        wanted[head.name] = "head"
    wanted = {name: way for name, way in wanted.items() if name in said}
    for name in wanted:
        module = model.get_submodule(name)
        kind = "embedding" if wanted[name] == "vocabulary" else "linear"
        acts = [child for child in module.children() if isinstance(child, Delta)]
        packed = isinstance(module.weight, PackedWeight)
        fits = seams.map_kind(module) == kind and not packed and all(c.in_parts for c in acts)
        if not fits or len(module.get_parameter("weight")) % parts:
            return {}
    return wanted


def _own(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the model itself; what techniques attached is left out."""
    attached: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Delta):
            attached.append(f"{name}.")
        elif not name.startswith(tuple(attached)):
            yield name, module


def _matched(plan: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The strings by full names: a star in the plan's stands for a number."""
    for pattern, style in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in names:
            if wanted.fullmatch(name):
                yield name, style


def _refuse_other_kinds(name: str, module: nn.Module, way: Way) -> None:
    """Raises where a module is none that can be shared out so."""
    if way == "vocabulary":
        raise ConfigError(
            "parallel.tensor: this model has another embedding than that of its tokens, and shares it out",
            got=name,
            cure=WAY_OUT,
        )
    if way in ("columns", "columns_joined", "rows", "rows_split") and (
        seams.map_kind(module) != "linear"
    ):
        raise ConfigError(
            "parallel.tensor: the model's plan shares out a map of a kind that is not known here",
            got=f"{name}: {type(module).__name__}",
            wanted="linears",
            cure=WAY_OUT,
        )
    for own, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, PackedWeight):
            raise ConfigError(
                "parallel.tensor cannot share out packed weights",
                got=f"{name}.{own}",
                wanted="weights in fp32, bf16 or fp16",
                cure="leave quantize out, or take parallel.zero=1 or 2: packed weights are small",
            )


WAY_OUT = "leave parallel.tensor out; parallel.zero=3 and parallel.pipeline share weights out too"


def refused_without(model: str) -> ConfigError:
    """The error of a model that has no plan."""
    return ConfigError(
        "parallel.tensor shares matrices out as the model itself says, and this one does not say how",
        got=model,
        wanted="a model for which Transformers has a tensor plan, such as Llama, Qwen, Gemma or Mistral",
        cure=WAY_OUT,
    )


def refused_unknown(name: str, style: str) -> ConfigError:
    """The error of a string that is not known."""
    return ConfigError(
        "parallel.tensor: the model's own plan shares something out in a way that is not known here",
        got=f"{name}: {style}",
        wanted=", ".join(WAYS),
        cure=WAY_OUT,
    )
