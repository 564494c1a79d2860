"""Dagster's Kubernetes launcher, which gives a run that was launched from an asset's page the pod of that asset's job,
and tells what became of the pod of a run that has not begun.

A run from an asset's page (and one of a backfill) belongs to Dagster's own job of all assets, which has no tags: its
pod would have no weights' tokenizers and too little disk. The daemon and the webserver need our code for it: they run
from our image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from dagster import DagsterRun
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._utils.tags import normalize_tags
from dagster_k8s import K8sRunLauncher
from dagster_k8s.client import DagsterK8sAPIRetryLimitExceeded, DagsterK8sUnrecoverableAPIError
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import get_job_name_from_run_id, get_user_defined_k8s_config
from urllib3.exceptions import HTTPError

from batch_pipeline import settings as configuration
from batch_pipeline.settings import Settings
from resources.kubernetes import intake_tags, merge_tags
from resources.pod_end import PodEnd

log = logging.getLogger(__name__)
OVERDUE_SECONDS = 60.0
"""A pod that is still there so long after its grace is on a node that is gone: a kubelet would have killed it."""

_TAGS: Mapping[str, Callable[[Settings], Mapping[str, Any]]] = {
    "request_chunks": intake_tags,
    "batch_results": merge_tags,
}
"""Intake comes first: a run of both needs the tokenizers, and as much disk as the merge."""


class PodLauncher(K8sRunLauncher):
    """K8sRunLauncher, with the pods of intake and merge also for runs of their assets alone."""

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Return how the pod of a run that has begun fares; what is neither running nor a success ends the run.

        A Kubernetes that cannot be asked, as while its control plane is upgraded, says nothing about pods: they count
        as running (K8sRunLauncher's answer is UNKNOWN, which would fail the run while its pod works on). A pod that
        should have ended some time ago is on a node that is gone: nobody will ever say how it ended, and the run would
        keep its place for as long as the node is away.
        """
        job, namespace = self._job_of(run)
        try:
            status = self._api_client.get_job_status(job, namespace)
            is_lost = status is not None and not status.active and self._is_overdue(status, job, namespace)
        except (DagsterK8sAPIRetryLimitExceeded, DagsterK8sUnrecoverableAPIError, HTTPError) as error:
            log.warning("Kubernetes cannot be asked for the Job of run %s: %s", run.run_id, error)
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"Kubernetes cannot be asked: {error}")
        if status is None:
            return CheckRunHealthResult(WorkerStatus.UNKNOWN, f"there is no Job {job}")
        if is_lost:
            return CheckRunHealthResult(WorkerStatus.FAILED, "its pod should have ended long ago: its node is gone")
        if not status.active and (status.failed or status.succeeded):
            return CheckRunHealthResult(WorkerStatus.FAILED, "its Job has ended, and the run has not")
        return CheckRunHealthResult(WorkerStatus.RUNNING)

    def _job_of(self, run: DagsterRun) -> tuple[str, str]:
        """Return the name of a run's Job, and its namespace."""
        job: str = get_job_name_from_run_id(run.run_id)  # type: ignore[no-untyped-call]
        return job, self.get_container_context_for_run(run).namespace or ""

    def _is_overdue(self, status: Any, job: str, namespace: str) -> bool:
        """Whether all pods of a Job should have ended OVERDUE_SECONDS ago; asks for them only where some are ending."""
        if not status.terminating:
            return False
        pods = self._api_client.get_pods_in_job(job, namespace)
        # A pod's deletion is at the end of its grace.
        times = [pod.metadata.deletion_timestamp for pod in pods]
        latest = datetime.now(UTC) - timedelta(seconds=OVERDUE_SECONDS)
        return bool(times) and all(time is not None and time < latest for time in times)

    def end_of_pod(self, run: DagsterRun) -> PodEnd | None:
        """Return how the pod of a run has ended; None where it may still run. Raises what Kubernetes' client raises."""
        job, namespace = self._job_of(run)
        status = self._api_client.get_job_status(job, namespace)
        if status is None:
            return PodEnd.NO_JOB
        if status.active or status.terminating or not (status.failed or status.succeeded):
            return None
        return PodEnd.DIED if self._api_client.get_pods_in_job(job, namespace) else PodEnd.TAKEN

    def get_container_context_for_run(self, dagster_run: DagsterRun) -> K8sContainerContext:
        """Return how the run's pod looks. Raises SettingsError where the configuration cannot be read."""
        context = super().get_container_context_for_run(dagster_run)
        tags = tags_of_assets(dagster_run)
        if tags is None:
            return context
        given = get_user_defined_k8s_config(normalize_tags(tags(configuration.load())))
        return context.merge(K8sContainerContext(run_k8s_config=given))


def tags_of_assets(run: DagsterRun) -> Callable[[Settings], Mapping[str, Any]] | None:
    """Return what makes the tags of the pod that a run of assets needs; None where it has its own or needs none."""
    if run.job_name != IMPLICIT_ASSET_JOB_NAME:
        return None
    chosen = {key.to_user_string() for key in run.asset_selection or ()}
    return next((tags for asset, tags in _TAGS.items() if asset in chosen), None)
