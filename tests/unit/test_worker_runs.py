"""What the sensor of the workers makes of runs and workers that disagree, and of a launcher's words."""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg
import pytest

from batch_pipeline.ledger.records import Worker, WorkerState
from resources.run_process import ENDED_TAG, LOST
from sensors.worker_runs import find_lost, trouble_in

LEASE = 10.0
STARTED_AT = 1000.0


def record(run_id: str, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED, tag: str = "") -> dg.RunRecord:
    run = dg.DagsterRun(job_name="gpu_worker_m", run_id=run_id, status=status, tags={tag: LOST} if tag else {})
    then = datetime.fromtimestamp(STARTED_AT, UTC)
    return dg.RunRecord(
        storage_id=1, dagster_run=run, create_timestamp=then, update_timestamp=then, start_time=STARTED_AT
    )


def worker(run_id: str, seen_at: float) -> Worker:
    return Worker(
        worker_id=f"worker-{run_id}",
        model="m",
        run_id=run_id,
        host="h",
        state=WorkerState.READY,
        detail=None,
        leave=False,
        batches=[],
        started_at=STARTED_AT,
        ready_at=STARTED_AT,
        seen_at=seen_at,
    )


def test_a_worker_that_stays_silent_is_lost_and_its_run_is_ended() -> None:
    workers = {"a": worker("a", seen_at=2000.0)}
    first = find_lost([record("a")], workers, 2021.0, LEASE, {})
    assert (first.lost, first.since) == ([], {"a": 2021.0}), "it may only be the ledger that was away"
    second = find_lost([record("a")], workers, 2031.0, LEASE, first.since)
    assert [(lost.run.run_id, lost.worker_id, lost.silent_seconds) for lost in second.lost] == [("a", "worker-a", 31.0)]


def test_a_worker_that_is_heard_again_is_not_lost() -> None:
    silent = find_lost([record("a")], {"a": worker("a", 2000.0)}, 2025.0, LEASE, {})
    heard = find_lost([record("a")], {"a": worker("a", 2024.0)}, 2026.0, LEASE, silent.since)
    assert heard == ([], {})


def test_a_run_whose_worker_never_came_is_lost_after_a_while() -> None:
    soon = find_lost([record("a")], {}, STARTED_AT + 200.0, LEASE, {})
    assert soon == ([], {})
    later = find_lost([record("a")], {}, STARTED_AT + 400.0, LEASE, {"a": STARTED_AT + 350.0})
    assert [lost.worker_id for lost in later.lost] == [None]


@pytest.mark.parametrize(
    "run",
    [
        record("a", dg.DagsterRunStatus.STARTING),
        record("a", dg.DagsterRunStatus.CANCELING),
        record("a", tag=ENDED_TAG),
    ],
)
def test_a_run_that_starts_or_is_being_ended_is_not_lost(run: dg.RunRecord) -> None:
    assert find_lost([run], {"a": worker("a", 0.0)}, 2000.0, LEASE, {"a": 0.0}).lost == []


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        (
            "Debug information for pod p:\n\nPod status: Pending\n\nWarning events for pod:\n"
            "FailedScheduling: 0/1 nodes are available\nFailed to pull image: gone (x3)\nFor more information ...",
            "Failed to pull image: gone (x3)",
        ),
        (
            "Pod status: Running\n\nWarning events for pod:\nBackOff: Back-off restarting\nUnhealthy: failed",
            "BackOff: Back-off restarting",
        ),
        ("Pod status: Pending\nContainer 'd' status: Waiting: PodInitializing\n\nNo warning events for pod.", None),
        (
            "Pod status: Pending\nContainer 'd' status: Waiting: CreateContainerConfigError: no secret",
            "CreateContainerConfigError: no secret",
        ),
        ("Pod status: Failed: The node was low on memory.", "The node was low on memory."),
        (
            "\n\nDebug information for job dagster-run-1:\n\nJob status:\n - active=None\n - failed=None\n\n"
            'FailedCreate: Error creating: pods "dagster-run-1-x" is forbidden: exceeded quota: gpus, requested: '
            "requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8\n\n"
            "For more information about the failure, try running `kubectl describe job dagster-run-1` in your cluster.",
            'FailedCreate: Error creating: pods "dagster-run-1-x" is forbidden: exceeded quota: gpus, requested: '
            "requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
        ),
        (
            "\n\nDebug information for job dagster-run-1:\n\nJob status:\n - active=1\n\n"
            "SuccessfulCreate: Created pod: dagster-run-1-x\n\nFor more information about the failure, ...",
            None,
        ),
        ("\n\nDebug information for job j:\n\nCould not find job j\n\nFor more information ...", None),
        ("", None),
    ],
)
def test_the_trouble_of_a_pod_is_one_line(text: str, trouble: str | None) -> None:
    assert trouble_in(text) == trouble
