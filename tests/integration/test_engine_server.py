"""Engines as processes: ready, dead, restarted, stopped; and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from batch_pipeline.engine import AnswerTimeout, ConnectionLost, EngineClient, VllmServer, engine_for, guard
from batch_pipeline.engine.server import free_port
from batch_pipeline.errors import EngineError
from batch_pipeline.models import Model
from tests.fakes import engine as fake_engine
from tests.fakes.waiting import wait_until
from tests.fakes.workers import MODEL, attached, child_engine

# Its child starts a grandchild in a session of its own, which notices nothing; both tell their pids.
FAMILY = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(grandchild.pid, flush=True)
time.sleep(600)
"""


def guarded(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, guard.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the guard's child and grandchild, once both are there."""
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    (child,) = psutil.Process(process.pid).children()
    return [child, psutil.Process(grandchild)]


def close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def test_the_guard_ends_all_when_the_worker_is_gone() -> None:
    process = guarded(sys.executable, "-c", FAMILY)
    family = family_of(process)
    close(process)
    assert process.wait() == 128 + signal.SIGKILL
    assert psutil.wait_procs(family, timeout=30)[1] == []


def test_the_guard_ends_what_the_engine_leaves_behind_and_tells_its_end() -> None:
    process = guarded(sys.executable, "-c", FAMILY)
    family = family_of(process)
    family[0].kill()
    assert process.wait() == 128 + signal.SIGKILL
    assert psutil.wait_procs(family, timeout=30)[1] == []
    close(process)


def test_the_engines_first_process_dies_with_a_killed_guard() -> None:
    process = guarded(sys.executable, "-c", FAMILY)
    child, grandchild = family_of(process)
    process.kill()
    assert psutil.wait_procs([child], timeout=30)[1] == []
    grandchild.kill()
    close(process)


@pytest.mark.parametrize("status", [0, 3])
def test_the_guards_status_is_the_engines(status: int) -> None:
    process = guarded(sys.executable, "-c", f"raise SystemExit({status})")
    assert process.wait() == status
    close(process)


def test_an_engine_is_started_restarted_elsewhere_and_stopped(tmp_path: Path) -> None:
    async def live() -> list[psutil.Process]:
        server = child_engine(tmp_path / "engine.log")
        await server.start()
        await server.wait_ready()
        assert await server.alive()
        assert await server.version() == fake_engine.VERSION
        first, family = server.url, psutil.Process(server.pid).children(recursive=True)
        family[0].kill()
        await server.died()
        assert not await server.alive()
        await server.restart()
        assert server.url != first
        assert await server.alive()
        family += psutil.Process(server.pid).children(recursive=True)
        await server.stop()
        assert not await server.alive()
        return family

    family = asyncio.run(live())
    assert len(family) == 2
    assert psutil.wait_procs(family, timeout=30)[1] == []


def test_an_engine_that_is_never_ready_is_ended_and_its_log_is_named(tmp_path: Path) -> None:
    model = Model(source="none", context_length=8, engine_start_seconds=1.0)
    log = tmp_path / "engine.log"

    async def live() -> None:
        server = VllmServer(MODEL, model, log, command=lambda _: ["sh", "-c", "echo still loading; sleep 600"])
        await server.start()
        # The second is not to go by while the processes of the guard and of the engine start.
        wait_until(lambda: "still loading" in log.read_text(), "the engine has said something")
        with pytest.raises(EngineError, match=r"not ready after 1 s .* still loading \(log: .*engine.log\)"):
            await server.wait_ready()
        assert not await server.alive()

    asyncio.run(live())


def test_a_killed_start_says_by_which_signal(tmp_path: Path) -> None:
    async def live() -> None:
        server = child_engine(tmp_path / "engine.log", "--start-seconds", "600")
        await server.start()
        wait_until(lambda: bool(psutil.Process(server.pid).children()), "the engine's process is there")
        psutil.Process(server.pid).children()[0].kill()
        with pytest.raises(EngineError, match="was killed by SIGKILL while starting"):
            await server.wait_ready()

    asyncio.run(live())


def test_a_model_without_a_folder_is_named_before_anything_starts(tmp_path: Path) -> None:
    engine = engine_for(MODEL, Model(source=str(tmp_path / "nowhere"), context_length=8), tmp_path / "engine.log")
    with pytest.raises(EngineError, match=rf"models.{MODEL}.source: there is no folder .*nowhere"):
        asyncio.run(engine.start())


def test_an_attached_engine_is_waited_for_and_never_stopped() -> None:
    async def live(url: str) -> None:
        engine = attached(url)
        await engine.start()
        await engine.wait_ready()
        await engine.stop()
        assert await engine.alive()

    with fake_engine.running() as fake:
        asyncio.run(live(fake.url))
    assert not asyncio.run(attached(fake.url).alive())


def test_an_engine_that_says_it_is_not_well_is_not_alive() -> None:
    with fake_engine.running() as fake:
        fake.control(health_status=503)
        assert not asyncio.run(attached(fake.url).alive())


def test_no_answer_tells_whether_the_request_was_sent() -> None:
    async def ask(url: str, prompt: str, seconds: float = 60.0) -> None:
        async with EngineClient(url) as client:
            await client.complete("/v1/completions", b'{"prompt":"%s"}' % prompt.encode(), seconds)

    with fake_engine.running() as fake:
        with pytest.raises(AnswerTimeout, match="no answer within"):
            asyncio.run(ask(fake.url, "[[hang]]", 0.5))
        for prompt in ("[[reset]]", "[[die]]"):
            with pytest.raises(ConnectionLost) as broken:
                asyncio.run(ask(fake.url, prompt))
            assert broken.value.sent
    with pytest.raises(ConnectionLost) as refused:
        asyncio.run(ask(f"http://127.0.0.1:{free_port()}", "hello"))
    assert not refused.value.sent
