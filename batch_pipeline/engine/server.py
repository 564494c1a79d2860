"""vLLM's OpenAI server as a child process, so that its death is an event and not ours.

The child is `guard.py`, which runs the engine and ends all of its processes when the worker ends, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from batch_pipeline.engine import guard, logs, probe
from batch_pipeline.engine.probe import Health
from batch_pipeline.errors import EngineError
from batch_pipeline.models import FETCH_ENVIRONMENT, Model

LOOPBACK = "127.0.0.1"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **FETCH_ENVIRONMENT}
"""An engine fetches nothing and reports nothing to anybody, unless the catalogue says otherwise."""
_POLL_SECONDS = 0.25
_STOP_SECONDS = 15.0
"""Time from SIGTERM to SIGKILL."""
# Below the range that the kernel gives to outgoing connections: none takes the port while the engine loads.
_LOWEST_PORT, _HIGHEST_PORT = 23_000, 31_000

Command = Callable[[int], list[str]]
"""Returns what to run for an engine that is to listen on the given port of the loopback interface."""


class _Child(NamedTuple):
    """One start of the engine."""

    process: subprocess.Popen[bytes]
    ended: asyncio.Event
    url: str
    log_start: int
    """Where in the log this start's lines begin."""


class VllmServer:
    """One engine process, started again after each death. Use it in one event loop, which must outlive it."""

    def __init__(
        self,
        name: str,
        model: Model,
        log: Path,
        command: Command | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._model = model
        self._log = log
        self._command = command or (lambda port: vllm_command(name, model, port))
        self._clock = clock
        self._child: _Child | None = None

    @property
    def url(self) -> str:
        """Where it listens now. Raises EngineError where it was never started."""
        return self._running().url

    @property
    def pid(self) -> int:
        """The guard's process id, which is also its group's. Raises EngineError where it was never started."""
        return self._running().process.pid

    async def start(self) -> None:
        """Start the process; it dies with this one. Raises EngineError where it cannot be run at all."""
        port = free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    [sys.executable, guard.__file__, *self._command(port)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **ENVIRONMENT, **self._model.engine_environment},
                    # A group of its own, and no session: Linux shares out processors by session, and within one the
                    # processes of vLLM that wait for each other by spinning let others in at once. In a session beside
                    # them the worker waits for its turn, up to 15 ms for each answer on a machine with few cores.
                    process_group=0,
                )
            except OSError as error:
                raise EngineError(f"the engine of {self._name} cannot be started: {error}") from error
            ended = asyncio.Event()
            self._child = _Child(process, ended, f"http://{LOOPBACK}:{port}", log.tell())
        threading.Thread(
            target=_watch, args=(process, asyncio.get_running_loop(), ended), name=f"engine-{process.pid}", daemon=True
        ).start()

    async def wait_ready(self) -> None:
        """Wait until it serves the model. Raises EngineError, with its log's telling lines, where it ends first."""
        child = self._running()
        give_up_at = self._clock() + self._model.engine_start_seconds
        while await probe.health(child.url) is not Health.READY:
            if await _wait(child.ended, _POLL_SECONDS):
                raise EngineError(
                    f"the engine of {self._name} {self._end_of(child)} while starting: {self._why(child)}"
                )
            if self._clock() > give_up_at:
                await self.stop()
                raise EngineError(
                    f"the engine of {self._name} is not ready after {self._model.engine_start_seconds:.0f} s "
                    f"(the model's engine_start_seconds): {self._why(child)}"
                )
        await probe.check_serves(child.url, self._name)

    async def version(self) -> str:
        """Return the version that it reports."""
        return await probe.version(self.url)

    async def alive(self) -> bool:
        """Return whether its process runs and it is not down by its own word."""
        child = self._running()
        return child.process.poll() is None and await probe.health(child.url) is not Health.DOWN

    async def died(self) -> None:
        """Return when the process of the last start has ended."""
        await self._running().ended.wait()

    async def restart(self) -> None:
        """End what is left, start again, wait until it is ready."""
        await self.stop()
        await self.start()
        await self.wait_ready()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to the whole group where that does not help; returns when the process has ended."""
        child = self._child
        if child is None:
            return
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
            await _wait(child.ended, _STOP_SECONDS)
        try:
            # Also after its own end: were the guard killed, the rest of its group may still be there.
            os.killpg(child.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await child.ended.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()

    def _running(self) -> _Child:
        if self._child is None:
            raise EngineError(f"the engine of {self._name} was not started")
        return self._child

    def _end_of(self, child: _Child) -> str:
        status = child.process.returncode
        number = -status if status < 0 else status - 128
        if number in signal.valid_signals():
            return f"was killed by {signal.Signals(number).name}"
        return f"ended with status {status}"

    def _why(self, child: _Child) -> str:
        return f"{logs.telling_lines(logs.tail(self._log, child.log_start))} (log: {self._log})"


def vllm_command(name: str, model: Model, port: int) -> list[str]:
    """Return the command of vLLM's server for a model (its console script needs a package of its name).

    Raises EngineError where the model's folder is missing: vLLM would take its path for a name to download.
    """
    if not Path(model.source).is_dir():
        raise EngineError(f"models.{name}.source: there is no folder {model.source}")
    return [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model.source),
        *("--served-model-name", name),
        *("--max-model-len", str(model.context_length)),
        *model.fetch_arguments,
        *("--host", LOOPBACK),
        *("--port", str(port)),
        "--disable-uvicorn-access-log",
        # Without it the usage does not say how many tokens came from the prefix cache.
        "--enable-prompt-tokens-details",
        *model.engine_arguments,
    ]


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on. Raises EngineError where none is found."""
    for _ in range(100):
        port = _LOWEST_PORT + secrets.randbelow(_HIGHEST_PORT - _LOWEST_PORT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probing:
            try:
                probing.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise EngineError(f"no free port between {_LOWEST_PORT} and {_HIGHEST_PORT} on {LOOPBACK}")


def _watch(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    process.wait()
    try:
        loop.call_soon_threadsafe(ended.set)
    except RuntimeError:
        return  # the loop has ended before the engine: nobody waits any more


async def _wait(event: asyncio.Event, timeout_seconds: float) -> bool:
    """Wait for the event, at most so long; return whether it came."""
    try:
        await asyncio.wait_for(event.wait(), timeout_seconds)
    except TimeoutError:
        return False
    return True
