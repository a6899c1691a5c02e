"""Generation: a row's answer is its own, whatever is beside it, and ends where it should."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from afina.config import GenerateSettings
from afina.errors import ConfigError, DataError, ModelError, RunError
from afina.models.generate import encode, evaluating, generate, stream
from afina.models.sampling import Draw, filtered, seed_of_row
from afina.models.stops import cut, end_of_turn, held, stop_ids
from tests.tiny import byte_tokenizer, follow, tiny_gpt2, tiny_llama

PROMPTS = ["a", "the quick brown fox", "ünïcode £5", "jumps over", "b c d e f g"]
END, PAD, TURN_END = 256, 257, 259


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chain(tokenizer, text, end):
    """Successors that make a rigged model say `text` after '>', then `end`; the characters must differ."""
    ids = ids_of(tokenizer, ">" + text)
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, [*ids[1:], end], strict=True))


@pytest.fixture
def rigged():
    return tiny_llama(hidden_size=320, intermediate_size=16)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_answers_as_single_prompts_do(make, temperature, tokenizer):
    model = make()
    settings = GenerateSettings(
        max_new_tokens=12, temperature=temperature, top_p=0.9, top_k=40, batch_rows=3, seed=3
    )
    together = generate(model, tokenizer, PROMPTS, settings)
    alone = generate(model, tokenizer, PROMPTS, settings.model_copy(update={"batch_rows": 1}))
    assert together == alone
    assert len({answer.tokens for answer in together}) == len(PROMPTS)


def test_greedy_equals_argmax_without_cache(tokenizer):
    model = tiny_llama()
    tokens = ids_of(tokenizer, PROMPTS[1])
    expected = []
    for _ in range(8):
        logits = model(torch.tensor([tokens + expected]), use_cache=False).logits
        expected.append(int(logits[0, -1].argmax()))
    answer = generate(model, tokenizer, [PROMPTS[1]], GenerateSettings(max_new_tokens=8))[0]
    assert list(answer.tokens) == expected
    assert answer.stop_reason == "length"


def test_padding_that_was_seen_would_change_the_answer(tokenizer):
    """The control: the same left-padded prompt without its mask gives something else."""
    model = tiny_llama()
    tokens = ids_of(tokenizer, "a")
    settings = GenerateSettings(max_new_tokens=8)
    right = generate(model, tokenizer, [tokens], settings)[0]
    padded = generate(model, tokenizer, [[PAD] * 6 + tokens], settings)[0]
    assert right.tokens != padded.tokens


@pytest.mark.parametrize("end", [END, TURN_END])
def test_an_answer_stops_at_eos_and_at_the_templates_end_of_turn(rigged, tokenizer, end):
    model = follow(rigged, chain(tokenizer, "yes", end))
    answers = generate(model, tokenizer, [">", "longer prompt >"])
    assert [answer.text for answer in answers] == ["yes", "yes"]
    assert [answer.stop_reason for answer in answers] == ["stop", "stop"]
    assert list(answers[0].tokens) == ids_of(tokenizer, "yes")


def test_a_generated_pad_is_not_an_end(rigged, tokenizer):
    successors = chain(tokenizer, "ab", PAD) | {PAD: ids_of(tokenizer, "c")[0]}
    successors[ids_of(tokenizer, "c")[0]] = END
    model = follow(rigged, successors)
    answer = generate(model, tokenizer, [">"])[0]
    assert answer.tokens == (*ids_of(tokenizer, "ab"), PAD, *ids_of(tokenizer, "c"))
    assert answer.text == "abc"


def test_a_pad_equal_to_the_end_changes_nothing(rigged, tokenizer):
    other = byte_tokenizer()
    other.pad_token = other.eos_token
    model = follow(rigged, chain(tokenizer, "yes", END) | {ids_of(tokenizer, "<")[0]: END})
    prompts = [">", "abc <"]
    assert generate(model, other, prompts) == generate(model, tokenizer, prompts)
    assert [answer.text for answer in generate(model, other, prompts)] == ["yes", ""]


def test_the_models_own_sampling_defaults_do_not_leak_in(tokenizer):
    plain, opinionated = tiny_llama(), tiny_llama()
    opinionated.generation_config.update(
        repetition_penalty=5.0, do_sample=True, temperature=3.0, top_k=2, no_repeat_ngram_size=1
    )
    settings = GenerateSettings(max_new_tokens=16)
    before = generate(plain, tokenizer, PROMPTS[:2], settings)
    assert generate(opinionated, tokenizer, PROMPTS[:2], settings) == before


def test_stop_texts_end_a_row_and_are_cut_off(rigged, tokenizer):
    model = follow(rigged, chain(tokenizer, "one.TWO", END))
    settings = GenerateSettings(stop=("TW",))
    answer = generate(model, tokenizer, [">"], settings)[0]
    assert (answer.text, answer.stop_reason) == ("one.", "stop")
    assert "".join(stream(model, tokenizer, ">", settings)) == "one."
    assert generate(model, tokenizer, [">"])[0].text == "one.TWO"


def test_stop_ids_are_the_union_of_three_sources(tokenizer):
    model = tiny_llama()
    assert end_of_turn(tokenizer) == TURN_END
    assert stop_ids(model, tokenizer) == (END, TURN_END)
    model.generation_config.eos_token_id = [7, END]
    assert stop_ids(model, tokenizer) == (7, END, TURN_END)
    assert stop_ids(model, byte_tokenizer(chat=False)) == (7, END)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }} <|end|>\n{% endfor %}", END),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_end_of_turn_is_read_off_the_rendered_text(template, expected):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer) == expected


def test_sampling_is_reproducible_and_touches_no_global_state(tokenizer):
    model = tiny_llama()
    settings = GenerateSettings(max_new_tokens=10, temperature=1.0, seed=5)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(model, tokenizer, ["a", "a"], settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert generate(model, tokenizer, ["a", "a"], settings) == first
    assert first[0].tokens != first[1].tokens
    other = generate(model, tokenizer, ["a", "a"], settings.model_copy(update={"seed": 6}))
    assert other[0].tokens != first[0].tokens


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draw = Draw(GenerateSettings(temperature=1.0), range(1))
    n = 4000
    counts = Counter(int(draw(None, logits[None]).argmax()) for _ in range(n))
    for token, p in enumerate(logits.softmax(0).tolist()):
        assert abs(counts[token] / n - p) < 4 * (p * (1 - p) / n) ** 0.5


def test_filters_equal_transformers_own():
    torch.manual_seed(0)
    logits = torch.randn(5, 50, dtype=torch.float64) * 3
    for temperature, top_k, top_p in [(0.7, 0, 1.0), (1.3, 7, 1.0), (1.0, 0, 0.8), (0.5, 9, 0.6)]:
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        got = filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        assert torch.equal(got, expected)


def test_a_tiny_top_p_keeps_the_likeliest_token():
    got = filtered(torch.tensor([[1.0, 3.0, 2.0]]), temperature=1.0, top_k=0, top_p=1e-9)
    assert got.isfinite().tolist() == [[False, True, False]]


def test_row_seeds_differ():
    assert len({seed_of_row(seed, row) for seed in range(10) for row in range(10)}) == 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_pieces_join_to_the_generated_text(tokenizer, temperature):
    model = tiny_llama()
    messages = [{"role": "user", "content": "héllo"}]
    for seed in range(4):
        settings = GenerateSettings(max_new_tokens=40, temperature=temperature, seed=seed)
        pieces = list(stream(model, tokenizer, messages, settings))
        assert "".join(pieces) == generate(model, tokenizer, [messages], settings)[0].text
        assert all(pieces)


def test_a_character_of_several_tokens_is_streamed_whole(rigged, tokenizer):
    model = follow(rigged, chain(tokenizer, "a€ñ", END))
    assert list(stream(model, tokenizer, ">")) == ["a", "€", "ñ"]


def test_a_character_cut_by_the_limit_still_comes_out(rigged, tokenizer):
    model = follow(rigged, chain(tokenizer, "a€", END))
    settings = GenerateSettings(max_new_tokens=2)
    assert "".join(stream(model, tokenizer, ">", settings)) == "a\ufffd"
    assert generate(model, tokenizer, [">"], settings)[0].text == "a\ufffd"


def test_closing_a_stream_stops_the_model(tokenizer):
    model = tiny_llama()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    pieces = stream(model, tokenizer, "a", GenerateSettings(max_new_tokens=200, temperature=1.0))
    next(pieces)
    pieces.close()
    after_close = len(calls)
    assert after_close < 150
    assert generate(model, tokenizer, ["a"], GenerateSettings(max_new_tokens=1))
    assert len(calls) == after_close + 1


def test_an_error_in_the_model_reaches_the_reader(tokenizer):
    model = tiny_llama()

    def fail(*_):
        raise ZeroDivisionError("inside")

    model.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError, match="inside"):
        list(stream(model, tokenizer, "a"))


def test_a_reader_of_a_stream_keeps_its_gradients(tokenizer):
    pieces = stream(tiny_llama(), tokenizer, "a", GenerateSettings(max_new_tokens=3))
    next(pieces)
    assert torch.is_grad_enabled()
    pieces.close()


class Largest(TorchDispatchMode):
    """Knows the most numbers that one operation has made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_head_is_not_copied_for_each_row(frozen, tokenizer):
    model = tiny_llama(hidden_size=32, vocab_size=8192).requires_grad_(not frozen)
    head, prompts = model.get_output_embeddings(), ["a", "bc", "def"]
    with Largest() as largest, torch.no_grad():
        generate(model, tokenizer, prompts, GenerateSettings(max_new_tokens=2))
    assert head.weight.numel() >= largest.numbers
    # Without that, PyTorch would do it (where it never does any more, the hook may go).
    with Largest() as largest, torch.no_grad():
        head(torch.zeros(3, 5, 32, dtype=head.weight.dtype)[:, -1:])
    assert (largest.numbers == 3 * head.weight.numel()) == frozen
    assert not head._forward_pre_hooks


