"""What sensors share: which runs are under way, and the pause before one that failed is requested again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import dagster as dg
from dagster import DagsterRunStatus, RunsFilter

from batch_pipeline.errors import StoreError
from batch_pipeline.ledger import Ledger, notices
from batch_pipeline.ledger.records import Batch
from batch_pipeline.plain import one_line
from batch_pipeline.scheduling.turns import in_turn
from batch_pipeline.settings import Scheduling

UNDER_WAY = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
_BEFORE_THE_QUEUE = DagsterRunStatus.NOT_STARTED
BORN_SECONDS = 600.0
"""A run is queued right after it is created. One that is not after this long was forgotten: its launch failed, or the
daemon died in between. Nothing in Dagster ends it; its step is requested again, which is harmless should it still come.
"""
PARTITION_TAG = "dagster/partition"
CUSTOMER_TAG = "batch_pipeline/customer"
LONGEST_PAUSE_SECONDS = 600.0
_MOST_FAILURES = 8
_WORKED_SECONDS = 600.0


class RunsUnderWay(NamedTuple):
    """The runs of one job that are queued or running, or were created a moment ago."""

    partitions: set[str]
    customers: Counter[str]
    """How many of them each customer has; without those that no queue has yet, which may be forgotten."""


def runs_under_way(instance: dg.DagsterInstance, job_name: str) -> RunsUnderWay:
    """Return the runs of this job that are queued or running."""
    runs = [run for wanted in _under_way(job_name) for run in instance.get_runs(wanted)]
    partitions = {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}
    in_the_queue = [run for run in runs if run.status != _BEFORE_THE_QUEUE]
    return RunsUnderWay(partitions, Counter(run.tags.get(CUSTOMER_TAG, "") for run in in_the_queue))


def next_in_turn(
    awaiting: Callable[[int], list[Batch]], under_way: RunsUnderWay, scheduling: Scheduling
) -> list[Batch]:
    """Return the batches for which a run is to be requested now, one customer in turn.

    No more are under way than twice the places: what waits beyond that waits in the ledger, where its turn is decided
    when a place is free, and not in Dagster's queue, where it would stand behind whatever came before.
    """
    room = min(2 * scheduling.runs_at_once - under_way.customers.total(), scheduling.sensor_batch)
    if room <= 0:
        return []
    # So many more, so that those under way hold up no other.
    found = awaiting(room + len(under_way.partitions))
    waiting = [batch for batch in found if batch.batch_id not in under_way.partitions]
    return in_turn(waiting, under_way.customers, room)


def count_under_way(instance: dg.DagsterInstance, job_name: str) -> int:
    """Return how many runs of this job are queued or running."""
    return sum(instance.get_runs_count(wanted) for wanted in _under_way(job_name))


def _under_way(job_name: str) -> list[RunsFilter]:
    """Return what finds the runs of a job that are queued or running, or were created a moment ago: these first, so
    that none that is queued between the two questions escapes both.
    """
    started = [status for status in UNDER_WAY if status != _BEFORE_THE_QUEUE]
    born_after = datetime.now(UTC) - timedelta(seconds=BORN_SECONDS)
    return [
        RunsFilter(job_name=job_name, statuses=[_BEFORE_THE_QUEUE], created_after=born_after),
        RunsFilter(job_name=job_name, statuses=started),
    ]


def pause_seconds(attempts: int, first: float) -> float:
    """Return the pause before a step's run is requested again after so many requests: doubling, at most 10 minutes."""
    return min(first * 2.0 ** min(attempts, 16), LONGEST_PAUSE_SECONDS)


def is_failing(instance: dg.DagsterInstance, job_name: str, first_pause: float) -> bool:
    """Whether the newest runs of a job failed soon after their start, more than once, and the pause is not over.

    So a job whose process dies at once (no memory, a broken image) is not launched every few seconds. One failure is
    no reason to wait: a worker may be preempted. Nor is one of a run that had worked for long.
    """
    records = instance.get_run_records(RunsFilter(job_name=job_name), limit=_MOST_FAILURES)
    ends = []
    for record in records:
        end = record.end_time or record.update_timestamp.timestamp()
        if record.dagster_run.status != DagsterRunStatus.FAILURE or end - (record.start_time or end) > _WORKED_SECONDS:
            break
        ends.append(end)
    return len(ends) > 1 and time.time() < ends[0] + pause_seconds(len(ends) - 2, first_pause)


@contextmanager
def store_watch(ledger: Ledger) -> Iterator[None]:
    """Let every batch's status say that the object store is away while what stands within fails for it.

    Raises the StoreError again: the tick has failed, and Dagster's UI shows it too.
    """
    try:
        yield
    except StoreError as error:
        tell_store_outage(ledger, error)
        raise
    tell_store_outage(ledger, None)


def tell_store_outage(ledger: Ledger, outage: StoreError | None) -> None:
    """Let every batch's status say that the object store is away, or say it no longer."""
    if outage is None:
        ledger.notices.clear(notices.STORE)
    else:
        ledger.notices.post(notices.STORE, f"the object store cannot be used: {one_line(str(outage))}")
