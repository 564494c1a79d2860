"""What the checks of batches say, as Dagster's events: for the checks, their assets and the sensor `alarms`."""

from collections.abc import Iterable

import dagster as dg

from batch_pipeline.alarms import workerless
from batch_pipeline.ledger.alarms import AlarmKind
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results import demand
from batch_pipeline.results.checks import Check, Verdict, chunk_verdicts
from batch_pipeline.results.forecast import outlook
from batch_pipeline.scheduling.risk import duration, risk_of
from resources import Parts

CHUNK_RESULTS = dg.AssetKey("chunk_results")
_ALARMS = 10_000
"""Most alarms that are looked at where a model has no worker: among them are those of failed runs, never over."""


def chunk_evaluations(parts: Parts, batch_id: str) -> list[dg.AssetCheckEvaluation]:
    """Return the evaluations of the checks of chunk_results for a batch, whether it is over or still runs."""
    batch = parts.ledger.batches.get(batch_id)
    verdicts = chunk_verdicts(batch, demand.summarise(batch_id, parts.ledger, parts.store))
    if batch.status == BatchStatus.IN_PROGRESS and batch.outcome is None:
        verdicts = [verdict for verdict in verdicts if verdict.check != Check.ON_TIME]
        verdicts += [now_on_time(parts, batch_id)]
    return [evaluation(CHUNK_RESULTS, batch_id, verdict) for verdict in verdicts]


def now_on_time(parts: Parts, batch_id: str) -> Verdict:
    """Return whether a batch in progress will end before its deadline, as the queue is."""
    pace = parts.ledger.desk.pace(batch_id)
    risk = None
    if pace is not None:
        now = parts.ledger.now()
        expected = outlook(batch_id, pace.models, now, ledger=parts.ledger, settings=parts.settings)
        risk = risk_of(pace, expected, now)
    return Verdict(check=Check.ON_TIME, passed=risk is None, text=risk or "in time, as far as is known")


def workers_evaluation(parts: Parts) -> dg.AssetCheckEvaluation:
    """Return whether a model with work has been without a worker for too long, which the alarm about it says.

    Only the sensor `alarms` sees since when each model has been without one; whoever evaluates the check, by hand or
    by the clock, finds the same.
    """
    alone = workerless(parts.ledger, parts.settings.worker.lease_seconds)
    raised = parts.ledger.alarms.recent(_ALARMS, only_current=True) if alone else []
    alarmed = {alarm.subject for alarm in raised if alarm.kind == AlarmKind.MODEL_WITHOUT_WORKERS}
    too_long = [model for model in alone if model in alarmed]
    after = duration(parts.settings.alarms.workerless_seconds)
    text = f"work has waited for {after} or more without a worker: {', '.join(too_long)}"
    return dg.AssetCheckEvaluation(
        asset_key=CHUNK_RESULTS,
        check_name=str(Check.WORKERS),
        passed=not too_long,
        description=text if too_long else "every model with work has a worker, or will soon",
        metadata={"models": len(too_long), "without_a_worker_now": ", ".join(alone) or "none"},
    )


def evaluation(asset: dg.AssetKey, batch_id: str, verdict: Verdict) -> dg.AssetCheckEvaluation:
    """Return the evaluation of a check for one batch. All but a line that is not accounted for are warnings."""
    is_fault_of_ours = verdict.check == Check.LINES_ACCOUNTED_FOR
    return dg.AssetCheckEvaluation(
        asset_key=asset,
        check_name=str(verdict.check),
        passed=verdict.passed,
        severity=dg.AssetCheckSeverity.ERROR if is_fault_of_ours else dg.AssetCheckSeverity.WARN,
        description=verdict.text,
        metadata=dict(verdict.figures),
        partition=batch_id,
    )


def log_evaluations(context: dg.OpExecutionContext, found: Iterable[dg.AssetCheckEvaluation]) -> None:
    """Log evaluations by hand: a run over several batches has one for each, and Dagster knows one a run."""
    for one in found:
        context.log_event(one)  # type: ignore[arg-type]
