"""P-tuning: vectors in front of every row, as prompt tuning has them, but made by a small network that trains too.

    p = MLP(e)                  three maps with ReLU between them
    p = MLP(LSTM(e))            an LSTM that reads e both ways, then two maps with a ReLU between them

The network ties the vectors together, which makes them easier to learn. What it gives does not depend on the row: an
adapter's folder holds the vectors alone, and one that is loaded from there trains these directly.

Legend: p vectors in front (n × width), e as many inputs of the same width, normal at first.

Source: Liu et al. 2021, "GPT Understands, Too", arXiv 2103.10385, section 3.2 (the prompt encoder).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from afina import seams
from afina.techniques.front import FrontDelta, InFront, trunk_of
from afina.tree import Edit, Side, seed_of

Network = Literal["mlp", "lstm", "none"]


class PTuning(InFront):
    """Vectors in front of every row, made by a small network."""

    key: ClassVar[str] = "p_tuning"

    network: Network = Field(
        default="mlp", description="what makes the vectors; none trains them directly"
    )
    hidden: int | None = Field(
        default=None, ge=1, description="inner width of the network; None is the embedding's"
    )
    lstm_layers: int = Field(default=2, ge=1, description="layers of the LSTM")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share dropped between layers of the LSTM"
    )

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: the model cannot have anything in front of its rows.
        """
        trunk = trunk_of(model, self.key)
        weight = model.get_submodule(seams.input_embedding(model)).get_parameter("weight")
        with Edit(model, [self]).whole() as edit:
            edit.attach(trunk, self, PTuningDelta(self, weight))
            self.train_whole(edit, undoable=undoable)
        return edit


# --- mathematics -----------------------------------------------------------------------------------------------


@torch.no_grad()
def drawn_like(parameter: Tensor, bound: float, seed: int) -> Tensor:
    """Numbers uniform in ±bound in the shape of a parameter, on the CPU in fp32 so that every device gets the same."""
    uniform = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return (uniform * 2 - 1) * bound


# --- module ----------------------------------------------------------------------------------------------------


class PTuningDelta(FrontDelta):
    """The network and its inputs, in fp32 whatever the embedding's dtype (fp64 beside fp64)."""

    follows: ClassVar[Mapping[str, Side]] = {}

    def __init__(self, settings: PTuning, embedding_VD: Tensor) -> None:
        super().__init__(settings.tokens)
        width = embedding_VD.shape[1]
        hidden = settings.hidden or width
        dtype = torch.promote_types(embedding_VD.dtype, torch.float32)
        made: dict[str, Any] = {"dtype": dtype, "device": embedding_VD.device}
        self.weight = nn.Parameter(torch.zeros(settings.tokens, width, **made))
        self.lstm: nn.LSTM | None = None
        self.maps: nn.Sequential | None = None
        self.dropout = settings.dropout if settings.network == "lstm" else 0.0
        if settings.network == "mlp":
            self.maps = nn.Sequential(
                nn.Linear(width, hidden, **made),
                nn.ReLU(),
                nn.Linear(hidden, hidden, **made),
                nn.ReLU(),
                nn.Linear(hidden, width, **made),
            )
        elif settings.network == "lstm":
            self.lstm = nn.LSTM(
                width,
                hidden,
                settings.lstm_layers,
                dropout=self.dropout if settings.lstm_layers > 1 else 0.0,
                bidirectional=True,
                batch_first=True,
                **made,
            )
            self.maps = nn.Sequential(
                nn.Linear(2 * hidden, 2 * hidden, **made),
                nn.ReLU(),
                nn.Linear(2 * hidden, width, **made),
            )

    @property
    def direct(self) -> bool:
        """Whether the vectors train themselves."""
        return self.maps is None

    def made(self) -> Tensor:
        """The vectors (n, D)."""
        inner = self.weight
        if self.lstm is not None:
            inner = self.lstm(inner[None])[0][0]
        return inner if self.maps is None else self.maps(inner)

    def vectors(self, embedding: nn.Module) -> Tensor:
        """See `FrontDelta.vectors`."""
        return self.made()

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Inputs normal; the network's tensors uniform in ±1/sqrt of what enters a unit, as torch starts them."""
        normal = torch.randn(
            self.weight.shape, generator=torch.Generator().manual_seed(seed_of(seed, "weight"))
        )
        self.weight.copy_(normal)
        for name, module in self.named_modules():
            if isinstance(module, nn.LSTM | nn.Linear):
                entering = module.hidden_size if isinstance(module, nn.LSTM) else module.in_features
                for own, parameter in module.named_parameters():
                    seeded = seed_of(seed, f"{name}.{own}")
                    parameter.copy_(drawn_like(parameter, 1 / math.sqrt(entering), seeded))
