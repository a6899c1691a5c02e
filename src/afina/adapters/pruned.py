"""Encoders whose tokens are pruned: what an adapter's record says of it, and thresholds that were learnt, in a folder.

Pruning changes what an encoder answers, so whatever loads an adapter that was trained with it prunes again. Where it
has no tensors the adapter is a plain one, which PEFT loads too, for whole rows; the record alone knows of it. PEFT has
nothing of the kind of thresholds and refuses the word `TOKEN_PRUNING` by name. Their keys are
`base_model.model.BLOCK.token_pruning.threshold`, scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from afina.adapters.kinds import Allowed, Config, Found, Kind, Part
from afina.adapters.layout import PREFIX, RECORD, read_json, recorded
from afina.errors import AdapterError
from afina.techniques.encoder_blocks import EncoderBlock
from afina.techniques.encoder_pruning import acts_at_inference, learning_blocks
from afina.techniques.token_pruning import TokenPruning

_END = ".token_pruning.threshold"


def read_pruning(folder: Path, model: nn.Module) -> TokenPruning | None:
    """How the rows of a model were pruned when the adapter in `folder` was trained, and are to be when it answers.

    None where they were not, where that acts in training alone, and where the folder's tensors say it.

    Raises:
        AdapterError: the record cannot be read.
    """
    folder = recorded(folder)
    if not (folder / RECORD).is_file():
        return None
    listed: Any = read_json(folder / RECORD, "the adapter's record").get("techniques")
    found = [
        each[TokenPruning.key]
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict) and TokenPruning.key in each
    ]
    if not found:
        return None
    try:
        technique = TokenPruning.model_validate(found[0])
    except ValidationError as error:
        raise AdapterError(
            "the adapter's record does not say how tokens were pruned",
            got=f"{folder / RECORD}: {error.errors()[0]['msg']}",
            wanted="what afina wrote",
            cure="take the file from where the adapter came from, or the version of afina that wrote it",
        ) from None
    if technique.score == "learned" or not acts_at_inference(model, technique):
        return None
    return technique


def noted(technique: TokenPruning) -> str:
    """What to note where an adapter is loaded whose rows are pruned."""
    return (
        f"trained with token_pruning, {technique.keep:g} of a row's tokens kept: wherever afina loads it rows are "
        "pruned so; PEFT, and merged weights, run whole rows and answer otherwise"
    )


def _thresholds(part: Part) -> dict[str, Tensor]:
    blocks = {n: d for n, d in part.deltas.items() if isinstance(d, EncoderBlock)}
    return {
        f"{PREFIX}{name}{_END}": block.threshold
        for name, block in blocks.items()
        if block.threshold is not None
    }


@torch.no_grad()
def _fill(part: Part, tensors: Mapping[str, Tensor]) -> None:
    for key, threshold in _thresholds(part).items():
        if not threshold.is_meta:
            threshold.copy_(tensors[key])


def _read(model: nn.Module, config: Config, tensors: Mapping[str, Tensor]) -> Found:
    technique = TokenPruning.model_validate(config[TokenPruning.key])
    wanted = {f"{PREFIX}{name}{_END}" for name in learning_blocks(model, technique)}
    problems = [(key, "the model has no such place") for key in sorted(set(tensors) - wanted)]
    problems += [(key, "the file lacks it") for key in sorted(wanted - set(tensors))]
    problems += [
        (key, f"shape {tuple(tensor.shape)}, and a threshold is a scalar")
        for key, tensor in tensors.items()
        if key in wanted and tensor.dim()
    ]
    return Found(technique, tensors, problems)


THRESHOLDS = Kind(
    technique=TokenPruning,
    peft_type="TOKEN_PRUNING",
    allowed=Allowed(
        needed=(TokenPruning.key,),
        types={TokenPruning.key: (dict,)},
        items={},
        neutral={"modules_to_save": (None,)},
        free=frozenset({"base_model_name_or_path", "inference_mode", "revision", "task_type"}),
        cures={},
    ),
    config=lambda part: {TokenPruning.key: part.technique.model_dump(mode="json")},
    stored=_thresholds,
    fill=_fill,
    read=_read,
)
