"""Token pruning of decoders: which blocks, what chooses in them, and what they are told in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from afina import seams
from afina.errors import TechniqueError
from afina.techniques.front import trunk_of
from afina.techniques.pruned_blocks import CutBlock, PrunedBlock
from afina.techniques.pruned_pass import Entry, Told
from afina.techniques.pruned_scores import ByDraw, ByLoss, ByNetwork, Chooser, LossTable
from afina.tree import Edit, Seams
from afina.tree.timing import Each
from afina.types import Batch

if TYPE_CHECKING:
    from afina.techniques.token_pruning import TokenPruning

BY_LATER = (
    "how often a token is looked at, and how like others it is, depends on the tokens behind it"
)


OF_ONE_SCORE = {
    "random": ("granularity",),
    "predictor": ("predictor_width",),
    "loss": ("loss_decay", "loss_start"),
    "learned": ("temperature", "threshold_start", "penalty"),
}
"""Settings that only one score reads."""


def is_causal(model: nn.Module, key: str) -> bool:
    """Whether a token sees no later one.

    Args:
        model: any.
        key: of the technique that asks.

    Raises:
        TechniqueError: the model's attention does not say.
    """
    seams.require_stack(model, key)
    said = {
        flag
        for block in seams.blocks(model)
        for module in block.module.modules()
        if isinstance(flag := getattr(module, "is_causal", None), bool)
    }
    if not said:
        raise TechniqueError(
            f"{key}: whether a token of this model sees later ones is not known",
            got=type(model).__name__,
            wanted="attention that has is_causal, as Transformers' own models have",
        )
    # Attention to an encoder's states is never causal; attention to the row itself tells.
    return True in said


def attach(edit: Edit, settings: TokenPruning) -> None:
    """Gives a decoder's trunk and chosen blocks their children.

    Raises:
        TechniqueError: this score is not for a decoder, or this decoder's blocks cannot run on some of their tokens.
    """
    model, key = edit.model, settings.key
    score = "predictor" if settings.score == "auto" else settings.score
    _refuse(model, settings, score)
    trunk = trunk_of(model, key)
    cuts = settings.dropped == "cut"
    every = seams.blocks(model)
    chosen = _layers(model, settings, edit)
    table = None
    embedding = model.get_submodule(seams.input_embedding(model)).get_parameter("weight")
    if score == "loss":
        vocabulary = embedding.shape[0]
        decay, start = settings.loss_decay, settings.loss_start
        table = LossTable(vocabulary, decay, start, embedding.device)
    touched = [b for b in every if b.index in chosen or (cuts and b.index > min(chosen))]
    for block in touched:
        by = _chooser(model, settings, score, block.module) if block.index in chosen else None
        if cuts:
            child = CutBlock(block.index, by, last=block is every[-1])
        else:
            child = PrunedBlock(block.index, by, _window(model, block))
        edit.attach(block.name, settings, child)
    ends_stay = seams.classifies(model) == "rows"
    numbers = [block.index for block in touched]
    edit.attach(trunk, settings, Entry(settings, numbers, table, cuts=cuts, ends_stay=ends_stay))
    edit.notes.append(_told(settings, score, sorted(chosen), len(every)))


def _refuse(model: nn.Module, settings: TokenPruning, score: str) -> None:
    key = settings.key
    if score in ("attention", "similarity", "learned"):
        raise TechniqueError(
            f"{key}.score = {score} is not for a decoder: {BY_LATER}, so the choice would tell of the future",
            got=type(model).__name__,
            wanted="predictor, loss or random",
            cure=f"leave {key}.score out: then a predictor chooses",
        )
    if settings.dropped in ("fuse", "merge"):
        raise TechniqueError(
            f"{key}.dropped = {settings.dropped} is not for a decoder: a token made of several would tell those before "
            "it of later ones",
            got=type(model).__name__,
            wanted="restore or cut",
            cure=f"leave {key}.dropped out: then blocks put their tokens back",
        )
    if score == "loss" and seams.classifies(model) is not None:
        raise TechniqueError(
            f"{key}.score = loss is for models that predict tokens, and this one gives classes",
            got=type(model).__name__,
            cure=f"leave {key}.score out: then a predictor chooses",
        )
    idle = [
        name
        for other, names in OF_ONE_SCORE.items()
        for name in names
        if other != score and getattr(settings, name) != type(settings).model_fields[name].default
    ]
    if idle:
        raise TechniqueError(
            f"{' and '.join(f'{key}.{name}' for name in idle)} would do nothing: the score is {score}",
            got=", ".join(f"{name} = {getattr(settings, name)}" for name in idle),
            cure="leave it out, or choose by the score that reads it",
        )
    if settings.ramp_from != 1 and not settings.ramp:
        raise TechniqueError(
            f"{key}.ramp_from would do nothing: there is no ramp",
            got=settings.ramp_from,
            cure=f"say over which share of the run: {key}.ramp=0.5",
        )
    if not seams.supports_rows(model):
        raise TechniqueError(
            f"{key}: this model's blocks cannot run on some of a row's tokens",
            got=type(model).__name__,
            wanted="attention through Transformers' interface, with nothing that mixes neighbours beside it",
            cure=f"leave {key} out",
        )


def _layers(model: nn.Module, settings: TokenPruning, edit: Edit) -> set[int]:
    """Numbers of the blocks that choose.

    Raises:
        TechniqueError: a block that was named cannot, or none is left.
    """
    key, cuts = settings.key, settings.dropped == "cut"
    every = seams.blocks(model)
    depth = len(every)
    cure = f"name others in {key}.layers"
    if settings.layers is not None:
        chosen = seams.chosen_layers(model, settings.layers, setting=f"{key}.layers")
    else:
        chosen = {min(1, depth - 1)} if cuts else set(range(1, depth - 1)) or {depth - 1}
    run = {b.index: b for b in every if b.index in chosen or (cuts and b.index > min(chosen))}
    odd = [number for number, block in run.items() if _kind(model, block) not in KNOWN]
    windowed = [number for number, block in run.items() if _window(model, block) is not None]
    if odd and (settings.layers is not None or cuts):
        raise TechniqueError(
            f"{key}: some blocks limit what a token sees in a way that is not known for a part of the tokens",
            got=f"{_numbers(odd)}: {_kind(model, run[odd[0]])}",
            wanted="blocks in which a token sees all before it",
            cure=cure,
        )
    if windowed and cuts:
        raise TechniqueError(
            f"{key}: blocks that see a window of tokens cannot run on a part of them: the window would reach further "
            "back",
            got=f"{_numbers(windowed)}, {_window(model, run[windowed[0]])} tokens",
            cure=f"set {key}.dropped=restore: such blocks then run whole where rows are longer than the window",
        )
    chosen -= set(odd)
    if not chosen:
        raise TechniqueError(
            f"{key}: no block is left that can run on a part of the tokens",
            got=f"{_numbers(odd)} of another kind",
            cure=f"leave {key} out",
        )
    if odd:
        edit.warnings.append(
            f"{key}: {_numbers(odd)} run whole: what a token sees is limited there"
        )
    if windowed:
        edit.warnings.append(
            f"{key}: {_numbers(windowed)} see a window of tokens, and run whole where a row is longer"
        )
    return chosen


KNOWN = ("full_attention", "sliding_attention")
"""Kinds of attention, in the words of Transformers' configurations, of which it is known what they see."""


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if config is not None else None


