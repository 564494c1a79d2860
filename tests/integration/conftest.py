"""The running HTTP service, and the official `openai` SDK as its client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.results import merge
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import engine as fake_engine
from tests.fakes import service
from tests.fakes.openai_client import Connect, Run, validate
from tests.fakes.workers import attached, make_worker, quick


@pytest.fixture
def served(ledger: Ledger, store: ObjectStore, settings: Settings) -> Iterator[service.Running]:
    with service.running(ledger, store, settings) as running:
        yield running


@pytest.fixture
def connect(served: service.Running, ledger: Ledger) -> Iterator[Connect]:
    """Returns the SDK's client of a customer."""
    opened = []

    def connect(customer: str) -> openai.OpenAI:
        key = service.new_key(ledger, customer)
        opened.append(openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


@pytest.fixture
def client(connect: Connect) -> openai.OpenAI:
    return connect("acme")


@pytest.fixture
def run(ledger: Ledger, store: ObjectStore, settings: Settings) -> Run:
    """Returns what brings a batch from `validating` to its end: intake, a worker on a fake engine, the merge."""

    def run(batch_id: str) -> None:
        validate(batch_id, ledger, store, settings)
        with fake_engine.running() as fake:
            make_worker(ledger, store, quick(settings), attached(fake.url)).run()
        merge.merge(batch_id, ledger=ledger, store=store, settings=settings, run_id="merge")

    return run
