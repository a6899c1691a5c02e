"""Token pruning: chosen blocks run on a share of each row's tokens; the others are not computed there.

    restore:   y = h,   y[kept] = block(h[kept])          every block puts its tokens back, the others pass it by
    cut:       h' = h[kept], to the last block            what is dropped stays out, and comes back behind it as it was

Kept tokens stay in their order, with their own positions, and see each other alone: this is exactly the whole block
with the dropped tokens' keys hidden. The first tokens of a row, on which attention rests, are always kept.

| score | what is kept | of |
|---|---|---|
| random | exactly the share of each row, drawn by seed, step, block and row | decoders, encoders |
| predictor | tokens to which a small network of the token's own state gives enough | decoders |
| loss | tokens whose id was hard to predict lately: m ← β m + (1 - β) loss, by id | decoders |
| attention | tokens that are looked at most | encoders |
| similarity | tokens that are least like others | encoders |
| learned | tokens that are looked at more than a threshold that was learned | encoders |

In a causal model nothing of a token may depend on a later one, not even whether it is kept. So scores are the token's
own there, and they are not ranked in their row: a token is kept where its score is above a threshold, which is the
quantile of the scores of the steps before. A row may then keep more or less than its share; over a step it is met.
The first step runs whole, and finds the thresholds. How often a token is looked at is a sum over later tokens, so
attention and similarity are refused.

The predictor's gradient is that of a gate g on what the block adds, y = h + g · (block(h) - h), taken at g = 1, where
the value is the block's own, bit for bit: ∂loss/∂s = ⟨∂loss/∂y, block(h) - h⟩. So tokens whose update lowers the loss
come to be kept, and neither the model nor its gradient knows of the gate. It is made small, which Adam does not see
and clipping does not either. Of an adapter, all this is no part: it is on disk as if nothing had been pruned.

A decoder is pruned in training alone: evaluated, merged and asked, it runs whole.

An encoder sees both ways, so what it looks at may decide, and it is pruned whenever it runs: in training, in
evaluation, and wherever afina loads an adapter that was trained so (PEFT, and merged weights, run whole rows). Rows
grow shorter from block to block, decided by the block before:

    fuse:      Σ_j m_j h_j / Σ_j m_j                      one token for all that left; they keep the state they had
    merge:     Σ_j n_j h_j / Σ_j n_j                      into the token most like it, of n_j tokens; in attention a
                                                          key of n tokens counts as n (+ log n); each gets the result
    learned:   h σ((m - threshold) / temperature)         in training; at inference what has m < threshold leaves

where m_j is the attention that token j gets, a mean over heads and a sum over the row's tokens: 1 on average. Padding
neither gives nor gets any, so that a row is pruned alike alone and in a batch. Behind the last block every token is
there, so any head works. Thresholds are learnt softly, which saves no time in training; `penalty` is the price of the
tokens they let through, and `keep` does not count. Their gradient goes through the attention, as LTP's.

Legend: h what enters a block, y what leaves it, s a token's score, m the running loss of an id of the vocabulary.

Source: Yao et al. 2022, "Random-LTD", arXiv 2211.11586 (random; first and last block whole; the schedule); Hou et al.
2022, "Token Dropping for Efficient BERT Pretraining", arXiv 2203.13240 (loss; β = 0.995, from 10); Raposo et al. 2024,
"Mixture-of-Depths", arXiv 2404.02258 (a router by token, and that ranking a row is not causal). For encoders: Liang et
al. 2022, "EViT", arXiv 2202.07800 (attention, fuse); Bolya et al. 2022, "ToMe", arXiv 2210.09461 (similarity, merge);
Kim et al. 2021, "LTP", arXiv 2107.00910 (learned).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from afina import seams
from afina.techniques import encoder_pruning, pruned_decoder
from afina.tree import Edit, Seams, Technique

Score = Literal["auto", "random", "predictor", "loss", "attention", "similarity", "learned"]
Dropped = Literal["auto", "restore", "cut", "fuse", "merge"]


class TokenPruning(Technique):
    """Blocks that run on a share of each row's tokens."""

    key: ClassVar[str] = "token_pruning"

    keep: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of a row's tokens kept where it is pruned; in encoders the share that is left in the end",
    )
    score: Score = Field(
        default="auto",
        description="what chooses: random, predictor, loss (decoders); random, attention, similarity, learned "
        "(encoders); auto is predictor for decoders and attention for encoders",
    )
    dropped: Dropped = Field(
        default="auto",
        description="what becomes of the others: restore (they pass the block by), cut (they stay out until the "
        "end; in decoders never a token that trains), fuse (into one token, weighted) or merge (into tokens like "
        "them); auto is restore for decoders, and for encoders what goes with the score",
    )
    layers: tuple[int, ...] | str | None = Field(
        default=None,
        description="block numbers, as a list or '0-5,28,-1'; None is all but the first and the last for restore, "
        "and the second for cut; in encoders those that are given fewer tokens than the one before: None is at a "
        "quarter, a half and three quarters of the depth for attention, and all but the first for the others",
    )
    always: int = Field(
        default=1, ge=1, description="first tokens of a row that are kept whatever their score"
    )
    ramp: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the run over which the share kept goes evenly from ramp_from to keep",
    )
    ramp_from: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share kept at the first step of a ramp; below keep for random-LTD's schedule",
    )
    granularity: int = Field(
        default=1,
        ge=1,
        description="score random: tokens kept of a row are a multiple of this, rounded down",
    )
    predictor_width: int = Field(
        default=16, ge=1, description="score predictor: inner width of its network"
    )
    loss_decay: float = Field(
        default=0.995,
        ge=0,
        lt=1,
        description="score loss: β, the share of m that a new loss leaves",
    )
    loss_start: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="score loss: m of an id that was not predicted yet, in nats",
    )

    temperature: float = Field(
        default=0.05,
        gt=0,
        allow_inf_nan=False,
        description="score learned: how sharp a threshold is while it is learnt, in means of a row's tokens",
    )
    threshold_start: float = Field(
        default=0.1,
        ge=0,
        allow_inf_nan=False,
        description="score learned: the last block's threshold at first, in means of a row's tokens; those before "
        "rise evenly to it",
    )
    penalty: float = Field(
        default=0.1,
        ge=0,
        allow_inf_nan=False,
        description="score learned: the price of the share of tokens kept, in the loss",
    )

    @model_validator(mode="after")
    def _check(self) -> TokenPruning:
        seams.parse_layers(self.layers)
        return self

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: the score or what becomes of the others is not for this model, or its blocks cannot be run
                on some of their tokens.
        """
        with Edit(model, [self]).whole() as edit:
            if pruned_decoder.is_causal(model, self.key):
                pruned_decoder.attach(edit, self)
            else:
                encoder_pruning.attach(edit, self, self)
        return edit

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """Tells the children of each micro-batch, and lets them learn from the step."""
        if not pruned_decoder.is_causal(edit.model, self.key):
            return encoder_pruning.seams_of(edit, self, self, total_steps)
        return pruned_decoder.seams_of(edit, self, total_steps)
