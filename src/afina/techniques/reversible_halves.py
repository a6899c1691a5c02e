"""A block taken apart into what its attention adds to the stream and what its feed-forward adds.

    F(x) = block(x) - x  with the feed-forward silent,    G(y) = block(y) - y  with the attention silent

A silent sublayer is not computed, and says zeros of the form in which it speaks; its hooks, and so the adapters on it,
do not run either. Both together silent must leave a block that says what it was given, which is tried once: a norm
behind the sum, as BERT's, is no summand of the stream.

Legend: x, y states (B, T, D), F, G summands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.techniques.sublayers import Sublayer, sublayers

_SLOT = "_compiled_call_impl"
"""Where a module looks for what is to be called in its place, hooks and all."""

Call = Callable[[Tensor], Any]


class Halves:
    """The two sublayers of one block.

    Attributes:
        attention: modules that are silenced together, by their names in the block; the first is the sublayer.
        feed_forward: as `attention`.
    """

    def __init__(self, attention: Sequence[str], feed_forward: Sequence[str]) -> None:
        self.attention, self.feed_forward = tuple(attention), tuple(feed_forward)
        self._forms: dict[str, int | None] = {}

    def of(self, block: nn.Module, call: Call, learn: Call, x: Tensor) -> tuple[Call, Call]:
        """x -> x + F(x) and x -> x + G(x), each in the form in which the block speaks.

        Args:
            block: that this is of.
            call: the block's own call, all but its states given.
            learn: the same without a cache, for a first look; it leaves nothing behind.
            x: a state (B, T, D).

        Raises:
            TechniqueError: the block is no sum of its sublayers.
        """
        if not self._forms:
            self._learn(block, learn, x)

        def without(names: Sequence[str]) -> Call:
            def run(state: Tensor) -> Any:
                with self._silent(block, names):
                    return call(state)

            return run

        return without(self.feed_forward), without(self.attention)

    @torch.no_grad()
    def _learn(self, block: nn.Module, call: Call, x: Tensor) -> None:
        """In what form the sublayers speak, and that the block adds them up."""
        names = (*self.attention, *self.feed_forward)
        found: dict[str, int | None] = {}
        devices = [x.device] if x.device.type == "cuda" else []
        with cast("Any", torch.random).fork_rng(devices=devices):
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(_watched(block.get_submodule(name), name, found))
                call(x)
            self._forms = found
            with self._silent(block, names):
                said = call(x)
        said = cast("tuple[Tensor, ...]", said)[0] if isinstance(said, tuple) else said
        if not torch.equal(said, x):
            self._forms = {}
            raise TechniqueError(
                "reversible.form=additive: this model's blocks are not the sum of their input, their attention and "
                "their feed-forward",
                got=type(block).__name__,
                wanted="norms in front of the sublayers, as in Llama or GPT-2",
                cure="set reversible.form=bdia, which takes any block",
            )

    @contextmanager
    def _silent(self, block: nn.Module, names: Sequence[str]) -> Generator[None, None, None]:
        with ExitStack() as stack:
            for name in names:
                module = block.get_submodule(name)
                stack.enter_context(_instead(module, _zeros(self._forms.get(name))))
            yield


def halves_of(model: nn.Module) -> dict[str, Halves]:
    """The halves of each block, by the block's name.

    Raises:
        TechniqueError: a block has not just an attention and a feed-forward, or one of them is not one module.
    """
    found: dict[str, Halves] = {}
    every = sublayers(model)
    for block in seams.blocks(model):
        mine = [s for s in every if s.name.startswith(f"{block.name}.")]
        roles = [s.role for s in mine]
        if sorted(roles) != ["attention", "feed-forward"]:
            raise _unfit(block.name, " and ".join(roles) or "neither")
        one, other = sorted(mine, key=lambda s: s.role)
        found[block.name] = Halves(_modules(model, one, block), _modules(model, other, block))
    return found


def _modules(model: nn.Module, sublayer: Sublayer, block: seams.Block) -> tuple[str, ...]:
    """The sublayer's module, and a norm of its own behind it, by their names in the block."""
    maps = {id(site.module) for site in seams.map_sites(model)}
    if id(sublayer.reader) in maps:
        raise _unfit(block.name, f"a {sublayer.role} that is not one module")
    start = f"{block.name}."
    every = cast("Iterable[tuple[str, nn.Module]]", block.module.named_modules())
    reader = next(name for name, module in every if module is sublayer.reader)
    return tuple(dict.fromkeys((reader, sublayer.name.removeprefix(start))))


def _unfit(block: str, got: str) -> TechniqueError:
    return TechniqueError(
        "reversible.form=additive needs blocks of one attention and one feed-forward, each a module of its own",
        got=f"{block}: {got}",
        cure="set reversible.form=bdia, which takes any block",
    )


@contextmanager
def _instead(module: nn.Module, call: Callable[..., Any]) -> Generator[None, None, None]:
    before = getattr(module, _SLOT)
    setattr(module, _SLOT, call)
    try:
        yield
    finally:
        setattr(module, _SLOT, before)


@contextmanager
def _watched(
    module: nn.Module, name: str, found: dict[str, int | None]
) -> Generator[None, None, None]:
    """Inside the block the form in which a module speaks is noted: how long a tuple, or None for a tensor."""
    own: Callable[..., Any] = getattr(module, _SLOT) or cast("Any", module)._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        said = own(*args, **kwargs)
        several = cast("tuple[Any, ...]", said) if isinstance(said, tuple) else None
        found[name] = None if several is None else len(several)
        return cast("Any", said)

    with _instead(module, call):
        yield


def _zeros(form: int | None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given: Tensor = args[0] if args else next(iter(kwargs.values()))
        none = torch.zeros_like(given)
        return none if form is None else (none, *(None,) * (form - 1))

    return call
