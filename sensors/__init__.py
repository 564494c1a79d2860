"""Dagster sensors: each asks the ledger or the store what is due and requests runs for it, a bounded number a tick.

And what runs by the clock: housekeeping, and the report of each day's usage.
"""

from sensors.alarms import alarms_sensor, failed_runs_sensor
from sensors.batch_progress import batch_progress_sensor
from sensors.drop_folder import drop_folder_sensor
from sensors.gpu_workers import gpu_worker_sensor
from sensors.housekeeping import housekeeping_job, housekeeping_schedule
from sensors.progress import batch_observations_sensor
from sensors.usage_report import report_usage_job, usage_report_schedule

__all__ = [
    "alarms_sensor",
    "batch_observations_sensor",
    "batch_progress_sensor",
    "drop_folder_sensor",
    "failed_runs_sensor",
    "gpu_worker_sensor",
    "housekeeping_job",
    "housekeeping_schedule",
    "report_usage_job",
    "usage_report_schedule",
]
