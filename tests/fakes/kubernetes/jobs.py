"""The job controller: one pod for each job, and what became of it. No pod is started a second time (backoffLimit 0)."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from tests.fakes.kubernetes.objects import Object, Objects, now


class Pods(Protocol):
    """Who ends pods."""

    def delete(self, pod: Object, grace_seconds: float | None = None) -> None:
        """Delete a pod gracefully."""


class Jobs:
    """Reacts to jobs and to their pods."""

    def __init__(self, objects: Objects, pods: Pods) -> None:
        self._objects = objects
        self._pods = pods
        self._failed: dict[str, set[str]] = {}
        """Of each job (uid), the pods that have failed (uid); a pod counts once, also when it is gone."""
        self._succeeded: dict[str, set[str]] = {}
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}
        objects.listeners.append(self._heard)

    def delete(self, job: Object, propagation: str) -> None:
        """Delete a job, and its pods unless they are to be orphans."""
        pods = self._of(job)
        self._objects.remove("jobs", job)
        for pod in pods:
            if propagation == "Orphan":
                pod["metadata"].pop("ownerReferences")
                self._objects.changed("pods", pod)
            else:
                self._pods.delete(pod)

    def _heard(self, kind: str, what: str, it: Object) -> None:
        if kind == "jobs" and what == "ADDED":
            self._start(it)
        if kind == "jobs" and what == "DELETED":
            for timer in self._timers.pop(it["metadata"]["uid"], []):
                timer.cancel()
        if kind == "pods":
            for owner in it["metadata"].get("ownerReferences", []):
                for job in self._objects.all("jobs"):
                    if job["metadata"]["uid"] == owner["uid"]:
                        self._count(job, it, what)

    def _start(self, job: Object) -> None:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        assert job["spec"].get("backoffLimit") == 0, "this controller starts no second pod"
        self._failed[uid], self._succeeded[uid] = set(), set()
        job["status"] = {"startTime": now()}
        template = job["spec"]["template"]
        labels = {"job-name": name, "batch.kubernetes.io/job-name": name, "controller-uid": uid}
        metadata = {
            **template.get("metadata", {}),
            "name": f"{name}-{uid[:5]}",
            "labels": {**template.get("metadata", {}).get("labels", {}), **labels},
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "controller": True}
            ],
        }
        self._objects.create("pods", {"metadata": metadata, "spec": template["spec"]}, job["metadata"]["namespace"])
        deadline = job["spec"].get("activeDeadlineSeconds")
        if deadline is not None:
            self._later(job, deadline, self._too_late, job)

    def _of(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [
            pod
            for pod in self._objects.all("pods")
            if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", []))
        ]

    def _count(self, job: Object, pod: Object, what: str) -> None:
        uid, pod_uid = job["metadata"]["uid"], pod["metadata"]["uid"]
        phase = pod.get("status", {}).get("phase", "Pending")
        ends_early = job["spec"].get("podReplacementPolicy", "TerminatingOrFailed") != "Failed"
        if phase == "Succeeded":
            self._succeeded[uid].add(pod_uid)
        elif phase == "Failed" or what == "DELETED" or (ends_early and "deletionTimestamp" in pod["metadata"]):
            self._failed[uid].add(pod_uid)
        counted = self._failed[uid] | self._succeeded[uid]
        alive = [it for it in self._of(job) if it["metadata"]["uid"] not in counted]
        ending = [it for it in alive if "deletionTimestamp" in it["metadata"]]
        counts = {
            "active": len(alive) - len(ending),
            "terminating": len(ending),
            "failed": len(self._failed[uid]),
            "succeeded": len(self._succeeded[uid]),
        }
        status = {"startTime": job["status"]["startTime"], **{key: value for key, value in counts.items() if value}}
        status["conditions"] = job["status"].get("conditions", [])
        job["status"] = status
        if counted:
            self._finish(job, "Complete" if self._succeeded[uid] else "Failed", "BackoffLimitExceeded")
        self._objects.changed("jobs", job)

    def _finish(self, job: Object, condition: str, reason: str) -> None:
        conditions = job["status"].setdefault("conditions", [])
        if conditions:
            return
        conditions.append({"type": condition, "status": "True", "reason": reason, "lastTransitionTime": now()})
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is not None:
            self._later(job, ttl, self.delete, job, "Background")

    def _too_late(self, job: Object) -> None:
        self._finish(job, "Failed", "DeadlineExceeded")
        for pod in self._of(job):
            self._pods.delete(pod)
        self._objects.changed("jobs", job)

    def _later(self, job: Object, seconds: float, call: Any, *arguments: Any) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, call, *arguments)
        self._timers.setdefault(job["metadata"]["uid"], []).append(timer)
