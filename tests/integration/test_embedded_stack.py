"""`up` and `down`: the stack as one, on the real programs, with a code location of the test's own."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.dagster_client import DagsterClient
from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.embedded.processes import Identity, wait_for_end
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.errors import OperatorError, SettingsError
from batch_pipeline.models import Model
from batch_pipeline.store.objects import ObjectStore
from tests.chaos.parts import kill
from tests.fakes.waiting import wait_until

DEFINITIONS = "embedded_definitions"
LAUNCH = """
mutation { launchRun(executionParams: {selector: {
    repositoryLocationName: "batch_pipeline", repositoryName: "__repository__", jobName: "holding"}}) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }
"""
until = partial(wait_until, pause_seconds=0.05)
STATUSES = "{ runsOrError { ... on Runs { results { runId status } } } }"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="module")
def stack_settings(folder: Path) -> configuration.Settings:
    s3, ui, code, api = free_ports(4)
    settings = configuration.Settings(
        store=configuration.Store(
            endpoint_url=f"http://{LOOPBACK}:{s3}", access_key_id="key", secret_access_key="secret"
        ),
        embedded=configuration.Embedded(data_dir=str(folder), s3_port=s3, dagster_port=ui, code_server_port=code),
        api=configuration.Api(port=api),
        models={"test-model": Model(source="nowhere", context_length=1, pool_limit=1)},
    )
    # The HTTP service reads a file, as every part does in earnest.
    lines = []
    for table in ("store", "api", "embedded"):
        values = msgspec.to_builtins(getattr(settings, table))
        fields = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
        lines += [f"[{table}]", *fields]
    config_of(folder).write_text("\n".join(lines), encoding="utf-8")
    return settings


def config_of(folder: Path) -> Path:
    return folder / "batch-pipeline.toml"


@pytest.fixture(scope="module")
def stack(stack_settings: configuration.Settings, folder: Path) -> Iterator[Stack]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(Path(__file__).parent))
    patch.setenv("HOLD_FOLDER", str(folder))
    stack = Stack(stack_settings, config_of(folder), definitions=DEFINITIONS)
    yield stack
    stack.down()
    patch.undo()


def all_of(stack: Stack) -> list[Identity]:
    return [member for service in stack.services for member in service.family()]


def holding(folder: Path) -> set[int]:
    return {int(file.name) for file in folder.iterdir() if file.name.isdigit()}


def statuses(client: DagsterClient) -> dict[str, str]:
    results = client._query(STATUSES)["runsOrError"]["results"]
    return {run["runId"]: run["status"] for run in results}


def test_up_starts_all_parts_on_loopback_and_again_starts_none(
    stack: Stack, stack_settings: configuration.Settings
) -> None:
    said: list[str] = []
    addresses = stack.up(said.append)
    assert said == [
        f"starting {s}" for s in ("seaweedfs", "api", "dagster-code-server", "dagster-webserver", "dagster-daemon")
    ]
    assert DagsterClient(addresses.dagster).sick_daemons() == []
    ObjectStore.open(stack_settings.store).put("key", b"value")
    assert addresses.api == f"http://{LOOPBACK}:{stack_settings.api.port}"
    assert httpx.get(f"{addresses.api}/readyz", timeout=30).json() == {"ready": True, "missing": []}
    before = stack.running()
    said.clear()
    stack.up(said.append)
    assert said == ["already running"]
    assert stack.running() == before
    for member in all_of(stack):
        process = psutil.Process(member.pid)
        hosts = {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert hosts <= {LOOPBACK, f"::ffff:{LOOPBACK}"}, process.cmdline()


@pytest.mark.parametrize("name", ["dagster-daemon", "dagster-code-server", "seaweedfs", "api"])
def test_part_that_was_killed_is_started_again_and_others_go_on(stack: Stack, name: str) -> None:
    stack.up()
    before = stack.running()
    [service] = [service for service in stack.services if service.name == name]
    family = service.family()
    os.kill(family[0].pid, signal.SIGKILL)
    assert wait_for_end(family[:1], 20) == []
    assert stack.running() == {**before, name: None}
    said: list[str] = []
    stack.up(said.append)
    daemon_too = ["stopping dagster-daemon", "starting dagster-code-server", "starting dagster-daemon"]
    assert said == (daemon_too if name == "dagster-code-server" else [f"starting {name}"])
    anew = {line.removeprefix("starting ") for line in said}
    assert {n: pid for n, pid in stack.running().items() if n not in anew} == {
        n: pid for n, pid in before.items() if n not in anew
    }
    assert None not in stack.running().values()
    assert service.log.with_name(f"{name}.log.before").stat().st_size > 0  # what it had to say before it was killed
    assert wait_for_end(family, 0) == []  # also what the killed one had started


def test_run_beyond_the_pool_stays_queued_and_killed_code_server_loses_no_place(stack: Stack, folder: Path) -> None:
    client = DagsterClient(stack.up().dagster)
    first = client._query(LAUNCH)["launchRun"]["run"]["runId"]
    until(lambda: len(holding(folder)) == 1, "one run holds its place")
    second = client._query(LAUNCH)["launchRun"]["run"]["runId"]
    until(
        lambda: "is blocked by global concurrency limits" in (folder / "logs" / "dagster-daemon.log").read_text(),
        "the other one is held back",
    )
    assert statuses(client) == {first: "STARTED", second: "QUEUED"}

    [code_server] = [service for service in stack.services if service.name == "dagster-code-server"]
    kill(code_server.family())
    said: list[str] = []
    stack.up(said.append)
    assert "cancelling 1 run(s) whose processes have gone" in said
    until(lambda: statuses(client) == {first: "CANCELED", second: "STARTED"}, "the second one runs")
    until(lambda: len(holding(folder)) == 2, "it holds a place")


def test_down_ends_runs_in_progress_and_leaves_no_process(stack: Stack, folder: Path) -> None:
    client = DagsterClient(stack.up().dagster)
    if not client.runs_in_progress():
        client._query(LAUNCH)
    until(client.runs_in_progress, "a run is in progress")
    until(lambda: any(psutil.pid_exists(pid) for pid in holding(folder)), "its process is there")
    running = [pid for pid in holding(folder) if psutil.pid_exists(pid)]
    family = all_of(stack)
    said: list[str] = []
    assert stack.down(said.append) is True
    assert "ending 1 run(s) in progress" in said
    assert wait_for_end(family, 0) == []
    assert all((folder / f"{pid}.ended").exists() for pid in running)
    assert set(stack.running().values()) == {None}
    said.clear()
    assert stack.down(said.append) is False
    assert said == ["nothing was running"]


def test_down_ends_everything_also_where_the_webserver_hangs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    client = DagsterClient(stack.up().dagster)
    client._query(LAUNCH)
    until(client.runs_in_progress, "a run is in progress")
    monkeypatch.setattr("batch_pipeline.embedded.dagster_client._TIMEOUT_SECONDS", 1.0)
    for service in stack.services:
        if service.name in {"dagster-webserver", "dagster-code-server"}:
            monkeypatch.setattr(service, "stop_seconds", 3.0)
    family = all_of(stack)
    os.kill(stack.running()["dagster-webserver"] or 0, signal.SIGSTOP)
    said: list[str] = []
    assert stack.down(said.append) is True
    assert any("runs in progress will be killed" in line for line in said)
    assert wait_for_end(family, 0) == []


def test_code_that_does_not_load_is_shown_and_nothing_is_left_running(
    stack_settings: configuration.Settings, folder: Path
) -> None:
    broken = Stack(stack_settings, config_of(folder), definitions="no_such_module")
    with pytest.raises(OperatorError, match="No module named 'no_such_module'"):
        broken.up()
    assert set(broken.running().values()) == {None}


def test_port_of_another_program_is_named_with_its_setting_and_left_alone(
    stack_settings: configuration.Settings,
) -> None:
    stack = Stack(stack_settings, definitions=DEFINITIONS)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((LOOPBACK, stack_settings.embedded.dagster_port))
        other.listen()
        with pytest.raises(OperatorError, match=rf"in use by .*\(pid {os.getpid()}\).*set embedded\.dagster_port"):
            stack.up()
    assert set(stack.running().values()) == {None}


def test_recycled_pid_is_never_signalled(stack_settings: configuration.Settings, folder: Path) -> None:
    stack = Stack(stack_settings, definitions=DEFINITIONS)
    [daemon] = [service for service in stack.services if service.name == "dagster-daemon"]
    bystander = os.getpid()
    daemon.pid_file.write_text(f"{bystander}\n1\n{Path('/proc/sys/kernel/random/boot_id').read_text()}")
    assert stack.running()["dagster-daemon"] is None
    assert stack.down() is False  # and this test is still alive
    assert not daemon.pid_file.exists()


def test_two_ups_at_once_do_not_mix(stack_settings: configuration.Settings) -> None:
    stack = Stack(stack_settings, definitions=DEFINITIONS)
    with stack._locked(), pytest.raises(OperatorError, match="another `up` or `down`"):
        stack.up()


def test_endpoint_and_port_that_disagree_are_refused(stack_settings: configuration.Settings) -> None:
    moved = msgspec.structs.replace(
        stack_settings, embedded=msgspec.structs.replace(stack_settings.embedded, s3_port=8433)
    )
    with pytest.raises(SettingsError, match=r"store\.endpoint_url .* must have the port of embedded\.s3_port"):
        Stack(moved)


def test_object_store_elsewhere_is_not_started(stack_settings: configuration.Settings) -> None:
    elsewhere = msgspec.structs.replace(stack_settings, store=configuration.Store(endpoint_url=None))
    assert "seaweedfs" not in Stack(elsewhere).running()


def test_the_http_service_may_be_left_out(stack_settings: configuration.Settings) -> None:
    embedded = msgspec.structs.replace(stack_settings.embedded, serve_api=False)
    without = Stack(msgspec.structs.replace(stack_settings, embedded=embedded))
    assert "api" not in without.running()
    assert without.addresses().api is None
