"""LoRA on fused experts as places of arithmetic: a low-rank change for each expert, taken apart and put together again.

    ΔW[e] = s · B[e] A[e]

What is a place of its own is called by the tensor and the expert: `model.layers.0.mlp.experts.down_proj[3]`. The file
has one rank for all experts of a tensor: where a cut leaves them different ones, directions of nought fill up.

Legend: e expert, A[e] (r × in), B[e] (out × r), s the scale. See `peft_experts` for how they lie in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from afina.adapters.kinds import Config, Parts
from afina.adapters.layout import CONFIG
from afina.adapters.peft_experts import ENDS, INNER
from afina.adapters.products import Product, alpha_of, patterns_of
from afina.errors import AdapterError

AGAIN = "the folder is damaged, or its configuration is another adapter's: save or fetch it again"
"""What helps against a file and a configuration that contradict each other."""

_PLACE = re.compile(r"(?P<tensor>.*)\[(?P<expert>\d+)\]")


# --- names --------------------------------------------------------------------------------------------------------


def place_of(tensor: str, expert: int) -> str:
    """What the change of one expert is called."""
    return f"{tensor}[{expert}]"


def expert_of(place: str) -> tuple[str, int] | None:
    """The tensor and the expert that a place is of; None where it is of no experts."""
    found = _PLACE.fullmatch(place)
    return None if found is None else (found["tensor"], int(found["expert"]))


def renamed(place: str, names: Mapping[str, str]) -> str:
    """A place under another name of its module; one without another keeps its own."""
    found = expert_of(place)
    if found is None:
        return names.get(place, place)
    module, _, projection = found[0].rpartition(".")
    return place_of(f"{names.get(module, module)}.{projection}", found[1])


def numbers(places: Iterable[str]) -> dict[str, int]:
    """How many experts each tensor has among some places."""
    found: dict[str, int] = {}
    for tensor, _ in filter(None, map(expert_of, places)):
        found[tensor] = found.get(tensor, 0) + 1
    return found


# --- reading ------------------------------------------------------------------------------------------------------


def of_experts(module: str, config: Config) -> bool:
    """Whether a module is one of fused experts, whose A and B hold one product for each of them."""
    targets = config.get("target_parameters")
    holders = [str(t).rpartition(".")[0] for t in targets] if isinstance(targets, list) else []
    plain = module.replace(".base_layer", "")
    return any(plain == holder or plain.endswith(f".{holder}") for holder in holders)


def starts_of(module: str, parts: Iterable[str], config: Config) -> dict[str, str | None]:
    """The tensor that the A and B of each beginning are beside, by its own name in the module; None: nobody knows.

    PEFT wraps a module once for each, in its own order, in which Transformers has `down_proj` last.

    Args:
        module: its name.
        parts: the endings of its keys.
        config: the adapter's.
    """
    starts = [INNER, ""] if any(part.startswith(INNER) for part in parts) else [""]
    names = {
        str(target).rpartition(".")[2]
        for target in config["target_parameters"]
        if f".{module}".endswith(f".{str(target).rpartition('.')[0]}")
    }
    known = len(names) == len(starts)
    return dict(zip(starts, _ordered(names) if known else [None] * len(starts), strict=True))


def _ordered(projections: Iterable[str]) -> list[str]:
    return sorted(projections, key=lambda name: (name == "down_proj", name))


def taken_apart(module: str, parts: Parts, config: Config, folder: Path) -> dict[str, Product]:
    """The change of each expert of each tensor of a module.

    Args:
        module: its name, as the configuration calls it.
        parts: its tensors, by the endings of their keys.
        config: the adapter's.
        folder: the adapter's, for errors.

    Raises:
        AdapterError: it is not said which tensors these are of, one is lacking, or see `products_of_experts`.
    """
    found: dict[str, Product] = {}
    starts = starts_of(module, parts, config)
    wanted = {start + end for start in starts for end in ENDS}
    if wanted != set(parts):
        raise AdapterError(
            "the factors of fused experts are not pairs of A and B",
            got=f"{folder}: {module} with {', '.join(sorted(parts))}",
            wanted=", ".join(sorted(wanted)),
            cure=AGAIN,
        )
    for start, projection in starts.items():
        if projection is None:
            raise AdapterError(
                "target_parameters does not say which tensors of the experts A and B are beside",
                got=f"{folder / CONFIG}: {config['target_parameters']}",
                wanted=f"{len(starts)} of {module}",
                cure="name them there, as the program that trained it does; a configuration from elsewhere lacks them",
            )
        name = f"{module}.{projection}"
        a_QI, b_OQ = (parts[start + end] for end in ENDS)
        each = products_of_experts(name, a_QI, b_OQ, config, folder)
        found |= {place_of(name, expert): product for expert, product in enumerate(each)}
    return found


def products_of_experts(
    name: str, a_QI: Tensor, b_OQ: Tensor, config: Config, folder: Path
) -> list[Product]:
    """The change of one tensor of fused experts: a product for each.

    Args:
        name: of the tensor, as the configuration calls it.
        a_QI: (experts · r, in), the expert slowest.
        b_OQ: (out, r · experts), the expert fastest.
        config: the adapter's.
        folder: the adapter's, for errors.

    Raises:
        AdapterError: the two do not fit each other or the rank, or rank or alpha are in doubt.
    """
    ranks = patterns_of(name, "rank_pattern", config.get("r"), config, folder)
    both = a_QI.shape[0] if a_QI.dim() == b_OQ.dim() == 2 and a_QI.numel() else 0
    fitting = [r for r in ranks if isinstance(r, int) and r > 0 and both % r == 0]
    if not both or b_OQ.shape[1] != both or len(fitting) != 1:
        raise AdapterError(
            "the factors of fused experts do not fit each other, or their rank",
            got=f"{folder}: {name}, A {tuple(a_QI.shape)}, B {tuple(b_OQ.shape)}, rank "
            + " or ".join(map(str, ranks)),
            wanted="A (experts · r, in) and B (out, r · experts)",
            cure=AGAIN,
        )
    rank = fitting[0]
    alpha = alpha_of(name, rank, config, folder)
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    a_ERI, b_ORE = a_QI.reshape(-1, rank, a_QI.shape[1]), b_OQ.reshape(b_OQ.shape[0], rank, -1)
    return [Product(b_ORE[:, :, e], a_RI, scale) for e, a_RI in enumerate(a_ERI)]


# --- writing ------------------------------------------------------------------------------------------------------


def ranks_of(products: Mapping[str, Product]) -> dict[str, int]:
    """The rank that each place has in the file: by module, and by tensor for experts, of which all have the largest."""
    found: dict[str, int] = {}
    for place, product in products.items():
        tensor, _ = expert_of(place) or (place, 0)
        found[tensor] = max(found.get(tensor, 0), product.rank)
    return found


def put_together(products: Mapping[str, Product]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each module by the endings of their keys.

    Args:
        products: of scale 1, by place; of a tensor of experts all of them.
    """
    found: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, list[Product]] = {}
    numbered = {name: expert_of(name) for name in products}
    for place in sorted(products, key=lambda name: numbered[name] or (name, 0)):
        expert = numbered[place]
        if expert is None:
            found[place] = products[place].tensors()
        else:
            tensors.setdefault(expert[0], []).append(products[place])
    modules: dict[str, list[str]] = {}
    for tensor in tensors:
        module, _, projection = tensor.rpartition(".")
        modules.setdefault(module, []).append(projection)
    for module, projections in modules.items():
        starts = ("",) if len(projections) == 1 else (INNER, "")
        for start, projection in zip(starts, _ordered(projections), strict=True):
            pair = _of_tensor(tensors[f"{module}.{projection}"])
            parts = {start + end: tensor for end, tensor in zip(ENDS, pair, strict=True)}
            found[module] = found.get(module, {}) | parts
    return found


def _of_tensor(each: list[Product]) -> tuple[Tensor, Tensor]:
    """A and B of all experts, of one rank."""
    rank = max(product.rank for product in each)
    a_ERI = torch.stack([F.pad(p.a_RI, (0, 0, 0, rank - p.rank)) for p in each])
    b_ORE = torch.stack([F.pad(p.b_OR, (0, rank - p.rank)) for p in each], dim=2)
    return a_ERI.flatten(0, 1), b_ORE.flatten(1, 2)
