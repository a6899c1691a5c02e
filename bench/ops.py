"""afina's operations beside PyTorch's, forward and backward: attention, and the loss of a large vocabulary.

    python bench/ops.py --quick                      # a minute: small shapes, few repetitions
    python bench/ops.py --json ops.json              # 128 to 4,096 tokens, seven repetitions of each
    python bench/ops.py --only attention --threads 1

*attention*: 9 query heads and 3 key heads of width 64 (SmolLM2's), causal; one row alone, and four rows packed end to
end. Beside it stand PyTorch's `scaled_dot_product_attention` and attention written out (*eager*), each given one row
after the other, padded to the longest: what a padded batch costs them. *loss*: the cross-entropy of 49,152 ids, beside
logits and `cross_entropy`. The formats are those that afina trains in on this machine.

Time: medians, all ways taking turns in one process. Memory: the most that a fresh process held, less what it held
before the operation (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEADS, KEY_HEADS, WIDTH = 9, 3, 64
VOCABULARY, HIDDEN = 49_152, 576

Way = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
        lengths: tokens of a row of attention.
        positions: of the loss.
        times: repetitions of each way; one more comes first and is not counted.
    """

    lengths: tuple[int, ...]
    positions: int
    times: int


FULL = Sizes((128, 256, 512, 1024, 2048, 4096), 1024, 7)
QUICK = Sizes((128, 256), 128, 5)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    sys.path.insert(0, str(ROOT))
    if options.memory:
        print(json.dumps(memory_of(options.memory, options.positions, options.dtype)))
        return 0
    import torch

    from afina.models.precision import choose
    from bench.kit.cache import machine
    from bench.kit.pieces import only_one
    from bench.kit.report import table, write_figures

    torch.set_num_threads(options.threads)
    sizes = QUICK if options.quick else FULL
    dtype = choose("cpu").base
    print(f"{machine()}; {str(dtype).removeprefix('torch.')}, {options.threads} threads")
    figures: list[Any] = []
    with only_one():
        if options.only in (None, "attention"):
            figures += attention(sizes, dtype)
        if options.only in (None, "loss"):
            figures += loss(sizes, dtype)
    print(table(figures))
    if options.json:
        write_figures(options.json, figures)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="afina's operations beside PyTorch's.")
    parser.add_argument("--quick", action="store_true", help="small shapes, five repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--only", choices=("attention", "loss"), help="leave the other out")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--memory", choices=("afina", "logits"), help=argparse.SUPPRESS)
    parser.add_argument("--positions", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# --- attention -----------------------------------------------------------------------------------------------------


def attention(sizes: Sizes, dtype: Any) -> list[Any]:
    """Figures of every length, alone and packed."""
    from bench.kit.report import Figure
    from bench.kit.turns import interleaved

    figures: list[Any] = []
    for length in sizes.lengths:
        # Rows of unequal length, as data has them: packed, they make up the line; padded, each costs the longest.
        packed = [length // 2, length // 4, length // 8, length // 8]
        for work, rows in (("one row", [length]), ("packed", packed)):
            found = interleaved(attention_ways(rows, dtype), sizes.times)
            figures += [
                Figure("ops", f"attention, {length} tokens, {work}", peer, "time", "ms",
                       found["afina"] * 1e3, peer, found[peer] * 1e3)
                for peer in ("sdpa", "eager")
            ]  # fmt: skip
    return figures


def attention_ways(lengths: Sequence[int], dtype: Any, device: str = "cpu") -> dict[str, Way]:
    """Forward and backward of each way, on the same rows."""
    import torch
    import torch.nn.functional as F

    from afina.ops.attention import rows_attention
    from afina.ops.layout import with_layout
    from afina.types import Context

    longest = max(lengths)
    draw = torch.Generator().manual_seed(0)
    shapes = [
        (len(lengths), heads, longest, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]
    *padded, above_padded = (
        torch.randn(shape, generator=draw).to(dtype).to(device) for shape in shapes
    )
    for row, length in enumerate(lengths):
        above_padded[row, :, length:] = 0
    *line, above = (
        torch.cat([x[row, :, :length] for row, length in enumerate(lengths)], dim=1)[None]
        for x in (*padded, above_padded)
    )
    for tensor in (*padded, *line):
        tensor.requires_grad_()
    segments = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    context = with_layout(Context(segments.to(device), positions.to(device)))

    def ours() -> None:
        q, k, v = line
        rows_attention(q, k, v, context, causal=True).backward(above)

    def sdpa() -> None:
        q, k, v = padded
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(above_padded)

    def eager() -> None:
        q, k, v = padded
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
        hidden = torch.ones(longest, longest, dtype=torch.bool, device=device).triu(1)
        scores = (q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(hidden, -torch.inf)
        (torch.softmax(scores, -1, dtype=torch.float32).to(dtype) @ v).backward(above_padded)

    return {"afina": ours, "sdpa": sdpa, "eager": eager}


# --- loss ----------------------------------------------------------------------------------------------------------


def loss(sizes: Sizes, dtype: Any) -> list[Any]:
    """Time and memory of the loss."""
    from bench.kit.report import Figure
    from bench.kit.turns import interleaved

    ways = {name: loss_way(name, sizes.positions, dtype) for name in ("afina", "logits")}
    found = {way: seconds * 1e3 for way, seconds in interleaved(ways, sizes.times).items()}
    work = f"loss, {sizes.positions} positions"
    name = str(dtype).removeprefix("torch.")
    held = {way: held_mib(way, sizes.positions, name) for way in ways}
    return [
        Figure("ops", work, "logits", "time", "ms", found["afina"], "logits", found["logits"]),
        Figure("ops", work, "logits", "memory", "MiB", held["afina"], "logits", held["logits"]),
    ]


def loss_way(name: str, positions: int, dtype: Any, device: str = "cpu") -> Way:
    """Forward and backward of a frozen head's loss."""
    import torch
    import torch.nn.functional as F

    from afina.ops.loss import linear_cross_entropy

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn((positions, HIDDEN), generator=draw).to(dtype).to(device).requires_grad_()
    weight = (torch.randn((VOCABULARY, HIDDEN), generator=draw) * 0.05).to(dtype).to(device)
    targets = torch.randint(0, VOCABULARY, (positions,), generator=draw).to(device)

    def ours() -> None:
        linear_cross_entropy(hidden, weight, targets).sum().backward()

    def logits() -> None:
        F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum").backward()

    def liger() -> None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

        lost: Any = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        lost(weight, hidden, targets).backward()

    return {"afina": ours, "logits": logits, "liger": liger}[name]


def memory_of(name: str, positions: int, dtype: str) -> int:
    """Bytes that this process held at most during the operation, beyond what it held before."""
    import torch

    from bench.kit.meter import peak_memory_bytes

    way = loss_way(name, positions, getattr(torch, dtype))
    # Linux forgets the highest use when told so; else what making the tensors took could hide the operation's.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory_bytes()
    way()
    return peak_memory_bytes() - before


def held_mib(way: str, positions: int, dtype: str) -> float:
    """The same, of a fresh process."""
    command = [sys.executable, __file__, "--memory", way, "--positions", str(positions)]
    done = subprocess.run(
        [*command, "--dtype", dtype], env=dict(os.environ), capture_output=True, check=True
    )
    return json.loads(done.stdout) / 2**20


if __name__ == "__main__":
    sys.exit(main())
