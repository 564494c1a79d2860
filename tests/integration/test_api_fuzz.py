"""Whatever the OpenAPI document allows to be sent, and much that it does not, is answered without a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation, BaseSchema

from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import service
from tests.fakes.openai_client import create, line

_LEAST_OPERATIONS = 14


class Target(NamedTuple):
    """The running service, a key, and ids of what there is."""

    schema: BaseSchema
    headers: dict[str, str]
    real: dict[str, str]


@pytest.fixture
def target(postgres_url: str, store: ObjectStore, settings: Settings) -> Iterator[Target]:
    # Postgres refuses texts that SQLite takes.
    ledger = Ledger.open(postgres_url)
    key = service.new_key(ledger)
    ledger.customers.set("acme", limits={"requests_per_minute": 1_000_000})
    with (
        service.running(ledger, store, settings) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=key) as client,
    ):
        batch = create(client, line("a"))
        upload = client.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="batch")
        real = {"batch_id": batch.id, "file_id": batch.input_file_id, "upload_id": upload.id}
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        yield Target(schema, {"Authorization": f"Bearer {key}"}, real)
    ledger.close()


def test_nothing_that_is_sent_makes_the_service_fail(target: Target) -> None:
    operations = [found.ok() for found in target.schema.get_all_operations()]
    assert len(operations) >= _LEAST_OPERATIONS
    for operation in operations:
        _ask(operation, target)


def _ask(operation: APIOperation, target: Target) -> None:
    has_input = bool(operation.body) or any(True for _ in operation.iter_parameters())
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if has_input else [])]

    @limits(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of([operation.as_strategy(mode) for mode in modes]), known=st.booleans())
    def ask(case: schemathesis.Case, known: bool) -> None:
        for name in target.real.keys() & case.path_parameters.keys():
            if known:
                case.path_parameters[name] = target.real[name]
        answer = case.call(headers=target.headers, timeout=60)
        assert answer.status_code < 500, (operation.label, answer.status_code, case.as_curl_command())

    ask()
