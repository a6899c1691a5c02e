"""Unsloth's worker: its model, adapter and trainer on a rows file. Run as `python -m bench.kit.peer_unsloth JOB.json`.

Where no GPU is, Unsloth trains with Transformers, PEFT and TRL, and changes a few things in them, such as the loss,
which it makes in pieces. Everything but the rows, their order, LoRA, the learning rate and the knob `dtype` is its
default or TRL's, which recompute activations.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .jobs import Job, read_job, write_json
from .meter import peak_memory_bytes
from .peer import note_taker, step_order
from .rows import Rows, read_rows

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics and result in its folder."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", UNSLOTH_FORCE_CPU="1")
    import torch
    import unsloth  # pyright: ignore  # noqa: F401  (before transformers, which it changes)

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    rows = read_rows(job.rows)
    build(job, rows, step_order(rows, job)).train()
    write_json(Path(job.folder) / "result.json", {"peak_bytes": peak_memory_bytes()})


def build(job: Job, rows: Rows, order: list[int]) -> Any:
    """The trainer with model, adapter, the rows in their order and a callback that takes notes."""
    import torch
    from trl import SFTTrainer  # pyright: ignore
    from unsloth import FastLanguageModel  # pyright: ignore

    from .peer_trl import arguments, dataset

    model, tokenizer = FastLanguageModel.from_pretrained(
        job.model,
        max_seq_length=max(len(ids) for ids, _ in rows.train),
        dtype=getattr(torch, job.knobs["dtype"]),
        load_in_4bit=False,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=job.rank,
        lora_alpha=job.alpha,
        lora_dropout=0.0,
        target_modules=LINEARS,
        random_state=job.seed,
    )
    return SFTTrainer(
        model=model,
        args=arguments(job),
        train_dataset=dataset(rows, order),
        processing_class=tokenizer,
        callbacks=[note_taker(job, rows, order)],
    )


if __name__ == "__main__":
    run(read_job(sys.argv[1]))
