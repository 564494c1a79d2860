"""The Dagster code location in one process, with an instance of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    PARTITION_NAME_TAG,
)

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
        self.cursors: dict[str, str] = {}

    def tick(self, sensor: str, *, goes_on: bool = False) -> list[dg.RunRequest]:
        """Evaluate a sensor once, and do with its answer what the daemon does, short of executing the runs. Each tick
        is the sensor's first, unless it `goes_on` with the cursor of the one before.
        """
        with dg.SensorEvaluationContext(
            instance_ref=self.instance.get_ref(),
            last_tick_completion_time=None,
            last_run_key=None,
            cursor=self.cursors.get(sensor) if goes_on else None,
            log_key=None,
            repository_name=self.repository.name,
            repository_def=self.repository,
            sensor_name=sensor,
            resources=self.repository.get_top_level_resources(),
        ) as context:
            result = self.repository.get_sensor_def(sensor).evaluate_tick(context)
        if result.cursor is not None:
            self.cursors[sensor] = result.cursor
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

    def backfill(self, asset: str, batch_ids: Sequence[str], **config: Any) -> dg.ExecuteInProcessResult:
        """Materialize one asset for adjacent partitions in one run, as a backfill of a single run does."""
        job = self.repository.get_implicit_global_asset_job_def()
        return job.get_subset(asset_selection={dg.AssetKey(asset)}).execute_in_process(
            instance=self.instance,
            tags={ASSET_PARTITION_RANGE_START_TAG: batch_ids[0], ASSET_PARTITION_RANGE_END_TAG: batch_ids[-1]},
            run_config={"ops": {asset: {"config": config}}} if config else {},
        )

    def check(self, asset: str, *names: str, batch_id: str | None = None) -> dg.ExecuteInProcessResult:
        """Execute checks of an asset by hand, for a batch or without a partition."""
        keys = {dg.AssetCheckKey(dg.AssetKey(asset), name) for name in names}
        job = self.repository.get_implicit_global_asset_job_def()
        return job.get_subset(asset_selection=set(), asset_check_selection=keys).execute_in_process(
            instance=self.instance, tags={} if batch_id is None else {PARTITION_NAME_TAG: batch_id}
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
