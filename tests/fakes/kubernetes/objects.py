"""The objects of the cluster, as their JSON, and who wants to hear of changes. Lives in one event loop."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]
KINDS = {
    "namespaces": "Namespace",
    "jobs": "Job",
    "pods": "Pod",
    "events": "Event",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "serviceaccounts": "ServiceAccount",
}


class ApiError(Exception):
    """What the API answers with a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


def now(in_seconds: float = 0.0) -> str:
    """Return the time, or one to come, as Kubernetes writes it."""
    return (datetime.now(UTC) + timedelta(seconds=in_seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Objects:
    """All objects by kind (in the plural) and name; one namespace is like the other."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self._version = itertools.count(1)
        self._watchers: dict[asyncio.Queue[tuple[str, str, Object]], str] = {}
        self.listeners: list[Callable[[str, str, Object], None]] = []
        """Called with kind, what happened (ADDED, MODIFIED, DELETED) and the object, at once."""

    def create(self, kind: str, wanted: Object, namespace: str) -> Object:
        """Add an object. Raises ApiError 409 where the name is taken."""
        metadata = dict(wanted.get("metadata") or {})
        name = metadata.get("name") or f"{metadata.get('generateName', '')}{uuid.uuid4().hex[:6]}"
        if name in self._objects[kind]:
            raise ApiError(409, "AlreadyExists", f"{kind} {name!r} already exists")
        metadata |= {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        api_version = "batch/v1" if kind == "jobs" else "v1"
        created = {**wanted, "kind": KINDS[kind], "apiVersion": api_version, "metadata": metadata}
        self._objects[kind][name] = created
        self.changed(kind, created, "ADDED")
        return created

    def get(self, kind: str, name: str) -> Object:
        """Return an object. Raises ApiError 404."""
        found = self._objects[kind].get(name)
        if found is None:
            raise ApiError(404, "NotFound", f"{kind} {name!r} not found")
        return found

    def has(self, wanted: Object) -> bool:
        """Whether this very object is still there."""
        kind = next(plural for plural, single in KINDS.items() if single == wanted["kind"])
        found = self._objects[kind].get(wanted["metadata"]["name"])
        return found is not None and found["metadata"]["uid"] == wanted["metadata"]["uid"]

    def all(self, kind: str) -> list[Object]:
        """Return all objects of a kind, the oldest first."""
        return list(self._objects[kind].values())

    def changed(self, kind: str, it: Object, what: str = "MODIFIED") -> None:
        """Tell everybody of a change that was made in place."""
        it["metadata"]["resourceVersion"] = str(next(self._version))
        for queue, wanted in self._watchers.items():
            if wanted == kind:
                queue.put_nowait((kind, what, it))
        for listener in self.listeners:
            listener(kind, what, it)

    def remove(self, kind: str, it: Object) -> None:
        """Take an object away; nothing where it is gone already."""
        if self.has(it):
            del self._objects[kind][it["metadata"]["name"]]
            self.changed(kind, it, "DELETED")

    def watch(self, kind: str) -> asyncio.Queue[tuple[str, str, Object]]:
        """Return a queue of what changes from now on; give it back with `unwatch`."""
        queue: asyncio.Queue[tuple[str, str, Object]] = asyncio.Queue()
        self._watchers[queue] = kind
        return queue

    def unwatch(self, queue: asyncio.Queue[tuple[str, str, Object]]) -> None:
        """Send no more changes."""
        del self._watchers[queue]

    def event(self, about: Object, reason: str, message: str, kind: str = "Warning") -> None:
        """Record an event, or count one that happened before."""
        name = about["metadata"]["name"]
        for event in self.all("events"):
            if (event["involvedObject"]["name"], event["reason"], event["message"]) == (name, reason, message):
                event["count"] += 1
                event["lastTimestamp"] = now()
                self.changed("events", event)
                return
        involved = {"kind": about["kind"], "name": name, "uid": about["metadata"]["uid"]}
        event = {"involvedObject": involved, "reason": reason, "message": message, "type": kind, "count": 1}
        times = {"firstTimestamp": now(), "lastTimestamp": now()}
        self.create("events", {"metadata": {"generateName": f"{name}."}, **event, **times}, "default")


def selected(found: list[Object], labels: str, fields: str) -> Iterator[Object]:
    """Yield the objects that a label selector and a field selector choose (equality only)."""
    for it in found:
        have = it["metadata"].get("labels") or {}
        if all(have.get(key) == value for key, value in _pairs(labels)) and all(
            _field(it, path) == value for path, value in _pairs(fields)
        ):
            yield it


def _pairs(selector: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, selector.split(",")):
        key, _, value = part.partition("=")
        yield key, value.removeprefix("=")


def _field(it: Object, path: str) -> Any:
    for part in path.split("."):
        it = it.get(part) or {}
    return it
