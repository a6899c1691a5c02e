"""Runs the blocks below the lowest one that trains once a row, and enters the model there in later epochs.

Where only upper blocks train, what enters the lowest of them is the same in every epoch: it is a function of the row's
tokens. The first time a row is seen all blocks run, and its states at that block are kept (`train.inputs`); a
micro-batch all of whose rows are known skips the blocks below. No gradient ever went there, so that nothing else
changes.

The model's own forward pass runs in either case: blocks below are exchanged for ones that hand on what they get, and
the lowest trained one is given the kept states in its place. That this model then computes the same is tried on the
first micro-batch of a run.

Legend: B lines, T tokens of a line, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from afina.data.prefix import tree
from afina.errors import TechniqueError
from afina.seams.calls import Call, instead
from afina.train.inputs import Store, key_of
from afina.train.lowest import OFF, SETTING, Place
from afina.train.passes import Passes
from afina.types import Row

WITHIN = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative difference of losses that is rounding, in half precision."""


class Entering:
    """The way into one model at its lowest trained block.

    Attributes:
        place: where that is.
        passes: how micro-batches go through the model.
        store: the states that are known.
    """

    def __init__(self, place: Place, passes: Passes, store: Store) -> None:
        self.place, self.passes, self.store = place, passes, store
        modules = list(place.blocks.values())
        self._below, self._first = modules[: place.first], modules[place.first]
        # What a block gives beside the states, which is nothing in training, in the models that have a place for it.
        self._beside: tuple[None, ...] | None = None

    @staticmethod
    def begin(
        place: Place,
        passes: Passes,
        base: str,
        run: tuple[Path, int],
        parts: Sequence[Sequence[Row]],
    ) -> Entering:
        """That of a run, tried out.

        Args:
            place: where the model is entered.
            passes: how micro-batches go through the model.
            base: fingerprint of the base's weights.
            run: its folder, and the step that it goes on after.
            parts: micro-batches of the run, one of them to try.

        Raises:
            RunError: the states of an earlier part of the run cannot be read or removed.
            TechniqueError: the model cannot be entered there.
        """
        dtype = str(next(passes.model.parameters()).dtype)
        out, step = run
        header = {"format": "1", "base": base, "dtype": dtype, "block": place.name}
        entering = Entering(place, passes, Store(out, header, step))
        entering.prove(max(parts, key=lambda rows: sum(row.trained_tokens for row in rows)))
        return entering

    @contextmanager
    def around(self, rows: Sequence[Row], step: int, number: int) -> Generator[None, None, None]:
        """Inside the block a forward pass over these rows skips what is known, or what it learns is kept afterwards.

        Args:
            rows: of the micro-batch, as they are given to `Passes.batch`.
            step: counted from 0.
            number: of the micro-batch in its step.

        Raises:
            TechniqueError: something below the lowest trained block trains after all.
            RunError: the states cannot be written.
        """
        keys = [key_of(row) for row in rows]
        if all(key in self.store for key in keys):
            with self._entered(rows, self.store.read(keys)):
                yield
            return
        caught: dict[str, Tensor] = {}
        with self._watched(rows, keys, caught):
            yield
        self.store.add(caught, step + 1, number)

    def prove(self, rows: Sequence[Row]) -> None:
        """Raises unless the model computes the same losses both ways.

        Raises:
            TechniqueError: it does not.
        """
        batch, keys = self.passes.batch(rows), [key_of(row) for row in rows]
        caught: dict[str, Tensor] = {}
        devices = [self.passes.device] if self.passes.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            with self._watched(rows, keys, caught):
                whole = self.passes.losses(batch).detach()
            torch.manual_seed(0)
            with self._entered(rows, [caught[key] for key in keys]):
                entered = self.passes.losses(batch).detach()
        within = WITHIN.get(next(self.passes.model.parameters()).dtype, 1e-4)
        if not torch.allclose(whole, entered, rtol=within, atol=within, equal_nan=True):
            raise TechniqueError(
                f"{SETTING}: this model's blocks hand on more than what enters the next one",
                got=f"losses that differ by {float((whole - entered).abs().max()):.3g}",
                cure=OFF,
            )

    @contextmanager
    def _watched(
        self, rows: Sequence[Row], keys: Sequence[str], caught: dict[str, Tensor]
    ) -> Generator[None, None, None]:
        """Inside the block the states of the rows are put into `caught` as they enter."""
        places = self._places(rows)

        def watch(call: Call) -> Call:
            def run(*args: Any, **kwargs: Any) -> Any:
                hidden_BTD = self._hidden(args, kwargs)
                for key, (line, at) in zip(keys, places, strict=True):
                    caught[key] = hidden_BTD.detach()[line, at.to(hidden_BTD.device)]
                out = call(*args, **kwargs)
                self._beside = (None,) * (len(out) - 1) if isinstance(out, tuple) else None
                return out

            return run

        with instead({self._first: watch}):
            yield

    @contextmanager
    def _entered(
        self, rows: Sequence[Row], states: Sequence[Tensor]
    ) -> Generator[None, None, None]:
        """Inside the block the blocks below do nothing, and these states (tokens, D) enter."""
        places = self._places(rows)

        def enter(call: Call) -> Call:
            def run(*args: Any, **kwargs: Any) -> Any:
                given_BTD = self._hidden(args, kwargs)
                hidden_BTD = torch.zeros_like(given_BTD)
                for state, (line, at) in zip(states, places, strict=True):
                    hidden_BTD[line, at.to(hidden_BTD.device)] = state.to(hidden_BTD.device)
                if args:
                    return call(hidden_BTD, *args[1:], **kwargs)
                return call(**{**kwargs, "hidden_states": hidden_BTD})

            return run

        def hand_on(call: Call) -> Call:
            def run(*args: Any, **kwargs: Any) -> Any:
                hidden = args[0] if args else kwargs["hidden_states"]
                return hidden if self._beside is None else (hidden, *self._beside)

            return run

        ways: dict[nn.Module, Callable[[Call], Call]] = dict.fromkeys(self._below, hand_on)
        with instead({**ways, self._first: enter}):
            yield

    def _hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What enters the lowest trained block (B, T, D)."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise TechniqueError(
                f"{SETTING}: what this model's blocks are given is not known",
                got=type(self._first).__name__,
                cure=OFF,
            )
        if hidden.requires_grad:
            raise TechniqueError(
                f"{SETTING}: something below {self.place.name} trains, so what enters it changes",
                got="an embedding, a head that is tied to it, or a prompt",
                cure=OFF,
            )
        return hidden

    def _places(self, rows: Sequence[Row]) -> list[tuple[int, Tensor]]:
        """Line and places of each row's tokens in the batch of these rows."""
        if self.passes.shared:
            return [(0, torch.tensor(places)) for places in tree(rows).places]
        lengths = [len(row.tokens) for row in rows]
        if not self.passes.packed:
            return [(line, torch.arange(length)) for line, length in enumerate(lengths)]
        ends = torch.tensor(lengths).cumsum(0).tolist()  # pyright: ignore[reportUnknownMemberType]
        return [
            (0, torch.arange(end - length, end)) for end, length in zip(ends, lengths, strict=True)
        ]
