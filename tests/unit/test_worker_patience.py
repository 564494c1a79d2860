"""How long an answer may take: by its tokens and the measured speed, between two bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.wire.chunk_files import ChunkRequest
from batch_pipeline.worker.patience import Patience

LEAST, MOST = 60.0, 1800.0


def request(prompt_tokens: int, max_tokens: int) -> ChunkRequest:
    return ChunkRequest(0, "a", b"{}", prompt_tokens, max_tokens)


def measured(seconds: float, output_tokens: int, answers: int = 100) -> Patience:
    patience = Patience(LEAST, MOST)
    for _ in range(answers):
        patience.answered(seconds, output_tokens)
    return patience


def test_until_enough_answers_have_come_the_ceiling_holds() -> None:
    assert measured(1.0, 100, answers=31).limit(request(10, 10), 0) == MOST
    assert measured(1.0, 100, answers=32).limit(request(10, 10), 0) == LEAST


def test_the_limit_grows_with_the_tokens_and_the_measured_time_of_each() -> None:
    patience = measured(4.0, 200)
    assert patience.limit(request(100, 900), 0) == pytest.approx(10 * 0.02 * 1000)
    assert patience.limit(request(100, 1900), 0) == pytest.approx(10 * 0.02 * 2000)
    assert measured(8.0, 200).limit(request(100, 900), 0) == pytest.approx(10 * 0.04 * 1000)


def test_the_slowest_of_the_newest_answers_counts_and_is_forgotten_in_time() -> None:
    patience = measured(4.0, 200)
    patience.answered(20.0, 200)
    assert patience.limit(request(0, 1000), 0) == pytest.approx(1000.0)
    for _ in range(256):
        patience.answered(4.0, 200)
    assert patience.limit(request(0, 1000), 0) == pytest.approx(200.0)


def test_each_try_without_an_answer_doubles_the_limit_up_to_the_ceiling() -> None:
    patience = measured(1.0, 100)
    assert [patience.limit(request(1, 1), timeouts) for timeouts in range(7)] == [60, 120, 240, 480, 960, 1800, 1800]


def test_a_ceiling_below_the_shortest_limit_wins() -> None:
    patience = Patience(LEAST, 5.0)
    for _ in range(100):
        patience.answered(1.0, 100)
    assert patience.limit(request(1, 1), 0) == 5.0


@given(
    answers=st.lists(st.tuples(st.floats(0.001, 3600.0), st.integers(0, 100_000)), min_size=32, max_size=300),
    prompt=st.integers(0, 1_000_000),
    longest=st.integers(1, 1_000_000),
    timeouts=st.integers(0, 100),
)
def test_no_answer_like_those_of_late_is_cut_short(
    answers: list[tuple[float, int]], prompt: int, longest: int, timeouts: int
) -> None:
    patience = Patience(LEAST, MOST)
    for seconds, tokens in answers:
        patience.answered(seconds, tokens)
    limit = patience.limit(request(prompt, longest), timeouts)
    assert LEAST <= limit <= MOST
    for seconds, tokens in answers[-256:]:
        if tokens <= longest:
            assert limit >= min(MOST, seconds)
