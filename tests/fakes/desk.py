"""The embedded stack with a fake engine, and files for it: what the pictures of the operator's pages show."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.dagster_services import dagster_services, prepare_home, webserver_url
from batch_pipeline.embedded.ports import free_ports
from batch_pipeline.embedded.processes import Service
from batch_pipeline.embedded.seaweedfs import s3_service
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.settings import Settings
from tests.fakes.engine import RunningFake, running

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"


def config_text(engine_url: str, *, warm_seconds: float = 5.0) -> str:
    """Return the configuration of a stack with ports of its own, whose workers attach to a fake engine."""
    s3, web, code, api = free_ports(4)
    text = (REPOSITORY / "batch-pipeline.toml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8433", f"127.0.0.1:{s3}").replace('source = "var/', f'source = "{REPOSITORY}/var/')
    text = text.replace("max_in_flight = 32", f'max_in_flight = 8\nengine_url = "{engine_url}"')
    return (
        f"{text}\n[embedded]\ns3_port = {s3}\ndagster_port = {web}\ncode_server_port = {code}\nserve_api = false\n"
        f"[api]\nport = {api}\n[intake]\nchunk_requests = 20\n"
        f"[worker]\nwarm_seconds = {warm_seconds}\npoll_seconds = 0.2\n"
        "[scheduling]\nsensor_interval_seconds = 1\n[alarms]\nlook_seconds = 2\nprogress_seconds = 3.0\n"
    )


@contextmanager
def stack(folder: Path, *engine_options: str) -> Iterator[tuple[Stack, Settings, Path, RunningFake]]:
    """A running stack in a folder; everything is stopped at the end."""
    with running(*engine_options) as engine:
        file = folder / "batch-pipeline.toml"
        file.write_text(config_text(engine.url), encoding="utf-8")
        settings = configuration.load(file, environment={})
        started = Stack(settings, file)
        started.up(lambda _: None)
        try:
            yield started, settings, file, engine
        finally:
            started.down(lambda _: None)


class Dagster(NamedTuple):
    """Dagster as operators see it, without its daemon: nothing is launched by itself."""

    settings: Settings
    home: Path
    url: str
    daemon: Service
    """Not started."""
    engine: RunningFake


@contextmanager
def dagster(folder: Path, *, configuration_more: str = "", instance: str | None = None) -> Iterator[Dagster]:
    """An object store, a fake engine, Dagster's code server and its webserver; everything is stopped at the end.

    `configuration_more` is added to the configuration, and `instance` takes the place of dagster.yaml. This process has
    the same configuration meanwhile, so that it may run assets by itself.
    """
    with ExitStack() as stack:
        engine = stack.enter_context(running())
        file = folder / "batch-pipeline.toml"
        file.write_text(config_text(engine.url, warm_seconds=0.2) + configuration_more, encoding="utf-8")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(configuration.CONFIG_VARIABLE, str(file))
        settings, home = configuration.load(file), folder / "dagster"
        prepare_home(settings, home)
        if instance is not None:
            (home / "dagster.yaml").write_text(instance, encoding="utf-8")
        # The tables are made here: two programs that start at once would both make them.
        dg.DagsterInstance.from_config(str(home)).dispose()
        environment = {configuration.CONFIG_VARIABLE: str(file)}
        code_server, webserver, daemon = dagster_services(settings, home, folder, folder, environment=environment)
        store = s3_service(settings.store, folder / "s3", folder, folder)
        for service in (store, code_server, webserver, daemon):
            stack.callback(service.stop)
        for service in (store, code_server, webserver):
            service.start()
        for service in (store, code_server, webserver):
            service.wait_ready()
        yield Dagster(settings, home, webserver_url(settings), daemon, engine)


def request_line(custom_id: str, content: str = "Say something.", **body: Any) -> bytes:
    """Return a request as a line of a file."""
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16, **body},
    }
    return json.dumps(request).encode() + b"\n"


def file_of(requests: int, bad: int = 0, seed: int = 1) -> bytes:
    """Return a file of good lines with some bad ones among them."""
    chance = random.Random(seed)
    lines = [request_line(f"request-{number:04d}", f"Question {number}?") for number in range(requests)]
    kinds = (b"{not json\n", request_line("too-many", n=999), request_line("elsewhere", model="no-such-model"))
    for number in range(bad):
        lines.insert(chance.randrange(len(lines) + 1), kinds[number % len(kinds)])
    return b"".join(lines)
