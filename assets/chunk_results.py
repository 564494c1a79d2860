"""`chunk_results`: every chunk of a batch has a result. GPU workers fill it; launching it makes sure that they do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import dagster as dg
from dagster._core.definitions.data_version import (
    CODE_VERSION_TAG,
    DATA_VERSION_IS_USER_PROVIDED_TAG,
    DATA_VERSION_TAG,
    NULL_EVENT_POINTER,
    extract_data_version_from_entry,
    get_input_data_version_tag,
    get_input_event_pointer_tag,
)
from pydantic import Field, model_validator

from assets.columns import RESULT_LINES
from assets.described import chunks_metadata, progress_metadata
from assets.evaluations import CHUNK_RESULTS, chunk_evaluations, log_evaluations, workers_evaluation
from assets.failures import LaunchConfig, in_one_sentence
from assets.partitions import CODE_VERSION, GROUP, OWNERS, RUNS_ON_TAG, batches
from assets.request_chunks import request_chunks
from batch_pipeline.errors import NotAllowedInState
from batch_pipeline.models import Model
from batch_pipeline.results import demand
from batch_pipeline.results.demand import Anew
from batch_pipeline.results.versions import model_code_version, version_of_hashes
from batch_pipeline.results.view import BatchView, view
from resources import Parts, Service

_NAMED = 20
"""Most batches that are named in the sentence about those that were skipped."""


class ChunkResultsConfig(LaunchConfig):
    """What an operator may ask for when launching `chunk_results`."""

    priority: int = Field(
        default=1,
        ge=-1000,
        le=1000,
        description="Runs before the customer's other batches where above 0. It changes nothing between customers.",
    )
    wait_minutes: float = Field(
        default=60.0 * 24,
        gt=0,
        description="How long the run waits for the workers before it fails; the chunks stay wanted.",
    )
    run_again: bool = Field(
        default=False,
        description=(
            "Run everything again, also what is committed, for instance after a mend of the model: the results so far "
            "do not count any more. Only while a batch is in_progress: the files of one that has ended never change, "
            "so its requests are handed in as a new batch. End workers with the old model first (terminate their runs)."
        ),
    )
    run_again_model_version: str = Field(
        default="",
        description=(
            "With run_again: of the committed chunks only those whose results came from this version of the model (see "
            "model_versions in the metadata). Empty: all of them."
        ),
    )

    @model_validator(mode="after")
    def _version_needs_run_again(self) -> Self:
        if self.run_again_model_version and not self.run_again:
            raise ValueError(
                f"run_again_model_version is {self.run_again_model_version} without run_again: true, so nothing would "
                "run again; give both, or neither"
            )
        return self


@dg.asset(
    name=CHUNK_RESULTS.to_python_identifier(),
    deps=[request_chunks],
    description=(
        "One committed result object per chunk, written by the GPU workers, which report it when a batch's last chunk "
        "stops. Launching it for a batch makes the ledger want what is missing (chunks that were given up are tried "
        "again), gives the batch an operator's priority, and waits; where all is committed it only records the same "
        "again. It never loads a model itself. What is committed runs again only where its configuration asks for it: "
        "run_again. It shows as stale when the request chunks or the version of a model of the catalogue have changed "
        "since."
    ),
    group_name=GROUP,
    owners=OWNERS,
    kinds={"vllm", "jsonl", "s3"},
    tags={RUNS_ON_TAG: "gpu_workers"},
    metadata=RESULT_LINES,
    code_version=CODE_VERSION,
    partitions_def=batches,
    backfill_policy=dg.BackfillPolicy.single_run(),
    # Dagster's own event would have one data version for all batches of a run: each has an event of its own instead.
    output_required=False,
)
def chunk_results(
    context: dg.AssetExecutionContext, config: ChunkResultsConfig, service: Service
) -> Iterator[dg.Output[None]]:
    """Want the chunks of these batches, and wait for them. Killed anywhere: what it asked for stays asked for, and a
    retry of the run asks for nothing twice.
    """
    parts = service.open()
    batch_ids = list(context.partition_keys)
    anew = None
    if config.run_again:
        anew = Anew(context.run.root_run_id or context.run_id, config.run_again_model_version or None)
    with in_one_sentence():
        # One of many that is over is no reason to do nothing for the others. What is to run again is named with care.
        skipped = demand.refusals(batch_ids, parts.ledger) if len(batch_ids) > 1 and anew is None else {}
        for why in skipped.values():
            context.log.warning(f"skipped: {why}")
        wanted = [batch_id for batch_id in batch_ids if batch_id not in skipped]
        waiting = demand.want(
            wanted, parts.ledger, priority=config.priority, actor=f"dagster run {context.run_id}", anew=anew
        )
        context.log.info(f"waiting for the chunks of {len(waiting)} batches")
        for batch_id in demand.wait(waiting, parts.ledger, timeout_seconds=config.wait_minutes * 60):
            context.log.info(f"every chunk of {batch_id} has stopped")
        skipped |= _show_all(context, parts, wanted, is_alone=len(batch_ids) == 1)
        log_evaluations(context.op_execution_context, [workers_evaluation(parts)])
    if skipped:
        context.log.warning(_in_short(list(skipped), len(batch_ids)))
    yield from ()


def _show_all(
    context: dg.AssetExecutionContext, parts: Parts, batch_ids: Sequence[str], *, is_alone: bool
) -> dict[str, str]:
    """Show the chunks of batches; returns why it could not, of those whose files are removed."""
    unshown = {}
    for batch_id in batch_ids:
        try:
            _show(context, parts, batch_id)
        except NotAllowedInState as error:
            if is_alone:
                raise
            context.log.warning(f"skipped: {error}")
            unshown[batch_id] = str(error)
    return unshown


def _show(context: dg.AssetExecutionContext, parts: Parts, batch_id: str) -> None:
    """Show the chunks of a batch and the verdicts on them. Dagster skips the checks behind an output that is not
    there, so these are told here.
    """
    context.log_event(chunk_results_event(parts, batch_id, context.instance))
    log_evaluations(context.op_execution_context, chunk_evaluations(parts, batch_id))


def _in_short(skipped: Sequence[str], of: int) -> str:
    more = f" and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
    return f"{len(skipped)} of {of} batches were skipped, see above why: {', '.join(skipped[:_NAMED])}{more}"


def of_catalogue(asset: dg.AssetsDefinition, models: Mapping[str, Model]) -> dg.AssetsDefinition:
    """Return the asset with a code version that changes with the models: then Dagster shows what is stale."""
    version = model_code_version(CODE_VERSION, models)
    return asset.map_asset_specs(lambda spec: spec.replace_attributes(code_version=version))


def chunk_results_event(parts: Parts, batch_id: str, instance: dg.DagsterInstance) -> dg.AssetMaterialization:
    """Return the event that shows the chunk results of a batch whose last chunk has stopped.

    Its tags are those that Dagster gives its own: data version, code version, and what it was made from.
    """
    shown = view(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)
    return dg.AssetMaterialization(
        chunk_results.key,
        partition=batch_id,
        description=_in_words(shown),
        metadata={
            **progress_metadata(shown),
            "dagster/partition_row_count": shown.chunks.completed + shown.chunks.failed,
            **chunks_metadata(shown),
        },
        tags=_versions(parts, batch_id, instance, version_of_hashes(shown.chunks.result_hashes)),
    )


def _versions(parts: Parts, batch_id: str, instance: dg.DagsterInstance, version: str) -> dict[str, str]:
    upstream = request_chunks.key
    record = instance.get_latest_data_version_record(upstream, is_source=False, partition_key=batch_id)
    made_from = None if record is None else extract_data_version_from_entry(record.event_log_entry)
    return {
        DATA_VERSION_TAG: version,
        DATA_VERSION_IS_USER_PROVIDED_TAG: "true",
        CODE_VERSION_TAG: model_code_version(CODE_VERSION, parts.settings.models),
        get_input_data_version_tag(upstream): "INITIAL" if made_from is None else made_from.value,
        get_input_event_pointer_tag(upstream): NULL_EVENT_POINTER if record is None else str(record.storage_id),
    }


def _in_words(shown: BatchView) -> str:
    chunks = shown.chunks
    return (
        f"{chunks.committed} chunks committed, {chunks.stopped} stopped without; {chunks.completed} requests answered, "
        f"{chunks.failed} failed"
    )
