"""A run whose process or pod is ended from outside before its work began: no failure, and no place is kept."""

import os
import signal
import sysconfig
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
import kubernetes
import pytest
from dagster._core.launcher import WorkerStatus
from dagster._utils.interrupts import capture_interrupts
from dagster_k8s.job import get_job_name_from_run_id

from resources.launcher import PodLauncher
from resources.pod_end import PodEnd
from resources.run_process import ENDED_TAG, PREEMPTED, run_process
from sensors import starts
from tests.fakes.kubernetes import Cluster, Image, Node, running
from tests.fakes.waiting import wait_until

NAMESPACE = "default"
JOB = "intake"
begun: list[str] = []
told: list[None] = []


@dg.resource
def told_while_it_opens(_context: dg.InitResourceContext) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # for the signal: it ends this


class Collected:
    """What is collected as garbage."""


@dg.resource
def told_where_errors_are_ignored(_context: dg.InitResourceContext) -> None:
    """As by a signal that comes during native code, and is taken by what the garbage collector calls within it. Once:
    the result of the run opens it again.
    """
    if told:
        return
    told.append(None)
    collected = Collected()
    watched = weakref.ref(collected, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del collected
    assert watched() is None
    time.sleep(60)  # for the signal that is sent again: it ends this


@dg.op(required_resource_keys={"part"})
def work(context: dg.OpExecutionContext) -> None:
    begun.append(context.run_id)


@dg.job(executor_def=run_process, resource_defs={"part": told_while_it_opens})
def told_while_it_starts() -> None:
    work()


@dg.job(executor_def=run_process, resource_defs={"part": told_where_errors_are_ignored})
def told_in_vain() -> None:
    work()


@dg.job(executor_def=run_process, resource_defs={"part": dg.ResourceDefinition.none_resource()})
def told_before_it_starts() -> None:
    work()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    begun.clear()
    told.clear()
    with dg.DagsterInstance.local_temp(str(tmp_path)) as dagster:
        yield dagster


def execute(job: dg.JobDefinition, instance: dg.DagsterInstance) -> dg.DagsterRun:
    """Run a job in this process, as the process of a run does, which may leave with the interrupt; return the run."""
    with (
        suppress(dg.DagsterExecutionInterruptedError),
        dg.execute_job(dg.reconstructable(globals()[job.name]), instance),
    ):
        pass
    (run,) = instance.get_runs()
    return run


@pytest.mark.parametrize("job", [told_while_it_starts, told_in_vain], ids=lambda job: job.name)
def test_a_run_that_is_told_to_end_while_its_process_starts_is_preempted(
    instance: dg.DagsterInstance, job: dg.JobDefinition
) -> None:
    run = execute(job, instance)
    assert (run.status, run.tags[ENDED_TAG]) == (dg.DagsterRunStatus.CANCELED, PREEMPTED)
    assert begun == []


def test_a_signal_that_came_before_dagster_looked_is_not_forgotten(instance: dg.DagsterInstance) -> None:
    with capture_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        run = execute(told_before_it_starts, instance)
    assert (run.status, run.tags[ENDED_TAG]) == (dg.DagsterRunStatus.CANCELED, PREEMPTED)
    assert begun == []


class Starting:
    """Runs that have been launched on a small cluster and have not begun."""

    def __init__(self, instance: dg.DagsterInstance, launcher: PodLauncher, cluster: Cluster) -> None:
        client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
        self.cluster = cluster
        self.jobs = kubernetes.client.BatchV1Api(client)
        self.core = kubernetes.client.CoreV1Api(client)
        self.instance = instance
        self.launcher = launcher

    def launch(self, seconds: float, exit_code: int = 0) -> dg.DagsterRun:
        """Return a run with a Job; the process of its pod lives for so long and never says anything."""
        run = self.launch_without_job()
        command = ["python", "-c", f"import time; time.sleep({seconds}); raise SystemExit({exit_code})"]
        container = {"name": "dagster", "image": "python", "command": command}
        pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
        spec = {"backoffLimit": 0, "podReplacementPolicy": "Failed", "template": {"spec": pod}}
        metadata = {"name": get_job_name_from_run_id(run.run_id)}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
        self.jobs.create_namespaced_job(NAMESPACE, job)
        return run

    def launch_without_job(self) -> dg.DagsterRun:
        run = self.instance.create_run_for_job(told_before_it_starts, status=dg.DagsterRunStatus.STARTING)
        self.instance.report_dagster_event(
            dg.DagsterEvent(dg.DagsterEventType.RUN_STARTING.value, run.job_name), run_id=run.run_id
        )
        return run

    def look(self, *, later_seconds: float = 0.0) -> None:
        """Do what the sensors do."""
        records = starts.starting(self.instance, told_before_it_starts.name)
        starts.end_without_pod(self.instance, records, time.time() + later_seconds)

    def status(self, run: dg.DagsterRun) -> tuple[dg.DagsterRunStatus, str | None]:
        current = self.instance.get_run_by_id(run.run_id)
        assert current is not None
        return current.status, current.tags.get(ENDED_TAG)


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    image = Image({"PATH": str(Path(sysconfig.get_path("scripts")))})
    with running(tmp_path, {"python": image}, [Node("a", gpus=0)]) as cluster:
        config: dict[str, Any] = {
            "service_account_name": "run",
            "instance_config_map": "none",
            "load_incluster_config": False,
            "kubeconfig_file": str(cluster.kubeconfig),
            "job_image": "python",
        }
        module = {"module": "resources.launcher", "class": "PodLauncher", "config": config}
        with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"run_launcher": module}) as dagster:
            launcher = dagster.run_launcher
            assert isinstance(launcher, PodLauncher)
            yield Starting(dagster, launcher, cluster)


