"""The sites of any Transformers model: where a technique can act. Found by structure, not by lists of architectures.

| site | what is there |
|---|---|
| map | a linear, `Conv1D` or embedding |
| attention | the attention modules that go through Transformers' `AttentionInterface` |
| experts | fused three-dimensional expert weights |
| stack | the lists of blocks |
| input | the embeddings before the first block |
| head | final norm and output projection or classifier |
"""

from afina.seams.depth import Depths, Place
from afina.seams.ends import HeadSite, head, input_embedding, task_head, vocabulary
from afina.seams.kinds import ELSEWHERE, PART, MapKind, bias_of, map_kind, weight_of
from afina.seams.maps import QUERY_VALUE, MapSite, attention_modules, expert_modules, map_sites
from afina.seams.stack import (
    MOST_BLOCKS,
    Block,
    Layers,
    blocks,
    chosen_layers,
    parse_layers,
    require_stack,
    stacks,
)
from afina.seams.whole import classifies, first_position, holders, require_model, supports_rows

__all__ = [
    "ELSEWHERE",
    "MOST_BLOCKS",
    "PART",
    "QUERY_VALUE",
    "Block",
    "Depths",
    "HeadSite",
    "Layers",
    "MapKind",
    "MapSite",
    "Place",
    "attention_modules",
    "bias_of",
    "blocks",
    "chosen_layers",
    "classifies",
    "expert_modules",
    "first_position",
    "head",
    "holders",
    "input_embedding",
    "map_kind",
    "map_sites",
    "parse_layers",
    "require_model",
    "require_stack",
    "stacks",
    "supports_rows",
    "task_head",
    "vocabulary",
    "weight_of",
]
