"""What sensors share: which runs are under way, and the pause before one that failed is requested again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from dagster import DagsterRunStatus, RunsFilter

from batch_pipeline.errors import StoreError
from batch_pipeline.ledger import Ledger, notices
from batch_pipeline.plain import one_line

UNDER_WAY = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
PARTITION_TAG = "dagster/partition"
LONGEST_PAUSE_SECONDS = 600.0


def partitions_under_way(instance: dg.DagsterInstance, job_name: str) -> set[str]:
    """Return the partitions for which a run of this job is queued or running."""
    runs = instance.get_runs(RunsFilter(job_name=job_name, statuses=UNDER_WAY))
    return {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}


def count_under_way(instance: dg.DagsterInstance, job_name: str) -> int:
    """Return how many runs of this job are queued or running."""
    return instance.get_runs_count(RunsFilter(job_name=job_name, statuses=UNDER_WAY))


def pause_seconds(attempts: int, first: float) -> float:
    """Return the pause before a step's run is requested again after so many requests: doubling, at most 10 minutes."""
    return min(first * 2.0 ** min(attempts, 16), LONGEST_PAUSE_SECONDS)


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
