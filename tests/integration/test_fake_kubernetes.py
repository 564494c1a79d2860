"""The small Kubernetes of the tests behaves as the real one where the service rests on it (see its own words)."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest

from tests.fakes.kubernetes import Cluster, Image, Node, running
from tests.fakes.waiting import wait_until

NAMESPACE = "default"
# Each says what happens to it in the journal, and ends by itself, or once it is told to, when a file of these names is
# there: a test's own steps take as long as they take.
SCRIPT = """
import os, signal, sys, time
name, journal, ends_at, ends_told_at = sys.argv[1:]
def say(word):
    with open(journal, "a") as file: file.write(name + " " + word + chr(10))
def wait(file):
    while not os.path.exists(file): time.sleep(0.01)
def told(*_):
    say("told")
    wait(ends_told_at)
    say("ends")
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
say("starts")
wait(ends_at)
"""
AT_ONCE = "/"
NEVER = "/none such"


class Client:
    """The cluster as a client sees it, and the journal of its containers."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
        self.cluster = cluster
        self.jobs = kubernetes.client.BatchV1Api(client)
        self.core = kubernetes.client.CoreV1Api(client)
        self.now = folder / "now"
        """Those that wait for it end."""
        self._journal = folder / "journal.txt"

    def container(
        self, name: str, *, ends: Path | str = NEVER, ends_told: Path | str = AT_ONCE, **more: Any
    ) -> dict[str, Any]:
        command = ["python", "-c", SCRIPT, name, str(self._journal), str(ends), str(ends_told)]
        return {"name": name, "image": "python", "command": command, **more}

    def start(self, name: str, *, grace: int = 60, sidecar: dict[str, Any] | None = None, **main: Any) -> None:
        volumes = {
            "settings": {"configMap": {"name": "settings"}},
            "shared": {"emptyDir": {}},
            "models": {"persistentVolumeClaim": {"claimName": "models"}},
        }
        gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            "initContainers": [] if sidecar is None else [sidecar],
            "containers": [self.container("main", **{**gpu, **main})],
            "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
        }
        spec = {"backoffLimit": 0, "podReplacementPolicy": "Failed", "template": {"spec": pod}}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        self.jobs.create_namespaced_job(NAMESPACE, job)

    def pod(self, job: str) -> Any:
        (pod,) = self.core.list_namespaced_pod(NAMESPACE, label_selector=f"job-name={job}").items
        return pod

    def status(self, job: str) -> Any:
        return self.jobs.read_namespaced_job_status(job, NAMESPACE).status

    def journal(self) -> list[str]:
        return self._journal.read_text(encoding="utf-8").splitlines() if self._journal.exists() else []


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    image = Image({"PATH": str(Path(sysconfig.get_path("scripts")))})
    (tmp_path / "claim" / "small").mkdir(parents=True)
    (tmp_path / "claim" / "small" / "weights").write_text("heavy", encoding="utf-8")
    with running(tmp_path, {"python": image}, [Node("a", gpus=1)], {"models": tmp_path / "claim"}) as cluster:
        yield Client(cluster, tmp_path)


def test_a_sidecar_is_told_to_end_after_the_worker_has_ended_and_a_job_fails_no_sooner(client: Client) -> None:
    client.start("one", sidecar=client.container("side", restartPolicy="Always"), ends_told=client.now)
    wait_until(lambda: {"main starts", "side starts"} <= {*client.journal()}, "both have started")
    client.core.delete_namespaced_pod(client.pod("one").metadata.name, NAMESPACE)
    status = client.status("one")
    assert (status.active, status.terminating, status.failed, status.succeeded) == (None, 1, None, None)
    client.now.touch()
    wait_until(lambda: client.status("one").succeeded == 1, "the job has ended")
    assert client.journal()[2:] == ["main told", "main ends", "side told", "side ends"]


