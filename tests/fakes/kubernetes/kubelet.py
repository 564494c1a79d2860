"""Nodes, who gets which of their GPUs, and how pods end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batch_pipeline.embedded.ports import free_ports
from tests.fakes.kubernetes.containers import Image
from tests.fakes.kubernetes.objects import Object, Objects, now
from tests.fakes.kubernetes.pod import PodLife
from tests.fakes.kubernetes.volumes import Volumes

GPU = "nvidia.com/gpu"
_ENDED = ("Succeeded", "Failed")


@dataclass
class Node:
    """A machine; pods without a GPU always find room on it."""

    name: str
    gpus: int
    labels: dict[str, str] = field(default_factory=dict)
    is_there: bool = True


class Kubelet:
    """The scheduler and the kubelets of all nodes."""

    def __init__(
        self,
        objects: Objects,
        nodes: list[Node],
        images: dict[str, Image],
        claims: Mapping[str, Path],
        folder: Path,
        *,
        unreachable_seconds: float,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.images = images
        self._objects = objects
        self._claims = claims
        self._folder = folder
        self._unreachable_seconds = unreachable_seconds
        self._lives: dict[str, PodLife] = {}
        """By the pod's uid."""
        self._tasks: set[asyncio.Task[None]] = set()
        objects.listeners.append(self._heard)

    def log(self, pod: Object, container: str) -> Path:
        """Return the file with what a container has printed."""
        return self._folder / f"{pod['metadata']['name']}.{container}.log"

    def delete(self, pod: Object, grace_seconds: float | None = None) -> None:
        """Delete a pod gracefully: it is gone once its containers have ended, at once with a grace of 0."""
        life = self._lives.get(pod["metadata"]["uid"])
        if grace_seconds == 0 or life is None or pod["status"].get("phase") in _ENDED:
            if life is not None:
                life.crash(report=False)
            self._objects.remove("pods", pod)
            return
        if "deletionTimestamp" in pod["metadata"]:
            return
        grace = float(pod["spec"].get("terminationGracePeriodSeconds", 30)) if grace_seconds is None else grace_seconds
        pod["metadata"] |= {"deletionTimestamp": now(grace), "deletionGracePeriodSeconds": int(grace)}
        self._objects.changed("pods", pod)
        if self.nodes[pod["spec"]["nodeName"]].is_there:
            task = asyncio.get_running_loop().create_task(self._end(life, grace))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def preempt(self, pod: Object, reason: str = "PreemptionByScheduler") -> None:
        """End a pod to make room, as the scheduler or a drain does: gracefully, and with its condition."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": now()}
        pod["status"].setdefault("conditions", []).append(condition)
        self.delete(pod)

    def evict(self, pod: Object) -> None:
        """End a pod at once because its node has no memory left. The object stays, as failed."""
        self._lives[pod["metadata"]["uid"]].crash(report=True)
        message = "The node was low on resource: memory."
        pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}
        self._objects.event(pod, "Evicted", message)
        self._objects.changed("pods", pod)

    def lose(self, name: str) -> None:
        """Let a node vanish with all that runs on it. Its pods seem to run, and later seem to be ending, for ever."""
        self.nodes[name].is_there = False
        for life in self._on(name):
            life.crash(report=False)
            asyncio.get_running_loop().call_later(self._unreachable_seconds, self.delete, life.pod)

    def remove(self, name: str) -> None:
        """Take a node out of the cluster: the pods that it had are gone for good."""
        for life in self._on(name):
            life.pod["status"]["phase"] = "Failed"
            self._objects.changed("pods", life.pod)
            self._objects.remove("pods", life.pod)
        del self.nodes[name]

    def add(self, node: Node) -> None:
        """Add a node, on which waiting pods may find room."""
        self.nodes[node.name] = node
        self._schedule()

    def close(self) -> None:
        """Kill everything that runs."""
        for life in self._lives.values():
            life.close()
        for task in self._tasks:
            task.cancel()

    async def _end(self, life: PodLife, grace_seconds: float) -> None:
        await life.end(grace_seconds)
        self._objects.remove("pods", life.pod)

    def _on(self, node: str) -> list[PodLife]:
        lives = [life for life in self._lives.values() if life.pod["spec"]["nodeName"] == node]
        return [life for life in lives if self._objects.has(life.pod)]

    def _heard(self, kind: str, what: str, it: Object) -> None:
        if kind != "pods":
            return
        if what == "ADDED":
            it.setdefault("status", {"phase": "Pending"})
        asyncio.get_running_loop().call_soon(self._schedule)

    def _schedule(self) -> None:
        for pod in self._objects.all("pods"):
            if "nodeName" in pod["spec"]:
                continue
            fitting = [node for node in self.nodes.values() if self._fits(pod, node)]
            if not fitting:
                self._cannot_be_placed(pod)
                continue
            pod["spec"]["nodeName"] = fitting[0].name
            uid = pod["metadata"]["uid"]
            volumes = Volumes(pod, self._objects, self._claims, self._folder / uid)
            life = PodLife(pod, self._objects, self.images, volumes, port=free_ports(1)[0], folder=self._folder)
            self._lives[uid] = life
            life.begin()

    def _fits(self, pod: Object, node: Node) -> bool:
        selector = pod["spec"].get("nodeSelector") or {}
        if not node.is_there or any(node.labels.get(key) != value for key, value in selector.items()):
            return False
        taken = [it for it in self._objects.all("pods") if it["spec"].get("nodeName") == node.name]
        used = sum(_gpus(it) for it in taken if it["status"]["phase"] not in _ENDED)
        return _gpus(pod) == 0 or used + _gpus(pod) <= node.gpus

    def _cannot_be_placed(self, pod: Object) -> None:
        count = len(self.nodes)
        message = f"0/{count} nodes are available: {count} Insufficient {GPU} or not matching the node selector."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        if condition not in pod["status"].setdefault("conditions", []):
            pod["status"]["conditions"] = [condition]
            self._objects.event(pod, "FailedScheduling", message)


def _gpus(pod: Object) -> int:
    spec = pod["spec"]
    sidecars = [it for it in spec.get("initContainers", []) if it.get("restartPolicy") == "Always"]
    return sum(int(it.get("resources", {}).get("limits", {}).get(GPU, 0)) for it in [*sidecars, *spec["containers"]])
