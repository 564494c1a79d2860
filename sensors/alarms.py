"""Alarms of operators: failed runs, batches at risk, models with work and no workers; and how they are told."""

import time

import dagster as dg
import msgspec
from dagster import DagsterEvent, DagsterEventType, DagsterRunStatus, RunsFilter
from dagster._core.instance.utils import RUNLESS_JOB_NAME
from dagster._core.storage.asset_check_execution_record import COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES
from dagster._core.utils import make_new_run_id

from assets.evaluations import CHUNK_RESULTS, evaluation, workers_evaluation
from batch_pipeline import alarms
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.alarms import AlarmKind
from batch_pipeline.models import job_name
from batch_pipeline.plain import one_line
from batch_pipeline.results.checks import Check, Verdict
from batch_pipeline.settings import Settings
from resources import Parts, Service
from sensors.gpu_workers import keep_pool_limits
from sensors.runs import PARTITION_TAG

_ENDED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE]
_HOUR = 3600


class Seen(msgspec.Struct, frozen=True):
    """What the sensor `alarms` carries from one tick to the next, as its cursor."""

    since: dict[str, float] = {}
    """Since when each model has been without a worker."""


def failed_runs_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor of failed runs: of every job of this code location, and of launches and backfills by hand."""
    workers = {job_name(name) for name in settings.models}

    @dg.run_failure_sensor(
        name="failed_runs",
        minimum_interval_seconds=settings.alarms.look_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Raises an alarm when a run fails: one an hour for each job and batch. Runs that were cancelled or "
            "preempted did not fail. A worker's is one only where the run before it failed too: a node may be lost."
        ),
    )
    def failed_runs(context: dg.RunFailureSensorContext, service: Service) -> None:
        run = context.dagster_run
        if run.job_name in workers and not _failed_before(context.instance, run):
            return
        parts = service.open()
        raise_run_failed(parts.ledger, run, context.failure_event.message or "no reason given")

    return failed_runs


def raise_run_failed(ledger: Ledger, run: dg.DagsterRun, why: str) -> bool:
    """Raise the alarm of a failed run; False where one of its job and batch was raised in this hour already."""
    batch_id = run.tags.get(PARTITION_TAG, "")
    what = f"{run.job_name} of {batch_id}" if batch_id else run.job_name
    text = f"run {run.run_id} ({what}) failed: {one_line(why, 500)}"
    hour = f"{int(ledger.now() // _HOUR)}"
    return ledger.alarms.raise_alarm(AlarmKind.RUN_FAILED, what, text, occurrence=hour)


def _failed_before(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether the run of this job that ended before this one failed, too; cancelled and preempted ones do not count."""
    ended = instance.get_runs(RunsFilter(job_name=run.job_name, statuses=_ENDED), limit=10)
    before = [other for other in ended if other.run_id != run.run_id]
    return bool(before) and before[0].status == DagsterRunStatus.FAILURE


def alarms_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor that looks at batches and models, and tells what was raised."""

    @dg.sensor(
        name="alarms",
        minimum_interval_seconds=settings.alarms.look_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Evaluates the checks on_time (of batches that come to be at risk, or are so no longer) and "
            "every_model_has_workers as they change, and posts alarms to the webhook of the section [alarms]: one "
            f"signed message in {settings.alarms.message_seconds:.0f} seconds at most, tried until it arrives. "
            "Sets pools back to the catalogue's limits."
        ),
    )
    def alarms_(context: dg.SensorEvaluationContext, service: Service) -> dg.SensorResult:
        parts = service.open()
        # As `gpu_workers` does: a limit that was changed by hand would else stay while that sensor is switched off.
        keep_pool_limits(context.instance, settings, only_known=True)
        changes = alarms.look_at_risks(parts.ledger, parts.settings)
        for change in changes:
            verdict = Verdict(check=Check.ON_TIME, passed=change.on_time, text=change.text)
            _report(context.instance, evaluation(CHUNK_RESULTS, change.batch_id, verdict))
        seen = _look_at_models(parts, _seen(context.cursor))
        of_models = workers_evaluation(parts)
        started = time.monotonic()
        told = alarms.tell(parts.ledger, parts.settings.alarms)
        parts.ledger.alarms.forget(parts.settings.alarms.kept_days * 86_400)
        said = told or "nothing to tell"
        context.log.info(f"{said} ({time.monotonic() - started:.1f} s)")
        return dg.SensorResult(
            asset_events=[] if _is_said(context.instance, of_models) else [of_models],
            cursor=msgspec.json.encode(seen).decode(),
            skip_reason=dg.SkipReason(f"{len(changes)} batches changed their risk; {said}"),
        )

    return alarms_


def _report(instance: dg.DagsterInstance, verdict: dg.AssetCheckEvaluation) -> None:
    """Record what a check says of a batch, as often as that changes.

    Of evaluations without a run Dagster keeps one for each check and partition and fails at the next: so each has an id
    of its own where the run's would be.
    """
    event = DagsterEvent(
        event_type_value=DagsterEventType.ASSET_CHECK_EVALUATION.value,
        event_specific_data=verdict,
        job_name=RUNLESS_JOB_NAME,
    )
    instance.report_dagster_event(event, run_id=make_new_run_id())


def _look_at_models(parts: Parts, seen: Seen) -> Seen:
    """Raise what is due of models, and resolve what has passed: what their check says follows from that."""
    alone = alarms.workerless(parts.ledger, parts.settings.worker.lease_seconds)
    return Seen(alarms.look_at_models(parts.ledger, seen.since, alone, parts.settings.alarms))


def _is_said(instance: dg.DagsterInstance, found: dg.AssetCheckEvaluation) -> bool:
    """Whether the newest evaluation of a check in Dagster, whoever made it, says the same."""
    key = found.asset_check_key
    newest = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    if newest is None or newest.status not in COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES:
        return False
    said = newest.evaluation
    return said is not None and (said.passed, said.description) == (found.passed, found.description)


def _seen(cursor: str | None) -> Seen:
    """Return what the last tick saw; nothing where the cursor is missing or of another release."""
    try:
        return msgspec.json.decode(cursor or "{}", type=Seen)
    except msgspec.DecodeError:
        return Seen()
