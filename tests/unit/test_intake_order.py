"""The order of requests and the cuts between chunks, as functions of a request table."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_pipeline.intake.chunks import prefix_groups
from batch_pipeline.intake.order import Cut, cut, order, together
from batch_pipeline.intake.table import SCHEMA
from batch_pipeline.settings import Intake


def table(rows: list[dict[str, Any]]) -> pa.Table:
    """A segment of a request table. A row says what matters: `prefix` as the words at the four depths, and sizes."""
    columns: dict[str, list[Any]] = {field.name: [] for field in SCHEMA}
    for index, row in enumerate(rows):
        prefix = list(row.get("prefix", [f"own {index}"]))
        hashes = [hash_of(" ".join(prefix[: depth + 1])) for depth in range(4)]
        values = {
            **dict.fromkeys(columns, 0),
            "index": row.get("index", index),
            "rewrite": False,
            "model": row.get("model", "m"),
            "body_bytes": row.get("bytes", 100),
            "prompt_tokens": row.get("tokens", 10),
            "max_tokens": row.get("answer", 0),
            **dict(zip(("prefix_64", "prefix_256", "prefix_1024", "prefix_4096"), hashes, strict=True)),
        }
        for name, column in columns.items():
            column.append(values[name])
    return pa.table({f.name: pa.array(columns[f.name], type=f.type) for f in SCHEMA}, schema=SCHEMA)


_hashes: dict[str, int] = {}


def hash_of(text: str) -> int:
    """A number of its own for each text, in no particular order."""
    return _hashes.setdefault(text, (len(_hashes) + 1) * 0x9E3779B97F4A7C15 % 2**64)


def chunks(rows: list[dict[str, Any]], **limits: int) -> list[Cut]:
    """The chunks of a segment."""
    return list(cut(table(rows), msgspec.structs.replace(Intake(), **limits)))


def test_where_nothing_is_shared_the_order_of_the_file_stays() -> None:
    rows = [{"tokens": 50 - number} for number in range(25)]
    assert [cut.rows.tolist() for cut in chunks(rows, chunk_requests=10)] == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 25)),
    ]


def test_one_prefix_for_all_keeps_chunks_contiguous_and_runs_each_by_length() -> None:
    rows = [{"prefix": ["system"], "tokens": 100 - number} for number in range(20)]
    rows = [{**row, "prefix": ["system", f"own {number}"]} for number, row in enumerate(rows)]
    found = chunks(rows, chunk_requests=10)
    assert [sorted(cut.rows.tolist()) for cut in found] == [list(range(10)), list(range(10, 20))]
    assert found[0].rows.tolist() == list(reversed(range(10)))


def test_groups_stand_where_their_first_request_stood() -> None:
    rows = [{"prefix": [word]} for word in ["b", "x1", "a", "b", "x2", "a", "b"]]
    assert order(table(rows)).rows.tolist() == [0, 3, 6, 1, 2, 5, 4]


def test_longer_shared_prefixes_sit_together_inside_shorter_ones() -> None:
    prefixes = [["s", "p"], ["s", "q"], ["s", "one"], ["s", "p"], ["t", "p"], ["s", "q"], ["s", "two"], ["t", "p"]]
    found = order(table([{"prefix": prefix} for prefix in prefixes])).rows.tolist()
    assert found == [0, 3, 2, 6, 1, 5, 4, 7]


def test_models_do_not_mix_and_come_in_the_order_in_which_they_appear() -> None:
    rows = [{"model": model, "prefix": ["same"]} for model in "yxyxzy"]
    found = chunks(rows)
    assert [(cut.model, cut.rows.tolist()) for cut in found] == [("y", [0, 2, 5]), ("x", [1, 3]), ("z", [4])]


def test_a_chunk_is_full_by_tokens_and_by_bytes_and_a_huge_request_is_alone() -> None:
    by_tokens = chunks([{"tokens": 40, "answer": 10} for _ in range(6)], chunk_tokens=100)
    assert [cut.rows.tolist() for cut in by_tokens] == [[0, 1], [2, 3], [4, 5]]
    by_bytes = chunks([{"bytes": size} for size in (10, 10, 5000, 10, 90, 1)], chunk_bytes=100)
    assert [cut.rows.tolist() for cut in by_bytes] == [[0, 1], [2], [3, 4], [5]]


def test_a_small_group_is_spared_by_a_slightly_earlier_cut() -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(8)] + [{"prefix": ["group"]} for _ in range(4)] + [{}]
    assert [len(cut.rows) for cut in chunks(rows, chunk_requests=10)] == [8, 5]
    # Where it would cost too much of the chunk, the group is divided.
    rows = [{} for _ in range(4)] + [{"prefix": ["large group"]} for _ in range(9)]
    assert [len(cut.rows) for cut in chunks(rows, chunk_requests=10)] == [10, 3]


def test_a_chunk_names_the_long_prefix_that_most_of_its_requests_share() -> None:
    long = [{"prefix": ["a", "b", "c", name]} for name in ("d", "e") for _ in range(5)]
    short: list[dict[str, Any]] = [{"prefix": ["a"]} for _ in range(5)]
    one, mixed, other, none = chunks(long + short, chunk_requests=4)
    assert one.prefix is not None
    assert mixed.prefix not in (None, one.prefix)
    assert other.prefix is None  # of two and two
    assert none.prefix is None


def test_chunks_with_one_long_prefix_are_a_group_named_by_its_first() -> None:
    m, n = ("m", 7), ("n", 7)
    assert prefix_groups([m, m, None, n, m, ("m", 8)]) == [0, 0, None, None, 0, None]


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(["m", "n"]),
            "prefix": st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4),
            "tokens": st.integers(1, 60),
            "bytes": st.integers(2, 300),
        }
    ),
    min_size=1,
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 20), st.integers(1, 200), st.integers(1, 900))
def test_every_request_is_in_exactly_one_chunk_within_its_limits(
    rows: list[dict[str, Any]], requests: int, tokens: int, size: int
) -> None:
    limits = {"chunk_requests": requests, "chunk_tokens": tokens, "chunk_bytes": size}
    found = chunks(rows, **limits)
    assert Counter(row for cut in found for row in cut.rows.tolist()) == Counter(range(len(rows)))
    for cut_ in found:
        held = [rows[row] for row in cut_.rows]
        assert {row["model"] for row in held} == {cut_.model}
        within = sum(row["tokens"] for row in held) <= tokens and sum(row["bytes"] for row in held) <= size
        assert len(held) == 1 or (len(held) <= requests and within)
    again = chunks(rows, **limits)
    assert [cut.rows.tolist() for cut in again] == [cut.rows.tolist() for cut in found]


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_groups_of_every_depth_are_never_interrupted(rows: list[dict[str, Any]]) -> None:
    segment = table(rows)
    ordered = order(segment).rows
    models = np.array(segment.column("model").to_pylist())[ordered]
    for depth in ("prefix_64", "prefix_256", "prefix_1024", "prefix_4096"):
        hashes = segment.column(depth).to_numpy()[ordered]
        seen: list[tuple[str, int]] = []
        for key in zip(models.tolist(), hashes.tolist(), strict=True):
            if not seen or seen[-1] != key:
                seen.append(key)
        assert len(seen) == len(set(seen)), depth


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_identical_requests_are_neighbours_and_every_row_is_in_one_chunk(kinds: list[int], size: int) -> None:
    # Kind 0 stands for requests that are identical to no other.
    twins = np.array([row if kind == 0 else kinds.index(kind) for row, kind in enumerate(kinds)])
    segment = table([{"prefix": [f"own {row}"] if kind == 0 else [f"kind {kind}"]} for row, kind in enumerate(kinds)])
    found = together(order(segment), twins)
    runs = twins[found.rows]
    assert np.count_nonzero(np.diff(runs)) + 1 == len(set(runs.tolist()))
    assert (np.diff(found.leaves) >= 0).all()
    limits = msgspec.structs.replace(Intake(), chunk_requests=size)
    rows = [row for chunk in cut(segment, limits, twins) for row in chunk.rows.tolist()]
    assert sorted(rows) == list(range(len(kinds)))


def misses(prefixes: list[int], room: int) -> int:
    """How often a prefix is not in a cache that has room for so many, and forgets the one not used for longest."""
    cached: dict[int, None] = {}
    missed = 0
    for prefix in prefixes:
        missed += prefix not in cached
        cached.pop(prefix, None)
        cached[prefix] = None
        if len(cached) > room:
            del cached[next(iter(cached))]
    return missed


def test_each_prefix_is_computed_once_though_the_cache_is_too_small_for_all() -> None:
    in_file = [row % 50 for row in range(400)]
    random.Random(1).shuffle(in_file)
    rows = [{"prefix": [f"prefix {number}"]} for number in in_file]
    as_run = [in_file[row] for chunk in chunks(rows, chunk_requests=100) for row in chunk.rows.tolist()]
    assert misses(as_run, room=12) == 50
    assert misses(in_file, room=12) > 250
