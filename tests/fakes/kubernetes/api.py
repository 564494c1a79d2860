"""The HTTP face of the cluster, as far as Dagster and the tests call it."""

from __future__ import annotations

from collections import deque
from typing import Any

import kubernetes_validate
import msgspec
from aiohttp import web

from tests.fakes.kubernetes.jobs import Jobs
from tests.fakes.kubernetes.kubelet import Kubelet
from tests.fakes.kubernetes.objects import KINDS, ApiError, Object, Objects, selected

SCHEMA = "1.33"
_NAMESPACES = "/api/v1/namespaces"
_LIST = "/{group:api/v1|apis/batch/v1}/namespaces/{namespace}/{kind}"
_ONE = _LIST + "/{name}"


class Api:
    """The handlers; everything that they do goes through the objects, the job controller and the kubelet."""

    def __init__(self, objects: Objects, jobs: Jobs, kubelet: Kubelet) -> None:
        self._objects = objects
        self._jobs = jobs
        self._kubelet = kubelet

    def app(self) -> web.Application:
        """Return the server's application."""
        app = web.Application(middlewares=[_statuses])
        app.add_routes(
            [
                web.post(_NAMESPACES, self._create_namespace),
                web.delete(_NAMESPACES + "/{name}", self._delete_namespace),
                web.get(_LIST, self._list),
                web.post(_LIST, self._create),
                web.get(_ONE, self._get),
                web.get(_ONE + "/status", self._get),
                web.delete(_ONE, self._delete),
                web.get(_ONE + "/log", self._log),
                web.post(_ONE + "/eviction", self._evict),
            ]
        )
        return app

    async def _create_namespace(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=dict[str, Any])
        return _json(self._objects.create("namespaces", wanted, ""), 201)

    async def _delete_namespace(self, request: web.Request) -> web.Response:
        """Delete a namespace, and what is in it."""
        it = self._objects.get("namespaces", request.match_info["name"])
        for kind in KINDS:
            for inner in self._objects.all(kind):
                if inner["metadata"]["namespace"] == it["metadata"]["name"]:
                    self._remove(kind, inner, "Background", None)
        self._objects.remove("namespaces", it)
        return _json(it)

    async def _create(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=dict[str, Any])
        kind = _kind(request)
        if kind == "jobs":
            try:
                kubernetes_validate.validate(wanted, SCHEMA, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise ApiError(422, "Invalid", f"{error.path}: {error.message}") from error
        created = self._objects.create(kind, wanted, request.match_info["namespace"])
        return _json(created, 201)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        kind = _kind(request)
        query = request.query
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        if query.get("watch") in ("true", "True", "1"):
            return await self._watch(request, kind, labels, fields)
        items = list(selected(self._objects.all(kind), labels, fields))
        return _json({"kind": f"{KINDS[kind]}List", "metadata": {"resourceVersion": "0"}, "items": items})

    async def _watch(self, request: web.Request, kind: str, labels: str, fields: str) -> web.StreamResponse:
        """Send what there is and then every change, a line of JSON each, until the client goes or its time is over."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        queue = self._objects.watch(kind)
        try:
            await response.prepare(request)
            for it in selected(self._objects.all(kind), labels, fields):
                await response.write(_line("ADDED", it))
            while True:
                _, what, it = await queue.get()
                if [*selected([it], labels, fields)]:
                    await response.write(_line(what, it))
        except ConnectionResetError:
            return response
        finally:
            self._objects.unwatch(queue)

    async def _get(self, request: web.Request) -> web.Response:
        return _json(self._objects.get(_kind(request), request.match_info["name"]))

    async def _delete(self, request: web.Request) -> web.Response:
        kind, name = _kind(request), request.match_info["name"]
        it = self._objects.get(kind, name)
        body = await request.read()
        options: dict[str, Any] = {**(msgspec.json.decode(body) if body else {}), **request.query}
        grace = options.get("gracePeriodSeconds")
        # Orphans are what batch/v1 leaves where nothing is said, since its first days.
        propagation = options.get("propagationPolicy", "Orphan")
        self._remove(kind, it, propagation, None if grace is None else float(grace))
        return _json(it)

    def _remove(self, kind: str, it: Object, propagation: str, grace_seconds: float | None) -> None:
        if kind == "jobs":
            self._jobs.delete(it, propagation)
        elif kind == "pods":
            self._kubelet.delete(it, grace_seconds)
        else:
            self._objects.remove(kind, it)

    async def _evict(self, request: web.Request) -> web.Response:
        self._kubelet.preempt(self._objects.get("pods", request.match_info["name"]), "EvictionByEvictionAPI")
        return _json({"kind": "Status", "status": "Success"}, 201)

    async def _log(self, request: web.Request) -> web.Response:
        pod = self._objects.get("pods", request.match_info["name"])
        containers = [container["name"] for container in pod["spec"]["containers"]]
        log = self._kubelet.log(pod, request.query.get("container", containers[0]))
        if not log.exists():
            raise ApiError(400, "BadRequest", "the container has not started")
        tail = request.query.get("tailLines")
        with log.open(encoding="utf-8", errors="replace") as lines:
            return web.Response(text="".join(deque(lines, None if tail is None else int(tail))))


def _kind(request: web.Request) -> str:
    kind = request.match_info["kind"]
    if kind not in KINDS:
        raise ApiError(404, "NotFound", f"the server has no {kind}")
    return kind


@web.middleware
async def _statuses(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except ApiError as error:
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(error)}
        return _json({**status, "reason": error.reason, "code": error.code}, error.code)
    return response


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _line(what: str, it: Object) -> bytes:
    return msgspec.json.encode({"type": what, "object": it}) + b"\n"
