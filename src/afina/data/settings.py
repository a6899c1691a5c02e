"""The settings of data, as `data:` of a run's configuration and `--set data.KEY=VALUE` spell them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from afina.problems import Frozen

FormatName = Literal[
    "auto",
    "messages",
    "sharegpt",
    "prompt_completion",
    "alpaca",
    "text_label",
    "tokens_tags",
    "text",
]
Role = Literal["train", "val", "eval"]


class DataSettings(Frozen):
    """How a source becomes rows of tokens."""

    format: FormatName = Field(
        default="auto", description="what a row looks like; auto looks at every row"
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="our name -> the file's column, e.g. {prompt: question, completion: answer}",
    )
    subset: str | None = Field(default=None, description="configuration of a hub data set")
    revision: str | None = Field(
        default=None, description="commit, tag or branch of a hub data set"
    )
    split: str | None = Field(
        default=None,
        description="split of a hub data set or folder; default: train, or validation or test",
    )
    txt: Literal["line", "paragraph"] = Field(
        default="line", description="what one row of a .txt file is"
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="read only the first rows of the source"
    )
    template: Literal["auto", "chat", "none"] = Field(
        default="auto", description="the tokenizer's chat template: if it has one, always, or never"
    )
    train_on: Literal["all", "last", "text"] = Field(
        default="all", description="labels: every assistant turn, the last one, or every token"
    )
    max_tokens: int | None = Field(
        default=None, ge=2, description="longest row, in tokens; default: the model's context"
    )
    over_long: Literal["error", "drop", "truncate"] = Field(
        default="drop", description="what happens to a row longer than max_tokens; always reported"
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="what happens to rows that cannot be used: all are said at once, or dropped and listed",
    )
    packing: bool = Field(
        default=True, description="lay rows end to end, with no attention across them"
    )
    share_prefixes: bool = Field(
        default=True,
        description="compute what rows of a micro-batch begin with in common once; needs packing, and no dropout",
    )
    val_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of the rows held out, by a hash of their content",
    )
    seed: int = Field(default=0, description="changes which rows val_fraction holds out")
