"""litgpt's worker: its LoRA fine-tuning on a rows file, through its own entry.

Run as `python -m bench.kit.peer_litgpt JOB.json`.

Everything but the rows, their order, LoRA and the learning rate is its default, except that its precision is the knob
`dtype` throughout (its default computes in bf16 beside fp32 weights) and that the step's rows go
through the model at once instead of one after the other. A step's end is noted by the optimiser, which litgpt lets a
user name; what it does behind the last step (merging, writing) is left out.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jobs import Job, read_job, write_json
from .meter import Notes, now_s, peak_memory_bytes
from .peer import step_order
from .rows import Rows, read_rows, trained_tokens

NAMES = {"bfloat16": "bf16-true", "float32": "32-true"}
CONFIG = "SmolLM2-135M-Instruct"
"""litgpt builds a model by its name in a list of its own."""


class Done(Exception):
    """The last step has been made."""


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics and result in its folder."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    from litgpt.finetune import lora  # pyright: ignore
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint  # pyright: ignore

    torch.set_num_threads(job.threads)
    rows = read_rows(job.rows)
    order = step_order(rows, job)
    checkpoint = Path(job.folder) / CONFIG
    if not (checkpoint / "lit_model.pth").exists():
        shutil.copytree(job.model, checkpoint, dirs_exist_ok=True)
        convert_hf_checkpoint(checkpoint, dtype=job.knobs["dtype"])
    data = data_module([rows.train[place] for place in order])
    ends: list[float] = []
    arguments = settings(job, ends)
    try:
        lora.setup(checkpoint, Path(job.folder) / "out", data=data, **arguments)
    except Done:
        peak = peak_memory_bytes()
        shutil.rmtree(checkpoint)
        take_notes(job, rows, order, ends)
        write_json(Path(job.folder) / "result.json", {"peak_bytes": peak})


def settings(job: Job, ends: list[float]) -> dict[str, Any]:
    """What its command line would be given; what is not named keeps its default.

    Args:
        job: what is done.
        ends: gets the end of each step.
    """
    from litgpt.args import EvalArgs, TrainArgs  # pyright: ignore

    every = ("query", "key", "value", "projection", "mlp")
    return {
        "precision": NAMES[job.knobs["dtype"]],
        "lora_r": job.rank,
        "lora_alpha": job.alpha,
        "lora_dropout": 0.0,
        **{f"lora_{name}": True for name in every},
        "train": TrainArgs(
            global_batch_size=job.batch,
            micro_batch_size=job.knobs["micro"],
            lr_warmup_steps=1,  # it divides by them
            epochs=1,
            max_steps=job.steps + 1,
        ),
        "eval": EvalArgs(max_iters=1, max_new_tokens=1),
        "optimizer": noting(job, ends),
        "seed": job.seed,
    }


def noting(job: Job, ends: list[float]) -> dict[str, Any]:
    """AdamW that notes when each step ends, as litgpt wants an optimiser: by the name of its class."""
    import torch

    class NotingAdamW(torch.optim.AdamW):
        """Raises `Done` behind the last step."""

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            ends.append(now_s())
            if len(ends) == job.steps:
                raise Done
            return result

    globals()[NotingAdamW.__name__] = NotingAdamW
    return {"class_path": f"{__name__}.{NotingAdamW.__name__}", "init_args": {"lr": job.lr}}


def data_module(pairs: Sequence[tuple[list[int], list[int]]]) -> Any:
    """The rows in their order, as litgpt's loop asks for them.

    Args:
        pairs: ids and labels of each row.
    """
    import torch
    from litgpt.data.base import DataModule, get_sft_collate_fn  # pyright: ignore
    from torch.utils.data import DataLoader

    def made(ids: list[int], labels: list[int]) -> dict[str, Any]:
        counts = {"raw": len(ids), "raw_plus_prompt_template": len(ids)}
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "token_counts": counts,
        }

    examples: Any = [made(*pair) for pair in pairs]

    class AsGiven(DataModule):
        """No row is tokenised, moved or left out."""

        batch_size = 1

        def connect(self, tokenizer: Any = None, batch_size: int = 1, **rest: Any) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            return DataLoader(examples, self.batch_size, collate_fn=get_sft_collate_fn())

        def val_dataloader(self) -> Any:
            return DataLoader(examples[:1], 1, collate_fn=get_sft_collate_fn())

    return AsGiven()


def take_notes(job: Job, rows: Rows, order: list[int], ends: Sequence[float]) -> None:
    """A line for each step; its loss is the mean over the step's micro-batches, from litgpt's own figures."""
    import csv

    figures = next((Path(job.folder) / "out").rglob("metrics.csv"))
    with figures.open(encoding="utf-8") as file:
        losses = [float(line["loss"]) for line in csv.DictReader(file) if line.get("loss")]
    each, notes = job.batch // job.knobs["micro"], Notes(job.folder)
    for step, end_s in enumerate(ends):
        pairs = [rows.train[place] for place in order[step * job.batch : (step + 1) * job.batch]]
        # The last step's line is written behind it, and the run ends within it.
        known = losses[min((step + 1) * each, len(losses)) - 1]
        tokens, trained = (
            sum(len(ids) for ids, _ in pairs),
            sum(trained_tokens(p[1]) for p in pairs),
        )
        notes.write(step + 1, known, tokens, trained, end_s)


if __name__ == "__main__":
    run(read_job(sys.argv[1]))
