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
_MODEL_FACTOR = np.uint64(0xD6E8FEB86659FD93)
"""Makes the same prefix before two models two prefixes."""
_ROW_BITS = 31
_NO_PREFIX = np.uint64(0)

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
    prefix: int | None
    """A hash of the long prefix that more than half of its requests have; None where there is none."""


def order(segment: pa.Table) -> OrderedSegment:
    """Return the order of a segment, whose rows are in the file's order: by model, then by shared prefix, then as in
    the file.

    Depth by depth, what shares nothing has found its place; only the rest is looked at again.
    """
    models = _models(segment).indices.to_numpy().astype(np.int64)
    rows: Rows = np.arange(segment.num_rows)
    leaf, deepest = rows.copy(), np.zeros(len(rows), dtype=np.int64)
    left, places, rank = rows.copy(), rows.copy(), models
    for depth, name in enumerate(DEPTHS, 1):
        hashes = segment.column(name).to_numpy()[left] + models[left].astype(np.uint64) * _MODEL_FACTOR
        first, shared = _groups(hashes)
        leaf[left[shared]] = left[first[shared]]
        deepest[left[shared]] = depth
        # What shares nothing at this depth stays together in its group, behind the subgroup that leads the group.
        key = (rank << _ROW_BITS | leaf[left]) << 1 | ~shared
        ordered = np.argsort(key, kind="stable")
        rows[places] = left[ordered]
        still = shared[ordered]
        left, places, key = left[ordered][still], places[still], key[ordered][still]
        if not len(left):
            break
        rank = np.cumsum(np.diff(key, prepend=key[0]) != 0)
    begins = np.flatnonzero(np.diff(leaf[rows]) | np.diff(deepest[rows])) + 1
    leaves = np.zeros(len(rows), dtype=np.int64)
    leaves[begins] = 1
    return OrderedSegment(rows, np.cumsum(leaves), deepest[rows] > 0)


def _groups(hashes: npt.NDArray[np.uint64]) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return for each position the first one with an equal hash, and whether there are others."""
    by_hash = np.argsort(hashes, kind="stable")
    ordered = hashes[by_hash]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.append(starts, len(ordered)))
    first, shared = np.empty(len(ordered), dtype=np.int64), np.empty(len(ordered), dtype=np.bool_)
    first[by_hash] = np.repeat(by_hash[starts], sizes)
    shared[by_hash] = np.repeat(sizes > 1, sizes)
    return first, shared


def _models(segment: pa.Table) -> pa.DictionaryArray:
    """Return the model of each row; they are numbered as they come up."""
    return segment.column("model").combine_chunks().dictionary_encode()


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
    models = _models(segment)
    codes = models.indices.to_numpy()[ordered.rows]
    names = models.dictionary.to_pylist()
    model_ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes))
    leaf_starts = np.searchsorted(ordered.leaves, ordered.leaves, side="left")
    leaf_ends = np.searchsorted(ordered.leaves, ordered.leaves, side="right")
    at_1024, at_4096 = (segment.column(name).to_numpy()[ordered.rows] for name in DEPTHS[-2:])
    # A text that ends before a depth stands for itself: it is no long prefix, however many have it.
    long_prefixes = np.where(at_1024 == at_4096, _NO_PREFIX, at_4096)
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
        prefix = _most_common(long_prefixes[start:end])
        yield Cut(names[codes[start]], _run_order(ordered, slice(start, end), prompts[start:end]), prefix)
        start = end


def _most_common(prefixes: npt.NDArray[np.uint64]) -> int | None:
    """Return the prefix of more than half of a chunk's requests; these are neighbours, so it is in the middle."""
    middle = prefixes[len(prefixes) // 2]
    if middle == _NO_PREFIX or 2 * np.count_nonzero(prefixes == middle) <= len(prefixes):
        return None
    return int(middle)


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
