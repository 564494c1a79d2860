"""Whose run is requested next."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.scheduling.turns import in_turn


class Waiting(NamedTuple):
    customer: str
    number: int


def names(chosen: list[Waiting]) -> list[str]:
    return [f"{batch.customer}{batch.number}" for batch in chosen]


def test_a_flood_delays_a_single_file_by_one_run() -> None:
    flood = [Waiting("flood", number) for number in range(300)]
    assert names(in_turn([*flood, Waiting("quiet", 0)], {}, 3)) == ["flood0", "quiet0", "flood1"]
    assert names(in_turn([*flood, Waiting("quiet", 0)], {"flood": 4}, 1)) == ["quiet0"]


def test_a_customer_alone_has_all_the_places() -> None:
    assert names(in_turn([Waiting("a", number) for number in range(9)], {"a": 2}, 4)) == ["a0", "a1", "a2", "a3"]


@given(
    customers=st.lists(st.sampled_from("abc"), max_size=30),
    under_way=st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
    most=st.integers(0, 35),
)
def test_nobody_is_two_ahead_of_whoever_still_waits(customers: list[str], under_way: dict[str, int], most: int) -> None:
    waiting = [Waiting(customer, number) for number, customer in enumerate(customers)]
    chosen = in_turn(waiting, under_way, most)
    assert len(chosen) == min(most, len(waiting))
    after = Counter(under_way) + Counter(batch.customer for batch in chosen)
    for batch in chosen:
        mine = [other.number for other in chosen if other.customer == batch.customer]
        assert mine == sorted(mine)
    for left in set(waiting) - set(chosen):
        assert all(after[left.customer] + 1 >= after[batch.customer] for batch in chosen)
