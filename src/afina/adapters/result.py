"""A low-rank adapter that was computed and not trained, as a folder that any reader of PEFT's layout takes as it is.

Its scale is 1 everywhere (alpha is the rank), so that no reader's convention can change it; where ranks differ, the
patterns say so. It is written, read back and compared as any adapter is, and fitted to its base where that is at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afina.adapters.at_hand import AtHand
from afina.adapters.card import Record, card, contents_of, dumps
from afina.adapters.expert_products import expert_of, numbers, put_together, ranks_of
from afina.adapters.layout import CARD, CONFIG, PREFIX, RECORD, recorded
from afina.adapters.outputs import copy_tokenizer, has_template, tokenizer_in
from afina.adapters.peft_lora import patterns
from afina.adapters.products import Product
from afina.adapters.rounded import NAMES, Rounded
from afina.adapters.sources import Source, stored_type
from afina.adapters.writing import write
from afina.techniques.lora import LoRA
from afina.tree import Technique


@dataclass(frozen=True)
class Result:
    """What is to be written.

    Attributes:
        products: of scale 1, by module, and by expert where these are fused.
        whole: base tensors that it brings whole, by name.
        dtype: of the products in the file.
        base: name or folder of the base.
        revision: of a base on the hub.
        fingerprint: of the base; None where nobody knows it.
        rounded: how the base was quantised; None where it was not.
        task: PEFT's name of the task.
        head: of a classifier's base; see `card.head_of_base`.
        targets: a list of names that says exactly the places; None lists them all.
        conv1d: the base stores the weights of these places turned.
        told: how it was made, for the record.
        tokenizer: the folder whose tokenizer goes along; None takes none.
    """

    products: Mapping[str, Product]
    whole: Mapping[str, Tensor]
    dtype: torch.dtype
    base: str
    revision: str | None
    fingerprint: str | None
    rounded: Rounded | None
    task: str | None
    head: Mapping[str, Any]
    targets: tuple[str, ...] | None
    conv1d: bool
    told: Mapping[str, Any]
    tokenizer: Path | None

    def tensors(self) -> dict[str, Tensor]:
        """By PEFT's keys."""
        found = {
            f"{PREFIX}{module}.{end}": tensor.to(self.dtype).contiguous()
            for module, parts in put_together(self.products).items()
            for end, tensor in parts.items()
        }
        # Clones, for a tied tensor stands under two keys and the file must hold it twice.
        return found | {PREFIX + n: t.contiguous().clone() for n, t in self.whole.items()}

    def config(self) -> dict[str, Any]:
        """The contents of `adapter_config.json`."""
        rank = self._rank()
        ranks = patterns(ranks_of(self.products), rank)
        return {
            "peft_type": "LORA",
            "task_type": self.task,
            "base_model_name_or_path": self.base,
            "revision": self.revision,
            "modules_to_save": self._modules() or None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "target_modules": self._targets(),
            **({"target_parameters": experts} if (experts := self._experts()) else {}),
            "exclude_modules": None,
            "use_rslora": False,
            "use_dora": False,
            "bias": "none",
            "fan_in_fan_out": self.conv1d,
            "rank_pattern": ranks,
            "alpha_pattern": ranks,
            "init_lora_weights": True,
        }

    def record(self) -> dict[str, Any]:
        """The contents of `afina.json`."""
        rank = self._rank()
        other = {n: r for n, r in ranks_of(self.products).items() if r != rank}
        lora = LoRA(
            rank=rank,
            alpha=rank,
            target=(*self._targets(), *self._experts()),
            rank_pattern=other,
            alpha_pattern={n: float(r) for n, r in other.items()},
            modules_to_save=tuple(self._modules()),
        )
        base: dict[str, Any] = {
            "name": self.base,
            "revision": self.revision,
            "fingerprint": self.fingerprint,
            "trained": sorted(self.whole),
        }
        if self.head.get("labels"):
            base |= {"task": self.head["task"], "labels": list(self.head["labels"])}
        techniques: list[Technique] = [lora]
        if self.rounded is not None:
            techniques.insert(0, self.rounded.technique)
            base["quantised_from"] = NAMES[self.rounded.dtype]
        return contents_of(base, techniques, Record(settings=self.told))

    def _rank(self) -> int:
        """The commonest rank; of equally common ones the largest."""
        found = Counter(ranks_of(self.products).values())
        return max(found, key=lambda rank: (found[rank], rank))

    def _modules(self) -> list[str]:
        return sorted({name.rpartition(".")[0] for name in self.whole})

    def _targets(self) -> list[str]:
        return sorted(plain(self.products) if self.targets is None else self.targets)

    def _experts(self) -> list[str]:
        """Tensors of fused experts."""
        return sorted(numbers(self.products))

    def write(self, out: Path, hand: AtHand | None) -> tuple[str, ...]:
        """Writes the folder, whole or not at all.

        Args:
            out: where `refuse_out` saw nothing amiss.
            hand: the base, to fit what was written to before it takes its place.

        Returns:
            How the result and the base met.

        Raises:
            AdapterError: what was written reads back otherwise, or does not fit.
        """
        tensors, record = self.tensors(), self.record()
        chats = self.tokenizer is not None and has_template(self.tokenizer)
        texts = {
            CONFIG: dumps(self.config()),
            RECORD: dumps(record),
            CARD: card(record, tensors, chats=chats),
        }
        notes: list[str] = []

        def beside(folder: Path) -> None:
            if self.tokenizer is not None:
                copy_tokenizer(self.tokenizer, folder)

        def check(folder: Path) -> None:
            if hand is not None:
                notes.extend(hand.check(folder)[0][1:])  # the first names the folder for the moment

        write(out, tensors, texts, beside=beside, check=check)
        return tuple(notes)


