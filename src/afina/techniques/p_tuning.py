"""P-tuning: vectors in front of every row, as prompt tuning has them, but made by a small network that trains too.

    p = MLP(e)                  three maps with ReLU between them
    p = MLP(LSTM(e))            an LSTM that reads e both ways, then two maps with a ReLU between them

The network ties the vectors together, which makes them easier to learn. What it gives does not depend on the row: an
adapter's folder holds the vectors alone, and one that is loaded from there trains these directly.

Legend: p vectors in front (n × width), e as many inputs of the same width, normal at first.

Source: Liu et al. 2021, "GPT Understands, Too", arXiv 2103.10385, section 3.2 (the prompt encoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from afina import seams
from afina.techniques.front import BeforeRows, FrontDelta, start_network
from afina.tree import Edit, Side, seed_of

Network = Literal["mlp", "lstm", "none"]


class PTuning(BeforeRows):
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
            TechniqueError: the model cannot have anything in front of its rows, or has no room for so much.
        """
        trunk = self.trunk(model)
        weight = model.get_submodule(seams.input_embedding(model)).get_parameter("weight")
        with Edit(model, [self]).whole() as edit:
            edit.attach(trunk, self, PTuningDelta(self, weight))
            self.train_whole(edit, undoable=undoable)
        return edit


# --- mathematics -----------------------------------------------------------------------------------------------


def through(inputs_nD: Tensor, lstm: nn.Module | None, maps: nn.Module | None) -> Tensor:
    """The vectors (n, D) that a network makes of its inputs (n, D); both parts None give the inputs themselves."""
    inner = inputs_nD if lstm is None else lstm(inputs_nD[None])[0][0]
    return inner if maps is None else maps(inner)


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
        return through(self.weight, self.lstm, self.maps)

    def vectors(self, embedding: nn.Module) -> Tensor:
        """See `FrontDelta.vectors`."""
        return self.made()

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Inputs normal, the network as torch starts its parts."""
        drawn = torch.Generator().manual_seed(seed_of(seed, "weight"))
        self.weight.copy_(torch.randn(self.weight.shape, generator=drawn))
        start_network(self, seed)
