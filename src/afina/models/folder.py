"""A model's folder, judged before it is loaded: is it one, are its parts there, and is it safe?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ModelError, counted
from .weights import INDEX, WHOLE_NUMBERS, check_files, read_json

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

DATA = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
"""Names of files that hold rows, and so are no models."""

OF_MODELS = (
    "tokenizer",
    "special_tokens_map",
    "added_tokens",
    "vocab",
    "merges",
    "generation_config",
    "chat_template",
)
"""How the names of a model's own files begin that are written as rows are: they do not make a folder data."""

SWAPPED = "this looks like data: the model comes first, as in afina train MODEL DATA"


def check_folder(path: Path) -> None:
    """Raises unless a model can be loaded from the folder.

    Raises:
        ModelError: a part is missing or damaged, the weights are pickled, or code of its own would have to be run.
    """
    config = read_json(path / "config.json")
    _refuse_unknown(path, config)
    if not any(path.glob("*.safetensors")) and not (path / INDEX).exists():
        raise _without_weights(path)
    found = check_files(path)
    whole = [name for name, one in found.items() if one.dtype in WHOLE_NUMBERS]
    whole = [name for name in whole if name.endswith((".weight", ".bias"))]
    if whole and not config.get("quantization_config"):
        raise ModelError(
            "weights are stored as whole numbers, and config.json does not say how they were quantised",
            got=f"{path}: {counted(len(whole), 'tensor')}, such as {whole[0]} of dtype {found[whole[0]].dtype}",
            wanted="F32, F16 or BF16",
            cure="take the model that was not quantised",
        )
    if (path / "generation_config.json").exists():
        # Transformers passes over a damaged one in silence, and the model then never stops.
        read_json(path / "generation_config.json")


def _refuse_unknown(path: Path, config: dict[str, Any]) -> None:
    """Raises for a model type that transformers has not built in."""
    from transformers import CONFIG_MAPPING

    kind, architectures = config.get("model_type"), config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(each, str) for each in architectures)
    ):
        raise ModelError(
            "config.json: architectures is no list of names",
            got=f"{path}: {str(architectures)[:60]}",
            wanted='["LlamaForCausalLM"], or the like',
            cure="copy or download the file again",
        )
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return
    own = sorted({str(each).partition(".")[0] + ".py" for each in _values(config.get("auto_map"))})
    if own:
        raise ModelError(
            "this model brings code of its own, which afina never runs",
            got=f"{path}: model type {kind!r}, with {', '.join(own[:3])}",
            wanted="a model type that the installed transformers has built in",
            cure="upgrade transformers, which may know it by now; or take a model of a known type",
        )
    raise ModelError(
        "config.json names no model type that the installed transformers knows",
        got=f"{path}: {'no model_type' if kind is None else f'model_type {kind!r}'}",
        wanted="llama, qwen2, gemma3_text, gpt2, bert, … as the model's publisher wrote it",
        cure="upgrade transformers, or copy config.json of the original model"
        if kind is not None
        else "copy config.json of the original model; that of an adapter or a pipeline will not do",
    )


def _values(table: Any) -> list[Any]:
    return list(table.values()) if isinstance(table, dict) else []


def _without_weights(path: Path) -> ModelError:
    pickles = sorted(each.name for kind in PICKLES for each in path.glob(kind))
    return ModelError(
        "the folder holds no safetensors weights",
        got=f"{path}: {', '.join(pickles) or 'no weights at all'}",
        wanted="model.safetensors, or its shards and their index",
        cure="a pickle can run code when it is read, so afina does not: convert it in a sandbox with "
        "transformers' save_pretrained, or find a revision with safetensors"
        if pickles
        else "copy or download the weights too",
    )


def no_config(path: Path, files: list[Path]) -> ModelError:
    """The error for a folder without config.json, which says what it is instead; `files` are its GGUF files."""
    return ModelError(
        "the folder holds no config.json",
        got=f"{path}: {_what_is_in(path, files)}",
        wanted="a Hugging Face model folder: config.json, *.safetensors, tokenizer files",
        cure=cure_of(path, files),
    )


def _what_is_in(path: Path, files: list[Path]) -> str:
    if files:
        return counted(len(files), "GGUF file")
    if (path / "adapter_config.json").is_file():
        return "an adapter, not a model"
    if (path / "adapter").is_dir():
        return "a run, not a model"
    return ", ".join(sorted(each.name for each in path.iterdir())[:5]) or "nothing"


def cure_of(path: Path, files: list[Path]) -> str:
    """What to do about a folder that is no model's, by what lies in it; `files` are its GGUF files."""
    if files:
        return f"name one: {files[0]}"
    if (path / "adapter_config.json").is_file():
        return "load its base model, then afina.load_adapter(model, folder)"
    if (path / "adapter").is_dir():
        return f"`afina chat {path}` takes a run; in Python load its base, then its adapter/ folder"
    if any(path.glob("*.safetensors")) or any(any(path.glob(kind)) for kind in PICKLES):
        return "copy config.json of the original model too: the weights alone do not say what model they are of"
    rows = [each for each in path.iterdir() if each.suffix.lower() in DATA]
    if not all(each.name.startswith(OF_MODELS) for each in rows):
        return SWAPPED
    return "check the path; a model folder holds config.json at its top"


def not_a_model_file(path: Path) -> ModelError:
    """The error for a single file that is not GGUF."""
    return ModelError(
        "afina loads a single file only when it is GGUF",
        got=path,
        wanted="a .gguf file, or the folder that holds config.json and *.safetensors",
        cure=SWAPPED if path.suffix.lower() in DATA else f"give the folder: {path.parent}",
    )
