"""The whole stack as an operator starts it: object store, Dagster's services, workers that start the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import free_ports
from batch_pipeline.embedded.stack import Stack

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stack_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's configuration with ports and folders of its own, in a file that every service reads."""
    folder = tmp_path_factory.mktemp("stack")
    s3, web, code, api = free_ports(4)
    text = (REPOSITORY / "batch-pipeline.toml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8433", f"127.0.0.1:{s3}")
    text = text.replace('source = "var/', f'source = "{REPOSITORY}/var/')
    text += f"\n[embedded]\ns3_port = {s3}\ndagster_port = {web}\ncode_server_port = {code}\n[api]\nport = {api}\n"
    file = folder / "batch-pipeline.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def stack(stack_config: Path) -> Iterator[Stack]:
    """The running stack; stopped at the end, with every run in progress."""
    running = Stack(configuration.load(stack_config, environment={}), stack_config)
    running.up()
    yield running
    running.down()
