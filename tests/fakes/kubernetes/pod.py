"""The life of one pod on its node, as a kubelet leads it.

init containers, one after the other; a native sidecar only has to be there (and to have passed its start-up probe)
main containers, all at once; when the last has ended, the sidecars get SIGTERM, and the pod has an end
deleted meanwhile: SIGTERM to init and main containers, then to the sidecars, SIGKILL to all when the grace is over
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.fakes.kubernetes.containers import Container, Image, at_port, environment
from tests.fakes.kubernetes.objects import ApiError, Object, Objects, now
from tests.fakes.kubernetes.volumes import Volumes

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 8.0
_LEAST_GRACE_SECONDS = 2.0


class PodLife:
    """Runs the containers of one pod."""

    def __init__(
        self, pod: Object, objects: Objects, images: dict[str, Image], volumes: Volumes, *, port: int, folder: Path
    ) -> None:
        self.pod = pod
        self._objects = objects
        self._images = images
        self._volumes = volumes
        self._port = port
        self._folder = folder
        self._containers: list[Container] = []
        self._births = asyncio.Lock()
        """Held while a process is being started: whoever ends the pod waits for it, and can tell it."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ends = False
        """Nothing is started any more."""
        self._crashed = False
        self._frozen = False
        """Its node is gone: nothing is reported any more."""

    def begin(self) -> None:
        """Start to live."""
        self.pod["status"] |= {"phase": "Pending", "startTime": now()}
        self._spawn(self._live())

    def log(self, container: str) -> Path:
        """Return the file with what a container has printed."""
        return self._folder / f"{self.pod['metadata']['name']}.{container}.log"

    async def end(self, grace_seconds: float) -> None:
        """Do what a deletion asks for; return when everything has ended."""
        self._ends = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        async with self._births:
            pass  # what is just being started is there then, and is told like the others
        await self._stop([it for it in self._containers if not it.is_sidecar], until)
        await self._stop(
            [it for it in self._containers if it.is_sidecar], max(until, loop.time() + _LEAST_GRACE_SECONDS)
        )
        if self.pod["status"]["phase"] not in ("Succeeded", "Failed"):
            self._finish()

    def crash(self, *, report: bool) -> None:
        """Kill everything at once; without a report nobody hears of it."""
        self._ends = self._crashed = True
        if not report:
            self._frozen = True
            # What its processes do from now on is seen by nobody.
            self.pod["status"] = copy.deepcopy(self.pod["status"])
        for container in self._containers:
            container.kill()

    def close(self) -> None:
        """Kill everything and stop looking after it."""
        self.crash(report=False)
        for task in self._tasks:
            task.cancel()

    async def _live(self) -> None:
        spec = self.pod["spec"]
        for given in spec.get("initContainers", []):
            container = await self._create(given, "initContainerStatuses")
            if container is None:
                return
            if container.is_sidecar:
                self._spawn(self._keep(container))
                if given.get("startupProbe"):
                    await self._started(container)
            elif await container.wait() != 0 or self._ends:
                self._report()
                if not self._ends:
                    self._finish()
                return
        mains = [await self._create(given, "containerStatuses") for given in spec["containers"]]
        running = [container for container in mains if container is not None]
        if len(running) < len(mains):
            return
        self.pod["status"]["phase"] = "Running"
        self._report()
        await asyncio.gather(*(container.wait() for container in running))
        self._report()
        if not self._ends:
            self._ends = True
            grace = float(spec.get("terminationGracePeriodSeconds", 30))
            sidecars = [it for it in self._containers if it.is_sidecar]
            await self._stop(sidecars, asyncio.get_running_loop().time() + grace)
            self._finish()

    async def _create(self, given: Object, statuses: str) -> Container | None:
        """Start a container, and return it; None where that cannot be, or the pod is to end."""
        if self._ends:
            return None
        image = self._images.get(given["image"])
        if image is None:
            why = f'Back-off pulling image "{given["image"]}": ErrImagePull: not found'
            self._waits(given, statuses, "ImagePullBackOff", why)
            self._objects.event(self.pod, "Failed", f'Failed to pull image "{given["image"]}": not found')
            return None
        try:
            translate = self._volumes.mount(given, lambda text: at_port(text, self._port))
            variables = environment(given, image, self._objects, translate)
        except ApiError as error:
            self._waits(given, statuses, "CreateContainerConfigError", str(error))
            self._objects.event(self.pod, "Failed", f"Error: {error}")
            return None
        container = Container(given, variables, translate, self._port, self.log(given["name"]))
        self._containers.append(container)
        self.pod["status"].setdefault(statuses, []).append(container.status)
        if not await self._start(container):
            return None
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if given.get(probe):
                self._spawn(self._probe(container, probe))
        return container

    async def _start(self, container: Container) -> bool:
        """Start a container's process, unless the pod is to end; return whether it was started."""
        async with self._births:
            if self._ends:
                return False
            await container.start()
            if self._crashed:
                # Whoever has killed all the others has found none of this one.
                container.kill()
        self._report()
        return True

    def _waits(self, given: Object, statuses: str, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        status = {"name": given["name"], "image": given["image"], "imageID": "", "ready": False, "restartCount": 0}
        self.pod["status"].setdefault(statuses, []).append({**status, "state": state})
        self._report()

    async def _keep(self, sidecar: Container) -> None:
        """Start a sidecar again whenever it ends: at once, then after growing pauses."""
        pause = 0.0
        while True:
            await sidecar.wait()
            self._report()
            if self._ends:
                return
            if pause:
                why = f"Back-off restarting failed container {sidecar.name}"
                sidecar.status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": why}}
                self._objects.event(self.pod, "BackOff", why)
                self._report()
                await asyncio.sleep(pause)
            if self._ends:
                return
            sidecar.status["restartCount"] += 1
            if not await self._start(sidecar):
                return
            pause = min(2 * pause or FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)

    async def _probe(self, container: Container, which: str) -> None:
        """Ask a probe for as long as the pod lives, and do what Kubernetes does with its answers."""
        probe = container.spec[which]
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failures = 0
        while not self._ends:
            if container.is_running and (which == "startupProbe") != container.status["started"]:
                fine = await container.answers(probe)
                failures = 0 if fine else failures + 1
                if which == "startupProbe" and fine:
                    container.status["started"] = container.status["ready"] = True
                elif which == "readinessProbe":
                    container.status["ready"] = fine
                elif not fine and failures >= probe.get("failureThreshold", 3):
                    container.kill()
                    failures = 0
                if not fine and not self._ends:
                    self._objects.event(self.pod, "Unhealthy", f"{which} of {container.name} failed")
                self._report()
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _started(self, container: Container) -> None:
        while not container.status["started"] and not self._ends:
            await asyncio.sleep(0.05)

    async def _stop(self, containers: Iterable[Container], until: float) -> None:
        """SIGTERM, and SIGKILL at `until` (the loop's time); return when all have ended."""
        left = [container for container in containers if container.is_running]
        if not left:
            return
        for container in left:
            container.terminate()
        ends = [asyncio.ensure_future(container.ended()) for container in left]
        _, late = await asyncio.wait(ends, timeout=max(0.0, until - asyncio.get_running_loop().time()))
        if late:
            for container in left:
                container.kill()
            await asyncio.wait(late)

    def _finish(self) -> None:
        codes = [status["state"].get("terminated", {}).get("exitCode", 1) for status in self._main_statuses()]
        mains = len(self.pod["spec"]["containers"])
        done = len(codes) == mains and not any(codes)
        self.pod["status"]["phase"] = "Succeeded" if done else "Failed"
        self._report()

    def _main_statuses(self) -> list[Object]:
        statuses: list[Object] = self.pod["status"].get("containerStatuses", [])
        return statuses

    def _report(self) -> None:
        if not self._frozen and self._objects.has(self.pod):
            self._objects.changed("pods", self.pod)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "in a pod", "exception": error})
