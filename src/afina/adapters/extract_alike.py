"""Whether two models are a base and what was trained from it: the same tensors, of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence

from afina.adapters.at_hand import AtHand
from afina.errors import AdapterError, ModelError, counted

SHOWN = 6
"""Tensors that an error lists; it counts the others."""


def refuse_unlike(new: AtHand, old: AtHand, *, drops: bool) -> tuple[str, ...]:
    """Raises unless two models have the same tensors, of the same shapes, and files that hold them.

    Args:
        new: the tuned model.
        old: the base.
        drops: what has no factors is left out.

    Returns:
        Biases that the tuned model has besides, to be left out.

    Raises:
        AdapterError: it has such biases, and they are not to be left out.
        ModelError: the two are not alike, or are stored in another form.
    """
    for model in (new, old):
        if not model.complete:
            raise ModelError(
                "the model's files keep its tensors in another form than the model has them",
                got=model.folder,
                wanted="files from which each of the model's tensors can be read",
                cure="keep the tuned model: of such files no adapter can be extracted",
            )
    here, there = shapes_of(new), shapes_of(old)
    unlike = [n for n in sorted({*here, *there}) if here.get(n) != there.get(n)]
    added = tuple(n for n in unlike if n not in there and n.endswith(".bias"))
    if not unlike or (len(added) == len(unlike) and drops):
        return added
    first = unlike[0]
    told = [
        f"{m.get(n, 'not there')} in {w}"
        for m, w, n in ((here, new.name, first), (there, old.name, first))
    ]
    if len(added) == len(unlike):
        raise AdapterError(
            "the tuned model has biases that the base has not, and an adapter of factors and whole modules brings none",
            got=listed(added),
            cure="leave them out: --rest drop (in Python rest='drop' in the settings); of a merged bitfit keep the "
            "adapter itself",
        )
    raise ModelError(
        f"the two models differ in {counted(len(unlike), 'tensor')}, and have no difference",
        got=f"{first}: {', '.join(told)}",
        wanted="a model and the one that it was trained from",
        cure=_cure(new, old, unlike),
    )


def _cure(new: AtHand, old: AtHand, unlike: Sequence[str]) -> str | None:
    """What makes two models alike, where that is known."""
    if type(new.skeleton) is not type(old.skeleton):
        return (
            f"they are of two kinds, {type(new.skeleton).__name__} and {type(old.skeleton).__name__}: load the base as "
            "the tuned model's kind, afina.load(BASE, task=…, labels=[…]) for a classifier, and save it with its "
            "tokenizer"
        )
    shapes = [shapes_of(model) for model in (new, old)]
    pairs = [tuple(shape.get(name) for shape in shapes) for name in unlike]
    if all(a and b and a[0] > b[0] and a[1:] == b[1:] for a, b in pairs):
        return (
            "where only the vocabulary grew, give the base as many tokens: model.resize_token_embeddings(…), and save "
            "it"
        )
    return None


def shapes_of(model: AtHand) -> dict[str, tuple[int, ...]]:
    """Of each tensor by name, a tied one under each of its names."""
    named = model.skeleton.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
