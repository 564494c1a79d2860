"""Whose run is requested next, where few places are free: one customer in turn, whoever has the least under way first.

Pure. So a customer with ten thousand small files delays another's single one by a run or two, and not by all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class _Owned(Protocol):
    @property
    def customer(self) -> str: ...


_T = TypeVar("_T", bound=_Owned)


def in_turn(waiting: Sequence[_T], under_way: Mapping[str, int], most: int) -> list[_T]:
    """Return up to `most` of those that wait; `under_way` counts each customer's runs.

    A customer's own keep their order.

    Cost: the product of how many wait and how many are returned.
    """
    counts = Counter(under_way)
    left = list(waiting)
    chosen: list[_T] = []
    while left and len(chosen) < most:
        # The first of equals, so that among them the oldest goes first.
        nearest = min(range(len(left)), key=lambda place: counts[left[place].customer])
        batch = left.pop(nearest)
        counts[batch.customer] += 1
        chosen.append(batch)
    return chosen
