"""`afina eval`: measure a run or a model on data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from afina.cli.common import table
from afina.cli.loading import (
    AllowPartial,
    Device,
    Dtype,
    Loaded,
    Name,
    Offline,
    Revision,
    Source,
    Token,
    load_source,
)
from afina.cli.metrics import (
    METRICS,
    eval_flags,
    parse_metrics,
    refuse_unchosen,
    refuse_unmeasured,
)
from afina.cli.output import (
    note,
    progress,
    refuse_over_inputs,
    refuse_unwritable,
    write_json,
    write_jsonl,
)
from afina.cli.several import Further, targets
from afina.errors import ConfigError, counted

EXAMPLES = (
    "afina eval runs/calls-001 test.jsonl",
    "afina eval runs/calls-001 test.jsonl --beside-base --limit 200 --json scores.json",
    "afina eval runs/calls-001 test.jsonl --metrics exact_match,field:intent --rows-out rows.jsonl",
    "afina eval smollm2-135m questions.jsonl --metrics accuracy   # rows with a `choices` column",
    "afina eval smollm2-135m book.txt --metrics loss --set data.max_tokens=512",
    "afina eval runs/calls-001:0.7 test.jsonl --adapter runs/chat-001:0.3",
)

IDLE = ("train", "techniques", "model", "revision", "val")
"""Groups and settings of a run that an evaluation never looks at."""

# Of a run's data settings these say which of its training rows were taken, which is nothing to other data.
OF_TRAINING = ("max_rows", "subset", "split", "val_fraction", "on_bad_row")


def command(
    name: Name,
    data: Annotated[str, typer.Argument(help="jsonl, json, csv, parquet, txt, folder, hub id")],
    json_file: Annotated[
        str | None, typer.Option("--json", help="the scores, as JSON; - is the standard output")
    ] = None,
    rows_out: Annotated[str | None, typer.Option(help="each row's scores, as jsonl")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace these files")] = False,
    limit: Annotated[int | None, typer.Option(help="only the first rows")] = None,
    metrics: Annotated[
        str | None, typer.Option(help=f"only some of {', '.join(METRICS)}; default: all that apply")
    ] = None,
    beside_base: Annotated[
        bool, typer.Option("--beside-base", help="also the base, and the difference row by row")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="most tokens of an answer")] = None,
    batch_rows: Annotated[int | None, typer.Option(help="rows and prompts at once")] = None,
    on_bad_row: Annotated[
        str | None, typer.Option(help="error (default), or skip: drop and list such rows")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="any setting, as data.columns.prompt=question")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    token: Token = None,
    offline: Offline = False,
    allow_partial: AllowPartial = False,
    adapter: Further = None,
) -> None:
    """Measure a run or a model on data.

    The loss is the sum of the token losses over the trained tokens, as in training. Exact match compares a greedy
    answer with the reference, white space around them aside; json_match and field:NAME compare JSON values; accuracy
    chooses the likeliest of the row's `choices`, by the whole answer and by token. Of a classifier accuracy is the
    share of right classes, macro_f1 the mean F1 of the classes, and the commonest confusions are shown. A run's data
    is read as its training data was.
    """
    wanted = parse_metrics(metrics)
    refuse_unwritable(json_file, rows_out, force=force)
    every = [one for one, _ in targets(name, adapter or ())]
    target = every[0]
    places = [place for one in every for place in (one.adapter, one.run)]
    refuse_over_inputs([json_file, rows_out], (data, target.base, *places))
    flags = {
        "model": target.base,
        "data.source": data,
        "data.on_bad_row": on_bad_row,
        "eval.max_rows": limit,
        "eval.batch_rows": batch_rows,
        "eval.answers.batch_rows": batch_rows,
        "eval.answers.max_new_tokens": max_new_tokens,
        **eval_flags(wanted),
    }
    config = _resolve(target.run, flags, sets or [])
    source = Source(
        name, dtype, device, revision, token, offline, allow_partial, tuple(adapter or ())
    )
    loaded = load_source(source, with_base=beside_base)
    prepared, scores, before = _scores(loaded, config, wanted, beside_base=beside_base)
    # JSON on the standard output is alone there.
    show = note if "-" in (json_file, rows_out) else print
    show(report(scores, before, wanted))
    try:
        if json_file is not None:
            write_json(json_file, _document(name, loaded, prepared, config, scores, before))
    finally:  # the rows are not lost with the scores' file
        if rows_out is not None:
            write_jsonl(rows_out, _rows(scores, before))
    refuse_unmeasured(wanted, scores.values)


def _scores(
    loaded: Loaded, config: Any, wanted: tuple[str, ...] | None, *, beside_base: bool
) -> tuple[Any, Any, Any]:
    """The prepared rows, the model's scores, and its base's, if asked for."""
    from afina.evaluate import inputs

    prepared = inputs.prepared(loaded.model, loaded.tokenizer, config.source, config.data)
    refuse_unchosen(wanted, prepared.rows, config.eval.choices)
    for line in prepared.report.lines():
        note(line)
    scores = _measure(loaded.model, loaded, prepared.rows, config.eval)
    if not beside_base:
        return prepared, scores, None
    with loaded.base() as base:
        return prepared, scores, _measure(base, loaded, prepared.rows, config.eval)


def _resolve(run: Path | None, flags: dict[str, Any], sets: list[str]) -> Any:
    """A run's own settings under the flags and --set, as a run configuration.

    Raises:
        ConfigError: one is unknown, out of range, or of no effect here.
    """
    from afina.config import load_config
    from afina.data.settings import DataSettings
    from afina.table import TECHNIQUES

    _refuse_idle(sets)
    fresh = {f"data.{name}": DataSettings.model_fields[name].default for name in OF_TRAINING}
    said = {text.partition("=")[0].strip() for text in sets}
    said |= {path for path, value in flags.items() if value is not None}
    cleared = [f"{path}={_word(value)}" for path, value in fresh.items() if path not in said]
    return load_config(
        techniques=TECHNIQUES,
        data_settings=DataSettings,
        yaml_path=None if run is None else run / "config.yaml",
        flags=flags,
        sets=[*(cleared if run is not None else ()), *sets],
    ).config


def _refuse_idle(sets: list[str]) -> None:
    """Raises for a setting that an evaluation never looks at, which its user thinks it does."""
    for text in sets:
        path = text.partition("=")[0].strip()
        if path.partition(".")[0] in IDLE:
            raise ConfigError(
                f"--set {path} changes nothing in an evaluation",
                got=text,
                wanted="data.… or eval.…",
                cure="leave it out; what was trained is fixed, and the model is the first argument",
            )


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


def _measure(model: Any, loaded: Loaded, rows: Any, settings: Any) -> Any:
    from afina.evaluate.evaluate import evaluate

    return evaluate(model, loaded.tokenizer, rows, settings, on_progress=progress())


def report(scores: Any, before: Any = None, wanted: tuple[str, ...] | None = None) -> str:
    """The table of scores with standard errors; with `before` also the base's and the differences.

    Args:
        scores: of the model.
        before: of its base.
        wanted: the metrics to show; None shows all.
    """
    names = [name for name in scores.values if wanted is None or name in wanted]
    lines = []
    if before is None:
        rows = [(name, _value(scores, name), _over(scores, name)) for name in names]
        lines.append(table(rows))
    else:
        from afina.evaluate.evaluate import compare

        changes = compare(scores, before)
        rows = [
            (name, _value(before, name), _value(scores, name), _change(changes.get(name)))
            for name in names
        ]
        lines.append(table(rows, head=("", "base", "tuned", "difference")))
    if scores.confusion is not None:
        lines += [f"{right}: {n} taken for {guess}" for right, guess, n in scores.confusion.worst()]
    return "\n".join(lines)


def _value(scores: Any, name: str) -> str:
    if name not in scores.values:
        return "-"
    error = scores.errors.get(name)
    return f"{scores.values[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _change(change: tuple[float, float] | None) -> str:
    return "" if change is None else f"{change[0]:+.4f} ± {change[1]:.4f}"


def _over(scores: Any, name: str) -> str:
    if name == "loss" and scores.trained_tokens:
        tokens = counted(scores.trained_tokens, "token")
        return f"nats a token, {tokens} in {counted(scores.counts[name], 'row')}"
    return counted(scores.counts[name], "row") if name in scores.counts else ""


def _document(
    name: str, loaded: Loaded, prepared: Any, config: Any, scores: Any, before: Any
) -> dict[str, Any]:
    import torch
    import transformers

    from afina import __version__
    from afina.evaluate.evaluate import compare

    document = {
        "model": name,
        "base": loaded.target.base,
        "adapter": None if loaded.target.adapter is None else str(loaded.target.adapter),
        "further": list(loaded.source.further),
        "data": config.source,
        "data_fingerprint": prepared.report.fingerprint,
        **scores.summary(),
    }
    if before is not None:
        document["base_scores"] = before.summary()
        document["difference"] = {
            metric: {"value": value, "standard_error": error}
            for metric, (value, error) in compare(scores, before).items()
        }
    document["settings"] = config.eval.model_dump(mode="json")
    document["versions"] = {
        "afina": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return document


def _rows(scores: Any, before: Any) -> list[dict[str, Any]]:
    if before is None:
        return scores.rows
    return [{**row, "base": base} for row, base in zip(scores.rows, before.rows, strict=True)]
