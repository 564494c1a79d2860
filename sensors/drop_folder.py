"""The drop folder: takes what customers have put there, and requests the intake of every batch that awaits it.

The ledger says which batches await intake, whichever door they came through; so whatever crashes between taking a file
and its run, the next tick goes on from there, and a run that failed is requested again after a pause.
"""

from collections.abc import Sequence

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from assets.partitions import batches
from assets.uploads import upload_events
from batch_pipeline.intake import drop
from batch_pipeline.ledger.records import Batch
from batch_pipeline.settings import Settings
from resources import Parts, Service
from sensors import starts
from sensors.runs import CUSTOMER_TAG, next_in_turn, pause_seconds, runs_under_way, store_watch


def drop_folder_sensor(settings: Settings, intake_job: UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """Return the sensor of the drop folder."""

    @dg.sensor(
        name="drop_folder",
        job=intake_job,
        minimum_interval_seconds=settings.scheduling.sensor_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Takes the files that customers dropped into inbox/CUSTOMER/, at most "
            f"{settings.scheduling.sensor_batch} in a tick, and requests the intake of the batches that await it, one "
            "customer in turn, as far as there are places."
        ),
    )
    def drop_folder(context: dg.SensorEvaluationContext, service: Service) -> dg.SensorResult | dg.SkipReason:
        parts = service.open()
        starts.end_without_pod(context.instance, starts.starting(context.instance, intake_job.name), parts.ledger.now())
        limit = settings.scheduling.sensor_batch
        with store_watch(parts.ledger):
            taken = drop.take_drops(ledger=parts.ledger, store=parts.store, settings=parts.settings, limit=limit)
        under_way = runs_under_way(context.instance, intake_job.name)
        due = next_in_turn(parts.ledger.batches.awaiting_intake, under_way, settings.scheduling)
        if not due:
            return dg.SkipReason(f"took {len(taken)} files; {under_way.customers.total()} intake runs are under way")
        return _intake_runs(context.instance, parts, due, intake_job.name)

    return drop_folder


def _intake_runs(instance: dg.DagsterInstance, parts: Parts, due: Sequence[Batch], job_name: str) -> dg.SensorResult:
    requests = []
    for batch in due:
        pause = pause_seconds(batch.intake_attempts, parts.settings.scheduling.retry_run_seconds)
        attempt = parts.ledger.batches.note_intake_requested(batch.batch_id, pause)
        requests.append(
            dg.RunRequest(
                run_key=f"intake:{batch.batch_id}:{attempt}",
                job_name=job_name,
                partition_key=batch.batch_id,
                tags={CUSTOMER_TAG: batch.customer, "batch_pipeline/name": batch.name},
            )
        )
    # One by one: reading the whole list takes seconds where there are tens of thousands.
    new = [batch for batch in due if not instance.has_dynamic_partition(str(batches.name), batch.batch_id)]
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[batches.build_add_request([batch.batch_id for batch in new])] if new else [],
        asset_events=[event for batch in new for event in upload_events(batch)],
    )