def test_modes_are_put_back(tokenizer):
    model = tiny_llama().train()
    model.model.layers[0].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training


def test_an_answer_ends_where_the_context_does(tokenizer):
    model = tiny_gpt2()  # 48 positions, learnt: one more would be an index error
    settings = GenerateSettings(max_new_tokens=20, batch_rows=4)
    prompts = ["x" * 40, "w" * 10, "z" * 47]
    answers = generate(model, tokenizer, prompts, settings)
    assert [len(answer.tokens) for answer in answers] == [8, 20, 1]
    assert {answer.stop_reason for answer in answers} == {"length"}
    assert answers[1] == generate(model, tokenizer, prompts[1:2], settings)[0]
    with pytest.raises(ModelError, match="48 tokens"):
        generate(model, tokenizer, ["x" * 48], settings)


def test_progress_counts_prompts(tokenizer):
    seen = []
    settings = GenerateSettings(max_new_tokens=2, batch_rows=2)
    generate(tiny_llama(), tokenizer, PROMPTS, settings, on_progress=lambda *n: seen.append(n))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_no_prompts_no_answers(tokenizer):
    assert generate(tiny_llama(), tokenizer, []) == []


def test_encode_adds_the_system_prompt_only_where_there_is_none(tokenizer):
    user = {"role": "user", "content": "hi"}
    own = {"role": "system", "content": "mine"}
    text = tokenizer.decode(encode(tokenizer, [user], system="set"))
    assert text.startswith("<|im_start|>system\nset<|im_end|>\n<|im_start|>user\nhi")
    assert text.endswith("<|im_start|>assistant\n")
    assert "set" not in tokenizer.decode(encode(tokenizer, [own, user], system="set"))
    assert encode(tokenizer, [5, 6]) == [5, 6]


