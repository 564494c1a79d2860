"""What came of a chaos run: every line counted in the files that the customers read, and every call of the engines."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results.verify import verify
from batch_pipeline.store import ObjectMissing, ObjectStore, keys
from tests.chaos.engine import SPREAD
from tests.chaos.files import Dropped
from tests.chaos.parts import CHECKPOINT_SECONDS, DELAY_SECONDS
from tests.chaos.plan import Part

_WRITE_SECONDS = 3.0
"""A checkpoint's encoding, its object and its row, on a busy machine."""
UNSAVED_SECONDS = DELAY_SECONDS * (1 + SPREAD) + CHECKPOINT_SECONDS + _WRITE_SECONDS
"""A call that is older than this has been answered and is in a checkpoint, unless store or ledger were away."""


class Done(msgspec.Struct, frozen=True):
    """A kill that was made. Times in monotonic seconds."""

    part: Part
    sleeps: bool
    at: float
    back_at: float
    engines: list[int]
    """Process ids of the engines whose calls it may have cost."""


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
    unexplained: list[str]
    """Repeated calls whose predecessor was not lost by a kill: it had been answered and checkpointed."""


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


def count_calls(journal: Path, kills: Sequence[Done]) -> Calls:
    """Read the engines' journal. A repeated call is explained where the call before it was lost by a kill."""
    calls = defaultdict(list)
    for line in journal.read_text(encoding="utf-8").splitlines():
        at, engine, label = line.split(" ", 2)
        calls[label].append((float(at), int(engine)))
    unexplained = []
    for label, made in calls.items():
        for (at, engine), (again_at, _) in itertools.pairwise(made):
            if not any(_cost(kill, at, engine, again_at, kills) for kill in kills):
                unexplained.append(f"{label}: called at {at:.1f} by engine {engine} and again at {again_at:.1f}")
    count = sum(map(len, calls.values()))
    return Calls(count, count - len(calls), unexplained)


def _cost(kill: Done, at: float, engine: int, again_at: float, kills: Sequence[Done]) -> bool:
    """Whether this kill may have cost a call of this engine at `at`: it was under way then, or in no checkpoint yet."""
    if engine not in kill.engines or not at <= kill.at <= again_at:
        return False
    return kill.at - at <= UNSAVED_SECONDS or any(_kept_unsaved(other, at, kill.at) for other in kills)


def _kept_unsaved(outage: Done, at: float, killed_at: float) -> bool:
    """Whether store or ledger were away in such a way that an answer of a call at `at` was unsaved at `killed_at`.

    The pauses between tries double, so the next try may come as long after an outage as it has lasted, and a quarter.
    """
    if outage.part not in (Part.STORE, Part.LEDGER):
        return False
    tried_again_at = outage.back_at + 1.25 * (outage.back_at - outage.at) + _WRITE_SECONDS
    return outage.at <= at + UNSAVED_SECONDS and killed_at <= tried_again_at


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
        ("repeated although checkpointed", str(len(calls.unexplained))),
        ("seconds", f"{seconds:.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [f"| {'what':{width}} | count |", f"| {'-' * width} | --- |", *(f"| {a:{width}} | {b} |" for a, b in rows)]
    )