def _kind(model: nn.Module, block: seams.Block) -> str:
    """What a block's attention is called in the model's configuration."""
    kinds = getattr(_config(model), "layer_types", None)
    return kinds[block.index] if kinds else KNOWN[0]


def _window(model: nn.Module, block: seams.Block) -> int | None:
    """Tokens that a block sees back; None where they are all."""
    config = _config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[block.index] == KNOWN[0]:
        return None
    own = [getattr(module, "sliding_window", None) for module in block.module.modules()]
    told = [one for one in (*own, getattr(config, "sliding_window", None)) if isinstance(one, int)]
    return min(told, default=None)


def _numbers(blocks: list[int]) -> str:
    """Blocks in words."""
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"


def _chooser(model: nn.Module, settings: TokenPruning, score: str, block: nn.Module) -> Chooser:
    near = next(p for p in block.parameters() if p.is_floating_point())
    if score == "random":
        return ByDraw(settings.granularity)
    if score == "loss":
        return ByLoss(near.device)
    return ByNetwork(_config(model).hidden_size, settings.predictor_width, near)


def _told(settings: TokenPruning, score: str, chosen: list[int], depth: int) -> str:
    what = "run on" if settings.dropped != "cut" else "cut rows to"
    runs = f"{what} {settings.keep:.0%} of a row's tokens in training, chosen by {score}"
    return f"{settings.key}: {_numbers(chosen)} of {depth} {runs}; evaluated and asked, the model runs whole"


# --- in training ---------------------------------------------------------------------------------------------------


def seams_of(edit: Edit, settings: TokenPruning, total_steps: int) -> Seams:
    """What the loop calls.

    Args:
        edit: with the children.
        settings: whose they are.
        total_steps: of the run.
    """
    children = list(edit.deltas_of(settings).values())
    entry = next(child for child in children if isinstance(child, Entry))
    entry.total_steps = total_steps
    choosers = [c.by for c in children if isinstance(c, PrunedBlock) and c.by is not None]

    def tell(batch: Batch, step: int) -> Batch:
        entry.told = Told.of(batch, step)
        return batch

    def learn(step: int) -> None:
        entry.told = None
        for chooser in choosers:
            chooser.learn(entry.kept(step + 1))
        if entry.table is not None:
            entry.table.learn()

    def bring(each: Each) -> None:
        for chooser in choosers:
            chooser.bring(each)
        if entry.table is not None:
            entry.table.bring(each)

    see = () if entry.table is None else (entry.table.see,)
    return Seams(on_batch=(tell,), loss=see, bring=(bring,), after_step=(learn,))
