"""The Dagster code location: assets, jobs, sensors, resources. The one module of the domain that knows Dagster."""

from __future__ import annotations

import dagster as dg

import assets
import sensors
from assets.gpu_workers import job_name
from batch_pipeline import settings as configuration
from batch_pipeline.errors import SettingsError
from resources import make_resources


def make_definitions(settings: configuration.Settings) -> dg.Definitions:
    """Return the code location for a configuration. Raises SettingsError where two models would share one job."""
    intake_job = dg.define_asset_job(
        "intake",
        selection=[assets.request_chunks],
        executor_def=dg.in_process_executor,
        description="Validate the file of a batch, order its requests and cut them into chunks.",
    )
    merge_job = dg.define_asset_job(
        "merge",
        selection=[assets.batch_results],
        executor_def=dg.in_process_executor,
        description="Assemble the results of a batch, prove that they are whole, and make them visible.",
    )
    names = [job_name(name) for name in settings.models]
    if len(set(names)) < len(names):
        raise SettingsError(f"models: two names give the same job name ({', '.join(sorted(names))}); rename one")
    workers = {name: assets.gpu_worker_job(name, model) for name, model in settings.models.items()}
    return dg.Definitions(
        assets=[assets.uploads, assets.request_chunks, assets.chunk_results, assets.batch_results, assets.usage_report],
        jobs=[intake_job, merge_job, sensors.housekeeping_job, sensors.report_usage_job, *workers.values()],
        schedules=[sensors.housekeeping_schedule(), sensors.usage_report_schedule()],
        sensors=[
            sensors.drop_folder_sensor(settings, intake_job),
            sensors.batch_progress_sensor(settings, merge_job),
            sensors.gpu_worker_sensor(settings, workers),
        ],
        resources=make_resources(settings),
        # A run costs seconds of a core already; a process for each step would double it.
        executor=dg.in_process_executor,
    )


defs = make_definitions(configuration.load())
