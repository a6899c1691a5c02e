"""LoRA beside the fused experts of a mixture: each expert's projection gets a low-rank path of its own.

    y = W[e] x + s · B[e] (A[e] drop(x))

No W[e] + s B[e] A[e] is ever made. The experts' forward is Transformers' own order of things: through its
`ExpertsInterface` each module calls the function below, which puts the path into both projections; rows are sorted by
expert and multiplied in groups, or expert by expert where the model's own implementation is eager.

Legend: E experts, W (E, out, in), A (E r × in) the expert slowest, B (out × r E) the expert fastest, as PEFT has them.

Source: Hu et al. 2021, arXiv 2106.09685; the layout of PEFT 0.21.2 (`target_parameters`); the order of the products as
in Transformers 5 (`integrations/moe.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.ops.lowrank import low_rank_add
from afina.tree import Delta, Side, seed_of
from afina.tree.pieces import Share

IMPLEMENTATION = "afina_lora"
"""Under this name Transformers finds the function that puts the paths in."""

EAGER = "eager"


@dataclass(frozen=True)
class ExpertSite:
    """One projection of all the experts of a module.

    Attributes:
        name: full name of the tensor.
        weight: (experts, out, in), or (experts, in, out) where `transposed`.
        block: index in its stack, or None outside the blocks.
    """

    name: str
    weight: Tensor
    block: int | None
    transposed: bool

    @property
    def module(self) -> str:
        """Name of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def projection(self) -> str:
        """Its own name in that module."""
        return self.name.rpartition(".")[2]

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Width of what an expert is given."""
        return self.weight.shape[1 if self.transposed else 2]

    @property
    def out_features(self) -> int:
        """Width of what it gives."""
        return self.weight.shape[2 if self.transposed else 1]


def expert_sites(model: nn.Module) -> list[ExpertSite]:
    """The projections of all fused experts that go through `ExpertsInterface`, in the order of their modules."""
    where = {block.name: block.index for block in seams.blocks(model)}
    found: list[ExpertSite] = []
    for module in seams.expert_modules(model):
        experts: Any = model.get_submodule(module)
        if not hasattr(experts, "_apply_gate") or getattr(experts, "_is_expert_parallel", False):
            continue
        block = next((n for name, n in where.items() if module.startswith(f"{name}.")), None)
        wanted = {"gate_up_proj" if experts.has_gate else "up_proj", "down_proj"}
        for projection, weight in experts.named_parameters(recurse=False):
            if projection in wanted and weight.is_floating_point():
                site = ExpertSite(f"{module}.{projection}", weight, block, experts.is_transposed)
                found.append(site)
    return found


# --- mathematics -----------------------------------------------------------------------------------------------


def one_by_one(
    experts: Any, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, paths: Paths
) -> Tensor:
    """The experts' output, expert by expert.

    Args:
        experts: a module of Transformers' form.
        x_ND: tokens.
        index_NK: the experts of each token.
        weights_NK: how much each of them counts.
        paths: beside each projection.
    """
    out_ND = torch.zeros_like(x_ND)
    for expert in _numbers(cast("Tensor", index_NK.unique())):  # pyright: ignore[reportUnknownMemberType]
        if expert >= experts.num_experts:
            continue  # another process has it
        choice, token = torch.where(index_NK.t() == expert)

        def product(name: str, rows: Tensor, expert: int = expert) -> Tensor:
            weight = getattr(experts, name)[expert]
            y = F.linear(rows, weight.t() if experts.is_transposed else weight)
            y = y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y
            for path in paths.get(name, ()):
                y = path.beside(rows, y, expert)
            return y

        done = _through(experts, x_ND[token], product) * weights_NK[token, choice, None]
        out_ND.index_add_(0, token, done.to(out_ND.dtype))
    return out_ND


def in_groups(
    experts: Any, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, paths: Paths
) -> Tensor:
    """The same with all rows sorted by expert, and each projection as one grouped product."""
    tokens, choices = index_NK.shape
    expert_S, order_S = index_NK.reshape(-1).sort()
    if experts._is_expert_parallel:
        # Those of experts that another process has lie behind all others.
        mine = int((expert_S < experts.num_experts).sum())
        expert_S, order_S = expert_S[:mine], order_S[:mine]
    counts_E = torch.zeros(experts.num_experts, dtype=torch.int32, device=x_ND.device)
    counts_E.scatter_add_(0, expert_S, torch.ones_like(expert_S, dtype=torch.int32))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)

    def product(name: str, rows: Tensor) -> Tensor:
        weight = getattr(experts, name)
        y = grouped(rows, weight if experts.is_transposed else weight.transpose(1, 2), ends_E)
        y = y + getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else y
        for path in paths.get(name, ()):
            y = path.grouped(rows, y, ends_E)
        return y

    done_SD = _through(experts, x_ND[order_S // choices], product)
    done_SD = done_SD * weights_NK.reshape(-1)[order_S, None]
    back_SD = done_SD.new_zeros(tokens * choices, done_SD.shape[1])
    back_SD = back_SD.index_copy(0, order_S, done_SD)
    return back_SD.view(tokens, choices, -1).sum(dim=1).to(x_ND.dtype)


def _through(experts: Any, rows: Tensor, product: Callable[[str, Tensor], Tensor]) -> Tensor:
    """One expert's two projections and what lies between and behind them."""
    if experts.has_gate:
        inner = experts._apply_gate(product("gate_up_proj", rows))
    else:
        inner = experts.act_fn(product("up_proj", rows))
    done = product("down_proj", inner)
    return experts.post_expert_norm(done) if experts.has_post_expert_norm else done


