"""The embedded stack with a fake engine, and files for it: what the pictures of the operator's pages show."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import free_ports
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.settings import Settings
from tests.fakes.engine import RunningFake, running

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"


def config_text(engine_url: str) -> str:
    """Return the configuration of a stack with ports of its own, whose workers attach to a fake engine."""
    s3, web, code, api = free_ports(4)
    text = (REPOSITORY / "batch-pipeline.toml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8433", f"127.0.0.1:{s3}").replace('source = "var/', f'source = "{REPOSITORY}/var/')
    text = text.replace("max_in_flight = 32", f'max_in_flight = 8\nengine_url = "{engine_url}"')
    return (
        f"{text}\n[embedded]\ns3_port = {s3}\ndagster_port = {web}\ncode_server_port = {code}\nserve_api = false\n"
        f"[api]\nport = {api}\n[intake]\nchunk_requests = 20\n"
        "[worker]\nwarm_seconds = 5.0\npoll_seconds = 0.2\n"
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
