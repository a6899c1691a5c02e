"""`afina eval`: measure a run or a model on data."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from afina.cli.common import table
from afina.cli.loading import (
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
from afina.cli.output import note, progress, refuse_unwritable, write_json, write_jsonl
from afina.errors import ConfigError, nearest

EXAMPLES = (
    "afina eval runs/calls-001 test.jsonl",
    "afina eval runs/calls-001 test.jsonl --beside-base --limit 200 --json scores.json",
    "afina eval runs/calls-001 test.jsonl --metrics exact_match,field:intent --rows-out rows.jsonl",
    "afina eval smollm2-135m questions.jsonl --metrics accuracy   # rows with a `choices` column",
    "afina eval smollm2-135m book.txt --metrics loss --set data.max_tokens=512",
)

ANSWERED = ("exact_match", "json_match")
FIELD = re.compile("field:.+")
METRICS = ("loss", "perplexity", *ANSWERED, "accuracy", "accuracy_per_token", "field:NAME")

# Of a run's data settings these say which of its training rows were taken, which is nothing to other data.
OF_TRAINING = ("max_rows", "subset", "split", "val_fraction")


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
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="any setting, as data.columns.prompt=question")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    token: Token = None,
    offline: Offline = False,
) -> None:
    """Measure a run or a model on data.

    The loss is the sum of the token losses over the trained tokens, as in training. Exact match compares a greedy
    answer with the reference, white space around them aside; json_match and field:NAME compare JSON values; accuracy
    chooses the likeliest of the row's `choices`, by the whole answer and by token. A run's data is read as its training
    data was.
    """
    wanted = parse_metrics(metrics)
    refuse_unwritable(json_file, rows_out, force=force)
    source = Source(name, dtype, device, revision, token, offline)
    loaded = load_source(source, with_base=beside_base)
    flags = {
        "model": loaded.target.base,
        "data.source": data,
        "eval.max_rows": limit,
        "eval.batch_rows": batch_rows,
        "eval.answers.batch_rows": batch_rows,
        "eval.answers.max_new_tokens": max_new_tokens,
        **_eval_flags(wanted),
    }
    config = _resolve(loaded, flags, sets or [])
    from afina.evaluate import inputs

    prepared = inputs.prepared(loaded.model, loaded.tokenizer, config.source, config.data)
    for line in prepared.report.lines():
        note(line)
    scores = _measure(loaded.model, loaded, prepared.rows, config.eval)
    before = None
    if beside_base:
        with loaded.base() as base:
            before = _measure(base, loaded, prepared.rows, config.eval)
    show = (
        note if "-" in (json_file, rows_out) else print
    )  # JSON on the standard output is alone there
    show(report(scores, before, wanted))
    try:
        if json_file is not None:
            write_json(json_file, _document(name, loaded, prepared, config, scores, before))
    finally:  # the rows are not lost with the scores' file
        if rows_out is not None:
            write_jsonl(rows_out, _rows(scores, before))


def parse_metrics(text: str | None) -> tuple[str, ...] | None:
    """The metrics of a comma-separated list; None for no list.

    Raises:
        ConfigError: one is unknown.
    """
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [n for n in names if n not in METRICS[:-1] and not FIELD.fullmatch(n)]
    if unknown or not names:
        near = nearest(unknown[0], METRICS) if unknown else []
        raise ConfigError(
            "--metrics names something that is not measured",
            got=", ".join(unknown) or repr(text),
            wanted=", ".join(METRICS),
            cure=f"did you mean {near[0]}?" if near else None,
        )
    return names


def _eval_flags(wanted: tuple[str, ...] | None) -> dict[str, Any]:
    """What the metrics ask of the evaluation: whether answers are needed, and which fields of them."""
    if wanted is None:
        return {}
    fields = [name.removeprefix("field:") for name in wanted if name.startswith("field:")]
    needed = bool(fields) or any(name in ANSWERED for name in wanted)
    return {"eval.generate": needed, "eval.fields": fields or None}


def _resolve(loaded: Loaded, flags: dict[str, Any], sets: list[str]) -> Any:
    """A run's own settings under the flags and --set, as a run configuration."""
    from afina.config import load_config
    from afina.data.settings import DataSettings
    from afina.table import TECHNIQUES

    run = loaded.target.run
    fresh = {f"data.{name}": DataSettings.model_fields[name].default for name in OF_TRAINING}
    said = {text.partition("=")[0].strip() for text in sets}
    cleared = [f"{path}={_word(value)}" for path, value in fresh.items() if path not in said]
    return load_config(
        techniques=TECHNIQUES,
        data_settings=DataSettings,
        yaml_path=None if run is None else run / "config.yaml",
        flags=flags,
        sets=[*(cleared if run is not None else ()), *sets],
    ).config


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
    missing = [name for name in wanted or () if name not in scores.values]
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
    lines += [f"{name}: these rows do not have what it needs" for name in missing]
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
        return f"nats a token, {scores.trained_tokens} tokens in {scores.counts[name]} rows"
    return f"{scores.counts[name]} rows" if name in scores.counts else ""


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