def grouped(rows_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows sorted by expert, each times the matrix of its expert.

    Args:
        rows_SI: sorted.
        weight_EIO: any strides; computed in its own dtype.
        ends_E: the row behind each expert's last, int32.
    """
    x = rows_SI.to(weight_EIO.dtype)
    # torch's grouped product has no fp64, and wants rows of whole 16 bytes.
    aligned = all(size * x.element_size() % 16 == 0 for size in weight_EIO.shape[1:])
    if x.dtype != torch.float64 and aligned:
        return F.grouped_mm(x, weight_EIO, offs=ends_E)
    starts = [0, *_numbers(ends_E)]
    pieces = [x[start:end] @ weight_EIO[e] for e, (start, end) in enumerate(pairwise(starts))]
    return torch.cat([*pieces, x.new_zeros(len(x) - starts[-1], weight_EIO.shape[2])])


def _numbers(tensor: Tensor) -> list[int]:
    """Its entries."""
    return [int(number) for number in tensor]


# --- module ----------------------------------------------------------------------------------------------------


class ExpertPath(Delta):
    """A and B of all experts beside one projection, in fp32 whatever the base's dtype (fp64 beside fp64)."""

    foldable: ClassVar[bool] = True
    additive: ClassVar[bool] = True

    def __init__(self, site: ExpertSite, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        dtype = torch.promote_types(site.weight.dtype, torch.float32)
        device = site.weight.device
        self.experts, self.rank = site.experts, rank
        self.scaling, self.dropout = scaling, dropout
        self.turned = site.transposed
        self.a = nn.Parameter(
            torch.zeros(site.experts * rank, site.in_features, dtype=dtype, device=device)
        )
        self.b = nn.Parameter(
            torch.zeros(site.out_features, rank * site.experts, dtype=dtype, device=device)
        )

    def downs(self) -> Tensor:
        """A as (E, r, in), of the experts that are here."""
        return self.a.view(self.experts, self.rank, -1)[self._here]

    def ups(self) -> Tensor:
        """B as (E, out, r), of the same."""
        return self.b.view(-1, self.rank, self.experts).permute(2, 0, 1)[self._here]

    @property
    def _here(self) -> slice:
        return slice(None) if self.share is None else slice(self.share.first, self.share.end)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Not called: it acts by expert."""
        raise NotImplementedError

    def beside(self, rows: Tensor, y: Tensor, expert: int) -> Tensor:
        """The output `y` of one expert for its `rows`, and the change beside it."""
        dropout = self.dropout if self.training else 0.0
        a_RI, b_OR = self.downs()[expert], self.ups()[expert]
        scaling = self.scaling * self.strength
        return low_rank_add(rows, y, a_RI, b_OR, scaling, dropout=dropout)

    def grouped(self, rows: Tensor, y: Tensor, ends_E: Tensor) -> Tensor:
        """The same for rows sorted by expert."""
        seen = F.dropout(rows, self.dropout) if self.dropout and self.training else rows
        # Directions of nought fill the rank up to what a grouped product takes.
        spare = -self.rank % 8
        a_EIR = F.pad(self.downs(), (0, 0, 0, spare)).to(rows.dtype).transpose(1, 2)
        b_ERO = F.pad(self.ups(), (0, spare)).to(rows.dtype).contiguous().transpose(1, 2)
        scaling = self.scaling * self.strength
        return y + scaling * grouped(grouped(seen, a_EIR, ends_E), b_ERO, ends_E)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """A uniform in ±1/sqrt(in) and B at nought, as beside a linear."""
        generator = torch.Generator().manual_seed(seed_of(seed, "a"))
        bound = 1 / math.sqrt(self.a.shape[1])
        uniform = torch.rand(self.a.shape, generator=generator)
        self.a.copy_((uniform * 2 - 1) * bound)
        self.b.zero_()

    def weight_delta(self) -> Tensor:
        """s · B[e] A[e] as the base stores it: (E, out, in), or (E, in, out)."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        change = self.scaling * (self.ups().detach().to(wide) @ self.downs().detach().to(wide))
        return change.transpose(1, 2) if self.turned else change


Paths = Mapping[str, Sequence[ExpertPath]]
"""What acts beside each projection: one path, or those of several adapters."""


class ExpertsDelta(Delta):
    """The paths of one module of fused experts, one a projection, each a child of that projection's name."""

    follows: ClassVar[Mapping[str, Side]] = {}
    foldable: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True

    def __init__(self, paths: Mapping[str, ExpertPath]) -> None:
        super().__init__()
        self.dropout = max(path.dropout for path in paths.values())
        for name, path in paths.items():
            self.add_module(name, path)

    @property
    def paths(self) -> dict[str, ExpertPath]:
        """The path beside each projection."""
        return {n: p for n, p in self.named_children() if isinstance(p, ExpertPath)}

    def shared_out(self, share: Share) -> None:
        """Every path is that of some experts; A and B, which lie by expert in B's columns, stay whole.

        Raises:
            TechniqueError: with dropout, which processes draw for the rows of their own experts.
        """
        if self.dropout:
            raise TechniqueError(
                "dropout beside experts that processes share out would be drawn by each for other rows",
                got=f"dropout {self.dropout}",
                cure="set lora.dropout to 0, or leave the experts out of lora.target",
            )
        super().shared_out(share)
        for path in self.paths.values():
            path.shared_out(share)

    def counts(self, strength: float) -> None:
        """All paths do."""
        super().counts(strength)
        for path in self.paths.values():
            path.counts(strength)

    def weights(self) -> dict[str, Delta]:
        """Each projection has a weight of its own."""
        return dict(self.paths)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Not called: see `hooks`."""
        raise NotImplementedError

    def reset(self, seed: int) -> None:
        """Each path's own."""
        for name, path in self.paths.items():
            path.reset(seed_of(seed, name))

    def silent_at_start(self) -> frozenset[str]:
        """Every A, which meets a B of nought."""
        return frozenset(f"{name}.a" for name in self.paths)

    def hooks(self, module: nn.Module, key: str) -> list[Redirected]:
        """The module asks Transformers for our function instead of its own implementation."""
        _register()
        return [Redirected(module, key)]


_OWN = "_afina_own_config"
_KEYS = "_afina_paths"


class Redirected:
    """A module of experts that goes through our function until this, and all others of that module, are removed."""

    def __init__(self, module: Any, key: str) -> None:
        self._module, self._key = module, key
        held: dict[str, Any] = module.__dict__
        if _KEYS not in held:
            held[_OWN] = module.config
            module.config = copy.copy(module.config)
            module.config._experts_implementation = IMPLEMENTATION
        held[_KEYS] = (*held.get(_KEYS, ()), key)

    def remove(self) -> None:
        """The child acts no more; without any the module goes its own way again."""
        held: dict[str, Any] = self._module.__dict__
        left = tuple(key for key in held[_KEYS] if key != self._key)
        if left:
            held[_KEYS] = left
            return
        del held[_KEYS]
        self._module.config = held.pop(_OWN)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        functions: Any = ALL_EXPERTS_FUNCTIONS
        functions.register(IMPLEMENTATION, _forward)


def _forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What Transformers calls for a module of experts that has paths; see `one_by_one` for the arguments."""
    held: dict[str, Any] = module.__dict__
    children: list[ExpertsDelta] = [getattr(module, key) for key in held[_KEYS]]
    acting = [child for child in children if child.acts]
    plain: str = held[_OWN]._experts_implementation or EAGER
    if not acting:
        return _plain(module, plain)(module, hidden_states, top_k_index, top_k_weights)
    names = dict.fromkeys(name for delta in acting for name in delta.paths)
    paths = {n: [delta.paths[n] for delta in acting if n in delta.paths] for n in names}
    way = one_by_one if plain == EAGER else in_groups
    return way(module, hidden_states, top_k_index, top_k_weights, paths)


def _plain(module: nn.Module, name: str) -> Callable[..., Tensor]:
    """The module's own implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own: Any = type(module).forward
    functions: Any = ALL_EXPERTS_FUNCTIONS
    return functions.get_interface(name, own.__wrapped__)
