"""Runs whose pods have ended before they began: Dagster's run monitoring looks only at runs that have started.

Their pod was taken while it waited for its image or its weights, or its process while it loaded our code; or it died.
Without this, such a run keeps its place (in its pool, among its kind) until `start_timeout_seconds` are over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import dagster as dg
from dagster import DagsterRunStatus, RunRecord, RunsFilter

from resources.pod_end import PodEnd
from resources.run_process import ENDED_TAG, PREEMPTED
from sensors.worker_runs import pod_trouble

log = logging.getLogger(__name__)

_CREATED_SECONDS = 60.0
"""Between the note that a run is starting and its Job: a Job that is not there after so long was deleted."""


def starting(instance: dg.DagsterInstance, job_name: str) -> Sequence[RunRecord]:
    """Return the runs of a job that have been launched and have not begun."""
    return instance.get_run_records(RunsFilter(job_name=job_name, statuses=[DagsterRunStatus.STARTING]))


def end_without_pod(instance: dg.DagsterInstance, records: Sequence[RunRecord], now: float) -> None:
    """End those of the runs that are starting and whose pods have ended: as preempted where the pod was taken from
    outside, else as failed. Killed in between, the next look does the rest.
    """
    for record in records:
        run = record.dagster_run
        if run.status != DagsterRunStatus.STARTING:
            continue
        end = _end_of_pod(instance, run)
        if end is PodEnd.NO_JOB and now - (instance.get_run_stats(run.run_id).launch_time or now) < _CREATED_SECONDS:
            continue
        if end is not None:
            _end(instance, run, end)


def _end_of_pod(instance: dg.DagsterInstance, run: dg.DagsterRun) -> PodEnd | None:
    """Return how the pod of a run has ended; None where it has not, where there are no pods, or we may not ask."""
    # It loads Kubernetes' client, which every run would: they all load the sensors.
    from resources.launcher import PodLauncher

    try:
        launcher = instance.run_launcher
        return launcher.end_of_pod(run) if isinstance(launcher, PodLauncher) else None
    except Exception:
        log.exception("the run launcher does not tell whether the pod of run %s is there", run.run_id)
        return None


def _end(instance: dg.DagsterInstance, run: dg.DagsterRun, end: PodEnd) -> None:
    trouble = pod_trouble(instance, run) if end is PodEnd.DIED else None
    # It may have begun and ended since it was read.
    current = instance.get_run_by_id(run.run_id)
    if current is None or current.status != DagsterRunStatus.STARTING:
        return
    if end is PodEnd.DIED:
        instance.report_run_failed(run, f"its pod has ended before the run began: {trouble or 'no reason is known'}")
        return
    instance.add_run_tags(run.run_id, {ENDED_TAG: PREEMPTED})
    instance.report_run_canceled(run, "Its pod was taken before the run began; another run is requested.")
