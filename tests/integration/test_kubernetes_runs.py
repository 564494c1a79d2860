"""Whole batches by the Kubernetes path: Dagster's daemon, its run launcher and run monitoring; pods that are ended."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import dagster as dg
import msgspec
import pytest

from assets.gpu_workers import ENDED_TAG, LOST, PREEMPTED
from batch_pipeline import settings as configuration
from batch_pipeline.ledger.records import Batch
from batch_pipeline.store import objects
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.intake_files import file_of, request_line
from tests.fakes.kubernetes_stack import NAMESPACE, Stack, stack

REQUESTS = 120
IN_FLIGHT = 8
UNSAVED = 60
"""More than an engine answers between two checkpoints."""


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, s3_server: configuration.Store, postgres_server: str
) -> Iterator[Stack]:
    store = msgspec.structs.replace(s3_server, bucket=f"test-{secrets.token_hex(6)}")
    objects.make_client(store).create_bucket(Bucket=store.bucket)
    with stack(tmp_path_factory.mktemp("kubernetes"), store, postgres_server) as running:
        yield running


def test_a_dropped_file_becomes_results_by_pods_alone(service: Stack) -> None:
    service.store.put("inbox/acme/whole.jsonl", file_of(request_line(number) for number in range(20)))
    service.wait(lambda: bool(service.ledger.batches.recent(limit=1)), "the file is taken")
    (batch,) = service.ledger.batches.recent(limit=1)
    assert service.finish(batch).completed == 20
