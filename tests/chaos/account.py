"""What came of a chaos run: every line counted in the files that the customers read, and every call of the engines."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results.verify import verify
from batch_pipeline.store import ObjectMissing, ObjectStore, keys
from batch_pipeline.wire import chunk_files
from tests.chaos.files import Dropped
from tests.chaos.plan import Part


class Done(msgspec.Struct, frozen=True):
    """A kill that was made. Times in UTC seconds since the epoch."""

    part: Part
    sleeps: bool
    at: float
    back_at: float


class Tally(msgspec.Struct, frozen=True):
    """What one file, or all of them, came to."""

    statuses: list[str]
    requests: int
    lost: list[str]
    """What has no line, by custom_id or line number."""
    doubled: list[str]
    unknown: list[str]
    """Lines that belong to no request of the file."""
    unproved: list[str]
    """What `verify` found."""


class Calls(msgspec.Struct, frozen=True):
    """Calls of the engines."""

    calls: int
    repeated: int
    """Calls beyond the first of their request."""
    needless: list[str]
    """Calls of requests whose result a checkpoint held when the chunk was leased: there must be none. So a repeated
    call is always one of a request that was in flight, or not yet checkpointed, when something was killed.
    """


def tally(file: Dropped, batch: Batch, *, ledger: Ledger, store: ObjectStore) -> Tally:
    """Count the lines of one file's outbox. Reads only."""
    lines = [line for name in ("output.jsonl", "errors.jsonl") for line in _lines(file, name, store)]
    found = Counter(str(line["custom_id"] or f"line {(line['error'] or {}).get('line')}") for line in lines)
    expected = file.expected()
    return Tally(
        statuses=[batch.status],
        requests=len(expected),
        lost=[label for label in expected if not found[label]],
        doubled=[label for label, count in found.items() if count > 1],
        unknown=sorted(found.keys() - set(expected)),
        unproved=verify(batch.batch_id, ledger=ledger, store=store).problems,
    )


def total(tallies: Sequence[Tally]) -> Tally:
    """Return the sum."""
    sums = {
        field: [entry for one in tallies for entry in getattr(one, field)]
        for field in ("statuses", "lost", "doubled", "unknown", "unproved")
    }
    return Tally(requests=sum(one.requests for one in tallies), **sums)


def count_calls(
    journal: Path, batches: Sequence[tuple[Dropped, Batch]], *, ledger: Ledger, store: ObjectStore
) -> Calls:
    """Hold the engines' journal against the checkpoints that the ledger has. Reads only."""
    calls: defaultdict[str, list[float]] = defaultdict(list)
    for line in journal.read_text(encoding="utf-8").splitlines():
        moment, _, label = line.split(" ", 2)
        calls[label].append(float(moment))
    needless = []
    for file, batch in batches:
        for label, saved_before in _saved(file, batch, ledger=ledger, store=store):
            late = [at for at in calls[label] if at > saved_before]
            needless += [f"{label}: in a checkpoint before {saved_before:.2f}, called at {at:.2f}" for at in late]
    count = sum(map(len, calls.values()))
    return Calls(count, count - sum(1 for made in calls.values() if made), needless)


def _saved(file: Dropped, batch: Batch, *, ledger: Ledger, store: ObjectStore) -> Iterator[tuple[str, float]]:
    """Yield each request that a checkpoint held when its chunk was leased anew, and the time of that lease."""
    leased = {
        (event.chunk, event.token): event.at for event in ledger.events.of(batch.batch_id) if event.event == "leased"
    }
    for chunk in ledger.chunks.of(batch.batch_id):
        for part in chunk.parts:
            token = int(part.key.split("/")[-2].split("-")[0])
            if (anew := leased.get((chunk.chunk, token + 1))) is not None:
                for result in chunk_files.read_part(store.get(part.key)):
                    yield file.label(result.index), anew


def _lines(file: Dropped, name: str, store: ObjectStore) -> list[dict[str, dict[str, object]]]:
    try:
        data = store.get(keys.outbox(file.customer, file.name, name))
    except ObjectMissing:
        return []
    return [json.loads(line) for line in data.splitlines()]


def table(kills: Sequence[Done], whole: Tally, calls: Calls, seconds: float) -> str:
    """Return the result of a run as a Markdown table."""
    rows = [(f"kills of {part}", str(count)) for part, count in Counter(kill.part for kill in kills).items()]
    slept = sum(kill.sleeps for kill in kills)
    statuses = Counter(whole.statuses)
    rows = [
        *sorted(rows),
        ("kills in all", f"{len(kills)}, {slept} of them workers put to sleep past their lease"),
        ("batches", ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))),
        ("requests", f"{whole.requests:,}"),
        ("lost", str(len(whole.lost))),
        ("doubled", str(len(whole.doubled))),
        ("unknown or unproved", str(len(whole.unknown) + len(whole.unproved))),
        ("calls of the engines", f"{calls.calls:,}"),
        ("repeated calls", f"{calls.repeated:,} ({calls.repeated / max(1, len(kills)):.1f} a kill)"),
        ("repeated although checkpointed", str(len(calls.needless))),
        ("seconds", f"{seconds:.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [f"| {'what':{width}} | count |", f"| {'-' * width} | --- |", *(f"| {a:{width}} | {b} |" for a, b in rows)]
    )
