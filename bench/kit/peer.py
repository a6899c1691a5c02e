"""The peer's worker: Hugging Face Trainer + PEFT on a rows file. Run as `python -m bench.kit.peer JOB.json`.

Knobs: `dtype` ("float32" or "bfloat16"), `attention` ("sdpa" or "eager"), `autocast_adapter` (PEFT's default: fp32
adapter weights), `compile` (block by block), `group_by_length`, `pad_to`, `keep_heap` (glibc keeps freed memory
instead of returning it to the system, which saves page faults), `micro` (rows in a forward pass; with fewer than
`batch` the gradient is accumulated, and a step's rows are sorted by length, so that less padding is computed); where
they are given, `method` ("full" trains the model's own weights, without PEFT) and `autocast` ("bfloat16": products of
other weights are made in it).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .heap import keep_heap
from .jobs import Job, read_job, write_json
from .meter import Notes, compile_s, now_s, peak_memory_bytes
from .rows import Rows, read_rows, sequence, trained_tokens


def run(job: Job) -> None:
    """Trains as the job says; leaves metrics, result and, when asked, the adapter in its folder."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if job.knobs["keep_heap"]:
        keep_heap()
    if job.knobs["compile"]:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    rows = read_rows(job.rows)
    order = step_order(rows, job)
    trainer = build(job, rows, order)
    loaded_bytes = peak_memory_bytes()
    trainer.train(resume_from_checkpoint=last_checkpoint(job))
    if job.save:
        trainer.model.save_pretrained(Path(job.folder) / "adapter")
    result = {"peak_bytes": peak_memory_bytes(), "loaded_bytes": loaded_bytes}
    write_json(Path(job.folder) / "result.json", result)


def step_order(rows: Rows, job: Job) -> list[int]:
    """The places of the rows as the steps take them, sorted by length inside a step where steps are split."""
    order = sequence(len(rows.train), job.seed, job.steps * job.batch)
    if job.knobs["micro"] == job.batch:
        return order
    steps = [order[at : at + job.batch] for at in range(0, len(order), job.batch)]
    return [place for step in steps for place in sorted(step, key=lambda p: len(rows.train[p][0]))]


def build(job: Job, rows: Rows, order: list[int]) -> Any:
    """The Trainer with the model, the adapter, the rows in their order and a callback that takes notes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer

    knobs = job.knobs
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(
        job.model,
        dtype=getattr(torch, knobs["dtype"]),
        attn_implementation=knobs["attention"],
    )
    if knobs.get("method") != "full":
        model = with_adapter(model, job)
    examples: Any = [example(*rows.train[place]) for place in order]
    return Trainer(
        model=model,
        args=arguments(job),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=knobs["pad_to"]),
        callbacks=[note_taker(job, rows, order)],
    )


def with_adapter(model: Any, job: Job) -> Any:
    """The model with LoRA on all linears of its blocks."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=job.rank, lora_alpha=job.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config, autocast_adapter_dtype=job.knobs["autocast_adapter"])


def example(ids: list[int], labels: list[int]) -> dict[str, list[int]]:
    """A row as the Trainer's collator wants it."""
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def arguments(job: Job) -> Any:
    """The Trainer's arguments; what is not named keeps its default."""
    from transformers import TrainingArguments

    grouped = job.knobs["group_by_length"]
    return TrainingArguments(
        output_dir=str(Path(job.folder) / "checkpoints"),
        per_device_train_batch_size=job.knobs["micro"],
        gradient_accumulation_steps=job.batch // job.knobs["micro"],
        max_steps=job.steps,
        learning_rate=job.lr,
        lr_scheduler_type="linear",
        warmup_steps=job.warmup_steps,
        seed=job.seed,
        train_sampling_strategy="group_by_length" if grouped else "sequential",
        torch_compile=job.knobs["compile"],
        bf16=job.knobs.get("autocast") == "bfloat16",
        use_cpu=True,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        save_strategy="steps" if job.save else "no",
        save_steps=20,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )


def last_checkpoint(job: Job) -> str | None:
    """The newest checkpoint a stopped run of this job left, if any."""
    from transformers.trainer_utils import get_last_checkpoint

    folder = Path(job.folder) / "checkpoints"
    return get_last_checkpoint(str(folder)) if job.save and folder.exists() else None


def note_taker(job: Job, rows: Rows, order: list[int]) -> Any:
    """A Trainer callback that notes each step's loss, tokens and end.

    The tokens come from the Trainer's own count, which holds in any order; the labels are those of the given order,
    and are left out (0) where the Trainer chooses the order itself.
    """
    from transformers import TrainerCallback

    notes, grouped = Notes(job.folder), job.knobs["group_by_length"]
    labels = [trained_tokens(rows.train[place][1]) for place in order]

    class TakeNotes(TrainerCallback):
        seen, before, end_s, compile_s = 0, 0, 0.0, 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.seen = int(state.num_input_tokens_seen)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.end_s, self.compile_s = now_s(), compile_s()
            self.before, self.seen = self.seen, int(state.num_input_tokens_seen)

        def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            logs, step = rest["logs"], state.global_step
            if "loss" not in logs:
                return
            batch = labels[(step - 1) * job.batch : step * job.batch]
            trained = 0 if grouped else sum(batch)
            tokens, loss = self.seen - self.before, float(logs["loss"])
            notes.write(step, loss, tokens, trained, self.end_s, self.compile_s)

    return TakeNotes()


if __name__ == "__main__":
    run(read_job(sys.argv[1]))
