"""Whole batches by the Kubernetes path: Dagster's daemon, its run launcher and run monitoring; pods that are ended.

The tests share one service, and mostly one worker: an idle one waits for the next batch, and is then done harm.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from dagster import DagsterRunStatus

from batch_pipeline import settings as configuration
from batch_pipeline.ledger.records import Batch
from batch_pipeline.store.client import make_client
from resources.run_process import ENDED_TAG, LOST, PREEMPTED
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.clusters import Cluster, real_cluster, small_cluster
from tests.fakes.engine import MODEL
from tests.fakes.intake_files import file_of, request_line
from tests.fakes.kubernetes_stack import Stack, stack

REQUESTS = 160
CHUNK = 40
IN_FLIGHT = 8
TRIES = 5
UNSAVED = 60
"""More than an engine answers between two checkpoints."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The small cluster; with --kubeconfig, that one."""
    option = request.config.getoption
    if option("--kubeconfig") is None:
        with small_cluster(tmp_path_factory.mktemp("kubernetes")) as small:
            yield small
        return
    with real_cluster(
        option("--kubeconfig").resolve(),
        image=option("--kubernetes-image"),
        host=option("--kubernetes-host"),
        gpu_resource=option("--kubernetes-gpu"),
        namespace=option("--kubernetes-namespace"),
    ) as real:
        yield real


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    s3_server: configuration.Store,
    postgres_server: str,
    cluster: Cluster,
) -> Iterator[Stack]:
    store = msgspec.structs.replace(s3_server, bucket=f"test-{secrets.token_hex(6)}")
    make_client(store).create_bucket(Bucket=store.bucket)
    with stack(tmp_path_factory.mktemp("stack"), store, postgres_server, cluster) as running:
        for model in ("unplaceable", "unpullable"):
            submit(running, model, requests=1, model=model)
        yield running


def submit(service: Stack, name: str, *, requests: int = REQUESTS, model: str = MODEL, last: str = "") -> Batch:
    """Return a batch of requests `NAME request N`; `last` is added to the prompt of the last one."""
    prompts = [f"{name} request {number}{last if number == requests - 1 else ''}" for number in range(requests)]
    lines = [chat_request(number, prompt) for number, prompt in enumerate(prompts)]
    chunks = [lines[first : first + CHUNK] for first in range(0, requests, CHUNK)]
    batch = make_batch(service.ledger, service.store, chunks, name=name, model=model)
    service.begin(batch)
    return batch


def half_way(service: Stack, name: str) -> tuple[Batch, str]:
    """Submit a batch; return it and a run of a worker that has a lease on it, as soon as a good part of it has been
    asked of the engines. Where all of it has run before anybody looked, the next one is tried.
    """
    for number in range(TRIES):
        batch = submit(service, f"{name}-{number}")
        wait_asked(service, batch)
        if runs := service.runs_on(batch):
            return batch, min(runs)
    raise AssertionError(f"{TRIES} batches had run before anybody looked")


def wait_asked(service: Stack, batch: Batch) -> None:
    """Wait until more than a chunk of the batch has been asked of the engines."""
    service.wait(
        lambda: len(service.calls(f"{batch.name} request")) > CHUNK,
        lambda: f"{batch.name} runs: {service.reason(batch)}",
    )


def wait_run(service: Stack, batch: Batch) -> int:
    """Wait until the whole batch has run; return how many calls the engines got beside one for each request."""
    service.wait(lambda: service.has_run(batch), lambda: f"{batch.name} has run: {service.reason(batch)}")
    calls = Counter(service.calls(f"{batch.name} request"))
    assert len(calls) == REQUESTS
    return calls.total() - REQUESTS


def wait_ended(service: Stack, run_id: str) -> None:
    service.wait(lambda: service.run(run_id).is_finished, f"run {run_id} has ended")


def evict(service: Stack, run_id: str) -> None:
    """End the pod of a run as a drain does, or the scheduler to make room; as soon as there is one."""
    service.wait(lambda: service.pods(run_id) != [], f"run {run_id} has a pod")
    pod = service.pod(run_id).metadata.name
    service.core.create_namespaced_pod_eviction(pod, service.cluster.namespace, {"metadata": {"name": pod}})


def workers_under_way(service: Stack) -> set[str]:
    return {run.run_id for run in service.runs() if not run.is_finished}


def test_a_dropped_file_becomes_results_by_pods_alone(service: Stack) -> None:
    service.store.put("inbox/acme/whole.jsonl", file_of(request_line(number) for number in range(20)))
    service.wait(lambda: any(b.name == "whole" for b in service.ledger.batches.recent(limit=9)), "the file is taken")
    (batch,) = [b for b in service.ledger.batches.recent(limit=9) if b.name == "whole"]
    assert service.finish(batch).completed == 20
    pods = service.core.list_namespaced_pod(service.cluster.namespace).items
    roles = Counter(pod.metadata.labels.get("batch-pipeline/role", "housekeeping") for pod in pods)
    assert roles["intake"] == roles["merge"] == 1
    (worker,) = service.runs()
    engine = next(c for c in service.pod(worker.run_id).status.init_container_statuses if c.name == "engine")
    assert engine.restart_count == 0


