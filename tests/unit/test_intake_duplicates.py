"""Duplicates are found by hash and decided by the id itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.intake.duplicates import CustomIds


@given(st.lists(st.text("abc", min_size=1, max_size=2), max_size=60), st.integers(1, 9))
def test_the_first_of_equal_ids_keeps_it_whatever_hashes_collide(names: list[str], buckets: int) -> None:
    ids = CustomIds()
    hashes = [(sum(map(ord, name)) % buckets) << 58 for name in names]
    ids.add(np.array(hashes, dtype=np.uint64).tobytes())
    found = ids.duplicates(names.__getitem__)
    expected = [(later, names.index(name)) for later, name in enumerate(names) if names.index(name) != later]
    assert list(found) == expected
    assert len(found) == len(expected)
    middle = len(names) // 2
    parts = [*found.between(0, middle).tolist(), *found.between(middle, len(names)).tolist()]
    assert parts == [later for later, _ in expected]


def test_an_id_without_a_twin_is_never_read() -> None:
    ids = CustomIds()
    ids.add(np.arange(1000, dtype=np.uint64).tobytes())

    def read(position: int) -> str:
        raise AssertionError(position)

    assert list(ids.duplicates(read)) == []
