"""What of a model the stages of a pipeline hold: their own blocks, and what stands around the stack where it is used.

Which tensors around the stack a stage uses is not guessed from names: a stage's stretch is run once on a few tokens,
and what its result depends on is asked of autograd. So the embedding is found with the first stage and final norm and
head with the last; a tied embedding is found with both, and a prefix, which enters every block, with all.

What a stage does not hold keeps its name, shape, type and device, but is one number in memory that stands at every
place of it: nan, so that whatever used it all the same would show in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.ops.packed import PackedWeight
from afina.ops.prefix import knowing
from afina.parallel.pipeline_stage import Blocks, Chunk, Left
from afina.tree import front_of

OFF = "leave parallel.pipeline out"


def stack_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and blocks of the one stack that a pipeline shares out.

    Raises:
        TechniqueError: there is none, or more than one, or its blocks are left out by chance.
    """
    seams.require_stack(model, "parallel.pipeline")
    found = seams.stacks(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or len(found) > 1:
        raise TechniqueError(
            "parallel.pipeline shares out one stack of blocks, and this model has several",
            got=", ".join(found),
            wanted="a decoder such as Llama, or an encoder such as BERT",
            cure=OFF,
        )
    dropped = getattr(config, "layerdrop", 0) or 0
    if dropped:
        raise TechniqueError(
            "parallel.pipeline: this model leaves out blocks by chance in training, each process by its own",
            got=f"layerdrop {dropped}",
            cure="set layerdrop to 0 in the model's config, or leave parallel.pipeline out",
        )
    return next(iter(found.items()))


def in_block(name: str, stack: str) -> int | None:
    """The number of the block that a parameter belongs to; None around the stack."""
    if not name.startswith(f"{stack}."):
        return None
    return int(name[len(stack) + 1 :].split(".", 1)[0])


def flows_into(model: nn.Module, block: int, tensors: Mapping[str, nn.Parameter]) -> bool:
    """Whether a gradient flows into what enters a block: something that trains acts before it.

    Args:
        model: of the one stack.
        block: its number.
        tensors: that train, by name.
    """
    stack, _ = stack_of(model)
    depths = seams.Depths(model)
    # A tied weight is the head's as well, and counts as standing behind.
    embedding = {id(p) for p in model.get_submodule(seams.input_embedding(model)).parameters()}
    for name, parameter in tensors.items():
        number = in_block(name, stack)
        if number is None:
            before = depths.of(name) != "behind" or id(parameter) in embedding
        else:
            before = number < block
        if before:
            return True
    return False


def held_names(model: nn.Module, stack: str, blocks: Blocks, chunk: Chunk) -> set[str]:
    """Names of the parameters that a stretch needs, all of a tensor that has several.

    Args:
        model: whole; it may lie on the meta device.
        stack: its name.
        blocks: of it.
        chunk: the stretch.
    """
    around: dict[str, nn.Parameter] = {}
    held: set[int] = set()
    for name, parameter in model.named_parameters():
        number = in_block(name, stack)
        if number is None:
            around[name] = parameter
        elif chunk.first <= number < chunk.end:
            held.add(id(parameter))
    held |= {id(around[name]) for name in needed(model, blocks, chunk, around)}
    return {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in held}


def needed(
    model: nn.Module, blocks: Blocks, chunk: Chunk, around: dict[str, nn.Parameter]
) -> set[str]:
    """Names of the tensors around the stack that the result of a stretch depends on."""
    plain = {n: p for n, p in around.items() if type(p) is nn.Parameter and p.is_floating_point()}
    before = {n: p.requires_grad for n, p in plain.items()}
    # What autograd cannot be asked about stays where the model begins and ends.
    found = set(around) - set(plain) if chunk.begins or chunk.ends else set[str]()
    try:
        for parameter in plain.values():
            parameter.requires_grad_(True)
        result = result_of(model, blocks, chunk)
        if plain and result.requires_grad:
            given = torch.autograd.grad(result, list(plain.values()), allow_unused=True)
            found |= {n for n, g in zip(plain, given, strict=True) if g is not None}
    finally:
        for name, parameter in plain.items():
            parameter.requires_grad_(before[name])
    return found


def reads_embedding(model: nn.Module, blocks: Blocks, chunk: Chunk) -> bool:
    """Whether what a stretch computes depends on what the model looks up for tokens; its first one's does."""
    if chunk.begins:
        return True
    found: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1]

    # First of all, for what puts parts together wants to be the last.
    hook = model.get_submodule(seams.input_embedding(model)).register_forward_hook(
        note, prepend=True
    )
    try:
        result = result_of(model, blocks, chunk)
    finally:
        hook.remove()
    if not found or not result.requires_grad:
        return False
    return any(g is not None for g in torch.autograd.grad(result, found, allow_unused=True))


def result_of(model: nn.Module, blocks: Blocks, chunk: Chunk, tokens: int = 5) -> Tensor:
    """A number that depends on all that a stretch computes, for a few tokens."""
    speaker: Any = model
    training, implementation = model.training, speaker.config._attn_implementation
    device = next(model.parameters()).device
    vocabulary = model.get_submodule(seams.input_embedding(model)).get_parameter("weight").shape[0]
    ids_BT = torch.arange(1, tokens + 1, device=device)[None] * 7 % vocabulary
    entering: Callable[[Tensor], Tensor] | None = None if chunk.begins else torch.ones_like
    try:
        model.eval()
        # As in `models.head`: attention by rows wants its context, and a prefix acts in attention too.
        speaker.set_attn_implementation(knowing("eager") if front_of(model) else "eager")
        with torch.enable_grad(), blocks.only(chunk, entering):
            try:
                given: Any = speaker(input_ids=ids_BT, use_cache=False, **_mask(model, ids_BT))
                result: Tensor = next(
                    given[name] for name in ("logits", "last_hidden_state") if name in given
                )
            except Left as left:
                result = left.hidden_BTD
            except (RuntimeError, NotImplementedError) as error:
                if not ids_BT.is_meta:
                    raise
                raise TechniqueError(
                    "parallel.pipeline: a pass of this model looks at values, and it is cut before it has any",
                    got=str(error).splitlines()[0],
                    cure="set parallel.zero to 3 instead; or train from Python, with a model from afina.load",
                ) from error
    finally:
        model.train(training)
        speaker.set_attn_implementation(implementation)
    return result.double().sum()


def _mask(model: nn.Module, ids_BT: Tensor) -> dict[str, Tensor]:
    """Without values a mask that is made already, for to make one Transformers looks at what is in positions."""
    if not ids_BT.is_meta:
        return {}
    if front_of(model):
        return {
            "attention_mask": torch.ones_like(ids_BT)
        }  # it is made longer by what acts in front
    tokens = ids_BT.shape[1]
    dtype = model.get_submodule(seams.input_embedding(model)).get_parameter("weight").dtype
    return {"attention_mask": torch.zeros(1, 1, tokens, tokens, dtype=dtype, device="meta")}


@torch.no_grad()
def release(model: nn.Module, held: Iterable[str]) -> None:
    """Lets go of every parameter that is not held; its memory is free."""
    names = set(held)
    gone = [p for n, p in model.named_parameters() if n not in names and not p.is_meta]
    for parameter in gone:
        parameter.grad = None
        nothing = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
        nothing = nothing.expand(parameter.shape)
        if isinstance(parameter, PackedWeight):
            torch.utils.swap_tensors(parameter, nn.Parameter(nothing, requires_grad=False))
        else:
            parameter.data = nothing
