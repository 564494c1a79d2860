"""The cluster that the tests of the Kubernetes path run on: the small one of `tests.fakes.kubernetes`, or a real one.

Tests see a `Cluster`, and not which one it is. What they do to pods they do by the API of Kubernetes; a cluster has
methods only for what that API does not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kubernetes
import pytest

from batch_pipeline.embedded.ports import LOOPBACK
from tests.fakes import kubernetes as small
from tests.fakes.kubernetes.__main__ import REPOSITORY, gpu_nodes, this_machine

IMAGE = "batch-pipeline:test"
CLAIM = "models"


@dataclass(frozen=True)
class Cluster(ABC):
    """Where a cluster is, and how pods are placed and find things on it."""

    kubeconfig: Path
    namespace: str
    image: str
    """With this service and its tests; the fake engine runs from it too."""
    host: str
    """The address of this machine, as pods reach it: of its Postgres and its S3, and of the engines' journal."""
    gpu_resource: str
    claim: str
    """The claim that has the weights of models; empty where they are fetched from the store."""

    @abstractmethod
    def kill(self, pod: str) -> None:
        """End a pod at once: its processes get no signal that they could heed."""

    @abstractmethod
    def lose_node_of(self, pod: str) -> str:
        """Let the node of a pod vanish, without anybody hearing of it; return its name."""

    @abstractmethod
    def remove_node(self, name: str) -> None:
        """Take a node out of the cluster."""


@dataclass(frozen=True)
class SmallCluster(Cluster):
    """One in this process."""

    running: small.Cluster

    def kill(self, pod: str) -> None:
        """Let its node run out of memory."""
        self.running.evict(pod)

    def lose_node_of(self, pod: str) -> str:
        return self.running.lose_node_of(pod)

    def remove_node(self, name: str) -> None:
        self.running.remove_node(name)


@dataclass(frozen=True)
class RealCluster(Cluster):
    """One that is reached by its kubeconfig alone."""

    def kill(self, pod: str) -> None:
        client = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(self.kubeconfig)))
        client.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)

    def lose_node_of(self, pod: str) -> str:
        pytest.skip(f"no API of Kubernetes makes the node of {pod} vanish: this is seen on the small cluster")

    def remove_node(self, name: str) -> None:
        raise NotImplementedError(f"{name} was not lost")


@contextmanager
def small_cluster(folder: Path) -> Iterator[SmallCluster]:
    """Run a small cluster, with the weights of var/models in a claim."""
    claims = {CLAIM: REPOSITORY / "var" / "models"}
    with small.running(folder, {IMAGE: this_machine(folder)}, gpu_nodes(), claims) as running:
        yield SmallCluster(running.kubeconfig, "default", IMAGE, LOOPBACK, small.GPU, CLAIM, running)


@contextmanager
def real_cluster(
    kubeconfig: Path, *, image: str, host: str, gpu_resource: str, namespace: str
) -> Iterator[RealCluster]:
    """Use a cluster, in a namespace that is made here and deleted with all that is in it afterwards.

    Raises kubernetes.client.ApiException where the namespace is there already, or may not be made.
    """
    client = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(kubeconfig)))
    client.create_namespace({"metadata": {"name": namespace}})
    try:
        yield RealCluster(kubeconfig, namespace, image, host, gpu_resource, claim="")
    finally:
        client.delete_namespace(namespace)
