"""What DoRA costs beside LoRA, here and in PEFT: processor time of a training pass over blocks of SmolLM2's shapes.

    python bench/dora.py --quick               # two blocks, half a minute
    python bench/dora.py --json dora.json      # six blocks

Blocks with random weights, rank 16 on all their linears, in fp32 on one thread; a pass is forward and backward of the
blocks alone, without embedding and head, which would only make the difference smaller. The four ways take turns, and
each figure is the median of five passes' processor seconds, so that whatever else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMES = 5
RANK, ALPHA = 16, 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    sys.path.insert(0, str(ROOT))
    import torch

    from bench.kit.report import table, write_figures

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        blocks, rows, tokens = (2, 4, 128) if options.quick else (6, 8, 128)
        found = measured(blocks, rows, tokens, width=options.width)
    finally:
        torch.set_num_threads(before)
    figures = made(found, f"{blocks} blocks, {rows} x {tokens} tokens")
    print(table(figures))
    if options.json:
        write_figures(options.json, figures)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="DoRA beside LoRA.")
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--width", type=int, default=576, help="of the blocks; SmolLM2-135M's")
    return parser.parse_args(arguments)


def measured(blocks: int, rows: int, tokens: int, *, width: int) -> dict[str, float]:
    """Median processor seconds of a pass, by way."""
    return interleaved(ways(blocks, rows, tokens, width=width), TIMES)


def ways(blocks: int, rows: int, tokens: int, *, width: int) -> dict[str, Callable[[], None]]:
    """A training pass of each way, all on blocks of equal weights."""
    import torch
    from peft import LoraConfig, get_peft_model

    import afina

    settings: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": LINEARS}
    models: dict[str, Any] = {}
    for name, technique in (("lora", afina.LoRA), ("dora", afina.DoRA)):
        models[name] = model_of(blocks, width)
        afina.apply(models[name], [technique(rank=RANK, alpha=ALPHA)])
        config = LoraConfig(**settings, use_dora=name == "dora")
        models[f"peft {name}"] = get_peft_model(model_of(blocks, width), config)
    torch.manual_seed(0)
    x = torch.randn(rows, tokens, width)

    def way(model: Any) -> Callable[[], None]:
        model.train()

        def one() -> None:
            model.zero_grad()
            model(inputs_embeds=x, use_cache=False).last_hidden_state.square().mean().backward()

        return one

    return {name: way(model) for name, model in models.items()}


def model_of(blocks: int, width: int) -> Any:
    """The same random blocks at every call."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 8, "hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": blocks,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    return LlamaModel(LlamaConfig(**sizes))


def interleaved(ways: Mapping[str, Callable[[], None]], times: int) -> dict[str, float]:
    """Median processor seconds of each way, the ways taking turns after one pass that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(times + 1):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name] += [time.process_time() - began] if turn else []
    return {name: statistics.median(found) for name, found in seconds.items()}


def made(found: Mapping[str, float], work: str) -> list[Any]:
    """The rows: DoRA beside LoRA, and each beside PEFT's."""
    from bench.kit.report import Figure

    pairs = (
        ("dora", "lora"),
        ("peft dora", "peft lora"),
        ("dora", "peft dora"),
        ("lora", "peft lora"),
    )
    return [
        Figure("dora", work, own, "processor time", "s a pass", found[own], peer, found[peer])
        for own, peer in pairs
    ]


if __name__ == "__main__":
    sys.exit(main())
