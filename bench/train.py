"""afina beside Hugging Face Trainer + PEFT: speed, memory and quality of the same LoRA training on the same rows.

    python bench/train.py --quick                          # minutes: are both there, about how fast
    python bench/train.py --data FOLDER --json train.json  # everything; may be stopped, and a rerun continues
    python bench/train.py --only quality --tool afina --seed 0     # one piece
    python bench/train.py --cached --json train.json       # run nothing: the figures that are there
    python bench/train.py --only windows --data snips --data gsm8k --prompted       # several works
    python bench/train.py --only heap --data snips         # what an allocator that keeps all its memory would change

FOLDER holds `train.jsonl` and `test.jsonl`; without `--data` the demo's generated requests are used. `--prompted` has
each work a second time, its rows under one system prompt of about 300 tokens. All tools read the same token ids and
labels, take the same rows in every step, and train rank 16, alpha 32 on all linears in batches of 16 at a learning rate
of 1e-3 that falls linearly to 0.

Speed (real tokens a second; padding is not counted) and peak memory are medians of five windows of 20 steps after 3
that are not counted, each in a fresh process, the tools in turn. Quality is of full runs, one a seed: training loss
over the last tenth of the steps (weighted by trained tokens), and greedy answers to the test rows, decoded by one
program for all.

The peer runs with two settings. *usual*: what most people write; weights in bf16 (fp32 on a CPU that has no fast bf16,
where bf16 is several times slower), PEFT's default fp32 adapter weights, sdpa attention. *expert*: the fastest found:
adapter weights in the base's format, eager attention, blocks compiled, batches grouped by length and padded to
multiples of 32, freed memory kept by the process, micro-batches halved where rows are so long that a step would not fit
in 24 GiB. Quality runs keep the batches equal instead of grouping them, and accumulate the gradient over micro-batches,
which changes memory and speed but not what is computed.

TRL, LLaMA-Factory, litgpt and Unsloth stand beside too, near their defaults, where they are installed: each in an
environment of its own in WORK/peers (`--peers`). For one that is not there the line that installs it is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Returns the exit status: 0 unless a piece failed."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from bench.kit.training import bench, parse

    return bench(parse(__doc__ or ""))


if __name__ == "__main__":
    sys.exit(main())
