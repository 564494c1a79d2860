"""Shows in Dagster how far batches in progress are: observations of `chunk_results`, at a bounded rate."""

import dagster as dg

from assets.chunk_results import chunk_results
from assets.described import progress_metadata, timeline_metadata
from batch_pipeline.results.view import view
from batch_pipeline.settings import Settings
from resources import Parts, Service

_A_TICK = 20
"""Most observations in a tick: each costs some 20 ms, and the reading of a batch's events."""


def batch_observations_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor that shows progress."""

    @dg.sensor(
        name="batch_observations",
        minimum_interval_seconds=max(1, int(settings.alarms.progress_seconds / 3)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Shows how far a batch in progress is, as observations of chunk_results: one for each 5 % at most, never "
            f"more than one in {settings.alarms.progress_seconds:.0f} seconds. What was shown is in the ledger, so "
            "a restart shows nothing twice."
        ),
    )
    def batch_observations(context: dg.SensorEvaluationContext, service: Service) -> dg.SensorResult:
        parts = service.open()
        shown = observations(parts)
        context.log.debug(f"{[one.partition for one in shown]}")
        return dg.SensorResult(
            asset_events=shown, skip_reason=dg.SkipReason(f"showed the progress of {len(shown)} batches")
        )

    return batch_observations


def observations(parts: Parts) -> list[dg.AssetObservation]:
    """Return the observations that are due now. Killed afterwards: they are not shown, and the next step will be."""
    due = parts.ledger.desk.to_observe(parts.settings.alarms.progress_seconds, _A_TICK)
    return [_observation(parts, one.batch_id) for one in due if parts.ledger.desk.note_observed(one)]


def _observation(parts: Parts, batch_id: str) -> dg.AssetObservation:
    shown = view(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)
    return dg.AssetObservation(
        chunk_results.key,
        partition=batch_id,
        description=shown.status.reason,
        metadata={
            **progress_metadata(shown),
            "chunks_committed": shown.chunks.committed,
            "chunks_open": shown.chunks.open,
            **timeline_metadata(shown),
        },
    )
