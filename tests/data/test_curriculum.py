"""Which rows a curriculum shows at a step: known values, uniform draws, and settings that are refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from statistics import mean
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from afina.data import curriculum_difficulty as difficulties
from afina.data.curriculum import Curriculum
from afina.data.curriculum_course import Course, Growing
from afina.data.curriculum_lengthening import Lengthening
from afina.data.curriculum_pacing import (
    allowed,
    competence_linear,
    competence_sqrt,
    competence_steps,
    discrete_length,
    root_length,
)
from afina.data.order import shuffled
from afina.errors import ConfigError, DataError
from afina.tree.timing import Asked
from afina.types import Row

LIKELY = 0.001
"""A p-value below this says that draws are not uniform. Seeds are fixed, so a test that passes always passes."""


def likelihood(counts: Sequence[int]) -> float:
    """The p-value of Pearson's chi-square test that all are equally likely."""
    wanted = sum(counts) / len(counts)
    square = sum((count - wanted) ** 2 for count in counts) / wanted
    half = torch.tensor([(len(counts) - 1) / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_chi_square_is_that_of_the_tables() -> None:
    # 3.841 is the 5 % point of one degree of freedom: counts of 100 ± x with x² / 50 = 3.841.
    assert likelihood([100 + 13.858, 100 - 13.858]) == pytest.approx(0.05, abs=1e-4)  # type: ignore[list-item]
    assert likelihood([7, 7, 7]) == 1.0


def row(number: int, tokens: int, prompt: int = 1, **more: Any) -> Row:
    """A row of so many tokens, those after the prompt trained."""
    flags = tuple(at >= prompt for at in range(tokens))
    return Row(tuple(range(tokens)), flags, number, f"rows.jsonl:{number + 1}", **more)


def rising(count: int) -> list[Row]:
    """Rows of 2, 3, 4 … tokens, in an order that is none of length."""
    lengths = [2 + (7 * n) % count for n in range(count)]
    return [row(n, length) for n, length in enumerate(lengths)]


def course(
    rows: list[Row], *, total: int = 20, seed: int = 0, asked: Any = None, **settings: Any
) -> Any:
    size = {"rows_per_step": 4, "tokens_per_step": None} | (asked or {})
    return Curriculum(**settings).course(Asked(rows, seed, total, **size))


def ids(found: Course, start: int, count: int) -> list[list[int]]:
    return [[row.id for row in rows] for rows in islice(found.windows(start), count)]


# --- pacing: known values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "share"),
    [(0, 0.01), (100, 0.31637), (250, 0.500075), (500, 0.707142), (1000, 1.0), (5000, 1.0)],
)
def test_competence_by_the_square_root(step: int, share: float) -> None:
    assert competence_sqrt(step, 1000, 0.01) == pytest.approx(share, abs=5e-6)


@pytest.mark.parametrize(("step", "share"), [(0, 0.01), (100, 0.109), (500, 0.505), (1000, 1.0)])
def test_competence_that_is_linear(step: int, share: float) -> None:
    assert competence_linear(step, 1000, 0.01) == pytest.approx(share, abs=1e-12)


def test_buckets() -> None:
    shares = [competence_steps(step, 9, 4) for step in range(12)]
    assert shares == [0.25] * 3 + [0.5] * 3 + [0.75] * 3 + [1.0] * 3


def test_the_ramp_ends_at_exactly_all_whatever_is_rounded() -> None:
    for ramp in (1, 3, 7, 997):
        for pace in (competence_sqrt, competence_linear):
            assert pace(ramp, ramp, 0.013) == 1.0
            assert pace(ramp - 1, ramp, 0.013) < 1.0


def test_ranks_up_to_a_share_are_counted_exactly() -> None:
    for count in (1, 3, 10, 49, 1000):
        for k in range(count + 1):
            share = k / count
            assert allowed(share, count) == sum(
                rank / count <= share for rank in range(1, count + 1)
            )


class Naive:
    """DeepSpeed's scheduler of lengths, from its documentation: a state that is asked step by step."""

    def __init__(self, least: int, most: int, total: int, multiple: int, degree: float) -> None:
        self.least, self.most, self.total = least, most, total
        self.multiple, self.degree = multiple, degree

    def at(self, step: int) -> int:
        done = (float(step) / self.total) ** (1.0 / self.degree)
        length = math.floor(done * (self.most - self.least) + self.least)
        while length % self.multiple:
            length -= 1
        return self.most if length > self.most else length


@pytest.mark.parametrize("degree", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(
    ("least", "most", "total", "multiple"), [(8, 1024, 100, 8), (64, 200, 7, 16)]
)
def test_lengths_are_deepspeeds_at_every_step(
    least: int, most: int, total: int, multiple: int, degree: float
) -> None:
    naive = Naive(least, most, total, multiple, degree)
    for step in range(2 * total):
        ours = root_length(
            step, ramp=total, least=least, most=most, multiple=multiple, degree=degree
        )
        assert ours == naive.at(step)


def test_lengths_by_hand() -> None:
    grow = {"ramp": 1000, "least": 128, "most": 2048, "multiple": 16}
    assert [root_length(t, degree=1.0, **grow) for t in (0, 500, 1000, 1001)] == [
        128,
        1088,
        2048,
        2048,
    ]
    assert root_length(250, degree=2.0, **grow) == 1088  # sqrt(1/4) = 1/2


def test_discrete_lengths_keep_a_step_that_is_named() -> None:
    found = [discrete_length(step, (8, 16, 32), (2, 5)) for step in range(8)]
    assert found == [8, 8, 8, 16, 16, 16, 32, 32]


# --- difficulty ------------------------------------------------------------------------------------------------


def test_lengths_and_rarities_by_hand() -> None:
    rows = [
        Row((1, 2), (False, True), 0),
        Row((1, 1, 3), (False, False, True), 1),
        Row((1, 2, 2), (False, True, True), 2),
    ]
    assert difficulties.lengths(rows) == [2, 3, 3]
    assert difficulties.lengths(rows, trained=True) == [1, 1, 2]
    # Eight tokens: 1 four times, 2 three times, 3 once.
    one, two, three = (math.log(8 / count) for count in (4, 3, 1))
    assert difficulties.rarities(rows) == pytest.approx([one + two, 2 * one + three, one + 2 * two])
    # Four labels: 2 three times, 3 once.
    two, three = math.log(4 / 3), math.log(4)
    assert difficulties.rarities(rows, trained=True) == pytest.approx([two, three, 2 * two])


def test_a_column_takes_numbers_and_texts_of_numbers() -> None:
    rows = [
        row(n, 3, meta={"columns": {"hard": value}}) for n, value in enumerate((2, "1.5", -0.5))
    ]
    assert difficulties.column(rows, "hard") == [2.0, 1.5, -0.5]


@pytest.mark.parametrize("value", [None, True, "hard", "nan", float("inf"), [1]])
def test_a_row_without_a_number_is_named(value: Any) -> None:
    rows = [row(n, 3, meta={"columns": {"hard": 1.0}}) for n in range(9)]
    rows[4] = row(4, 3, meta={"columns": {"hard": value}})
    rows[7] = row(7, 3)
    with pytest.raises(
        DataError, match=r"2 rows of 9 have no number in the column 'hard'"
    ) as caught:
        course(rows, difficulty="column", column="hard")
    assert "at rows.jsonl:5, rows.jsonl:8" in str(caught.value.got)
    assert "techniques.curriculum.column" in str(caught.value.cure)


def test_ties_are_in_an_order_of_chance_and_both_ways_are_the_same_chance() -> None:
    values = [1.0] * 6 + [0.0] * 6
    one, other = (difficulties.ranked(values, seed) for seed in (0, 1))
    assert sorted(one[:6]) == sorted(other[:6]) == list(range(6, 12))
    assert one != other
    assert one[:6] != sorted(one[:6])
    hard = difficulties.ranked(values, 0, hardest_first=True)
    assert sorted(hard[:6]) == list(range(6))
    assert hard == difficulties.ranked([-value for value in values], 0)


# --- what is drawn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pacing", ["sqrt", "linear", "steps"])
@pytest.mark.parametrize("order", ["easy_first", "hard_first", "random"])
def test_no_row_is_drawn_before_its_rank_is_let_in(pacing: str, order: str) -> None:
    found = course(rising(100), total=40, pacing=pacing, order=order, ramp_steps=30)
    rank = {found.asked.rows[place].id: k / 100 for k, place in enumerate(found.ranked, start=1)}
    seen: set[int] = set()
    for step, shown in enumerate(ids(found, 0, 40)):
        share = max(found.share(step), 4 / 100)  # as many as a step takes, at least
        assert max(rank[id] for id in shown) <= share
        assert len(set(shown)) == 4
        seen |= set(shown)
    assert max(rank[id] for id in seen) > 0.9


def test_a_rank_that_is_not_let_in_would_be_seen() -> None:
    """The control: the rows of a plain run break the rule that those of a curriculum keep."""
    from afina.data.order import windows

    rows = rising(100)
    found = course(rows, total=40)
    rank = {rows[place].id: k / 100 for k, place in enumerate(found.ranked, start=1)}
    plain = next(windows([len(r.tokens) for r in rows], 0, rows_per_step=4)).rows
    assert max(rank[rows[place].id] for place in plain) > max(found.share(0), 4 / 100)


def test_easy_rows_come_first_and_hard_ones_where_they_are_asked_for() -> None:
    def first(**settings: Any) -> float:
        found = course(rising(100), total=40, start=0.1, **settings)
        return mean(len(row.tokens) for rows in islice(found.windows(), 5) for row in rows)

    assert first() < 30
    assert first(order="hard_first") > 70
    assert 40 < first(order="random") < 62  # of 2 to 101 tokens


def test_the_control_lets_in_as_many_rows_at_the_same_time() -> None:
    easy, control = (course(rising(100), order=order) for order in ("easy_first", "random"))
    assert [easy.pool(t) for t in range(25)] == [control.pool(t) for t in range(25)]
    assert list(easy.ranked) != list(control.ranked)


def draws(found: Any, step: int, pool: int, seeds: int) -> list[int]:
    """How often each of the first `pool` ranked rows is drawn at a step, over so many seeds' shuffles."""
    counts = Counter(
        at for seed in range(seeds) for at in islice(shuffled(found.pool(step), seed, step), 4)
    )
    return [counts[at] for at in range(pool)]


def test_each_row_of_the_pool_is_equally_likely() -> None:
    found = course(rising(50), total=20, start=0.2)
    pool = found.pool(3)
    assert 10 < pool < 50
    assert likelihood(draws(found, 3, pool, 3000)) > LIKELY
    # The control: draws that prefer the first rows by a tenth are found out.
    bent = [
        count + (count // 10 if at < pool // 2 else 0)
        for at, count in enumerate(draws(found, 3, pool, 3000))
    ]
    assert likelihood(bent) < LIKELY


@pytest.mark.parametrize("asked", [{}, {"rows_per_step": None, "tokens_per_step": 60}])
def test_after_the_ramp_all_rows_are_equally_likely(asked: dict[str, Any]) -> None:
    """By steps of tokens too, where long rows do not fit so easily; the last row carried on counts in the next step."""
    rows = rising(30)
    found = course(rows, total=20, ramp_steps=5, asked=asked)
    counts = Counter(id for shown in ids(found, 5, 3000) for id in shown)
    assert len(counts) == 30
    assert likelihood(list(counts.values())) > LIKELY
    early = Counter(id for shown in ids(found, 0, 3) for id in shown)
    assert len(early) < 30


def test_dropping_what_does_not_fit_would_pass_over_long_rows() -> None:
    """The control of carrying: without it long rows are shown less often."""

    class Dropping(Growing):
        def _places(self, step: int, carried: int | None) -> tuple[list[int], int | None]:
            return super()._places(step, None)[0], None

    rows = rising(30)
    kept = course(
        rows, total=20, ramp_steps=5, asked={"rows_per_step": None, "tokens_per_step": 60}
    )
    found = Dropping(kept.asked, kept.ranking, kept.pace, kept.ramp)
    counts = Counter(id for shown in ids(found, 5, 3000) for id in shown)
    assert likelihood(list(counts.values())) < 1e-12


@pytest.mark.parametrize("asked", [{}, {"rows_per_step": None, "tokens_per_step": 60}])
@pytest.mark.parametrize("settings", [{}, {"pacing": "length", "min_tokens": 8}])
def test_the_windows_of_a_step_do_not_depend_on_where_one_begins(
    asked: dict[str, Any], settings: dict[str, Any]
) -> None:
    def whole() -> list[list[Row]]:
        return list(islice(course(rising(60), asked=asked, **settings).windows(), 30))

    every = whole()
    assert whole() == every
    for start in (1, 7, 19, 29):
        made = course(rising(60), asked=asked, **settings)
        assert list(islice(made.windows(start), 30 - start)) == every[start:]
    other = course(rising(60), asked=asked, seed=1, **settings)
    assert list(islice(other.windows(), 30)) != every


def test_a_step_of_tokens_holds_no_more_than_it_may_and_shows_the_row_that_did_not_fit_next() -> (
    None
):
    rows = rising(40)
    asked = {"rows_per_step": None, "tokens_per_step": 50}
    found = course(rows, asked=asked, ramp_steps=1)
    steps = list(islice(found.windows(), 60))
    assert all(sum(len(r.tokens) for r in shown) <= 50 or len(shown) == 1 for shown in steps)
    assert all(len({r.id for r in shown}) == len(shown) for shown in steps)
    # What a step could still have held is less than the next step's first row.
    for shown, after in pairwise(steps):
        assert sum(len(r.tokens) for r in shown) + len(after[0].tokens) > 50


def test_the_pool_is_at_least_a_step_and_that_is_said() -> None:
    found = course(rising(100), total=40)
    assert [found.pool(t) for t in (0, 1)] == [4, 22]
    assert allowed(found.share(0), 100) == 1
    note = next(line for line in found.notes() if line.startswith("note"))
    assert (
        "a step takes 4 rows, and 1 would be let in at first: steps 1 to 1 show the same 4" in note
    )
    assert not any(line.startswith("note") for line in course(rising(100), start=0.1).notes())
    by_tokens = course(rising(100), asked={"rows_per_step": None, "tokens_per_step": 30})
    assert by_tokens.pool(0) == 7  # 2 + 3 + … + 8 = 35


def test_fewer_rows_than_a_step_takes_are_all_shown_once() -> None:
    assert [sorted(shown) for shown in ids(course(rising(3)), 0, 5)] == [[0, 1, 2]] * 5


def test_what_the_course_says_of_itself() -> None:
    (line,) = course(rising(100), start=0.1).notes()
    assert line == (
        "rows are drawn by length (tokens), easy ones first: 10 of 100 rows at first, all of them from step 11 of 20 "
        "on; drawn anew at each step, and not dealt in epochs"
    )


# --- rows that grow --------------------------------------------------------------------------------------------


def test_rows_are_cut_with_their_labels_and_wait_for_a_trained_token() -> None:
    rows = [row(0, 20), row(1, 30, prompt=10), row(2, 12, prompt=2), row(3, 28, prompt=27)]
    asked = {"rows_per_step": 2}
    found = course(rows, total=20, pacing="length", asked=asked)
    assert isinstance(found, Lengthening)
    assert found.tokens(0) == 8
    assert found.pool(0) == 2  # rows 0 and 2
    for step, shown in enumerate(islice(found.windows(), 20)):
        for one in shown:
            given = rows[one.id]
            assert one.tokens == given.tokens[: found.tokens(step)]
            assert one.trained == given.trained[: found.tokens(step)]
            assert one.trained_tokens
    assert found.tokens(10) == 32
    assert found.pool(10) == 4
    assert next(found.windows(10))[0] in rows
    waits, whole = found.notes()[1], found.notes()[0]
    assert "cut to 8 tokens at first, and whole from step 11 of 20" in whole
    assert "note: 2 of 4 rows have no trained token in their first 8 tokens" in waits


def test_a_length_at_which_no_step_can_be_filled_is_raised_and_that_is_said() -> None:
    rows = [row(n, 40, prompt=17) for n in range(6)]
    found = course(rows, pacing="length")
    assert [found.length(0), found.tokens(0), found.pool(0)] == [8, 24, 6]
    assert "the length begins with 24" in found.notes()[1]
    by_tokens = course(
        [row(n, 40) for n in range(6)],
        pacing="length",
        asked={"rows_per_step": None, "tokens_per_step": 100},
    )
    assert by_tokens.tokens(0) == 24  # six of them are 144 tokens, and six of 16 are 96


def test_lengths_that_are_listed() -> None:
    found = course(
        [row(n, 30) for n in range(8)], pacing="length", lengths=(8, 16, 32), last_steps=(2, 5)
    )
    longest = [max(len(r.tokens) for r in shown) for shown in islice(found.windows(), 8)]
    assert longest == [8, 8, 8, 16, 16, 16, 30, 30]


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"difficulty": "column"}, "name the column of the rows"),
        ({"column": "hard"}, "difficulty: column and column go together"),
        ({"difficulty": "loss", "count": "trained"}, "count would do nothing"),
        ({"ramp_steps": 5, "ramp_ratio": 0.2}, "say the same thing twice: give one"),
        ({"buckets": 3}, "buckets is for steps; leave them out, or change pacing"),
        ({"pacing": "steps", "start": 0.3}, "start is for sqrt and linear"),
        ({"min_tokens": 16}, "min_tokens is for length"),
        ({"pacing": "length", "order": "random"}, "order is for sqrt, linear and steps"),
        ({"pacing": "length", "difficulty": "loss"}, "difficulty is for sqrt"),
        (
            {"pacing": "length", "lengths": (8, 16), "last_steps": (3,), "ramp_steps": 4},
            "ramp_steps is for a length",
        ),
        ({"pacing": "length", "lengths": (8, 16)}, "one step fewer than lengths"),
        ({"pacing": "length", "lengths": (16, 8), "last_steps": (3,)}, "lengths must rise"),
        (
            {"pacing": "length", "lengths": (8, 16, 24), "last_steps": (3, 3)},
            "last_steps must rise",
        ),
        ({"pacing": "length", "min_tokens": 12}, "a multiple of multiple_of"),
        ({"start": 0.0}, "greater than 0"),
        ({"ramp_ratio": 1.5}, "less than or equal to 1"),
        ({"pacing": "exponential"}, "'sqrt', 'linear', 'steps' or 'length'"),
    ],
)
def test_settings_that_say_nothing_or_too_much_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, ValidationError), match=words):
        Curriculum(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ramp_steps": 21}, "longer than the run"),
        ({"pacing": "length", "min_tokens": 64}, "no row would be cut: the longest has 41 tokens"),
        ({"pacing": "length", "lengths": (8, 32), "last_steps": (4,)}, "cut to the end of the run"),
        (
            {"pacing": "length", "lengths": (8, 48), "last_steps": (19,)},
            "cut to the end of the run",
        ),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused_with_a_cure(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        course(rising(40), **settings)
    assert caught.value.cure


def test_the_cure_of_lengths_that_end_too_early_works() -> None:
    with pytest.raises(ConfigError) as caught:
        course(rising(40), pacing="length", lengths=(8, 32), last_steps=(4,))
    advised = int(str(caught.value.cure).split("lengths with ")[1].split()[0])
    course(rising(40), pacing="length", lengths=(8, advised), last_steps=(4,))


def test_rows_with_classes_are_not_cut_and_have_no_labels_to_count() -> None:
    classes = [row(n, 9, label=n % 2, meta={}) for n in range(8)]
    classes = [Row(r.tokens, (False,) * 9, r.id, r.source, label=r.label) for r in classes]
    with pytest.raises(ConfigError, match="rows with classes cannot be cut") as caught:
        course(classes, pacing="length", min_tokens=8)
    assert "pacing sqrt" in str(caught.value.cure)
    with pytest.raises(ConfigError, match="no row has a trained token to count"):
        course(classes, count="trained")
    assert len(ids(course(classes), 0, 1)[0]) == 4


CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "difficulty": ("rarity", {}),
    "column": ("other", {"difficulty": "column", "column": "hard"}),
    "count": ("trained", {}),
    "order": ("random", {}),
    "pacing": ("linear", {}),
    "ramp_steps": (3, {}),
    "ramp_ratio": (0.9, {}),
    "start": (0.5, {}),
    "buckets": (3, {"pacing": "steps"}),
    "min_tokens": (16, {"pacing": "length"}),
    "multiple_of": (4, {"pacing": "length"}),
    "root_degree": (2.0, {"pacing": "length"}),
    "lengths": ((16, 48), {"pacing": "length", "lengths": (8, 48), "last_steps": (3,)}),
    "last_steps": ((5,), {"pacing": "length", "lengths": (8, 48), "last_steps": (3,)}),
}
"""Setting -> a value that is not the default, and what must be set beside."""


@pytest.mark.parametrize("name", CHANGED)
def test_every_setting_changes_what_is_shown(name: str) -> None:
    value, beside = CHANGED[name]
    rows = [
        row(n, len(r.tokens), prompt=1 + n % 5, meta={"columns": {"hard": n, "other": -n}})
        for n, r in enumerate(rising(40))
    ]
    rows = [
        Row(tuple(n % 4 and n % 7 for _ in r.tokens), *(r.trained, r.id), meta=r.meta)
        for n, r in enumerate(rows)
    ]

    def shown(**settings: Any) -> list[list[Row]]:
        return list(islice(course(rows, **settings).windows(), 20))

    assert shown(**beside) == shown(**beside)
    assert shown(**{**beside, name: value}) != shown(**beside)


def test_no_setting_is_left_out() -> None:
    assert set(CHANGED) == set(Curriculum.model_fields)
