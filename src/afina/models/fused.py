"""Blocks that `ops.native.block` computes as one operation: which those are, and how they are called.

A block is taken whole where its kind is known, its weights are bf16 on a CPU that multiplies it, and nothing acts
inside it but low-rank paths beside its maps (LoRA from any start, AdaLoRA), with lengths of the rows or without (DoRA);
its own weights may train or not. This is asked at every call, so that a hook that comes later, or a technique that is
switched off for a while, is seen. Everything else is computed as the model itself does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afina.ops import native
from afina.ops.native.block import Block, Lengths, Line, Map, block
from afina.ops.native.gemm import serves
from afina.ops.packed import PackedWeight
from afina.seams.calls import Call
from afina.tree import Around, Delta, low_rank_path
from afina.types import Context

KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
"""Blocks of Transformers whose forward pass is that of `ops.native.block`."""

_MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class NotFused(Exception):
    """Why a block is computed as the model does it, in words."""


def fused(module: nn.Module, own: Call) -> Call:
    """The call of a block that goes through the kernels where that can be, and else is `own`."""
    return partial(_call, module, own)


def reason(module: nn.Module) -> str | None:
    """Why a block cannot be computed as one operation just now; None when it can."""
    try:
        block_of(module)
    except NotFused as found:
        return str(found)
    return None


def acts_elsewhere(model: nn.Module) -> str | None:
    """What changes the model beside low-rank paths, in words; None when nothing does."""
    for part in model.modules():
        if isinstance(part, Around) or (isinstance(part, Delta) and not part.is_low_rank):
            return f"{type(part).__name__.removesuffix('Delta')} acts in the model"
    return None


def block_of(module: nn.Module) -> Block:
    """What the kernels need of a block.

    Raises:
        NotFused: it is not one of theirs.
    """
    if (missing := native.missing()) is not None:
        raise NotFused(missing)
    if type(module).__name__ not in KNOWN or not type(module).__module__.startswith(
        "transformers."
    ):
        raise NotFused(f"the kernels do not know blocks such as {type(module).__name__}")
    whole: Any = module
    attention, mlp = whole.self_attn, whole.mlp
    config = attention.config
    _require(config.hidden_act == "silu", "its gate is not SiLU")
    _require(not config.attention_dropout or not module.training, "its attention drops weights")
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    _require(window is None, "its attention has a window")
    inside = (attention, mlp, mlp.act_fn, whole.input_layernorm, whole.post_attention_layernorm)
    _untouched(module, *inside)
    _require(all(part._compiled_call_impl is None for part in inside), "its parts are exchanged")
    maps = [
        _map(getattr(attention, n) if hasattr(attention, n) else getattr(mlp, n)) for n in _MAPS
    ]
    norms = [whole.input_layernorm, whole.post_attention_layernorm]
    for norm in norms:
        _plain(norm.weight)
    width = int(attention.head_dim)
    _require(width % 32 == 0, f"its heads are {width} wide, not a multiple of 32")
    q, k, v, o, gate, up, down = maps
    gained = [m for m in (gate, up) if m.lengths is not None and m.bias_O is not None]
    _require(not gained, "rows of its gate have lengths and a bias")
    first, second = norms
    return Block(
        q,
        k,
        v,
        o,
        gate,
        up,
        down,
        first.weight,
        second.weight,
        first.variance_epsilon,
        second.variance_epsilon,
        q.out // width,
        k.out // width,
        float(attention.scaling),
    )


def _map(linear: nn.Module) -> Map:
    if type(linear) is not nn.Linear:
        raise NotFused(f"a map of it is a {type(linear).__name__}")
    weight = linear.weight
    packed = isinstance(weight, PackedWeight)
    if packed:
        fit = weight.compute in (None, torch.bfloat16) and serves(weight.packed)
        _require(fit, "its quantised weights are not for the kernels")
    else:
        _plain(weight)
    if linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        _plain(linear.bias)
    _require(linear.weight.shape[0] % 32 == 0 and linear.weight.shape[1] % 32 == 0, "odd widths")
    # Last, for its tensors may be computed for it: where weights are shared out, so are some of what they come from.
    found = low_rank_path(linear)
    if isinstance(found, str):
        raise NotFused(found)
    if found is None:
        return Map(linear.weight, linear.bias, None, None, 0.0)
    lengths = found.delta.lengths(linear)
    if lengths is None:
        return Map(linear.weight, linear.bias, found.a_RI, found.b_OR, found.scaling)
    m, n = lengths
    own = (linear.weight, linear.bias)
    _require(not any(x is not None and x.requires_grad for x in own), "its rows have lengths")
    _require(bool(m.detach().all()), "a row of it has the length 0")
    gained = Lengths(m, n, m.detach() / n)
    return Map(linear.weight, linear.bias, found.a_RI, found.b_OR, found.scaling, gained)


def _plain(weight: Tensor) -> None:
    fit = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
    _require(fit, "its weights are not in bf16 on the CPU")
    _require(type(weight) in (Tensor, nn.Parameter), "its weights are shared out")


def _untouched(*modules: nn.Module) -> None:
    for module in modules:
        known: Any = module
        hooks = (
            known._forward_hooks,
            known._forward_pre_hooks,
            known._backward_hooks,
            known._backward_pre_hooks,
        )
        _require(not any(hooks) and "forward" not in vars(module), "something else acts inside it")


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise NotFused(why)


def _call(module: nn.Module, own: Call, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    context: Context | None = kwargs.get("afina_context")
    fits = (
        context is not None
        and context.layout is not None
        and not args
        and kwargs.get("position_embeddings") is not None
        and kwargs.get("cache", kwargs.get("past_key_values")) is None
        and kwargs.get("afina_prefix") is None
        and hidden_states.dtype == torch.bfloat16
        and not torch.is_autocast_enabled("cpu")
    )
    if fits:
        assert context is not None
        assert context.layout is not None
        try:
            of = block_of(module)
        except NotFused:
            return own(hidden_states, *args, **kwargs)
        cosine, sine = (x[0].contiguous() for x in kwargs["position_embeddings"])
        line = Line(cosine, sine, context.layout.runs)
        return block(hidden_states[0].contiguous(), of, line)[None]
    return own(hidden_states, *args, **kwargs)
