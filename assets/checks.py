"""Checks of batches with a meaning for operators, beside those that prove the files (`batch_results`).

Each is evidence: it holds nothing up. Those of request_chunks run behind it; those of chunk_results are told by the
asset itself (`assets.evaluations`), by the merge and, where a batch comes to be at risk, by the sensor `alarms`. Each
may be executed by hand: those of batches for given partitions, `every_model_has_workers` without one.
"""

from collections.abc import Iterable, Iterator

import dagster as dg

from assets.chunk_results import chunk_results
from assets.evaluations import chunk_evaluations, evaluation, log_evaluations, workers_evaluation
from assets.failures import in_one_sentence
from assets.partitions import batches
from assets.request_chunks import request_chunks
from batch_pipeline.results.checks import MEANING, Check, intake_verdicts
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
    with in_one_sentence():
        for batch_id in _partitions(context):
            _log_selected(context, _intake_evaluations(context, parts, batch_id))
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
    with in_one_sentence():
        for batch_id in _partitions(context):
            _log_selected(context, chunk_evaluations(parts, batch_id))
    yield from ()


@dg.asset_check(
    asset=chunk_results.key,
    name=str(Check.WORKERS),
    description=f"{MEANING[Check.WORKERS]} Evaluated by the sensor `alarms` as it changes.",
)
def every_model_has_workers(service: Service) -> dg.AssetCheckResult:
    """Say of all models what the sensor `alarms` says of them."""
    found = workers_evaluation(service.open())
    return dg.AssetCheckResult(
        passed=found.passed, severity=found.severity, description=found.description, metadata=found.metadata
    )


def _intake_evaluations(
    context: dg.AssetCheckExecutionContext, parts: Parts, batch_id: str
) -> list[dg.AssetCheckEvaluation]:
    batch = parts.ledger.batches.get(batch_id)
    if batch.input_sha256 is None:
        context.log.warning(f"the intake of {batch_id} has not been recorded: there is nothing to check yet")
        return []
    in_chunks = sum(lane.requests for lane in parts.ledger.batches.lanes(batch_id))
    return [evaluation(request_chunks.key, batch_id, verdict) for verdict in intake_verdicts(batch, in_chunks)]


def _partitions(context: dg.AssetCheckExecutionContext) -> list[str]:
    run = context.op_execution_context
    if not (run.has_partition_key or run.has_partition_key_range):
        raise dg.Failure(
            "these checks are of single batches, and this run has no partition: launch their asset for a batch "
            "instead, or the checks with a batch's id as the tag dagster/partition",
            allow_retries=False,
        )
    return list(run.partition_keys)


def _log_selected(context: dg.AssetCheckExecutionContext, found: Iterable[dg.AssetCheckEvaluation]) -> None:
    selected = context.selected_asset_check_keys
    log_evaluations(context.op_execution_context, [one for one in found if one.asset_check_key in selected])