def test_who_does_not_end_within_the_grace_is_killed(client: Client) -> None:
    client.start("slow", grace=2, ends_told=NEVER)
    wait_until(lambda: "main starts" in client.journal(), "it has started")
    client.core.delete_namespaced_pod(client.pod("slow").metadata.name, NAMESPACE)
    wait_until(lambda: client.status("slow").failed == 1, "the job has failed")
    assert client.journal() == ["main starts", "main told"]


def test_a_pod_waits_for_a_gpu_and_says_so(client: Client) -> None:
    client.start("first", ends=client.now)
    wait_until(lambda: client.pod("first").status.phase == "Running", "it runs")
    client.start("second", ends=AT_ONCE)
    assert client.pod("second").status.phase == "Pending"
    name = client.pod("second").metadata.name
    (event,) = client.core.list_namespaced_event(NAMESPACE, field_selector=f"involvedObject.name={name}").items
    assert (event.type, event.reason) == ("Warning", "FailedScheduling")
    client.now.touch()
    wait_until(lambda: client.status("second").succeeded == 1, "the job has ended")


def test_a_sidecar_that_ends_is_started_again_and_does_not_hold_up_the_end(client: Client) -> None:
    client.start("loop", sidecar=client.container("side", restartPolicy="Always", ends=AT_ONCE), ends=client.now)
    wait_until(lambda: client.journal().count("side starts") >= 2, "it is started again")
    client.now.touch()
    wait_until(lambda: client.status("loop").succeeded == 1, "the job has ended")
    assert client.pod("loop").status.init_container_statuses[0].restart_count >= 1


def test_the_pods_of_a_lost_node_seem_to_run_until_it_is_taken_out(client: Client) -> None:
    client.start("lost")
    wait_until(lambda: client.pod("lost").status.phase == "Running", "it runs")
    node = client.cluster.lose_node_of(client.pod("lost").metadata.name)
    assert client.pod("lost").status.phase == "Running"
    wait_until(lambda: client.pod("lost").metadata.deletion_timestamp is not None, "the pod is to be deleted")
    assert client.status("lost").failed is None
    client.cluster.remove_node(node)
    assert client.status("lost").failed == 1


def test_a_watch_tells_of_every_change(client: Client) -> None:
    watch = kubernetes.watch.Watch()
    seen = []
    client.start("seen", ends=AT_ONCE)
    for event in watch.stream(client.core.list_namespaced_pod, NAMESPACE, timeout_seconds=60):
        seen.append(event["object"].status.phase)
        if seen[-1] == "Succeeded":
            watch.stop()
    assert seen[-1] == "Succeeded"
    name = client.pod("seen").metadata.name
    assert client.core.read_namespaced_pod_log(name, NAMESPACE, _preload_content=False).data == b""


def test_a_pod_has_its_volumes_at_the_paths_that_it_was_given(client: Client, tmp_path: Path) -> None:
    """A config map (whose texts name paths too), a claim, and a folder that its containers share."""
    client.core.create_namespaced_config_map(
        NAMESPACE, {"metadata": {"name": "settings"}, "data": {"places.txt": "/models/small/weights:/shared/told"}}
    )
    names = {"settings": "/etc/settings", "shared": "/shared", "models": "/models/small"}
    mounts = [{"name": name, "mountPath": path} for name, path in names.items()]
    mounts[-1]["subPath"] = "small"
    telling = ["python", "-c", "open('/shared/told', 'w').write('told')"]
    reading = """
places = open("/etc/settings/places.txt").read().split(":")
open("{journal}", "w").write(" ".join(open(place).read() for place in places))
""".format(journal=tmp_path / "journal.txt")
    client.start(
        "reads",
        sidecar={"name": "tells", "image": "python", "command": telling, "volumeMounts": mounts[1:2]},
        command=["python", "-c", reading],
        volumeMounts=mounts,
    )
    wait_until(lambda: client.status("reads").succeeded == 1, "the job has ended")
    assert client.journal() == ["heavy told"]


def test_a_job_that_kubernetes_would_refuse_is_refused(client: Client) -> None:
    with pytest.raises(kubernetes.client.ApiException, match="Invalid"):
        client.start("wrong", sidecar=client.container("side", restartpolicy="Always"))
