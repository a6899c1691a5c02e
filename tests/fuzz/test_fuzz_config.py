"""Configuration in YAML, flags and `--set`: whatever is written, settings or an error that names the place."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from afina.config import dump, load_config
from afina.config.document import read_file, read_text, scalar, write
from afina.data.settings import DataSettings
from afina.table import TECHNIQUES
from tests.fuzz.kit import VALUES, fuzz, mutated, result_or_error, texts

RUN = """\
model: smollm2-135m
data: {source: calls.jsonl, max_tokens: 512, columns: {prompt: question}}
val: held_out.jsonl
techniques:
  - lora: {rank: 8, target: [q_proj, "v_proj"], layers: 0-5,-1, rank_pattern: {k: 4}}
train:
  steps: 100          # optimiser steps
  lr: 1e-3
  betas: [0.9, 0.99]
eval: {answers: {max_new_tokens: 64, stop: ["###"]}}
"""
SEEDS = [
    RUN.encode(),
    b"model: a\ndata: b\ntechniques: [lora]\n",
    b"a: &x [1, *x]\nb: {<<: *x}\n",
    b"? {a: b}\n: c\n",
    b"- 1\n- .nan\n- 0x1F\n- 1e400\n",
    b"",
]
NAMES = ["train.lr", "train.steps", "data.columns.prompt", "techniques.lora.rank", "techniques", "eval", "x", "data",
         "techniques.lora.rank_pattern.q_proj", "techniques.full.layers", "eval.answers.stop", "train.betas",
         ""]  # fmt: skip
SET = st.builds(
    "{}{}{}".format,
    st.sampled_from(NAMES) | texts(10),
    st.sampled_from(["=", "", " = "]),
    texts(20),
)


@fuzz(300)
@given(text=mutated(SEEDS).map(lambda content: content.decode("utf-8", "replace")) | texts(80))
def test_documents(text: str) -> None:
    result_or_error(lambda: read_text(text, "run.yaml"))


@fuzz(40)
@given(content=mutated(SEEDS))
def test_document_files(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    result_or_error(lambda: read_file(path))


@fuzz(250)
@given(
    content=st.none() | mutated(SEEDS[:2]),
    sets=st.lists(SET, max_size=3),
    flags=st.dictionaries(st.sampled_from(NAMES[:5]), VALUES, max_size=2),
)
def test_configurations(
    tmp_path_factory: Any, content: Any, sets: list[str], flags: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    if content is not None:
        path.write_bytes(content)
    if not isinstance(flags.get("techniques"), (list, type(None))):
        del flags["techniques"]  # the command line gives a list
    resolved = result_or_error(
        lambda: load_config(
            techniques=TECHNIQUES,
            data_settings=DataSettings,
            yaml_path=None if content is None else path,
            flags=flags,
            sets=sets,
            default_techniques=("lora",),
        )
    )
    if resolved is not None:
        path.write_text(dump(resolved), encoding="utf-8")
        again = load_config(techniques=TECHNIQUES, data_settings=DataSettings, yaml_path=path)
        assert again.config == resolved.config


@fuzz(200)
@given(value=VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    back = read_text(f"x: {write(value)}", "run.yaml").value["x"]
    assert repr(back) == repr(value) or back == value


@fuzz(100)
@given(text=texts(20))
def test_scalars(text: str) -> None:
    scalar(text)


@fuzz(150)
@given(
    kind=st.sampled_from([*TECHNIQUES.values(), DataSettings]),
    values=st.dictionaries(
        st.sampled_from(
            [
                "rank",
                "alpha",
                "layers",
                "target",
                "rank_pattern",
                "dropout",
                "max_tokens",
                "format",
                "rnk",
            ]
        ),
        VALUES,
        max_size=3,
    ),
)
def test_settings_in_python(kind: Any, values: dict[str, Any]) -> None:
    result_or_error(lambda: kind(**values))
