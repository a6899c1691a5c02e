"""A random Llama of 1.1 billion parameters in bf16, saved once. Run as `python -m bench.kit.llama JOB.json`.

The job file holds `shape` (of the configuration), `seed`, `threads` and `folder`; the model goes to FOLDER/model with a
tokenizer of a few words, which is there because every tool wants one. What is measured with it is time and memory.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from .cache import content_hash
from .jobs import write_json
from .pieces import run_piece
from .rows import IGNORE, Rows

SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""That of TinyLlama."""
NAME, TOKENS, COUNT = "llama-1.1b", 512, 96


def place(work: Path) -> Path:
    """The folder of the model, there or not."""
    return piece(work) / "model"


def piece(work: Path) -> Path:
    """The folder of the piece that makes the model."""
    return work.resolve() / f"{NAME}-{content_hash(SHAPE)}"


def make(work: Path, threads: int) -> None:
    """Makes the model where it is not there yet, in a process of its own."""
    folder = piece(work)
    job = {"shape": SHAPE, "seed": 0, "threads": threads, "folder": str(folder)}
    run_piece("llama", folder, job)


def random_rows(rows: int = COUNT, tokens: int = TOKENS) -> Rows:
    """Rows of random ids; every token but the first is trained."""
    draw = random.Random(0)
    made = [[draw.randrange(3, SHAPE["vocab_size"]) for _ in range(tokens)] for _ in range(rows)]
    return Rows(f"{NAME}, {tokens} tokens", [(ids, [IGNORE, *ids[1:]]) for ids in made], [])


def run(job: dict[str, Any]) -> None:
    """Saves model and tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    folder = Path(job["folder"]) / "model"
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**job["shape"])).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    said = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=said, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    write_json(Path(job["folder"]) / "result.json", {})


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text("utf-8")))
