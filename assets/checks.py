"""Checks of batches with a meaning for operators, beside those that prove the files (`batch_results`).

Each is evidence: it holds nothing up. They are evaluated whenever their asset is launched, and chunk_results' by the
merge and, where a batch is at risk, by the sensor `alarms`; each may be executed by hand at any time.
"""

from collections.abc import Iterable, Iterator

import dagster as dg

from assets.chunk_results import chunk_results
from assets.partitions import batches
from assets.request_chunks import request_chunks
from batch_pipeline.alarms import workerless
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results import demand
from batch_pipeline.results.checks import MEANING, Check, Verdict, chunk_verdicts, intake_verdicts
from batch_pipeline.results.forecast import outlook
from batch_pipeline.scheduling.risk import risk_of
from resources import Parts, Service

OF_INTAKE = (Check.LINES_ACCOUNTED_FOR, Check.LINES_VALID)
OF_CHUNKS = (Check.NOTHING_GIVEN_UP, Check.REQUESTS_ANSWERED, Check.ON_TIME)


def _specs(asset: dg.AssetKey, checks: Iterable[Check]) -> list[dg.AssetCheckSpec]:
    return [
        dg.AssetCheckSpec(str(check), asset=asset, description=MEANING[check], partitions_def=batches)
        for check in checks
    ]


@dg.multi_asset_check(
    name="request_chunks_checks",
    specs=_specs(request_chunks.key, OF_INTAKE),
    can_subset=True,
    description="Whether intake accounts for every line, and whether the file looks like one of requests.",
)
def request_chunks_checks(context: dg.AssetCheckExecutionContext, service: Service) -> Iterator[dg.AssetCheckResult]:
    """Look at the intake of these batches; reads the ledger only."""
    parts = service.open()
    for batch_id in _partitions(context):
        batch = parts.ledger.batches.get(batch_id)
        if batch.input_sha256 is None:
            context.log.warning(f"the intake of {batch_id} has not been recorded: there is nothing to check yet")
            continue
        in_chunks = sum(lane.requests for lane in parts.ledger.batches.lanes(batch_id))
        _log(context, [evaluation(request_chunks.key, batch_id, v) for v in intake_verdicts(batch, in_chunks)])
    yield from ()


@dg.multi_asset_check(
    name="chunk_results_checks",
    specs=_specs(chunk_results.key, OF_CHUNKS),
    can_subset=True,
    description="Whether chunks were given up, requests failed in numbers, or the deadline is missed.",
)
def chunk_results_checks(context: dg.AssetCheckExecutionContext, service: Service) -> Iterator[dg.AssetCheckResult]:
    """Look at the chunks of these batches; reads the ledger, or the manifest of one that is long over."""
    parts = service.open()
    for batch_id in _partitions(context):
        _log(context, chunk_evaluations(parts, batch_id))
    yield from ()


@dg.asset_check(
    asset=chunk_results.key,
    name=str(Check.WORKERS),
    description=f"{MEANING[Check.WORKERS]} Evaluated by the sensor `alarms` as it changes.",
)
def every_model_has_workers(service: Service) -> dg.AssetCheckResult:
    """Look at all models at this moment."""
    parts = service.open()
    alone = workerless(parts.ledger, parts.settings.worker.lease_seconds)
    return dg.AssetCheckResult(
        passed=not alone,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"work and no worker now: {', '.join(alone)}" if alone else "every model with work has a worker",
    )


def chunk_evaluations(parts: Parts, batch_id: str) -> list[dg.AssetCheckEvaluation]:
    """Return the evaluations of the checks of chunk_results for a batch, whether it is over or still runs."""
    batch = parts.ledger.batches.get(batch_id)
    verdicts = chunk_verdicts(batch, demand.summarise(batch_id, parts.ledger, parts.store))
    if batch.status == BatchStatus.IN_PROGRESS and batch.outcome is None:
        verdicts = [verdict for verdict in verdicts if verdict.check != Check.ON_TIME]
        verdicts += [now_on_time(parts, batch_id)]
    return [evaluation(chunk_results.key, batch_id, verdict) for verdict in verdicts]


def now_on_time(parts: Parts, batch_id: str) -> Verdict:
    """Return whether a batch in progress will end before its deadline, as the queue is."""
    pace = parts.ledger.desk.pace(batch_id)
    risk = None
    if pace is not None:
        now = parts.ledger.now()
        expected = outlook(batch_id, pace.models, now, ledger=parts.ledger, settings=parts.settings)
        risk = risk_of(pace, expected, now)
    return Verdict(check=Check.ON_TIME, passed=risk is None, text=risk or "in time, as far as is known")


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


def _partitions(context: dg.AssetCheckExecutionContext) -> list[str]:
    return list(context.op_execution_context.partition_keys)


def _log(context: dg.AssetCheckExecutionContext, found: Iterable[dg.AssetCheckEvaluation]) -> None:
    """Log evaluations by hand: a run over several batches has one result for each, and Dagster knows one a run."""
    for one in found:
        context.op_execution_context.log_event(one)  # type: ignore[arg-type]
