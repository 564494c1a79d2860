"""The process of a run: Dagster's in-process executor, which tells Dagster when its surroundings end the process.

On Kubernetes a pod that is preempted, drained or deleted gets SIGTERM, and Dagster takes what it did not order for a
failure. It is none: nobody has to look after it, and the work is handed on. A worker says so by itself as soon as it
is told (`assets.gpu_workers`); this is for whatever runs before it, and for runs of intake and merge.
"""

import logging
from collections.abc import Iterator

import dagster as dg
from dagster._core.events import DagsterEvent
from dagster._core.execution.context.system import PlanOrchestrationContext
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.in_process import InProcessExecutor
from sqlalchemy.exc import SQLAlchemyError

from batch_pipeline import interrupts
from batch_pipeline.plain import one_line

log = logging.getLogger(__name__)

ENDED_TAG = "batch_pipeline/ended"
"""Of a run that ended by neither its own nor an operator's will."""
PREEMPTED = "preempted"
"""Told to end by a signal, or its pod taken before it began: preempted, evicted, drained, deleted. Nothing was lost."""
LOST = "lost"
"""Its worker is not heard of any more: its node is gone, or it hangs. Its leases have run out."""


class RunProcess(InProcessExecutor):
    """Executes the steps in this process; a signal that ends it is no failure of the run."""

    def execute(self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan) -> Iterator[DagsterEvent]:
        """Execute all steps. A signal that came while the process was starting counts too: Dagster keeps it; and one
        whose error is lost on its way through somebody else's code is sent again, and kept for whoever looks.
        """
        try:
            with interrupts.kept(dg.DagsterExecutionInterruptedError):
                yield from super().execute(plan_context, execution_plan)
        except dg.DagsterExecutionInterruptedError:
            note_preemption(plan_context.instance, plan_context.run_id)
            raise


@dg.executor(name="in_process")
def run_process(_context: dg.InitExecutorContext) -> RunProcess:
    """Execute all steps in the process of the run: a process for each would double what a run costs."""
    return RunProcess(retries=RetryMode.ENABLED)


def note_preemption(instance: dg.DagsterInstance, run_id: str) -> None:
    """Let Dagster know that this run is being ended from outside: its pod is preempted or evicted, its Job was deleted.

    As soon as possible, because what run monitoring sees from then on is a pod that has gone. Nothing where somebody
    has terminated the run: Dagster knows. Killed before or in between, or in an outage of Dagster's database, run
    monitoring calls the run failed; afterwards it ends as cancelled, by this process or, if that is killed, after
    `cancel_timeout_seconds`.
    """
    try:
        run = instance.get_run_by_id(run_id)
        if run is None or run.status != dg.DagsterRunStatus.STARTED:
            return
        instance.add_run_tags(run_id, {ENDED_TAG: PREEMPTED})
        instance.report_run_canceling(run, "The run was told to end by its surroundings; its work is handed on.")
    except (SQLAlchemyError, dg.DagsterError) as error:
        log.warning("Dagster was not told that its run was told to end: %s", one_line(str(error)))
