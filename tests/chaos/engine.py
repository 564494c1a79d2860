"""The fake engine as the worker starts it: in the place of `python -m vllm.entrypoints.openai.api_server`.

So a chaos run goes the way that production goes: the catalogue, the command, the guard, the restart after a death.
`install` writes a package `vllm` that leads here; on PYTHONPATH it hides the real one from the engine's process alone.
The journal gets a line `SECONDS PID ID` for each request that arrives: UTC since the epoch, and the prompt's last line.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import time
from pathlib import Path

from aiohttp import web

from tests.fakes.engine import FakeEngine

REPOSITORY = Path(__file__).resolve().parents[2]
JOURNAL_VARIABLE = "CHAOS_JOURNAL"
DELAY_VARIABLE = "CHAOS_DELAY_SECONDS"
SPREAD = 1.0
"""Answers take from the delay to twice as long."""


class Journal(io.TextIOWrapper):
    """A file that several engines write to, one whole line at a time."""

    def write(self, text: str, /) -> int:
        """Write a line with its time and the process."""
        return super().write(f"{time.time():.3f} {os.getpid()} {text}")


def install(folder: Path, journal: Path, delay_seconds: float) -> dict[str, str]:
    """Write the package that hides vllm; return the environment of an engine that is to be this one."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for inner in (package, package.parent, package.parent.parent):
        (inner / "__init__.py").touch()
    (package / "api_server.py").write_text("from tests.chaos.engine import main\n\nmain()\n", encoding="utf-8")
    return {
        "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
        JOURNAL_VARIABLE: str(journal),
        DELAY_VARIABLE: str(delay_seconds),
    }


async def _serve(options: argparse.Namespace, journal: Journal) -> None:
    runner = web.ServerRunner(
        web.Server(FakeEngine(options, journal).handle, access_log=None, handler_cancellation=True)
    )
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, backlog=4096).start()
    await asyncio.Event().wait()


def main() -> None:
    """Run the server until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", dest="model", required=True)
    parser.set_defaults(
        delay=float(os.environ[DELAY_VARIABLE]), spread=SPREAD, best=0, want=0, want_until=0, hold_after=-1
    )
    options, _ = parser.parse_known_args()
    with Path(os.environ[JOURNAL_VARIABLE]).open("ab") as file:
        asyncio.run(_serve(options, Journal(file, encoding="utf-8")))
