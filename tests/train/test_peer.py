"""The loop beside Hugging Face's Trainer with PEFT: the same rows and starting values give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from afina.adapters import files
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from afina.types import IGNORE, Row
from tests.tiny import tiny_llama
from tests.train.kit import ragged_rows

STEPS, ROWS = 6, 4


def model() -> Any:
    return tiny_llama(dtype=torch.float32, initializer_range=0.1)


def trainer_run(
    adapter: Path, rows: list[Row], out: Path, accumulation: int
) -> tuple[list[float], Any]:
    """Losses of each step and the tuned model, by Trainer and PEFT from the adapter in a folder."""
    from peft import PeftModel
    from transformers import Trainer, TrainingArguments

    tuned = PeftModel.from_pretrained(model(), str(adapter), is_trainable=True)

    def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(item["input_ids"]) for item in items)

        def fill(key: str, value: int) -> torch.Tensor:
            lines = [item[key] + [value] * (width - len(item[key])) for item in items]
            return torch.tensor(lines)

        ids = fill("input_ids", 257)
        return {
            "input_ids": ids,
            "labels": fill("labels", IGNORE),
            "attention_mask": (ids != 257).long(),
        }

    data = [
        {
            "input_ids": list(row.tokens),
            "labels": [
                t if kept else IGNORE for t, kept in zip(row.tokens, row.trained, strict=True)
            ],
        }
        for row in rows
    ]
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=ROWS // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model=tuned, args=arguments, train_dataset=data, data_collator=pad)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], tuned


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the peers' own, of each other's older names
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_run_is_that_of_trainer_and_peft(tmp_path: Path, accumulation: int) -> None:
    rows = ragged_rows(STEPS * ROWS, seed=4)
    ours = model()
    edit = apply(ours, [LoRA(rank=3, alpha=6)], seed=2)
    start = files.save(edit, tmp_path / "start", base="tiny")
    run = train(
        ours,
        None,
        rows,
        edit,
        tmp_path / "run",
        options=RunOptions(reporter=Silent()),
        steps=STEPS,
        rows_per_step=ROWS,
        lr=1e-2,
        warmup_steps=0,
    )
    lines = read_metrics(run.folder)
    seen = [rows[i] for line in lines for i in line["rows"]]
    theirs, tuned = trainer_run(start, seen, tmp_path / "peer", accumulation)
    # Trainer rounds what it logs to four decimals or more.
    assert [line["loss"] for line in lines] == pytest.approx(theirs, abs=2e-4)
    named = dict(tuned.named_parameters())
    for key, tensor in files.peft_tensors(edit).items():
        other = named[key.replace(".weight", ".default.weight")]
        torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-5)