def result_of(
    sources: Sequence[Source],
    products: Mapping[str, Product],
    whole: Mapping[str, Tensor],
    hand: AtHand | None,
    told: Mapping[str, Any],
) -> Result:
    """What adapters of one base became.

    Args:
        sources: the adapters.
        products: of scale 1.
        whole: base tensors that the result brings whole.
        hand: their base.
        told: how it was made, for the record.
    """
    first = sources[0]
    if hand is not None:
        fingerprint = hand.fingerprint(sorted(whole))
    else:
        known = [s.record for s in sources if s.record and set(s.record.trained) <= set(whole)]
        fingerprint = known[0].fingerprint if known else None
    named = hand is not None and hand.name != first.target.base
    return Result(
        products=products,
        whole=whole,
        dtype=stored_type(list(sources)),
        base=hand.name if hand is not None else first.target.base,
        revision=None if named else first.target.revision,
        fingerprint=fingerprint,
        rounded=first.rounded,
        task=first.config.get("task_type"),
        head=first.head,
        targets=targets_of(sources, products),
        conv1d=any(bool(source.config.get("fan_in_fan_out")) for source in sources),
        told=told,
        tokenizer=next((t for s in sources if (t := tokenizer_in(recorded(s.folder)))), None),
    )


def targets_of(
    sources: Sequence[Source], products: Mapping[str, Product]
) -> tuple[str, ...] | None:
    """The lists of names in the adapters' configurations, together, where they say exactly the result's places.

    They do where each is a plain list: whatever a name in it means, the adapter has it. None where one says less
    (layers, exclusions) or says it otherwise (a regular expression).
    """
    names: set[str] = set()
    for source in sources:
        said = source.config.get("target_modules")
        if not isinstance(said, list) or any(
            source.config.get(key) for key in ("exclude_modules", "layers_to_transform")
        ):
            return None
        names |= set(said)
    reached = all(any(n == t or n.endswith(f".{t}") for t in names) for n in plain(products))
    return tuple(sorted(names)) if reached else None


def plain(products: Iterable[str]) -> list[str]:
    """The places that are modules, and no experts."""
    return [name for name in products if expert_of(name) is None]