def test_a_run_whose_pod_is_taken_before_it_begins_is_preempted(starting: Starting) -> None:
    taken, lives = starting.launch(seconds=600.0), starting.launch(seconds=600.0)
    assert starting.launcher.end_of_pod(taken) is None
    job = get_job_name_from_run_id(taken.run_id)
    starting.core.delete_namespaced_pod(
        starting.core.list_namespaced_pod(NAMESPACE, label_selector=f"job-name={job}").items[0].metadata.name, NAMESPACE
    )
    wait_until(lambda: starting.launcher.end_of_pod(taken) is PodEnd.TAKEN, "the pod is taken")
    starting.look()
    assert starting.status(taken) == (dg.DagsterRunStatus.CANCELED, PREEMPTED)
    assert starting.status(lives) == (dg.DagsterRunStatus.STARTING, None)


def test_a_run_whose_process_dies_before_it_begins_has_failed(starting: Starting) -> None:
    runs = [starting.launch(seconds=0.0, exit_code=3), starting.launch(seconds=0.0)]
    wait_until(lambda: all(starting.launcher.end_of_pod(run) is PodEnd.DIED for run in runs), "the pods have died")
    starting.look()
    assert [starting.status(run) for run in runs] == [(dg.DagsterRunStatus.FAILURE, None)] * 2


def test_a_run_without_a_job_is_given_the_time_to_get_one(starting: Starting) -> None:
    run = starting.launch_without_job()
    assert starting.launcher.end_of_pod(run) is PodEnd.NO_JOB
    starting.look()
    assert starting.status(run) == (dg.DagsterRunStatus.STARTING, None)
    starting.look(later_seconds=120.0)
    assert starting.status(run) == (dg.DagsterRunStatus.CANCELED, PREEMPTED)


def began(starting: Starting) -> dg.DagsterRun:
    """Return a run that has begun, and whose pod lives."""
    run = starting.launch(seconds=600.0)
    starting.instance.report_dagster_event(
        dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name), run_id=run.run_id
    )
    found = starting.instance.get_run_by_id(run.run_id)
    assert found is not None
    assert starting.launcher.check_run_worker_health(found).status is WorkerStatus.RUNNING
    return found


def test_a_run_is_not_lost_while_kubernetes_cannot_be_asked(starting: Starting) -> None:
    run = began(starting)
    reached = starting.launcher._api_client.batch_api.api_client.configuration
    address = reached.host
    reached.host = "http://127.0.0.1:1"
    health = starting.launcher.check_run_worker_health(run)
    assert (health.status, "cannot be asked" in str(health.msg)) == (WorkerStatus.RUNNING, True)
    reached.host = address
    starting.jobs.delete_namespaced_job(get_job_name_from_run_id(run.run_id), NAMESPACE)
    assert starting.launcher.check_run_worker_health(run).status is WorkerStatus.UNKNOWN, "which fails the run"


def test_a_run_whose_node_is_gone_keeps_no_place(starting: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it runs: while the node is away Kubernetes shows its pod as ending, and its Job as not ended."""
    run = began(starting)
    job = get_job_name_from_run_id(run.run_id)

    def pod() -> Any:
        return starting.core.list_namespaced_pod(NAMESPACE, label_selector=f"job-name={job}").items[0]

    wait_until(lambda: pod().status.phase == "Running", "the pod runs")
    starting.cluster.lose_node_of(pod().metadata.name)
    wait_until(lambda: pod().metadata.deletion_timestamp is not None, "Kubernetes gives the node up")
    assert starting.launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING, "it may still end by itself"
    monkeypatch.setattr("resources.launcher.OVERDUE_SECONDS", 0.5)
    wait_until(
        lambda: starting.launcher.check_run_worker_health(run).status is WorkerStatus.FAILED, "the run is given up"
    )
    assert starting.jobs.read_namespaced_job_status(job, NAMESPACE).status.failed is None
