"""afina's operations on a device beside PyTorch's and those of tools that are installed there: time, and memory.

*attention* as in `bench/ops.py`, beside PyTorch's kernel over padded rows and attention written out; afina's own Triton
kernels and the package flash-attn, which afina goes through where it is asked to, stand beside its default way. *loss*:
beside logits and `cross_entropy`, and Liger's fused one. *a map with a path*: of low rank, beside PEFT's module. What
is not installed, or cannot run on the device, is left out and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench import ops

from .report import Figure
from .turns import interleaved

RANK, ALPHA = 16, 32
IN, OUT = 576, 1536
"""SmolLM2's gate."""

Way = Callable[[], object]


def figures(device: str, dtype: Any, sizes: ops.Sizes, tokens: int) -> Iterator[Figure]:
    """Medians of ways that take turns.

    Args:
        device: cuda, or cpu to see that it runs.
        dtype: of all tensors.
        sizes: of attention and the loss, and repetitions.
        tokens: of the map.
    """
    for length in sizes.lengths:
        packed = [length // 2, length // 4, length // 8, length // 8]
        for work, rows in (("one row", [length]), ("packed", packed)):
            ways = attention_ways(rows, dtype, device)
            yield from _times(f"attention, {length} tokens, {work}", ways, device, sizes.times)
    losses = loss_ways(sizes.positions, dtype, device)
    work = f"loss, {sizes.positions} positions"
    yield from _times(work, losses, device, sizes.times)
    yield from _memory(work, losses, device)
    ways = map_ways(tokens, dtype, device)
    yield from _times(f"a map with a path, {tokens} tokens", ways, device, sizes.times)


def left_out(device: str) -> Iterator[str]:
    """A line for each way that cannot be taken."""
    import torch

    from afina.errors import ConfigError
    from afina.ops.attention import refuse_missing

    for way in ("triton", "flash"):
        try:
            refuse_missing(way, torch.device(device))
        except ConfigError as error:
            yield f"{way} is left out: {error.what}"
    if find_spec("liger_kernel") is None:
        yield "liger is left out: the package liger-kernel is not installed"


# --- ways ----------------------------------------------------------------------------------------------------------


def attention_ways(rows: Sequence[int], dtype: Any, device: str) -> dict[str, Way]:
    """Forward and backward of each way, on the same rows."""
    import torch

    from afina.errors import ConfigError
    from afina.ops.attention import Way as Asked
    from afina.ops.attention import computed_by, refuse_missing

    ways: dict[str, Way] = dict(ops.attention_ways(rows, dtype, device))
    ours, where = ways["afina"], torch.device(device)

    def asked(way: Asked) -> None:
        with computed_by(way, where):
            ours()

    for way in ("triton", "flash"):
        try:
            refuse_missing(way, where)
        except ConfigError:
            continue
        ways[way] = partial(asked, way)
    return ways


def loss_ways(positions: int, dtype: Any, device: str) -> dict[str, Way]:
    """Forward and backward of each way."""
    names = ["afina", "logits"] + (["liger"] if find_spec("liger_kernel") else [])
    return {name: ops.loss_way(name, positions, dtype, device) for name in names}


def map_ways(tokens: int, dtype: Any, device: str) -> dict[str, Way]:
    """Forward and backward of a frozen map and the path beside it."""
    import torch
    from peft.tuners.lora import Linear as Theirs
    from peft.tuners.lora import LoraConfig
    from torch import nn

    import afina

    def made() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(IN, OUT, bias=False).to(dtype).to(device).requires_grad_(False)

    torch.manual_seed(1)
    x = torch.randn(tokens, IN).to(dtype).to(device).requires_grad_()
    mine: Any = nn.Sequential(made())
    afina.apply(mine, [afina.LoRA(rank=RANK, alpha=ALPHA, target=("0",))])
    config = LoraConfig(r=RANK, lora_alpha=ALPHA)
    theirs = Theirs(made(), "default", config, r=RANK, lora_alpha=ALPHA).to(device)
    with torch.no_grad():
        for own, other in zip(_path(mine), _path(theirs), strict=True):
            own.normal_(std=0.1)
            other.copy_(own)

    def way(model: Any) -> None:
        model(x).square().mean().backward()

    return {"afina": partial(way, mine), "peft": partial(way, theirs)}


def _path(model: Any) -> list[Any]:
    """A and B of a map with a path, by their shapes."""
    return sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.shape)


# --- what is measured ----------------------------------------------------------------------------------------------


def _times(work: str, ways: Mapping[str, Way], device: str, times: int) -> Iterator[Figure]:
    found = interleaved({name: _whole(way, device) for name, way in ways.items()}, times)
    for peer in (name for name in ways if name != "afina"):
        own, other = (found[name] * 1e3 for name in ("afina", peer))
        yield Figure("gpu", work, peer, "time", "ms", own, peer, other)


def _memory(work: str, ways: Mapping[str, Way], device: str) -> Iterator[Figure]:
    """What a pass took at most beyond what was there; nothing where the device does not count it."""
    import torch

    if device != "cuda":
        return
    most: dict[str, float] = {}
    for name, way in ways.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _whole(way, device)()
        most[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for peer in (name for name in ways if name != "afina"):
        yield Figure("gpu", work, peer, "memory", "MiB", most["afina"], peer, most[peer])


def _whole(way: Way, device: str) -> Way:
    """A pass that has ended when it returns."""
    import torch

    def ended() -> None:
        way()
        if device == "cuda":
            torch.cuda.synchronize()

    return ended
