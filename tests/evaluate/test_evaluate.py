"""Evaluation of tiny models: values worked out from the logits of single rows, in fp64."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from afina.config import EvalSettings, GenerateSettings
from afina.data.settings import DataSettings
from afina.errors import ConfigError, DataError, ModelError, RunError
from afina.evaluate.answers import with_answer
from afina.evaluate.evaluate import compare, evaluate
from afina.evaluate.losses import row_losses
from afina.types import Row
from tests.tiny import byte_tokenizer, row, says, tiny_gpt2, tiny_llama

PAIRS = [("a", "xyz"), ("what is it?", "no"), ("ü", "a rather longer answer"), ("go", "1")]
LOSS_ONLY = EvalSettings(generate=False)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [row(tokenizer, p, a, number=n) for n, (p, a) in enumerate(PAIRS)]


@torch.no_grad()
def losses_alone(model, one):
    """Token losses of a row by itself, from the whole matrix of logits."""
    logits = model(torch.tensor([one.tokens])).logits[0].log_softmax(-1)
    return [
        -float(logits[t - 1, one.tokens[t]]) for t in range(1, len(one.tokens)) if one.trained[t]
    ]


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_gpt2(n_positions=96)])
def test_loss_and_perplexity_equal_a_computation_by_hand(make, tokenizer, rows):
    model = make()
    got = evaluate(model, tokenizer, rows, LOSS_ONLY)
    each = [losses_alone(model, one) for one in rows]
    flat = [loss for losses in each for loss in losses]
    assert got.trained_tokens == len(flat) == sum(one.trained_tokens for one in rows)
    assert got.loss == pytest.approx(sum(flat) / len(flat), abs=1e-10)
    assert got.perplexity == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-10)
    for entry, losses in zip(got.rows, each, strict=True):
        assert entry["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-10)
        assert entry["tokens"] == len(losses)
    of_rows = [sum(losses) / len(losses) for losses in each]
    assert abs(got.loss - sum(of_rows) / len(of_rows)) > 1e-3  # a mean of rows is something else


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 8])
def test_neighbours_do_not_change_a_rows_loss(batch_rows, rows):
    model = tiny_llama()
    alone = [sum(losses_alone(model, one)) for one in rows]
    assert row_losses(model, rows, batch_rows) == pytest.approx(alone, abs=1e-9)


def test_logits_exist_only_where_some_row_is_trained(rows):
    model = tiny_llama()
    widths = []
    model.lm_head.register_forward_hook(lambda _m, _i, out: widths.append(out.shape[1]))
    row_losses(model, [rows[2]], 8)
    assert widths == [rows[2].trained_tokens]


def test_a_batch_is_cut_where_its_logits_would_be_too_many(monkeypatch, rows):
    from afina.evaluate import losses

    model = tiny_llama()
    whole = row_losses(model, rows, 8)
    batches = []
    model.register_forward_pre_hook(
        lambda _m, _a, kwargs: batches.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 1)
    assert losses.row_losses(model, rows, 8) == pytest.approx(whole, abs=1e-9)
    assert batches == [1, 1, 1, 1]


def test_a_row_without_labels_counts_for_nothing(tokenizer, rows):
    model = tiny_llama()
    silent = replace(rows[0], trained=(False,) * len(rows[0].tokens), id=9)
    with_it = evaluate(model, tokenizer, [*rows, silent], LOSS_ONLY)
    assert with_it.loss == evaluate(model, tokenizer, rows, LOSS_ONLY).loss
    assert with_it.rows[-1]["loss"] is None
    assert with_it.counts["loss"] == len(rows)


def test_exact_match_counts_answers_equal_to_the_reference(tokenizer):
    asked = [row(tokenizer, "q", answer, number=n) for n, answer in enumerate(["yes", "no", "ye"])]
    got = evaluate(says(tokenizer, "yes"), tokenizer, asked)
    assert got.exact_match == pytest.approx(1 / 3)
    assert got.errors["exact_match"] == pytest.approx(math.sqrt(2 / 9 / 3))
    assert [entry["exact_match"] for entry in got.rows] == [True, False, False]
    assert {entry["completion"] for entry in got.rows} == {"yes"}
    assert [entry["reference"] for entry in got.rows] == ["yes", "no", "ye"]
    assert {entry["stop_reason"] for entry in got.rows} == {"stop"}
    assert got.rows[0]["prompt"].endswith("assistant\n")
    assert "json_match" not in got.values


def test_json_answers_are_compared_as_values_and_by_field(tokenizer):
    said = '{"i": [2,40]}'
    wanted = ['{ "i": [2, 40] }', '{"i": [2, 40], "j": 0}', '{"k": 5}']
    asked = [row(tokenizer, "q", answer, number=n) for n, answer in enumerate(wanted)]
    answers = iter([said] * 3)

    def reply(model, tokenizer, prompts, settings, *, on_progress=None):
        from afina.models.generate import Completion

        assert prompts == [list(one.tokens[: one.prompt_tokens]) for one in asked]
        return [Completion(next(answers), (), "stop") for _ in prompts]

    settings = EvalSettings(fields=("i", "nowhere"))
    got = evaluate(tiny_llama(), tokenizer, asked, settings, generate=reply)
    assert got.values["exact_match"] == 0
    assert got.values["json_match"] == pytest.approx(1 / 3)
    assert got.values["field:i"] == 1.0
    assert got.counts["field:i"] == 2
    assert "field:nowhere" not in got.values


def test_a_reference_given_in_the_row_wins_over_its_tokens(tokenizer):
    asked = [row(tokenizer, "q", "yes", reference="no")]
    got = evaluate(says(tokenizer, "yes"), tokenizer, asked)
    assert got.rows[0]["reference"] == "no"
    assert got.exact_match == 0


def test_the_likeliest_choice_is_taken(tokenizer):
    choices = ["yes", "no", "maybe"]
    asked = [
        row(tokenizer, "q", answer, number=n, choices=choices)
        for n, answer in enumerate(["yes", "no", "yes", "yes"])
    ]
    got = evaluate(says(tokenizer, "yes"), tokenizer, asked, LOSS_ONLY)
    assert got.accuracy == 0.75
    assert got.values["accuracy_per_token"] == 0.75
    assert {entry["choice"] for entry in got.rows} == {"yes"}


def test_choice_losses_are_those_of_the_whole_answers(tokenizer):
    model = tiny_llama()
    one = row(tokenizer, "q", "no")
    got = evaluate(model, tokenizer, [one], EvalSettings(generate=False, choices=("yes", "no")))
    yes = row(tokenizer, "q", "yes")
    expected = [sum(losses_alone(model, yes)), sum(losses_alone(model, one))]
    assert got.rows[0]["choice_losses"] == pytest.approx(expected, abs=1e-9)
    assert got.rows[0]["accuracy"] is (expected[1] < expected[0])


def test_another_answer_is_rendered_as_the_rows_own(tokenizer):
    one = row(tokenizer, "q", "no")
    other = row(tokenizer, "q", "yes")
    made = with_answer(one, "yes", tokenizer)
    assert made.tokens == other.tokens[:-1]  # but the newline after the turn, which is no label
    assert made.trained == other.trained[:-1]
    with pytest.raises(DataError, match="no tokens"):
        with_answer(one, "  ", tokenizer)


def test_choices_that_cannot_be_scored_are_errors(tokenizer):
    one = row(tokenizer, "q", "perhaps")
    settings = EvalSettings(generate=False, choices=("yes", "no"))
    with pytest.raises(DataError, match=r"rows.jsonl:1: the right answer is not among"):
        evaluate(tiny_llama(), tokenizer, [one], settings)
    bad = row(tokenizer, "q", "yes", choices="yes")
    with pytest.raises(DataError, match="not a list of texts"):
        evaluate(tiny_llama(), tokenizer, [bad], LOSS_ONLY)


def test_text_without_a_prompt_has_a_loss_and_nothing_else(tokenizer):
    ids = tuple(tokenizer("plain text")["input_ids"])
    one = Row(ids, (True,) * len(ids), 0)
    got = evaluate(tiny_llama(), tokenizer, [one])
    assert set(got.values) == {"loss", "perplexity"}
    assert got.trained_tokens == len(ids) - 1


def classes(tokenizer, labels):
    texts = ["one", "two words", "a third text"]
    return [
        Row(tuple(tokenizer(text)["input_ids"]), (False,) * len(tokenizer(text)["input_ids"]), n,
            label=label)
        for n, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["encoder", "decoder", "decoder without a pad"])
def test_a_classifier_is_scored_by_its_head(tokenizer, kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_labels": 3, "initializer_range": 0.5}  # fmt: skip
    if kind == "encoder":
        model = BertForSequenceClassification(BertConfig(**sizes)).eval().double()
    else:
        pad = None if "without" in kind else 257
        config = LlamaConfig(**sizes, pad_token_id=pad)
        model = LlamaForSequenceClassification(config).eval().double()
    labelled = classes(tokenizer, [0, 1, 2])
    logits = torch.cat([model(torch.tensor([one.tokens])).logits for one in labelled])
    guesses = logits.argmax(-1).tolist()
    got = evaluate(model, tokenizer, labelled)
    assert [entry["predicted"] for entry in got.rows] == guesses
    assert got.accuracy == sum(g == n for n, g in enumerate(guesses)) / 3
    expected = torch.nn.functional.cross_entropy(logits.detach(), torch.arange(3))
    assert got.loss == pytest.approx(float(expected), abs=1e-6)
    right = evaluate(model, tokenizer, classes(tokenizer, guesses))
    assert right.accuracy == 1.0


def test_labels_and_models_that_do_not_fit_are_errors(tokenizer, rows):
    labelled = classes(tokenizer, [0, 1, 2])
    with pytest.raises(ModelError, match="no classification head"):
        evaluate(tiny_llama(), tokenizer, labelled)
    with pytest.raises(DataError, match="some rows have a label"):
        evaluate(tiny_llama(), tokenizer, [labelled[0], rows[0]])
    config = BertConfig(vocab_size=260, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ModelError, match="label 2"):
        evaluate(BertForSequenceClassification(config), tokenizer, labelled)


def test_only_the_first_rows_are_read_when_told_so(tokenizer, rows):
    got = evaluate(tiny_llama(), tokenizer, rows, EvalSettings(generate=False, max_rows=2))
    assert got.n == 2
    assert got.loss == evaluate(tiny_llama(), tokenizer, rows[:2], LOSS_ONLY).loss


def test_nothing_to_measure_is_an_error(tokenizer, rows):
    with pytest.raises(DataError, match="no rows"):
        evaluate(tiny_llama(), tokenizer, [])
    silent = replace(rows[0], trained=(False,) * len(rows[0].tokens))
    with pytest.raises(DataError, match="nothing to measure"):
        evaluate(tiny_llama(), tokenizer, [silent], LOSS_ONLY)


def test_dictionaries_are_prepared_as_a_file_is(tokenizer, tmp_path):
    given = [{"prompt": f"q{n}", "completion": "yes", "choices": ["yes", "no"]} for n in range(3)]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, given)), encoding="utf-8")
    model = says(tokenizer, "yes")
    got, of_file = evaluate(model, tokenizer, given), evaluate(model, tokenizer, path)
    assert got.summary() == of_file.summary()
    assert (got.n, got.exact_match, got.accuracy) == (3, 1.0, 1.0)
    renamed = [{"ask": row["prompt"], "completion": row["completion"]} for row in given]
    mapped = DataSettings(columns={"prompt": "ask"})
    assert evaluate(model, tokenizer, renamed, LOSS_ONLY, data=mapped).loss == got.loss


@pytest.mark.parametrize("wrong", [None, 7, {"prompt": "a", "completion": "b"}, [7], b"d.jsonl"])
def test_what_holds_no_rows_is_refused(wrong, tokenizer):
    with pytest.raises(DataError, match=r"wanted: .*dicts such as"):
        evaluate(tiny_llama(), tokenizer, wrong)


def test_other_arguments_of_a_wrong_type_are_refused(tokenizer, rows):
    with pytest.raises(ModelError, match="a model and its tokenizer are needed"):
        evaluate(tokenizer, tiny_llama(), rows)
    with pytest.raises(ConfigError, match="these are no EvalSettings"):
        evaluate(tiny_llama(), tokenizer, rows, {"generate": False})
    with pytest.raises(ConfigError, match="these are no DataSettings"):
        evaluate(tiny_llama(), tokenizer, rows, data=EvalSettings())


def test_a_summary_is_json_and_leaves_the_rows_out(tokenizer, rows):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    got = evaluate(model, tokenizer, rows, LOSS_ONLY)
    assert got.perplexity == math.inf
    summary = json.loads(json.dumps(got.summary(), allow_nan=False))
    assert summary["n"] == 4
    assert summary["perplexity"] is None
    assert summary["loss"] == got.loss
    assert "rows" not in summary


def test_two_models_are_compared_row_by_row(tokenizer, rows):
    settings = EvalSettings(answers=GenerateSettings(max_new_tokens=2))
    one = evaluate(tiny_llama(seed=1), tokenizer, rows, settings)
    two = evaluate(tiny_llama(seed=2), tokenizer, rows, settings)
    changes = compare(one, two)
    assert changes["loss"][0] == pytest.approx(one.loss - two.loss, abs=1e-12)
    assert changes["loss"][1] > 0
    assert compare(one, one)["loss"] == (0.0, 0.0)
    assert changes["exact_match"] == (0.0, 0.0)
    assert "perplexity" not in changes


def test_a_file_is_read_as_rows(tokenizer, tmp_path):
    from afina.data.settings import DataSettings

    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"q": "hi", "completion": a}) for a in ("yes", "no")]
    file.write_text("\n".join(lines), encoding="utf-8")
    data = DataSettings(columns={"prompt": "q"})
    got = evaluate(says(tokenizer, "yes"), tokenizer, file, data=data)
    assert got.exact_match == 0.5
    prepared = [row(tokenizer, "hi", a, number=n) for n, a in enumerate(["yes", "no"])]
    assert got.loss == evaluate(says(tokenizer, "yes"), tokenizer, prepared).loss


def test_progress_and_modes(tokenizer, rows):
    model = tiny_llama().train()
    seen = []
    settings = EvalSettings(batch_rows=2, answers=GenerateSettings(max_new_tokens=1, batch_rows=4))
    evaluate(model, tokenizer, rows, settings, on_progress=lambda *n: seen.append(n))
    assert seen == [("loss", 2, 4), ("loss", 4, 4), ("answers", 4, 4)]
    assert model.training


def test_a_row_with_a_token_the_model_has_not_is_named(tokenizer):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|far|>"]})
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "<|far|>", "completion": "b"}]
    with pytest.raises(
        DataError, match="row:2: a token that the model has no embedding for"
    ) as caught:
        evaluate(tiny_llama(), tokenizer, rows, LOSS_ONLY)
    assert "'<|far|>', id 260" in str(caught.value)


def test_bad_rows_are_skipped_where_that_is_asked(tokenizer):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    with pytest.raises(DataError, match=r"row:2: this row is not like the others"):
        evaluate(tiny_llama(), tokenizer, rows, LOSS_ONLY)
    scores = evaluate(
        tiny_llama(), tokenizer, rows, LOSS_ONLY, data=DataSettings(on_bad_row="skip")
    )
    assert scores.n == 1


def test_a_loss_that_is_no_number_is_an_error_that_names_the_row(tokenizer, rows):
    """ "z" is in the answer of the first row alone, and its embedding is NaN."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("z")["input_ids"]] = torch.nan
    said = r"not finite numbers.*\n.*a loss of NaN at rows.jsonl:1, in float64"
    for settings in (LOSS_ONLY, EvalSettings()):
        with pytest.raises(RunError, match=said):
            evaluate(model, tokenizer, rows, settings)
    assert math.isfinite(evaluate(model, tokenizer, rows[1:], LOSS_ONLY).loss)


def test_an_infinite_loss_is_a_token_ruled_out_and_counts(tokenizer, rows):
    model = tiny_llama()
    (out,) = tokenizer("z")["input_ids"]

    def rule_out(module, args, logits):
        logits[..., out] = -torch.inf

    model.lm_head.register_forward_hook(rule_out)
    assert evaluate(model, tokenizer, rows, LOSS_ONLY).loss == math.inf


def test_a_class_of_no_number_is_an_error(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = BertConfig(**sizes, vocab_size=260, num_attention_heads=2, num_labels=2)
    model = BertForSequenceClassification(config).eval()
    labelled = [Row((1, 2, 3), (False,) * 3, id=n, label=n % 2) for n in range(3)]
    assert evaluate(model, tokenizer, labelled, LOSS_ONLY).n == 3
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="a loss of NaN at row 0, in float32"):
        evaluate(model, tokenizer, labelled, LOSS_ONLY)


def test_a_prompt_without_room_for_an_answer_is_named_by_its_row(tokenizer, rows):
    with pytest.raises(ModelError, match=r"the prompt of rows.jsonl:2 fills the model's whole"):
        evaluate(tiny_llama(max_position_embeddings=30), tokenizer, rows[:2], EvalSettings())