def test_errors_say_what_to_do(tokenizer):
    user = [{"role": "user", "content": "hi"}]
    with pytest.raises(ModelError, match="no chat template"):
        encode(byte_tokenizer(chat=False), user)
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('users only') }}"
    with pytest.raises(ModelError, match="users only"):
        encode(strict, user)
    with pytest.raises(DataError, match="no tokens"):
        encode(tokenizer, "")
    config = LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    classifier = LlamaForSequenceClassification(config)
    with pytest.raises(ModelError, match="from left to right"):
        generate(classifier, tokenizer, ["a"])


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("prompts", ["hello", b"hello", USER, 7, None])
def test_what_is_no_list_of_prompts_is_refused(prompts, tokenizer):
    with pytest.raises(DataError, match="prompts are a list") as caught:
        generate(tiny_llama(), tokenizer, prompts)
    assert "cure:   put the one prompt in a list" in str(caught.value)


@pytest.mark.parametrize("prompt", [USER, 7, b"hello", None, ["a", "b"], [USER, 7], {"text": "a"}])
def test_what_is_no_prompt_is_refused(prompt, tokenizer):
    with pytest.raises(DataError, match="this is no prompt\n  got:    "):
        generate(tiny_llama(), tokenizer, [prompt])


def test_other_arguments_of_a_wrong_type_are_refused(tokenizer):
    model = tiny_llama()
    for pair in ((tokenizer, model), (model, None), (None, tokenizer), ("smollm2-135m", tokenizer)):
        with pytest.raises(ModelError, match=r"cure:   model, tokenizer = afina\.load"):
            generate(*pair, ["a"])
    with pytest.raises(ConfigError, match=r"GenerateSettings\(\*\*settings\)"):
        generate(model, tokenizer, ["a"], {"max_new_tokens": 3})


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abc", (), 0),
        ("abc\ufffd", (), 1),
        ("abcST", ("STOP",), 2),
        ("abcS\ufffd", ("Sé",), 2),
        ("aab", ("aabc", "b"), 3),
        ("STOPS", ("STOP",), 1),
    ],
)
def test_what_may_become_a_stop_text_is_held_back(text, stops, expected):
    assert held(text, stops) == expected


