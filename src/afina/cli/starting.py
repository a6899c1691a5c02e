"""Where a run starts that does not start from nothing: at an adapter's weights, or where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OF_THE_BASE = "techniques.quantize"
"""Settings that are of the base and of no adapter."""

OF_THE_RUN = ("layer_decay", "gradient_noise", "curriculum")
"""Techniques that change how a run trains, and that no adapter has."""


def quantiser_of(settings: Any) -> Any:
    """The technique by which the base is quantised while it is loaded; None where it is not.

    Args:
        settings: of the run.
    """
    return next((t for t in settings.techniques if t.key == "quantize"), None)


def in_parts(
    settings: Any, hub: dict[str, Any], device: str | None, *, init_from: Path | None
) -> tuple[Any, Any, Any, Any] | str:
    """A model of which each process reads its own part later: see `models.in_parts`.

    Args:
        settings: of the run.
        hub: how to reach it.
        device: of this process.
        init_from: the adapter to start from; None for a run that starts from nothing.

    Returns:
        The model, its tokenizer, what was changed in it, and its values; or why it has to be read whole.
    """
    from afina.models.in_parts import NotInPartsError, load_in_parts
    from afina.table import apply
    from afina.train.filling import refuse_whole_start

    if init_from is not None:
        return "the run starts from an adapter"
    if quantiser_of(settings) is not None:
        return "its weights are packed as they are read"
    try:
        model, tokenizer, unread = load_in_parts(
            settings.model,
            dtype=settings.train.dtype,
            device=device,
            revision=settings.revision,
            **head_for(settings),
            **hub,
        )
    except NotInPartsError as why:
        return str(why)
    whole = refuse_whole_start(model, settings.techniques)
    if whole is not None:
        return whole
    seed = settings.train.seed
    edit = apply(model, settings.techniques, seed=seed, undoable=False, tokenizer=tokenizer)
    return model, tokenizer, edit, unread


TASKS = {"text_label": "classification", "tokens_tags": "token_classification"}
"""Format of rows with classes -> the task that the model is loaded for."""


def head_for(settings: Any) -> dict[str, Any]:
    """How a model is loaded for these rows, as arguments of `afina.load`: with a head for their classes, if they have.

    Data that cannot be read says nothing here: the run says why.
    """
    from afina.data.dataset import classes
    from afina.errors import AfinaError

    if settings.source is None:
        return {}
    try:
        found = classes(settings.source, settings.data)
    except AfinaError:
        return {}
    return {} if found is None else {"task": TASKS[found[0]], "labels": found[1]}


def is_finished(out: Path) -> bool:
    """Whether the run has nothing left to do, and nothing else is asked for: known without its model and data."""
    from afina.train import checkpoint, result, state
    from afina.train.report import reporter

    done = result.read(out)
    newest = checkpoint.found(out)
    if done is None or not newest or checkpoint.step_of(newest[-1]) != done.steps:
        return False
    then = state.or_none(newest[-1] / checkpoint.STATE)
    reporter().say(result.told(done, done.steps if then is None else then.total_steps))
    return True


def start_from(
    model: Any, resolved: Any, source: Path, *, allow_partial: bool = False
) -> tuple[Any, Any]:
    """The edit that an adapter's folder describes, with its weights, and the settings that say so.

    Raises:
        AdapterError: it does not fit the model.
        ConfigError: for technique settings of one's own: the adapter's decide.
    """
    from dataclasses import replace

    from afina.adapters import files
    from afina.errors import ConfigError
    from afina.table import apply

    free = ("dropout", "loraplus_ratio", "tinit", "tfinal", "delta_t")
    own = [
        path
        for path, origin in resolved.origins.items()
        if path.count(".") > 1
        and path.startswith("techniques.")
        and not path.startswith(OF_THE_BASE)
        and path.split(".")[1] not in OF_THE_RUN
        and origin != "default"
        and path.rpartition(".")[2] not in free
    ]
    if own:
        raise ConfigError(
            "--init-from takes the techniques and their settings from the adapter",
            got=", ".join(own),
            cure=f"leave these out; only {', '.join(free)} may differ",
        )
    folder = source / "adapter" if (source / "adapter").is_dir() else source
    fitted = files.fit(model, folder, allow_partial=allow_partial)
    every = (*fitted.beside, *fitted.techniques)
    keys = tuple(technique.key for technique in every)
    chosen = tuple(key for key in resolved.keys if key not in ("quantize", *OF_THE_RUN))
    if chosen not in ((), ("lora",), keys):
        raise ConfigError(
            "--init-from takes the techniques from the adapter",
            got=", ".join(chosen),
            wanted=f"those that {folder} has: {', '.join(keys)}",
            cure="leave --technique out",
        )
    given = {technique.key: technique for technique in resolved.config.techniques}
    techniques = tuple(_but_free(t, given.get(t.key), free) for t in every)
    base = quantiser_of(resolved.config)
    of_run = tuple(t for t in resolved.config.techniques if t is base or t.key in OF_THE_RUN)
    techniques, keys = (*of_run, *techniques), (*(t.key for t in of_run), *keys)
    edit = apply(model, techniques, seed=resolved.config.train.seed, undoable=False)
    files.restore(edit, fitted.tensors)
    edit.notes.extend(fitted.notes)
    config = replace(resolved.config, techniques=techniques)
    kept = {p: o for p, o in resolved.origins.items() if not p.startswith("techniques.")}
    origins = {
        f"techniques.{t.key}.{name}": resolved.origins.get(f"techniques.{t.key}.{name}", "default")
        if (name in free and t.key in given) or t in of_run
        else f"--init-from {folder}"
        for t in techniques
        for name, _ in t
    } | {f"techniques.{key}": f"--init-from {folder}" for key in keys}
    origins |= {f"techniques.{t.key}": resolved.origins[f"techniques.{t.key}"] for t in of_run}
    return edit, replace(resolved, config=config, keys=keys, origins={**kept, **origins})


def _but_free(technique: Any, given: Any, free: tuple[str, ...]) -> Any:
    """An adapter's technique with the values of these settings that the user gave for it."""
    names = [name for name in free if given is not None and hasattr(given, name)]
    return technique.model_copy(update={name: getattr(given, name) for name in names})


def scoring(settings: Any, tokenizer: Any) -> dict[str, Any]:
    """What validates by more than the loss, as arguments of `RunOptions`: none where the loss alone chooses.

    Args:
        settings: of the run.
        tokenizer: the model's.
    """
    if settings.train.best == "loss":
        return {}
    from afina.evaluate.evaluate import evaluate
    from afina.evaluate.measured import measured

    def score(model: Any, rows: Any) -> dict[str, float]:
        values = evaluate(model, tokenizer, rows, settings.eval).values
        return {name: value for name, value in values.items() if name != "loss"}

    def names(rows: Any) -> tuple[str, ...]:
        return measured(rows, settings.eval, tokenizer)

    return {"evaluate": score, "measured": names}


def sources_of(settings: Any, config: Path | None, init_from: Path | None) -> dict[str, object]:
    """What a run is made from, as `afina.train.folder.refuse_inside` takes it."""
    return {
        "the model": settings.model,
        "the training data": settings.source,
        "the validation data": settings.val,
        "the adapter to start from": init_from,
        "the configuration": config,
    }
