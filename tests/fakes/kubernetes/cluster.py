"""A whole cluster in a thread of this process, and the faults that no Kubernetes API knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml
from aiohttp import web

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.containers import Image
from tests.fakes.kubernetes.jobs import Jobs
from tests.fakes.kubernetes.kubelet import Kubelet, Node
from tests.fakes.kubernetes.objects import Objects

UNREACHABLE_SECONDS = 5.0
"""What takes a real cluster some five minutes: until a lost node's pods are to be deleted."""
_SECONDS = 30.0
_T = TypeVar("_T")


class Cluster:
    """A cluster that runs. Every method may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, objects: Objects, kubelet: Kubelet, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        """A file for Kubernetes clients."""
        self._loop = loop
        self._objects = objects
        self._kubelet = kubelet

    def evict(self, pod: str) -> None:
        """Kill a pod at once for its node's lack of memory."""
        self._call(lambda: self._kubelet.evict(self._objects.get("pods", pod)))

    def lose_node_of(self, pod: str) -> str:
        """Let the node of a pod vanish, without anybody hearing of it; return its name."""

        def lose() -> str:
            name = str(self._objects.get("pods", pod)["spec"]["nodeName"])
            self._kubelet.lose(name)
            return name

        return self._call(lose)

    def remove_node(self, name: str) -> None:
        """Take a node out of the cluster."""
        self._call(lambda: self._kubelet.remove(name))

    def add_node(self, name: str, gpus: int) -> None:
        """Add a node."""
        self._call(lambda: self._kubelet.add(Node(name, gpus)))

    def _call(self, work: Callable[[], _T]) -> _T:
        async def called() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(_SECONDS)


@contextmanager
def running(
    folder: Path, images: dict[str, Image], nodes: Sequence[Node], claims: Mapping[str, Path] | None = None
) -> Iterator[Cluster]:
    """Run a cluster until the block ends; nothing of its pods is left then. `claims` are folders that pods mount."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    objects = Objects()
    kubelet = Kubelet(objects, list(nodes), images, claims or {}, folder, unreachable_seconds=UNREACHABLE_SECONDS)
    jobs = Jobs(objects, kubelet)
    runner = web.AppRunner(Api(objects, jobs, kubelet).app(), access_log=None, shutdown_timeout=0.1)

    async def serve() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    async def stop() -> None:
        kubelet.close()
        await runner.cleanup()
        await asyncio.sleep(0)

    try:
        port = asyncio.run_coroutine_threadsafe(serve(), loop).result(_SECONDS)
        yield Cluster(loop, objects, kubelet, _kubeconfig(folder / "kubeconfig.yaml", port))
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_SECONDS)
        loop.close()


def _kubeconfig(file: Path, port: int) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody", "namespace": "default"}}],
        "current-context": "fake",
    }
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file
