"""A base in 4 or 8 bits: the memory that it takes, loaded and in training, and what it costs in speed.

    python bench/quantize.py --quick                       # minutes: about how much
    python bench/quantize.py --rounds 5 --json quantize.json   # longer steps, five times each
    python bench/quantize.py --dtype bf16                  # what is not quantised, and the products, in bf16
    python bench/quantize.py --model FOLDER --only nf4,whole

Each way is a fresh process: it loads the model, puts a LoRA on all its linears, and makes a few training steps of equal
random rows in one plain loop, the same for all. *whole* is afina without quantisation, *nf4* and *int8* are afina's
`Quantize`; beside them, where bitsandbytes is installed, PEFT trains on its 4- and 8-bit linears.

Figures: *weights*, the bytes of the frozen base; *loaded*, memory of the process after loading, what it had before
taken off; *training*, the most that it had in a step, likewise; *speed* in tokens a second, the first step not counted;
*loss* of the last step. Memory is that which the process cannot give back (`RssAnon`), with every tensor in memory of
its own, so that pages of the model's file, which come and go, count for none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS, PEERS = ("whole", "nf4", "int8"), {"nf4": "peft-nf4", "int8": "peft-int8"}
METRICS = (
    ("weights", "MiB"),
    ("loaded", "MiB"),
    ("training", "MiB"),
    ("speed", "tokens/s"),
    ("loss", "nats"),
)


@dataclass(frozen=True)
class Work:
    """What every way does.

    Attributes:
        model: as `afina.load` takes it.
        rows, tokens: of each step's batch.
        steps: the first is not timed.
        rank: of the LoRA.
        threads: of torch.
        dtype: of what is not quantised, and of the products.
    """

    model: str
    rows: int
    tokens: int
    steps: int
    rank: int
    threads: int
    dtype: str


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    sys.path.insert(0, str(ROOT))
    if options.way:
        print(json.dumps(run(options.way, Work(**json.loads(options.work)))))
        return 0
    from bench.kit.pieces import only_one
    from bench.kit.report import table, write_figures

    rows, tokens, steps = (2, 64, 3) if options.quick else (4, 256, 6)
    how = (options.rank, options.threads, options.dtype)
    work = Work(options.model, rows, tokens, steps, *how)
    with only_one():
        taken = [
            {way: apart(way, work) for way in ways(options.only)} for _ in range(options.rounds)
        ]
    found = {way: middle([each[way] for each in taken]) for way in taken[0]}
    figures = made(found, work)
    print(table(figures))
    if options.json:
        write_figures(options.json, figures)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A base in 4 or 8 bits.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--model", default="smollm2-135m", help="the base, as afina.load takes it")
    parser.add_argument("--only", default="", metavar="WAYS", help="such as nf4,peft-nf4")
    parser.add_argument("--rounds", type=int, default=1, help="of all ways in turns; medians count")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the rest")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def ways(only: str) -> list[str]:
    """The ways that can be gone here, or those asked for."""
    if only:
        return [way.strip() for way in only.split(",")]
    here = all(find_spec(name) is not None for name in ("bitsandbytes", "peft", "accelerate"))
    return [*OURS, *(PEERS.values() if here else ())]


def apart(way: str, work: Work) -> dict[str, float]:
    """The figures of one way, from a process of its own."""
    from bench.kit.pieces import environment

    command = [
        sys.executable,
        str(Path(__file__)),
        "--way",
        way,
        "--work",
        json.dumps(asdict(work)),
    ]
    around = environment(asdict(work))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    if done.returncode:
        raise RuntimeError(f"{way} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def middle(taken: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(each[name] for each in taken) for name in taken[0]}


def made(found: dict[str, dict[str, float]], work: Work) -> list[Any]:
    """Each quantised way beside the whole base, and beside the peer's."""
    from bench.kit.report import Figure

    name = Path(work.model).name
    pairs = [(way, "whole", f"afina {work.dtype}") for way in OURS[1:]]
    pairs += [(way, peer, "PEFT + bitsandbytes") for way, peer in PEERS.items()]
    return [
        Figure("quantize", name, way, metric, unit, found[way][metric], told, found[peer][metric])
        for way, peer, told in pairs
        if way in found and peer in found
        for metric, unit in METRICS
    ]


# --- in a process of its own --------------------------------------------------------------------------------------


def run(way: str, work: Work) -> dict[str, float]:
    """Loads, trains, and says what it took."""
    import torch

    torch.set_num_threads(work.threads)
    load = _peer if way in PEERS.values() else _ours
    _imported(way)
    before = anonymous_bytes()
    model, weights = load(way, work)
    loaded = anonymous_bytes() - before
    with highest() as most:
        speed, loss = train(model, work)
    mib = 2**20
    return {
        "weights": weights / mib,
        "loaded": loaded / mib,
        "training": (most() - before) / mib,
        "speed": speed,
        "loss": loss,
    }


def _imported(way: str) -> None:
    """Imports all that the way needs, so that it counts for none."""
    names = ["transformers.models.llama.modeling_llama", "afina.models.hub", "afina.table"]
    names += ["accelerate", "bitsandbytes", "peft"] if way in PEERS.values() else []
    for name in names:
        import_module(name)


def _own(model: Any) -> Any:
    """The model with no tensor in the pages of its file."""
    from torch import nn

    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            parameter.data = parameter.data.clone()
    return model


def _ours(way: str, work: Work) -> tuple[Any, int]:
    import afina
    from afina.ops.packed import stored_bytes

    quantize = None if way == "whole" else afina.Quantize(kind=way)
    model, _ = afina.load(work.model, dtype=work.dtype, device="cpu", quantize=quantize)
    weights = sum(stored_bytes(p) for p in model.parameters())
    afina.apply(_own(model), [afina.LoRA(rank=work.rank)])
    return model, weights


def _peer(way: str, work: Work) -> tuple[Any, int]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from afina.models.hub import resolve

    four, dtype = way == "peft-nf4", torch.bfloat16 if work.dtype == "bf16" else torch.float32
    settings = BitsAndBytesConfig(
        load_in_4bit=four,
        load_in_8bit=not four,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        resolve(work.model), quantization_config=settings, dtype=dtype, device_map="cpu"
    )
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = LoraConfig(
        r=work.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(_own(model), config), weights


def train(model: Any, work: Work) -> tuple[float, float]:
    """(tokens a second, loss of the last step) of plain steps on random rows, the same for every way."""
    import torch

    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    seconds, loss = 0.0, 0.0
    for step in range(work.steps):
        ids = torch.randint(0, model.config.vocab_size, (work.rows, work.tokens), generator=draw)
        began = time.perf_counter()
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        seconds += (time.perf_counter() - began) if step else 0.0
        loss = out.loss.item()
    return (work.steps - 1) * work.rows * work.tokens / seconds, loss


def anonymous_bytes() -> int:
    """Memory of this process that is backed by no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def highest(every_s: float = 0.005) -> Iterator[Callable[[], int]]:
    """Watches the memory inside the block; the value says the most that was seen."""
    seen, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            seen[0] = max(seen[0], anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: seen[0]
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
