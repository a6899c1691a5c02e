"""TRL's worker: its `SFTTrainer` on a rows file. Run as `python -m bench.kit.peer_trl JOB.json`.

Everything but the rows, their order, LoRA and the learning rate is TRL's default, which recomputes activations. The
format of the weights is the knob `dtype`, for TRL's own (autocast to bf16) is many times slower on a CPU that has no
fast bf16.
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


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics and result in its folder."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    rows = read_rows(job.rows)
    build(job, rows, step_order(rows, job)).train()
    write_json(Path(job.folder) / "result.json", {"peak_bytes": peak_memory_bytes()})


def build(job: Job, rows: Rows, order: list[int]) -> Any:
    """The trainer with model, adapter, the rows in their order and a callback that takes notes."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTTrainer  # pyright: ignore

    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.knobs["dtype"])
    )
    config = LoraConfig(
        r=job.rank, lora_alpha=job.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return SFTTrainer(
        model=model,
        args=arguments(job),
        train_dataset=dataset(rows, order),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=config,
        callbacks=[note_taker(job, rows, order)],
    )


def dataset(rows: Rows, order: list[int]) -> Any:
    """The rows in their order, as TRL's trainer takes what is tokenised."""
    from datasets import Dataset

    columns = zip(*(rows.train[place] for place in order), strict=True)
    return Dataset.from_dict(dict(zip(("input_ids", "labels"), map(list, columns), strict=True)))


def arguments(job: Job) -> Any:
    """The trainer's arguments; what is not named keeps its default."""
    from trl import SFTConfig  # pyright: ignore

    return SFTConfig(
        output_dir=str(Path(job.folder) / "checkpoints"),
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=job.batch,
        max_steps=job.steps,
        learning_rate=job.lr,
        lr_scheduler_type="linear",
        warmup_steps=job.warmup_steps,
        seed=job.seed,
        train_sampling_strategy="sequential",
        bf16=job.knobs["dtype"] == "bfloat16",
        use_cpu=True,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    run(read_job(sys.argv[1]))
