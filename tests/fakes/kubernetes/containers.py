"""Containers as local processes: what an image's name stands for, the environment that a pod gives, signals."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.kubernetes.objects import ApiError, Object, Objects, now
from tests.fakes.kubernetes.volumes import Translate


@dataclass(frozen=True)
class Image:
    """What a name of an image stands for here. Its containers see this environment and their pod's, nothing else."""

    environment: dict[str, str] = field(default_factory=dict)


class Container:
    """One container of a pod: at most one process at a time, in a session of its own."""

    def __init__(self, spec: Object, environment: dict[str, str], translate: Translate, port: int, log: Path) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.status: Object = {"name": self.name, "image": spec["image"], "imageID": "", "restartCount": 0}
        self.status |= {"ready": False, "started": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
        self._command = [translate(word) for word in [*spec.get("command", []), *spec.get("args", [])]]
        self._environment = environment
        self._port = port
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_sidecar(self) -> bool:
        """Whether it is started again whenever it ends (native sidecars only)."""
        return bool(self.spec.get("restartPolicy") == "Always")

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start its process."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.status["state"] = {"running": {"startedAt": now()}}
        self.status["started"] = self.status["ready"] = not self.spec.get("startupProbe")

    async def ended(self) -> None:
        """Wait for its end, whoever else does."""
        assert self._process is not None
        await self._process.wait()

    async def wait(self) -> int:
        """Wait for its end, and return the exit status; nothing of it is left then."""
        assert self._process is not None
        code = await self._process.wait()
        self.kill()
        self.status["lastState"] = self.status["state"]
        ended = {"exitCode": code if code >= 0 else 128 - code, "finishedAt": now()}
        self.status["state"] = {"terminated": {**ended, "reason": "Completed" if code == 0 else "Error"}}
        self.status["ready"] = self.status["started"] = False
        return code

    def terminate(self) -> None:
        """Send SIGTERM to its first process, as a container engine does."""
        if self.is_running:
            assert self._process is not None
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to all that it has started."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def answers(self, probe: Object) -> bool:
        """Ask its HTTP probe once."""
        url = f"http://127.0.0.1:{self._port}{probe['httpGet']['path']}"
        return await asyncio.to_thread(_is_fine, url, float(probe.get("timeoutSeconds", 1)))


def at_port(text: str, port: int) -> str:
    """Return a text of a pod with its port 8000 as the one that it has on this machine."""
    return str(port) if text == "8000" else text.replace(":8000", f":{port}")


def environment(spec: Object, image: Image, objects: Objects, translate: Translate) -> dict[str, str]:
    """Return the environment of a container. Raises ApiError where something that it names is not there."""
    values: dict[str, str] = {}
    for source in spec.get("envFrom", []):
        if "configMapRef" in source:
            values |= _data(objects.get("configmaps", source["configMapRef"]["name"]))
        else:
            values |= _data(objects.get("secrets", source["secretRef"]["name"]))
    for entry in spec.get("env", []):
        values[entry["name"]] = _value(entry, objects)
    return {**image.environment, **{name: translate(value) for name, value in values.items()}}


def _value(entry: Object, objects: Objects) -> str:
    if "valueFrom" not in entry:
        return str(entry.get("value", ""))
    for kind, field_name in (("secrets", "secretKeyRef"), ("configmaps", "configMapKeyRef")):
        if field_name in entry["valueFrom"]:
            reference = entry["valueFrom"][field_name]
            data = _data(objects.get(kind, reference["name"]))
            if reference["key"] not in data:
                raise ApiError(404, "NotFound", f"couldn't find key {reference['key']} in {reference['name']}")
            return data[reference["key"]]
    raise ApiError(422, "Invalid", f"this kubelet does not know {entry['valueFrom']}")


def _data(it: Object) -> dict[str, str]:
    if it["kind"] == "ConfigMap":
        return dict(it.get("data") or {})
    encoded: dict[str, Any] = it.get("data") or {}
    return {**{key: base64.b64decode(value).decode() for key, value in encoded.items()}, **(it.get("stringData") or {})}


def _is_fine(url: str, timeout_seconds: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:  # noqa: S310 - of our own making
            return bool(200 <= answer.status < 400)
    except (urllib.error.URLError, OSError):
        return False
