"""Token pruning of encoders: rows grow shorter from block to block, in training and at inference, and come back whole.

What leaves in front of a block is decided by the attention of the block before, or by how alike its keys are. The
children of the blocks decide and run them on shorter rows; one at the trunk begins each pass.

| score | dropped | what leaves | source |
|---|---|---|---|
| attention | fuse, cut | what is looked at least; fused into one token, or left out | EViT; PoWER-BERT |
| similarity | merge | tokens that go into those like them | ToMe |
| learned | cut | what is looked at less than a threshold, learnt softly | LTP |
| random | restore | a draw for each block alone, in training only | random-LTD |

Learnt thresholds are in units of the mean of a row's tokens, so that they mean the same in rows of any length (LTP's
own are shares of all attention). While they are learnt nothing is left out and no time is saved: a token's state is
multiplied by σ((mass - threshold) / temperature), and the mean of these factors is added to the loss.

Source: see `techniques.token_pruning`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.ops.pruning import ramped
from afina.techniques.encoder_blocks import EncoderBlock, EncoderStack, Stage
from afina.techniques.pruned_decoder import is_causal
from afina.tree import Edit, Seams, Technique

WAYS: Mapping[str, tuple[str, ...]] = {
    "attention": ("fuse", "cut"),
    "similarity": ("merge",),
    "learned": ("cut",),
    "random": ("restore",),
}
"""What can become of the tokens that a score drops; the first is taken by itself."""


class Settings(Protocol):
    """What is asked of `TokenPruning`."""

    @property
    def keep(self) -> float:
        """Share of the tokens that is left in the end."""
        ...

    @property
    def always(self) -> int:
        """First tokens that are kept."""
        ...

    @property
    def layers(self) -> tuple[int, ...] | str | None:
        """Blocks in front of which tokens leave."""
        ...

    @property
    def temperature(self) -> float:
        """Of learning thresholds."""
        ...

    @property
    def threshold_start(self) -> float:
        """Of the last threshold."""
        ...

    @property
    def score(self) -> str:
        """What decides."""
        ...

    @property
    def dropped(self) -> str:
        """What becomes of those that leave."""
        ...

    @property
    def penalty(self) -> float:
        """Weight of the mean factor in the loss."""
        ...

    @property
    def granularity(self) -> int:
        """What the number kept is a multiple of."""
        ...

    @property
    def ramp(self) -> float:
        """Share of the run over which `keep` is reached."""
        ...

    @property
    def ramp_from(self) -> float:
        """Share kept at its beginning."""
        ...


# --- apply ---------------------------------------------------------------------------------------------------------


def _way_of(score: str, dropped: str, key: str) -> tuple[str, str]:
    """What decides, and what becomes of those that leave, both named.

    Args:
        score: as set; auto is attention, or what goes with `dropped`.
        dropped: as set; auto goes with the score.
        key: of the technique, for errors.

    Raises:
        TechniqueError: the two do not go together, or are not for encoders.
    """
    if score == "auto":
        score = next((s for s, ways in WAYS.items() if dropped in ways), "attention")
    if score not in WAYS:
        raise TechniqueError(
            f"{key}.score: an encoder is not pruned so",
            got=score,
            wanted=", ".join(WAYS),
            cure=f"leave {key}.score out",
        )
    if dropped == "auto":
        dropped = WAYS[score][0]
    if dropped not in WAYS[score]:
        raise TechniqueError(
            f"{key}: what is chosen by {score} cannot become that in an encoder",
            got=f"dropped {dropped}",
            wanted=" or ".join(WAYS[score]),
            cure=f"leave {key}.dropped out",
        )
    return score, dropped


def acts_at_inference(model: nn.Module, settings: Settings) -> bool:
    """Whether a model is an encoder that is pruned so when it answers too."""
    if is_causal(model, "token_pruning"):
        return False
    return _way_of(settings.score, settings.dropped, "token_pruning")[0] != "random"


def learning_blocks(model: nn.Module, settings: Settings) -> list[str]:
    """Names of the blocks that have a threshold, where thresholds are learnt.

    Raises:
        TechniqueError: as `attach`.
    """
    way = _way_of(settings.score, settings.dropped, "token_pruning")
    blocks = _stack(model, "token_pruning")[1]
    entered = _entered(model, settings.layers, len(blocks), way, "token_pruning")
    return [blocks[number - 1].name for number in entered] if way[0] == "learned" else []


def attach(edit: Edit, technique: Technique, settings: Settings) -> None:
    """Puts the children into an encoder.

    Args:
        edit: of the model.
        technique: whose children they are.
        settings: of it; the same value.

    Raises:
        TechniqueError: the model's blocks cannot be run so, or a chosen block is none.
    """
    score, dropped = way = _way_of(settings.score, settings.dropped, technique.key)
    _refuse_idle(edit.model, settings, score, technique.key)
    trunk, blocks = _stack(edit.model, technique.key)
    entered = _entered(edit.model, settings.layers, len(blocks), way, technique.key)
    behind = entered if score == "random" else [number - 1 for number in entered]
    for number, block in enumerate(blocks):
        stage = threshold = None
        if number in behind:
            place = behind.index(number) + 1
            stage = Stage(score, dropped, place, len(behind), settings.temperature)
        near = next(p for p in block.module.parameters() if p.is_floating_point())
        if stage is not None and score == "learned":
            wide = torch.promote_types(near.dtype, torch.float32)
            threshold = torch.zeros((), dtype=wide, device=near.device)
        child = EncoderBlock(number, len(blocks), stage, threshold)
        if stage is not None:
            child.start = settings.threshold_start * stage.number / stage.stages
        child.only_in_training = score == "random"
        edit.attach(block.name, technique, child)
    stack = EncoderStack(settings.keep, settings.always, score)
    stack.only_in_training = score == "random"
    edit.attach(trunk, technique, stack)


def _refuse_idle(model: nn.Module, settings: Settings, score: str, key: str) -> None:
    """Raises for what would do nothing, or something else than is said.

    Raises:
        TechniqueError: see above.
    """
    if settings.granularity > 1:
        raise TechniqueError(
            f"{key}.granularity would do nothing in an encoder, whose rows are padded to the longest",
            got=settings.granularity,
            cure=f"leave {key}.granularity out",
        )
    if score != "learned":
        return
    if settings.ramp:
        raise TechniqueError(
            f"{key}.ramp would do nothing: thresholds that are learnt decide how many tokens are kept",
            got=settings.ramp,
            cure=f"leave {key}.ramp out; a higher {key}.penalty keeps fewer",
        )
    if seams.classifies(model) == "tokens":
        raise TechniqueError(
            f"{key}: thresholds are learnt on states that fade, and at inference what is dropped keeps its state: "
            "classes of tokens would be read from others than were trained",
            got=type(model).__name__,
            wanted="score attention or similarity",
            cure=f"leave {key}.score out",
        )


def _entered(
    model: nn.Module,
    layers: tuple[int, ...] | str | None,
    depth: int,
    way: tuple[str, str],
    key: str,
) -> list[int]:
    """The blocks that are given fewer tokens than those before, in order."""
    score = way[0]
    if score == "random":
        inner = list(range(1, depth - 1)) or list(range(depth))
        return inner if layers is None else sorted(_chosen(model, layers, key))
    if depth < 2:
        raise TechniqueError(f"{key}: an encoder of one block has none that could be given less")
    if layers is None:
        # EViT fuses at a quarter, a half and three quarters of the depth; ToMe merges, LTP drops, everywhere.
        quarters = sorted({max(1, round(depth * part / 4)) for part in (1, 2, 3)})
        return quarters if score == "attention" else list(range(1, depth))
    chosen = sorted(_chosen(model, layers, key))
    if chosen and chosen[0] == 0:
        raise TechniqueError(
            f"{key}.layers: nothing is known of a row's tokens in front of the first block",
            got="block 0",
            wanted=f"blocks from 1 to {depth - 1}: those that are given fewer tokens than the block before",
        )
    return chosen


def _chosen(model: nn.Module, layers: tuple[int, ...] | str, key: str) -> set[int]:
    return seams.chosen_layers(model, layers, setting=f"{key}.layers")


def _stack(model: Any, key: str) -> tuple[str, list[seams.Block]]:
    """The name of the model without its head, and its blocks.

    Raises:
        TechniqueError: there are several stacks, or arguments do not reach the blocks.
    """
    seams.require_stack(model, key)
    stacks = seams.stacks(model)
    if len(stacks) > 1:
        raise TechniqueError(
            f"{key} knows models of one stack of blocks", got=", ".join(sorted(stacks))
        )
    blocks = seams.blocks(model)
    owner = next(iter(stacks)).rpartition(".")[0]
    whole = getattr(model, "base_model", None)
    trunk = next((name for name, module in model.named_modules() if module is whole), "") or owner
    if not getattr(model, "_supports_attention_backend", False):
        raise TechniqueError(
            f"{key}: the attention of this model is not taken from Transformers' interface, so its blocks cannot be "
            "run on some of their tokens",
            got=type(model).__name__,
            wanted="an encoder such as BERT, RoBERTa, DistilBERT or ModernBERT",
        )
    callers = [model.get_submodule(name) for name in (trunk, owner)]
    callers += [block.module for block in blocks]
    deaf = [type(module).__name__ for module in callers if not _takes_keywords(module)]
    if deaf:
        raise TechniqueError(
            f"{key}: the blocks of this model are not told what its encoder is called with",
            got=", ".join(sorted(set(deaf))),
            wanted="an encoder such as BERT, RoBERTa, DistilBERT or ModernBERT",
        )
    return trunk, blocks


def _takes_keywords(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


# --- training ------------------------------------------------------------------------------------------------------


def seams_of(edit: Edit, technique: Technique, settings: Settings, total_steps: int) -> Seams:
    """What happens in the training loop: the share kept at each step, and the price of factors that are open.

    Args:
        edit: of the model.
        technique: whose children are there.
        settings: of it; the same value.
        total_steps: of the run.
    """
    children = edit.deltas_of(technique).values()
    learnt = [c for c in children if isinstance(c, EncoderBlock) and c.threshold is not None]
    stacks = [c for c in children if isinstance(c, EncoderStack)]

    def price(step: int) -> Tensor:
        shares = [c.last.share for c in learnt if c.last.share is not None]
        for child in learnt:
            child.last.share = None
        return settings.penalty * torch.stack(shares).mean() if shares else torch.zeros(())

    def ramp(batch: Any, step: int) -> Any:
        for child in stacks:
            child.training_keep = ramped(
                step, settings.ramp * total_steps, settings.ramp_from, settings.keep
            )
        return batch

    return Seams(
        penalty=(price,) if learnt and settings.penalty else (),
        on_batch=(ramp,) if settings.ramp else (),
    )
