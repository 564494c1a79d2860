"""Moves batches on: takes back leases that ran out, expires what is late, requests merges, shows statuses."""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from assets.chunk_results import chunk_results, chunk_results_event
from batch_pipeline.errors import StoreError
from batch_pipeline.results import outbox
from batch_pipeline.settings import Settings
from resources import Parts, Service
from sensors import starts
from sensors.runs import CUSTOMER_TAG, next_in_turn, pause_seconds, runs_under_way, tell_store_outage


def batch_progress_sensor(settings: Settings, merge_job: UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """Return the sensor that moves batches on."""

    @dg.sensor(
        name="batch_progress",
        job=merge_job,
        minimum_interval_seconds=settings.scheduling.sensor_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Takes back leases that have run out, stops batches that are past their deadline, requests the merge of "
            "those whose chunks have all stopped, and keeps every status.json in the outbox true."
        ),
    )
    def batch_progress(context: dg.SensorEvaluationContext, service: Service) -> dg.SensorResult | dg.SkipReason:
        parts = service.open()
        freed = parts.ledger.chunks.expire_leases()
        expired = parts.ledger.batches.expire_due()
        parts.ledger.batches.settle_all()
        starts.end_without_pod(context.instance, starts.starting(context.instance, merge_job.name), parts.ledger.now())
        requests = _merge_runs(context.instance, parts, merge_job.name)
        unshown = _unshown_chunks(context, parts, [str(request.partition_key) for request in requests])
        shown = _show_statuses(parts, context.cursor or "")
        # The next tick goes on with the batches after these, so that every one has its turn.
        context.update_cursor(shown.after)
        for problem in shown.broken:
            context.log.warning(problem)
        if not requests:
            statuses = "; ".join([f"{shown.written} statuses written", *shown.broken[:5]])
            if shown.outage is not None:
                statuses += f"; not the others: {shown.outage}"
            return dg.SkipReason(f"{freed} leases ran out, {len(expired)} batches expired, {statuses}")
        return dg.SensorResult(run_requests=requests, asset_events=unshown)

    return batch_progress


def _unshown_chunks(
    context: dg.SensorEvaluationContext, parts: Parts, batch_ids: list[str]
) -> list[dg.AssetMaterialization]:
    """Return the events of chunk results that no worker has shown: it died, or Dagster's database was away. They come
    before the merge, so that it does not look older than what it is made from.
    """
    key = chunk_results.key
    unshown = []
    for batch_id in batch_ids:
        if context.instance.get_latest_data_version_record(key, is_source=False, partition_key=batch_id) is None:
            try:
                unshown.append(chunk_results_event(parts, batch_id, context.instance))
            except StoreError as error:
                context.log.warning(f"the chunks of {batch_id} are left for its merge to show: {error}")
    return unshown


def _show_statuses(parts: Parts, after: str) -> outbox.Published:
    """Write the statuses that are due. While the store is away merges are requested all the same: they have counted."""
    shown = outbox.publish_due(ledger=parts.ledger, store=parts.store, settings=parts.settings, after=after)
    tell_store_outage(parts.ledger, shown.outage)
    return shown


def _merge_runs(instance: dg.DagsterInstance, parts: Parts, job_name: str) -> list[dg.RunRequest]:
    under_way = runs_under_way(instance, job_name)
    requests = []
    for batch in next_in_turn(parts.ledger.batches.awaiting_merge, under_way, parts.settings.scheduling):
        pause = pause_seconds(batch.merge_attempts, parts.settings.scheduling.retry_run_seconds)
        attempt = parts.ledger.batches.note_merge_requested(batch.batch_id, pause)
        requests.append(
            dg.RunRequest(
                run_key=f"merge:{batch.batch_id}:{attempt}",
                job_name=job_name,
                partition_key=batch.batch_id,
                tags={CUSTOMER_TAG: batch.customer, "batch_pipeline/name": batch.name},
            )
        )
    return requests
