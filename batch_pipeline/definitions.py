"""The Dagster code location: assets, jobs, sensors, resources. The one module of the domain that knows Dagster."""

from __future__ import annotations

import dagster as dg

import assets
import sensors
from assets.partitions import PRIORITY_TAG, STAGE_TAG
from batch_pipeline import settings as configuration
from resources import make_resources
from resources.kubernetes import intake_tags, merge_tags
from resources.run_process import run_process


def make_definitions(settings: configuration.Settings) -> dg.Definitions:
    """Return the code location for a configuration."""
    intake_job = dg.define_asset_job(
        "intake",
        selection=[assets.request_chunks],
        executor_def=run_process,
        description="Validate the file of a batch, order its requests and cut them into chunks.",
        tags={STAGE_TAG: "intake", **intake_tags(settings)},
    )
    merge_job = dg.define_asset_job(
        "merge",
        selection=[assets.batch_results],
        executor_def=run_process,
        description="Assemble the results of a batch, prove that they are whole, and make them visible.",
        # What is finished is handed out before anything new is begun.
        tags={STAGE_TAG: "merge", PRIORITY_TAG: "20", **merge_tags(settings)},
    )
    workers = {name: assets.gpu_worker_job(name, model, settings.worker) for name, model in settings.models.items()}
    return dg.Definitions(
        assets=[
            assets.uploads,
            assets.request_chunks,
            assets.of_catalogue(assets.chunk_results, settings.models),
            assets.batch_results,
            assets.usage_report,
        ],
        asset_checks=assets.CHECKS,
        jobs=[intake_job, merge_job, sensors.housekeeping_job, sensors.report_usage_job, *workers.values()],
        schedules=[sensors.housekeeping_schedule(), sensors.usage_report_schedule()],
        sensors=[
            sensors.drop_folder_sensor(settings, intake_job),
            sensors.batch_progress_sensor(settings, merge_job),
            sensors.gpu_worker_sensor(settings, workers),
            sensors.batch_observations_sensor(settings),
            sensors.failed_runs_sensor(settings),
            sensors.alarms_sensor(settings),
        ],
        resources=make_resources(settings),
        executor=run_process,
    )


defs = make_definitions(configuration.load())
