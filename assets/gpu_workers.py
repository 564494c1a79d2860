"""The GPU workers: a job per model, of one root op in the pool that is named after the model.

While a worker waits for a slot of its pool, its run is queued and costs nothing. A run is one worker: it leases chunks
of any batch until there is no work, it is told to leave, or its lifetime ends. Ending the run ends the worker.
"""

import logging
from collections.abc import Mapping
from typing import Any, cast

import dagster as dg
from pydantic import Field
from sqlalchemy.exc import SQLAlchemyError

from assets.chunk_results import chunk_results_event
from assets.partitions import GROUP, PRIORITY_TAG, STAGE_TAG
from batch_pipeline.errors import BatchPipelineError
from batch_pipeline.models import Model, job_name
from batch_pipeline.plain import one_line
from batch_pipeline.settings import Worker
from resources import Service
from resources.kubernetes import worker_tags
from resources.run_process import note_preemption, run_process

log = logging.getLogger(__name__)

WORKER_STAGE = "worker"
"""What Dagster's tag_concurrency_limits count: no more workers at once than there are GPUs."""


DEDICATED_TAG = "batch_pipeline/dedicated_to"
"""Of a worker's run that the sensor has launched for one batch alone: its id."""


class WorkerConfig(dg.Config):
    """What an operator may say when launching a worker."""

    batches: list[str] = Field(
        default=[],
        description="Ids of the only batches that the worker serves: dedicated capacity. Empty: any batch.",
    )


def pool_name(model_name: str) -> str:
    """Return the name of a model's pool."""
    return model_name


def _op_name(model_name: str) -> str:
    # A job and its op may not share a name.
    return job_name(model_name).replace("gpu_worker", "run_chunks", 1)


def dedicated_request(model_name: str, batch_id: str) -> dg.RunRequest:
    """Return the request of a worker that serves one batch alone."""
    config = {"ops": {_op_name(model_name): {"config": {"batches": [batch_id]}}}}
    return dg.RunRequest(job_name=job_name(model_name), run_config=config, tags={DEDICATED_TAG: batch_id})


def is_dedicated(run: dg.DagsterRun) -> bool:
    """Whether a worker's run serves given batches alone, by the sensor's or an operator's word."""
    ops = cast(Mapping[str, Any], run.run_config.get("ops") or {})
    return any((op.get("config") or {}).get("batches") for op in ops.values())


def gpu_worker_job(model_name: str, model: Model, worker_settings: Worker) -> dg.JobDefinition:
    """Return the job of a model's workers."""

    @dg.op(
        name=_op_name(model_name),
        pool=pool_name(model_name),
        description=f"Run chunks on {model_name} until there is no work, or the worker is told to leave.",
        out=dg.Out(dg.Nothing),
        tags={"kind": "vllm"},
    )
    def gpu_worker(context: dg.OpExecutionContext, config: WorkerConfig, service: Service) -> None:
        # Only workers need the engine's client, and each run's start waits for what is imported above.
        from batch_pipeline import worker

        parts = service.open()

        def report_drained(batch_id: str) -> None:
            """Show it in Dagster. An outage of its database must not cost the engine: the merge does it later."""
            try:
                context.log_event(chunk_results_event(parts, batch_id, context.instance))
            except (BatchPipelineError, SQLAlchemyError, dg.DagsterError) as error:
                log.warning("the chunks of %s are left for its merge to show: %s", batch_id, one_line(str(error)))

        report = worker.serve(
            parts.settings,
            model_name,
            run_id=context.run_id,
            only_batches=config.batches,
            on_batch_drained=report_drained,
            on_signal=lambda: note_preemption(context.instance, context.run_id),
        )
        context.log.info(str(report))
        if report.ended == worker.Ended.SIGNAL:
            # The run ends as cancelled (`resources.run_process`): not as a success, nor as a failure that alarms.
            raise dg.DagsterExecutionInterruptedError

    @dg.job(
        name=job_name(model_name),
        description=(
            f"One GPU worker of {model_name}: launched by the sensor where there is backlog, or by hand (with batch "
            "ids as dedicated capacity). Terminating the run hands its unfinished work back."
        ),
        executor_def=run_process,
        tags={
            "batch_pipeline/model": model_name,
            "batch_pipeline/group": GROUP,
            STAGE_TAG: WORKER_STAGE,
            # A worker whose place in the pool is free never waits behind runs of intake.
            PRIORITY_TAG: "10",
            **worker_tags(model_name, model, worker_settings),
        },
    )
    def run_worker() -> None:
        gpu_worker()

    return run_worker
