"""LLaMA-Factory's worker: its supervised fine-tuning on a rows file, already tokenised, through its own entry.

Run as `python -m bench.kit.peer_llamafactory JOB.json`. Everything but the rows, their order, LoRA, the learning rate
and the knob `dtype` is its default: it recomputes activations too, and pads to multiples of 8.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .jobs import Job, read_job, write_json
from .meter import peak_memory_bytes
from .peer import example, note_taker, step_order
from .rows import Rows, read_rows


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics and result in its folder."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    from llamafactory.train.tuner import run_exp  # pyright: ignore

    torch.set_num_threads(job.threads)
    rows = read_rows(job.rows)
    order = step_order(rows, job)
    tokenised = Path(job.folder) / "tokenised"
    write_tokenised(rows, order, tokenised)
    run_exp(arguments(job, tokenised), callbacks=[note_taker(job, rows, order)])
    write_json(Path(job.folder) / "result.json", {"peak_bytes": peak_memory_bytes()})


def write_tokenised(rows: Rows, order: list[int], folder: Path) -> None:
    """The rows in their order, as LLaMA-Factory keeps what it has tokenised."""
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list([example(*rows.train[place]) for place in order])
    DatasetDict({"train": made}).save_to_disk(str(folder))


def arguments(job: Job, tokenised: Path) -> dict[str, Any]:
    """What its command line would be given; what is not named keeps its default."""
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": job.model,
        "template": "empty",
        "dataset": "rows",  # a name must stand here; what is tokenised goes before it
        "tokenized_path": str(tokenised),
        "finetuning_type": "lora",
        "lora_target": "all",
        "lora_rank": job.rank,
        "lora_alpha": job.alpha,
        "lora_dropout": 0.0,
        "output_dir": str(Path(job.folder) / "checkpoints"),
        "per_device_train_batch_size": job.batch,
        "max_steps": job.steps,
        "learning_rate": job.lr,
        "lr_scheduler_type": "linear",
        "warmup_steps": job.warmup_steps,
        "seed": job.seed,
        "disable_shuffling": True,
        "bf16": job.knobs["dtype"] == "bfloat16",
        "use_cpu": True,
        "logging_steps": 1,
        "include_num_input_tokens_seen": "non_padding",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    run(read_job(sys.argv[1]))