def test_the_earliest_stop_text_cuts():
    assert cut("one two three", ("three", "two")) == "one "
    assert cut("one", ("two",)) == "one"


# --- outputs that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_that_are_no_numbers_are_an_error_and_no_answer(tokenizer, rigged, temperature):
    """After ">" the model says "a", whose embedding is NaN."""
    follow(rigged, chain(tokenizer, "a", TURN_END))
    settings = GenerateSettings(temperature=temperature, top_k=1, max_new_tokens=4)
    kept = {}
    assert generate(rigged, tokenizer, [">"], settings)[0].text == "a"
    with torch.no_grad():
        rigged.model.embed_tokens.weight[ids_of(tokenizer, "a")] = torch.nan
    said = r"not finite numbers.*\n.*nan after 1 token, in float64\n.*\n.*earlier checkpoint"
    with pytest.raises(RunError, match=said):
        generate(rigged, tokenizer, [">"], settings, on_answers=kept.update)
    with pytest.raises(RunError, match=said):
        list(stream(rigged, tokenizer, ">", settings))
    assert kept == {}


def test_what_an_ended_row_goes_on_to_say_does_not_count(tokenizer, rigged):
    """The short answer's row is filled with pads, whose embedding is NaN, until the long one ends."""
    follow(rigged, chain(tokenizer, "abcdef", TURN_END))
    with torch.no_grad():
        rigged.model.embed_tokens.weight[PAD] = torch.nan
    prompts = [ids_of(tokenizer, "e"), ids_of(tokenizer, ">")]
    answers = generate(rigged, tokenizer, prompts, GenerateSettings(max_new_tokens=9))
    assert [answer.text for answer in answers] == ["f", "abcdef"]


def test_tokens_that_a_model_rules_out_are_no_fault(tokenizer):
    """Minus infinity is a logit; fp16 is named as what overflows."""
    model = tiny_llama()
    plain = generate(model, tokenizer, ["go"], GenerateSettings(max_new_tokens=3))
    out = next(token for token in range(256) if token not in plain[0].tokens)

    def rule_out(module, args, logits):
        logits[..., out] = -torch.inf

    hook = model.lm_head.register_forward_hook(rule_out)
    assert generate(model, tokenizer, ["go"], GenerateSettings(max_new_tokens=3)) == plain
    hook.remove()
    with torch.no_grad():
        model.half().lm_head.weight.fill_(torch.inf)
    with pytest.raises(
        RunError, match=r"in float16\n.*\n.*--dtype fp32 \(in Python dtype='fp32'\)"
    ):
        generate(model, tokenizer, ["go"], GenerateSettings(max_new_tokens=3))
