"""The usage report of each day, by the clock: a quarter of an hour after the day (UTC) is over."""

from datetime import UTC, timedelta

import dagster as dg

from assets.usage_report import usage_report
from resources.run_process import run_process

report_usage_job = dg.define_asset_job(
    "report_usage",
    selection=[usage_report],
    executor_def=run_process,
    description="Write the usage report of a day: what every customer is charged for.",
)


def usage_report_schedule() -> dg.ScheduleDefinition:
    """Return the schedule of the job; a day that was missed is a backfill of its partition."""
    return dg.ScheduleDefinition(
        name="usage_report",
        job=report_usage_job,
        cron_schedule="15 0 * * *",
        execution_timezone="UTC",
        execution_fn=_request,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Writes the usage report of the day before.",
    )


def _request(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
    day = (context.scheduled_execution_time.astimezone(UTC) - timedelta(days=1)).date()
    return dg.RunRequest(run_key=f"usage-{day}", partition_key=f"{day}")
