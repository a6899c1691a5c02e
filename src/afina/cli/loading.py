"""From what the user names to something that answers: the model, its adapter, and the tokenizer it was trained with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from afina.cli.common import Target, located
from afina.cli.several import put_all, targets
from afina.errors import ConfigError, ModelError
from afina.places import exists, local

Name = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL", help="a run, an adapter (also so many times: runs/a:0.7), or a model"
    ),
]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16, fp16; default: by device")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: the best there is")]
Revision = Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")]
Token = Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="token of the Hub")]
Offline = Annotated[bool, typer.Option("--offline", help="download nothing")]
AllowPartial = Annotated[
    bool,
    typer.Option("--allow-partial", help="apply what fits of an adapter that does not fit whole"),
]
Plain = Annotated[
    bool | None,
    typer.Option(
        "--plain/--chat-template",
        help="send the text as it is, or by the chat template; default: as the run was trained",
        show_default=False,
    ),
]

SPARE = 2
"""How many times what quantised weights take unpacked must be free for them to be unpacked."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from and how it is loaded, as the flags of a verb say.

    Attributes:
        allow_partial: apply what fits of an adapter that does not fit whole, and list what does not.
        further: adapters that act too, each with how often it counts; see `several`.
    """

    name: str
    dtype: str | None = None
    device: str | None = None
    revision: str | None = None
    token: str | None = None
    offline: bool = False
    allow_partial: bool = False
    further: tuple[str, ...] = ()

    def load(
        self, base: str, revision: str | None, quantize: Any = None, **head: Any
    ) -> tuple[Any, Any]:
        """The model `base` and its tokenizer; its weights quantised, where it is said how.

        `head` is what `adapters.card.head_of_base` says of a classifier.
        """
        from afina.models.hub import load
        from afina.table import restore

        model, tokenizer = load(
            base,
            dtype=self.dtype,
            device=self.device,
            quantize=quantize,
            revision=self.revision or revision,
            token=self.token,
            offline=self.offline or None,
            **head,
        )
        restore(model)
        return model, tokenizer


@dataclass
class Loaded:
    """A model that answers.

    Attributes:
        source: what was asked for.
        target: what that means.
        model: with the adapter on, if there is one.
        tokenizer: the one saved with the adapter, else the model's.
        edits: its adapters; none for a model alone.
    """

    source: Source
    target: Target
    model: Any
    tokenizer: Any
    edits: tuple[Any, ...] = ()
    _base: Any = field(default=None, repr=False)

    @property
    def chats(self) -> bool:
        """Whether prompts go through a chat template: there is one, and the run was not trained without."""
        trained = run_settings(self.target).get("data")
        forbidden = isinstance(trained, dict) and trained.get("template") == "none"
        return bool(getattr(self.tokenizer, "chat_template", None)) and not forbidden

    @contextmanager
    def base(self) -> Iterator[Any]:
        """The model as it was before the run, inside the block; see `load_source` about `with_base`."""
        if self.target.adapter is not None:
            with ExitStack() as off:
                for edit in self.edits:
                    off.enter_context(edit.disabled())
                yield self.model
            return
        if self._base is None:
            # Full fine-tuning leaves a whole model, so its base is another one.
            settings = run_settings(self.target)
            base = located(settings["model"], self.target.run or Path())
            head = _head_of(self.model)
            self._base, _ = self.source.load(base, settings.get("revision"), **head)
        yield self._base


def _head_of(model: Any) -> dict[str, Any]:
    """How the base of a fully trained classifier is loaded, as arguments of `afina.load`."""
    from afina import seams
    from afina.adapters.card import TASKS
    from afina.models.classes import class_names

    kind = seams.classifies(model)
    return {} if kind is None else {"task": TASKS[kind], "labels": class_names(model)}


def load_source(source: Source, *, with_base: bool = False) -> Loaded:
    """Loads what the user named.

    Args:
        source: what, and how.
        with_base: `Loaded.base` will be used, so there must be one.

    Raises:
        ConfigError: a base is needed, and this is a model alone.
        AfinaError: it cannot be found, or does not fit together.
    """
    every = targets(source.name, source.further)
    target = every[0][0]
    if with_base and target.adapter is None and target.run is None:
        raise ConfigError(
            "there is no base to compare with",
            got=f"{source.name}, which is no run and no adapter here",
            wanted="a run or an adapter",
            cure=_meant(source.name) or "leave --beside-base out",
        )
    model, tokenizer = _load_base(source, target)
    adapters = [(one.adapter, times) for one, times in every if one.adapter is not None]
    if not adapters:
        return Loaded(source, target, model, tokenizer)
    if target.adapter is not None and (target.adapter / "tokenizer_config.json").is_file():
        tokenizer = _saved_tokenizer(target.adapter, model)
    edits = put_all(model, adapters, allow_partial=source.allow_partial)
    _quicken(model)
    model.eval()
    return Loaded(source, target, model, tokenizer, edits)


def _quicken(model: Any) -> None:
    """Computes quantised weights back for good where memory allows: a CPU would else do it for every token."""
    from afina.models.packing import unpack, unpacked_bytes
    from afina.train.memory import free_bytes

    device = next(model.parameters()).device
    if device.type == "cpu" and SPARE * unpacked_bytes(model) <= (free_bytes(device) or 0):
        unpack(model)


def _load_base(source: Source, target: Target) -> tuple[Any, Any]:
    """The model under the adapter; where it cannot be found, the error says whose it is and where it was sought."""
    from afina.adapters.card import head_of_base
    from afina.adapters.rounded import read_rounded
    from afina.models.demo import DEMOS
    from afina.models.locate import TUNED, asking, nearby

    # An adapter answers beside the base that it was trained beside: a quantised one, if it was.
    rounded = None if target.adapter is None else read_rounded(target.adapter)
    head = {} if target.adapter is None else head_of_base(target.adapter)
    try:
        return source.load(target.base, target.revision, rounded, **head)
    except ModelError as error:
        if target.base in DEMOS or exists(local(target.base)):
            raise
        if target.adapter is not None:
            raise _base_gone(source.name, target, error) from error
        if target.run is not None:
            raise
        raise asking(error, nearby(source.name, TUNED)) from error


def _meant(name: str) -> str | None:
    """The question whether a run or an adapter here was meant by a name that is like its own."""
    from afina.models.locate import TUNED, nearby

    near = nearby(name, TUNED)
    return f"did you mean {' or '.join(near)}?" if near else None


def _base_gone(name: str, target: Target, error: ModelError) -> ModelError:
    """The error of an adapter whose base is not found."""
    from afina.models.remote import HUB_ID

    assert target.adapter is not None
    settings, key = (
        (target.run / "config.yaml", "model")
        if target.run
        else (target.adapter / "adapter_config.json", "base_model_name_or_path")
    )
    got = error.what
    cure = f"put the model back there, or correct {key} in {settings}"
    if not local(target.base).is_absolute():
        above = f"nor in {target.adapter.resolve()} or a folder above it"
        got = f"no such folder in {Path.cwd()}, {above}; {error.what}"
        cure = f"work in the folder that holds {target.base}, or correct {key} in {settings}"
        if HUB_ID.fullmatch(target.base) and error.cure:
            cure += f"; for a model of the hub: {error.cure}"
    return ModelError(
        f"the base of {name}, {target.base!r}, is not found from here",
        got=got,
        wanted="a model's folder, a .gguf file, or a model that the hub has",
        cure=cure,
    )


def _saved_tokenizer(folder: Path, model: Any) -> Any:
    from transformers import AutoTokenizer

    from afina.models.tokenizer import repair_pad

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    repair_pad(model, tokenizer)
    return tokenizer


def run_settings(target: Target) -> dict[str, Any]:
    """The settings in a run's `config.yaml`, as plain values; empty for what is no run."""
    from afina.config.document import read_file

    if target.run is None:
        return {}
    settings = read_file(target.run / "config.yaml").value
    return settings if isinstance(settings, dict) else {}


def is_plain(loaded: Loaded, asked: bool | None) -> bool:
    """Whether prompts are sent as they are.

    Args:
        loaded: the model.
        asked: by --plain (True) or --chat-template (False); None asks how the run was trained.

    Raises:
        ModelError: a model alone without a chat template, and nobody said --plain.
    """
    if asked is not None:
        return asked
    if loaded.chats:
        return False
    if loaded.target.run is None and not loaded.edits:
        raise ModelError(
            "this model has no chat template: it goes on with a text, and does not answer",
            got=loaded.source.name,
            cure="--plain sends the text as it is",
        )
    return True
