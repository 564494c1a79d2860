"""In which order requests run, and where chunks are cut. Pure functions of the request table; the same table, the
same chunks.

Requests are ordered by model, then by the prefix they share, so that the engine's prefix cache is hit. Prefixes are
compared at four depths. At each, requests that agree are a group; a group stands where its first request stood in the
file, and requests that share nothing stay where they are, so that chunks of unshared prompts are runs of the input
(which the merge copies whole). Inside a group, requests that share no longer prefix keep the input's order too; only
within a chunk, where it costs the merge nothing, they run by length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batch_pipeline.settings import Intake

DEPTHS = ("prefix_64", "prefix_256", "prefix_1024", "prefix_4096")
_SMALL_GROUP_SHARE = 4
"""A cut is moved forward to spare a group if that costs the chunk at most one part in so many."""

Rows = npt.NDArray[np.int64]


class OrderedSegment(NamedTuple):
    """A segment of the table in the order in which chunks are cut from it."""

    rows: Rows
    """Positions in the segment."""
    leaves: Rows
    """For each, a number that grows from one deepest group to the next; requests that share nothing have one each."""
    shares: npt.NDArray[np.bool_]
    """For each, whether it shares a prefix with another of the segment."""


class Cut(NamedTuple):
    """One chunk: positions in the segment, in the order in which they run."""

    model: str
    rows: Rows


def order(segment: pa.Table) -> OrderedSegment:
    """Return the order of a segment: by model, then by shared prefix, then as in the file."""
    import polars as pl

    frame = pl.from_arrow(segment.select(["index", "model", *DEPTHS]))
    if not isinstance(frame, pl.DataFrame):
        raise TypeError("a table is a frame")
    frame = frame.with_row_index("row").with_columns(pl.col("index").min().over("model").alias("model_rank"))
    frame = frame.with_columns(pl.lit(0).alias("depth"), pl.col("index").alias("leaf"))
    keys = ["model_rank"]
    for number, depth in enumerate(DEPTHS, 1):
        group = pl.col("index").min().over("model", depth)
        shared = pl.len().over("model", depth) > 1
        first = f"first_{number}"
        # What shares nothing at this depth stays together in its group, behind the subgroup that leads the group.
        frame = frame.with_columns(shared.alias("shared"), group.alias("group"))
        frame = frame.with_columns(
            pl.when("shared").then("group").otherwise("leaf").alias(first),
            (~pl.col("shared")).alias(f"alone_{number}"),
            pl.when("shared").then(number).otherwise("depth").alias("depth"),
            pl.when("shared").then("group").otherwise("leaf").alias("leaf"),
        )
        keys += [first, f"alone_{number}"]
        if not frame["shared"].any():
            break
    ordered = frame.sort([*keys, "index"]).select(
        "row",
        shares=pl.col("depth") > 0,
        leaf=((pl.col("leaf") != pl.col("leaf").shift()) | (pl.col("depth") != pl.col("depth").shift()))
        .fill_null(False)
        .cum_sum(),
    )
    return OrderedSegment(
        ordered["row"].cast(pl.Int64).to_numpy(),
        ordered["leaf"].cast(pl.Int64).to_numpy(),
        ordered["shares"].to_numpy(),
    )


def together(ordered: OrderedSegment, twins: Rows) -> OrderedSegment:
    """Return the order with identical requests next to each other, where the first of them stood.

    `twins` says for each row of the segment which is the first that is identical: itself where there is none before.
    """
    count = len(ordered.rows)
    firsts = np.full(count, count, dtype=np.int64)
    # By the first row of each set of twins: the place of the foremost of them.
    np.minimum.at(firsts, twins[ordered.rows], np.arange(count))
    place = firsts[twins[ordered.rows]]
    moved = np.argsort(place, kind="stable")
    has_twin = np.bincount(place, minlength=count)[place] > 1
    return OrderedSegment(ordered.rows[moved], ordered.leaves[place[moved]], (ordered.shares | has_twin)[moved])


def cut(segment: pa.Table, limits: Intake, twins: Rows | None = None) -> Iterator[Cut]:
    """Yield the chunks of a segment: each of one model, full by requests, by tokens or by bytes, whichever comes first.

    A request that is larger than a chunk may be has a chunk of its own. A small group that shares a prefix is not
    divided where a slightly earlier cut avoids it. With `twins` (see `together`) identical requests are neighbours.
    """
    ordered = order(segment) if twins is None else together(order(segment), twins)
    prompts = _column(segment, "prompt_tokens", ordered.rows)
    tokens = prompts + _column(segment, "max_tokens", ordered.rows)
    lengths = _column(segment, "body_bytes", ordered.rows)
    models = segment.column("model").take(pa.array(ordered.rows)).combine_chunks().dictionary_encode()
    codes = models.indices.to_numpy()
    names = models.dictionary.to_pylist()
    model_ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes))
    leaf_starts = np.searchsorted(ordered.leaves, ordered.leaves, side="left")
    leaf_ends = np.searchsorted(ordered.leaves, ordered.leaves, side="right")
    token_sums, byte_sums = (np.concatenate(([0], np.cumsum(column))) for column in (tokens, lengths))
    start = 0
    while start < len(codes):
        model_end = int(model_ends[np.searchsorted(model_ends, start, side="right")])
        end = min(
            model_end,
            start + limits.chunk_requests,
            _last_within(token_sums, start, limits.chunk_tokens),
            _last_within(byte_sums, start, limits.chunk_bytes),
        )
        end = max(end, start + 1)
        if end < model_end:
            earlier, later = int(leaf_starts[end]), int(leaf_ends[end])
            spared = start < earlier < end and (end - earlier) * _SMALL_GROUP_SHARE <= end - start
            if spared and later - earlier <= limits.chunk_requests:
                end = earlier
        yield Cut(names[codes[start]], _run_order(ordered, slice(start, end), prompts[start:end]))
        start = end


def _run_order(ordered: OrderedSegment, here: slice, prompt_tokens: Rows) -> Rows:
    """Return a chunk's rows in the order in which they run: those of one group by length, the rest as they are."""
    lengths = np.where(ordered.shares[here], prompt_tokens, 0)
    by_length: Rows = np.lexsort((lengths, ordered.leaves[here]))
    return ordered.rows[here][by_length]


def _last_within(sums: Rows, start: int, limit: int) -> int:
    """Return the end of the longest run from `start` whose sum is at most `limit`."""
    return int(np.searchsorted(sums, sums[start] + limit, side="right")) - 1


def _column(segment: pa.Table, name: str, rows: Rows) -> Rows:
    taken = np.empty(len(rows), dtype=np.int64)
    taken[:] = segment.column(name).to_numpy()[rows]
    return taken
