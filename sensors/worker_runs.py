"""The runs of workers, as Dagster knows them, beside the workers that the ledger hears of: where the two disagree, and
why a model has no worker yet.

A node that is lost takes its worker along without a word: Kubernetes cannot tell whether the pod lives, so the run
would keep its place in the pool for as long as the node is away. The ledger can tell: the worker has not been heard of.
A run that was called failed may, the other way round, have a worker that lives; it is asked to leave.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import dagster as dg
from dagster import DagsterRunStatus, RunRecord, RunsFilter

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Worker, WorkerState
from batch_pipeline.plain import one_line
from resources.run_process import ENDED_TAG, LOST
from sensors.runs import UNDER_WAY

log = logging.getLogger(__name__)

MAX_RUNTIME_TAG = "dagster/max_runtime"
"""Read by run monitoring, which ends a run that has been started for longer: it has the rights to delete the Job."""
_SILENT_LEASES = 2.0
"""A worker that was silent for so many times its lease may be lost; if it stays so for one more, it is."""
_REGISTER_SECONDS = 300.0
"""A run that has started has made its worker known after this long."""
_SOON_SECONDS = 15.0
"""A run that waits or starts for so long does as it should: nothing to ask or to say."""
_LOADING_SECONDS = 60.0
"""After so long it is worth a question whether the engine beside a worker starts at all."""
_JOB_TROUBLES = ("FailedCreate: ", "BackoffLimitExceeded: ", "DeadlineExceeded: ")
"""How the events of a Job begin that say why it has no pod: a quota that is used up, a refusal by a policy, its end."""
_MOST_CHARACTERS = 240


class Lost(NamedTuple):
    """A run whose worker is not there any more."""

    run: dg.DagsterRun
    worker_id: str | None
    silent_seconds: float


class Silence(NamedTuple):
    """What one look at the runs found."""

    lost: list[Lost]
    since: dict[str, float]
    """When each run's worker was first seen to be silent (the ledger's time), for the next look."""


def records_under_way(instance: dg.DagsterInstance, job_name: str) -> Sequence[RunRecord]:
    """Return the runs of a job that are queued or running, the newest first."""
    return instance.get_run_records(RunsFilter(job_name=job_name, statuses=UNDER_WAY))


def find_lost(
    records: Sequence[RunRecord],
    workers: Mapping[str, Worker],
    now: float,
    lease_seconds: float,
    since: Mapping[str, float],
) -> Silence:
    """Return the started runs whose workers are lost. `workers` by run; `since` as the last look has left it. Pure.

    Being silent once is not enough: after an outage of the ledger nobody has been heard of for a while.
    """
    lost = []
    silent: dict[str, float] = {}
    for record in records:
        run = record.dagster_run
        if run.status != DagsterRunStatus.STARTED or ENDED_TAG in run.tags:
            continue
        worker = workers.get(run.run_id)
        heard_at = worker.seen_at if worker is not None else (record.start_time or now) + _REGISTER_SECONDS
        if now - heard_at <= _SILENT_LEASES * lease_seconds:
            continue
        silent[run.run_id] = since.get(run.run_id, now)
        if now - silent[run.run_id] >= lease_seconds:
            lost.append(Lost(run, worker.worker_id if worker else None, now - heard_at))
    return Silence(lost, silent)


def end_lost(instance: dg.DagsterInstance, ledger: Ledger, lost: Lost) -> None:
    """Have a lost run ended by run monitoring, which also deletes its Job; should its worker come back, it leaves.

    Killed before the tag, the next look does it; after it, run monitoring ends the run without the message.
    """
    if lost.worker_id is not None:
        ledger.workers.ask_to_leave(lost.worker_id)
    instance.add_run_tags(lost.run.run_id, {ENDED_TAG: LOST, MAX_RUNTIME_TAG: "1"})
    instance.report_engine_event(
        f"The worker of this run was not heard of for {lost.silent_seconds:.0f} s: its node is gone, or it hangs. "
        "Others go on with its chunks; the run is ended.",
        lost.run,
    )


def end_stuck(instance: dg.DagsterInstance, record: RunRecord, now: float, start_seconds: float) -> None:
    """Delete the Job of a run that does not start, and fail the run with the reason.

    Dagster fails such a run as well (`start_timeout_seconds`), but leaves its pod: one that waits for an image keeps
    the GPU that it was given, and each further start adds another. Killed before the failure is noted, the run ends as
    cancelled after `cancel_timeout_seconds`.
    """
    run = record.dagster_run
    if run.status != DagsterRunStatus.STARTING:
        return
    seconds = now - (instance.get_run_stats(run.run_id).launch_time or now)
    if seconds <= start_seconds:
        return
    trouble = pod_trouble(instance, run) or "no reason is known"
    try:
        is_ended = instance.run_launcher.terminate(run.run_id)
    except Exception:
        log.exception("the run launcher does not end run %s, which does not start", run.run_id)
        return
    if is_ended:
        instance.report_run_failed(run, f"not started after {seconds:.0f} s: {trouble}")


def dismiss_orphans(
    instance: dg.DagsterInstance, ledger: Ledger, models: Sequence[str], under_way: set[str], lease_seconds: float
) -> None:
    """Ask workers to leave that work on though their runs have ended in Dagster: others may have got their places."""
    for worker in ledger.workers.of_models(models, within_seconds=lease_seconds):
        if worker.state not in (WorkerState.STARTING, WorkerState.READY) or worker.run_id in under_way:
            continue
        run = None if worker.run_id is None else instance.get_run_by_id(worker.run_id)
        if run is not None and run.is_finished:
            log.warning("%s works on though its run has ended: it is asked to leave", worker.worker_id)
            ledger.workers.ask_to_leave(worker.worker_id)


def why_waiting(
    instance: dg.DagsterInstance, records: Sequence[RunRecord], workers: Mapping[str, Worker], now: float
) -> str | None:
    """Return what keeps the model's next worker, where one is under way and has been for a while; None otherwise."""
    for record in records:
        run = record.dagster_run
        worker = workers.get(run.run_id)
        if run.status == DagsterRunStatus.STARTED and worker is not None and worker.state == WorkerState.STARTING:
            loading = now - worker.started_at
            return pod_trouble(instance, run) if loading > _LOADING_SECONDS else None
    for record in records:
        run = record.dagster_run
        if run.status == DagsterRunStatus.STARTING:
            seconds = now - (instance.get_run_stats(run.run_id).launch_time or now)
            trouble = pod_trouble(instance, run) if seconds > _SOON_SECONDS else None
            said = f"its run has been starting for {seconds:.0f} s"
            return said if trouble is None else f"{said}: {trouble}"
    queued = [record for record in records if record.dagster_run.status == DagsterRunStatus.QUEUED]
    if queued and (seconds := now - queued[-1].create_timestamp.timestamp()) > _SOON_SECONDS:
        return f"its run has been queued for {seconds:.0f} s: every place for workers is taken"
    return None