def test_preempted_workers_cost_no_request_and_are_no_failures(service: Stack) -> None:
    """All of them at once, and the next one before its process has begun."""
    batch, _ = half_way(service, "preempted")
    preempted = workers_under_way(service)
    for run_id in preempted:
        evict(service, run_id)
    submit(service, "after", requests=CHUNK)  # the others may have been done before they were told
    service.wait(lambda: workers_under_way(service) - preempted != set(), "another worker is launched")
    early = min(workers_under_way(service) - preempted)
    evict(service, early)
    for run_id in [*preempted, early]:
        wait_ended(service, run_id)
        assert run_id not in service.runs_on(batch), "its leases were handed back, and did not run out"
        run = service.run(run_id)
        assert (run.status, run.tags[ENDED_TAG]) == (DagsterRunStatus.CANCELED, PREEMPTED)
    assert wait_run(service, batch) == 0


def test_a_cancel_in_the_ui_stops_the_pod_and_another_worker_goes_on(service: Stack) -> None:
    batch, run_id = half_way(service, "cancelled")
    assert service.instance.run_coordinator.cancel_run(run_id)
    wait_ended(service, run_id)
    run = service.run(run_id)
    assert run.status is DagsterRunStatus.CANCELED
    assert ENDED_TAG not in run.tags, "it was an operator's will"
    service.wait(lambda: service.pods(run_id) == [], "its pod is gone")
    assert wait_run(service, batch) == 0


def test_an_engine_that_crashes_is_started_again_alone(service: Stack) -> None:
    batch = submit(service, "crash", last=" [[die]]")
    repeated = wait_run(service, batch)
    crashing = [call for call in service.calls("crash") if "die" in call]
    assert 3 <= len(crashing) <= 4
    assert repeated <= len(crashing) + 3 * IN_FLIGHT

    def restarted() -> list[Any]:
        pods = [pod for run_id in workers_under_way(service) for pod in service.pods(run_id)]
        return [pod for pod in pods if sum(c.restart_count for c in pod.status.init_container_statuses or ()) >= 3]

    # The last time after a pause: the batch may have run by then.
    service.wait(lambda: restarted() != [], "the engine is started again as often as it crashed")
    assert {pod.status.phase for pod in restarted()} == {"Running"}


def test_a_killed_pod_costs_what_no_checkpoint_held(service: Stack) -> None:
    batch, run_id = half_way(service, "killed")
    service.cluster.kill(service.pod(run_id).metadata.name)
    wait_ended(service, run_id)
    assert service.run(run_id).status is DagsterRunStatus.FAILURE
    assert wait_run(service, batch) <= UNSAVED


def test_a_deleted_job_hands_its_work_back(service: Stack) -> None:
    batch, run_id = half_way(service, "deleted")
    job = service.pod(run_id).metadata.labels["job-name"]
    service.jobs.delete_namespaced_job(job, service.cluster.namespace, propagation_policy="Background")
    wait_ended(service, run_id)
    # Run monitoring may see that the Job is gone before the pod has said that it was told to end.
    assert service.run(run_id).status in (DagsterRunStatus.CANCELED, DagsterRunStatus.FAILURE)
    assert wait_run(service, batch) == 0


def test_a_lost_node_keeps_no_place_in_the_pool(service: Stack) -> None:
    """Kubernetes goes on to show its pod as running, then as ending, for ever; the ledger knows better."""
    batch, run_id = half_way(service, "lost")
    node = service.cluster.lose_node_of(service.pod(run_id).metadata.name)
    wait_ended(service, run_id)
    assert service.run(run_id).tags[ENDED_TAG] == LOST
    assert wait_run(service, batch) <= UNSAVED
    service.cluster.remove_node(node)


@pytest.mark.parametrize(("model", "why"), [("unplaceable", "FailedScheduling"), ("unpullable", "pull image")])
def test_a_batch_says_why_its_worker_does_not_start(service: Stack, model: str, why: str) -> None:
    (batch,) = [b for b in service.ledger.batches.recent(limit=99) if b.name == model]
    service.wait(lambda: why in service.reason(batch), lambda: f"{why} in {service.reason(batch)}")
    assert service.reason(batch).startswith(f"waiting for a worker of {model}: ")
    service.wait(
        lambda: any(run.status is DagsterRunStatus.FAILURE for run in service.runs(model)),
        "Dagster has given up the first start",
    )
    assert len([run for run in service.runs(model) if not run.is_finished]) <= 1


def test_every_batch_of_the_tests_before_is_whole(service: Stack) -> None:
    """Merges go on while they run; each batch is proven by what is in its files."""
    batches = [batch for batch in service.ledger.batches.recent(limit=99) if batch.models == [MODEL]]
    assert batches
    for batch in batches:
        done, crashed = service.finish(batch), int(batch.name == "crash")
        assert (done.completed, done.failed) == (done.total - crashed, crashed)


def test_pools_are_as_large_as_the_catalogue_says(service: Stack) -> None:
    limits = {pool.name: pool.limit for pool in service.instance.event_log_storage.get_pool_limits()}
    assert limits == {name: model.pool_limit for name, model in service.settings.models.items()}
