"""Housekeeping as a job, and its schedule: what is over leaves the ledger, the bucket and the list of partitions."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster import DagsterInstance, RunsFilter
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus
from dagster._core.storage.dagster_run import FINISHED_STATUSES
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_START_TAG, PARTITION_NAME_TAG, REPOSITORY_LABEL_TAG
from pydantic import Field

from assets.partitions import GROUP, batches
from assets.usage_report import usage_report
from batch_pipeline import housekeeping
from batch_pipeline.housekeeping import Report, Step
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Retention, Settings
from resources import Service
from resources.run_process import run_process
from sensors.runs import UNDER_WAY
from sensors.usage_report import report_usage_job

EVERY_HALF_HOUR = "*/30 * * * *"
_BETWEEN_LOOKS = 20
"""Partitions that are deleted between two looks at the runs under way: deleting one takes up to 0.1 s."""
_PAGE = 500
_BACKFILLS_UNDER_WAY = [BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING]


class HousekeepingConfig(dg.Config):
    """What an operator may ask for when launching housekeeping."""

    dry_run: bool = Field(default=False, description="Only say what would be removed.")


@dg.op(
    name="tidy_up",
    description=(
        "Remove what is over, as the section [retention] of the configuration says: rows of chunks, objects that no "
        "final file needs, expired files, old partitions and runs. Bounded; killed anywhere the next run goes on."
    ),
    out=dg.Out(dg.Nothing),
)
def tidy_up(context: dg.OpExecutionContext, config: HousekeepingConfig, service: Service) -> None:
    """One run of housekeeping."""
    parts = service.open()
    report = housekeeping.tidy(ledger=parts.ledger, store=parts.store, settings=parts.settings, dry_run=config.dry_run)
    for batch_id, why in itertools.islice(report.held.items(), 20):
        context.log.warning(f"{batch_id} is kept: {why}")
    for failure in report.failures:
        context.log.warning(failure)
    settings, ledger = parts.settings, parts.ledger
    partitions = delete_partitions(context.instance, ledger, settings.retention, dry_run=config.dry_run)
    location = _location_of(context.run)
    runs = delete_runs(context.instance, settings, ledger.now(), location=location, dry_run=config.dry_run)
    context.add_output_metadata({**_figures(report), "partitions": partitions, "runs": runs, "dry_run": config.dry_run})


@dg.job(
    name="housekeeping",
    description="Removes what is over. Requested by its schedule every half hour; may be launched at any time.",
    executor_def=run_process,
    tags={"batch_pipeline/group": GROUP},
)
def housekeeping_job() -> None:
    """Housekeeping."""
    tidy_up()


def housekeeping_schedule() -> dg.ScheduleDefinition:
    """Return the schedule of the job."""
    return dg.ScheduleDefinition(
        name="housekeeping",
        job=housekeeping_job,
        cron_schedule=EVERY_HALF_HOUR,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Removes what is over, as the section [retention] of the configuration says.",
    )


def delete_partitions(instance: DagsterInstance, ledger: Ledger, retention: Retention, *, dry_run: bool = False) -> int:
    """Delete the partitions of batches that ended long ago, or that are too many, with their runs; returns how many.

    None while it has a run under way (Dagster fails such a run), and none at all during a backfill, whose runs are
    still to come. A partition's runs go before it does: killed half-way, the next run deletes the rest.
    """
    name = str(batches.name)
    partitions = instance.get_dynamic_partitions(name)
    ends = ledger.retention.ends(partitions)
    due = iter(housekeeping.partitions_to_delete(partitions, ends, retention, ledger.now()))
    deleted = 0
    for some in iter(lambda: [*itertools.islice(due, _BETWEEN_LOOKS)], []):
        under_way = _partitions_under_way(instance)
        if under_way is None:
            break
        idle = [key for key in some if key not in under_way]
        if not dry_run:
            for key in idle:
                for run_id in instance.get_run_ids(RunsFilter(tags={PARTITION_NAME_TAG: key})):
                    instance.delete_run(run_id)
                instance.delete_dynamic_partition(name, key)
        deleted += len(idle)
    return deleted


def delete_runs(
    instance: DagsterInstance, settings: Settings, now: float, *, location: str | None, dry_run: bool = False
) -> int:
    """Delete runs that ended so long ago that the partition of each batch they can have served is gone by its age.

    They are those of workers, schedules and backfills of this code location, by its name as Dagster has it: others may
    have theirs in the same Dagster. None where it has no name: then nobody can tell them apart. Those of usage reports
    stay: with a run its events go, and a day without them would be one that was never reported. Returns how many, at
    most `retention.per_run`. Killed half-way, the next run deletes the rest.
    """
    if location is None:
        return 0
    days = settings.retention.partitions_days
    before = datetime.fromtimestamp(now - days * 86_400 - settings.intake.max_window_seconds, UTC)
    ours = {REPOSITORY_LABEL_TAG: location}
    over = RunsFilter(statuses=FINISHED_STATUSES, updated_before=before, tags=ours)
    run_ids = [*itertools.islice(_served_batches(instance, over), settings.retention.per_run)]
    if not dry_run:
        for run_id in run_ids:
            instance.delete_run(run_id)
    return len(run_ids)


def _location_of(run: dg.DagsterRun) -> str | None:
    """Return the name of a run's code location; None where it was not launched from one."""
    origin = run.remote_job_origin
    return None if origin is None else origin.repository_origin.get_label()


def _served_batches(instance: DagsterInstance, wanted: RunsFilter) -> Iterator[str]:
    """Yield the ids of the runs that did not report usage, newest first."""
    page = instance.get_runs(wanted, limit=_PAGE)
    while page:
        for run in page:
            if run.job_name != report_usage_job.name and usage_report.key not in (run.asset_selection or ()):
                yield run.run_id
        page = instance.get_runs(wanted, cursor=page[-1].run_id, limit=_PAGE)


def _partitions_under_way(instance: DagsterInstance) -> set[str] | None:
    """Return the partitions that have a run under way; None where that may be any of them."""
    if instance.get_backfills(filters=BulkActionsFilter(statuses=_BACKFILLS_UNDER_WAY), limit=1):
        return None
    found = set()
    for run in instance.get_runs(RunsFilter(statuses=UNDER_WAY)):
        if ASSET_PARTITION_RANGE_START_TAG in run.tags:
            return None
        if PARTITION_NAME_TAG in run.tags:
            found.add(run.tags[PARTITION_NAME_TAG])
    return found


def _figures(report: Report) -> dict[str, Any]:
    figures: dict[str, Any] = {"held": len(report.held), "failures": len(report.failures)}
    for step in Step:
        removals = report.of(step)
        figures[f"{step}"] = len(removals)
    figures["objects"] = sum(removal.objects for removal in report.removals)
    figures["bytes"] = sum(removal.bytes for removal in report.removals)
    figures["rows"] = sum(removal.rows for removal in report.removals)
    return figures