def last_failure(instance: dg.DagsterInstance, job_name: str) -> str | None:
    """Return why the newest run of a job has failed, in one line; None where it has not."""
    newest = instance.get_run_records(RunsFilter(job_name=job_name), limit=1)
    if not newest or newest[0].dagster_run.status != DagsterRunStatus.FAILURE:
        return None
    entries = instance.all_logs(newest[0].dagster_run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    texts = [entry.dagster_event.message or "" for entry in entries if entry.dagster_event is not None]
    if not texts:
        return None
    return trouble_in(texts[-1]) or _short(texts[-1].partition("\n")[0])


def pod_trouble(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str | None:
    """Return what Kubernetes says is wrong with the pod of a run; None where nothing is, or we may not ask.

    Through the run launcher, whichever it is: one that has no pods knows nothing. The code location needs the right to
    read pods and their events; without it, the cause is only told when Dagster gives the start up.
    """
    try:
        said = instance.run_launcher.get_run_worker_debug_info(run, include_container_logs=False)
    except Exception:
        log.exception("the run launcher does not tell what keeps run %s", run.run_id)
        return None
    return None if said is None else trouble_in(said)


def trouble_in(text: str) -> str | None:
    """Return the line of a launcher's words on a pod that says what is wrong: its newest warning, or its state; where
    there is no pod, the newest event of its Job that says why.

    A failed probe is none: that is what a model looks like while it loads.
    """
    _, _, warnings = text.partition("Warning events for pod:\n")
    told = [line for line in warnings.partition("\n\n")[0].splitlines() if line and not line.startswith("Unhealthy")]
    told = [line for line in told if not line.startswith("For more information")]
    if told:
        return _short(told[-1])
    _, _, of_job = text.partition("Debug information for job ")
    events = [event for event in of_job.split("\n\n") if event.startswith(_JOB_TROUBLES)]
    if events:
        return _short(events[-1])
    for line in text.splitlines():
        _, waits, why = line.partition(" status: Waiting: ")
        if waits and why not in ("PodInitializing", "ContainerCreating"):
            return _short(why)
        _, failed, why = line.partition("Pod status: Failed: ")
        if failed:
            return _short(why)
    return None


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."
