"""The Dagster code location in one process, with an instance of its own."""

from __future__ import annotations

from typing import Any

import dagster as dg

from batch_pipeline.settings import Settings
from resources import Parts


class CodeLocation:
    """The code location with an instance of its own: ticks sensors, and executes what they request."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        from batch_pipeline.definitions import make_definitions

        self.settings = settings
        self.instance = instance
        self.definitions = make_definitions(settings)
        self.repository = self.definitions.get_repository_def()

    def tick(self, sensor: str) -> list[dg.RunRequest]:
        """Evaluate a sensor once, and do with its answer what the daemon does, short of executing the runs."""
        with dg.SensorEvaluationContext(
            instance_ref=self.instance.get_ref(),
            last_tick_completion_time=None,
            last_run_key=None,
            cursor=None,
            log_key=None,
            repository_name=self.repository.name,
            repository_def=self.repository,
            sensor_name=sensor,
            resources=self.repository.get_top_level_resources(),
        ) as context:
            result = self.repository.get_sensor_def(sensor).evaluate_tick(context)
        for request in result.dynamic_partitions_requests or []:
            assert isinstance(request, dg.AddDynamicPartitionsRequest)
            self.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        for event in result.asset_events:
            assert isinstance(event, dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation)
            self.instance.report_runless_asset_event(event)
        return list(result.run_requests or [])

    def execute(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        """Execute a requested run in this process."""
        job = self.definitions.resolve_job_def(str(request.job_name))
        return job.execute_in_process(
            instance=self.instance, partition_key=request.partition_key, tags=dict(request.tags), raise_on_error=True
        )

    def launch(self, asset: str, batch_id: str, **config: Any) -> dg.ExecuteInProcessResult:
        """Materialize one asset for one batch, as the UI's button does."""
        job = self.repository.get_implicit_global_asset_job_def()
        return job.get_subset(asset_selection={dg.AssetKey(asset)}).execute_in_process(
            instance=self.instance,
            partition_key=batch_id,
            run_config={"ops": {asset: {"config": config}}} if config else {},
        )

    def materialized(self, asset: str) -> set[str]:
        """Return the batches for which an asset is materialized."""
        return self.instance.get_materialized_partitions(dg.AssetKey(asset))

    def parts(self) -> Parts:
        """Return what the code location's assets and sensors work with."""
        service = self.repository.get_top_level_resources()["service"]
        with dg.build_resources({"service": service, "s3": self.repository.get_top_level_resources()["s3"]}) as opened:
            parts: Parts = opened.service.open()
        return parts

    def react(self, sensor: str, run: dg.DagsterRun, failure: dg.DagsterEvent) -> None:
        """Let a sensor of failed runs see one, as the daemon does."""
        with dg.build_run_status_sensor_context(
            sensor_name=sensor,
            dagster_event=failure,
            dagster_instance=self.instance,
            dagster_run=run,
            resources=self.repository.get_top_level_resources(),
            repository_def=self.repository,
        ) as context:
            self.repository.get_sensor_def(sensor)(context.for_run_failure())
