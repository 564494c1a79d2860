"""The main job on real parts: dropped example files become proved results, through the real daemon and engine."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import demo
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.ledger import Ledger
from batch_pipeline.results.status import StatusDocument
from batch_pipeline.results.verify import verify
from batch_pipeline.store import ObjectStore
from tests.fakes.openai_client import create, line
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ASSETS = ("uploads", "request_chunks", "chunk_results", "batch_results")
LIMIT_SECONDS = 1200.0


class Done:
    """The stack after the example files went through it."""

    def __init__(self, stack: Stack, config: Path) -> None:
        self.stack = stack
        settings = configuration.load(config, environment={})
        self.settings = settings
        self.store = ObjectStore.open(settings.store)
        self.ledger = Ledger.from_settings(settings)
        self.drops = demo.find_drops(EXAMPLES, settings)
        self.reasons: set[str] = set()
        for drop in self.drops:
            demo.put(drop, "e2e", self.store)
        self.ledger.customers.add("initech")
        key = self.ledger.customers.add_key("initech").secret
        self.client = openai.OpenAI(base_url=f"{stack.addresses().api}/v1", api_key=key)
        self.asked = self._ask()
        outbox = demo.Outbox(self.store, "e2e", 0.0)
        self.documents = demo.follow(self.drops, outbox, stack, self._note, LIMIT_SECONDS)
        wait_until(lambda: self.poll().status == "completed", "the SDK's batch has completed", LIMIT_SECONDS)

    def _ask(self) -> Batch:
        """Hand in a file with the `openai` SDK."""
        lines = [line(name, f"Say {name}.") for name in ("yes", "no")] + [b"{bad\n"]
        return create(self.client, b"".join(lines), metadata={"door": "sdk"})

    def poll(self) -> Batch:
        """Return the SDK's batch as it is now."""
        return self.client.batches.retrieve(self.asked.id)

    def _note(self, documents: Any) -> None:
        self.reasons |= {document.reason for document in documents if document.reason}

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        """Ask Dagster as its UI does."""
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{self.stack.addresses().dagster}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
            decoded = json.load(answer)
        assert "errors" not in decoded, decoded
        data: dict[str, Any] = decoded["data"]
        return data


@pytest.fixture(scope="module")
def done(stack: Stack, stack_config: Path) -> Iterator[Done]:
    finished = Done(stack, stack_config)
    yield finished
    finished.client.close()
    finished.ledger.close()


def _total(documents: list[StatusDocument]) -> int:
    return sum(document.counts.total for document in documents)


def test_every_example_comes_back_once_and_proved(done: Done) -> None:
    assert [document.status for document in done.documents] == ["completed"] * len(done.drops)
    assert _total(done.documents) >= 24
    assert sum(document.counts.invalid for document in done.documents) == 3
    for drop, document in zip(done.drops, done.documents, strict=True):
        assert document.counts.completed == drop.requests - drop.bad_lines
        assert verify(document.id, ledger=done.ledger, store=done.store).holds


def test_the_answers_are_the_models(done: Done) -> None:
    for document in done.documents:
        assert document.files.output is not None
        for answer in done.store.get(document.files.output).splitlines():
            body = json.loads(answer)["response"]["body"]
            assert body["model"] == "smollm2-135m"
            assert body["choices"][0]["message"]["content"].strip()
            assert body["usage"]["completion_tokens"] > 0


def test_the_openai_sdk_gets_its_results_from_the_same_service(done: Done) -> None:
    batch = done.poll()
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert batch.metadata == {"door": "sdk"}
    output = done.client.files.content(str(batch.output_file_id)).text.splitlines()
    answers = {entry["custom_id"]: entry["response"]["body"] for entry in map(json.loads, output)}
    assert sorted(answers) == ["no", "yes"]
    assert all(answer["choices"][0]["message"]["content"].strip() for answer in answers.values())
    (bad,) = done.client.files.content(str(batch.error_file_id)).text.splitlines()
    assert json.loads(bad)["error"]["code"] == "invalid_json_line"
    assert verify(batch.id, ledger=done.ledger, store=done.store).holds
    assert done.store.head(f"outbox/initech/{batch.id}/output.jsonl") is not None


def test_whatever_a_batch_waited_for_had_a_name(done: Done) -> None:
    assert any("its engine is loading" in reason for reason in done.reasons), done.reasons
    assert any("running on smollm2-135m" in reason for reason in done.reasons), done.reasons


def test_one_engine_start_served_all_batches(done: Done) -> None:
    workers = done.ledger.workers.of_models(["smollm2-135m"])
    assert len(workers) == 1


def test_dagster_shows_each_batch_from_upload_to_results(done: Done) -> None:
    for asset in ASSETS:
        data = done.graphql(
            """query($path: [String!]!) { assetOrError(assetKey: {path: $path}) { ... on Asset {
                assetMaterializations(limit: 100) { partition } } } }""",
            path=[asset],
        )
        shown = {event["partition"] for event in data["assetOrError"]["assetMaterializations"]}
        assert shown == {done.asked.id, *(document.id for document in done.documents)}, asset


def test_a_backfill_of_what_is_done_changes_nothing(done: Done) -> None:
    before = [done.ledger.batches.get(document.id) for document in done.documents]
    data = done.graphql(
        """mutation($backfill: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $backfill) {
            __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
        backfill={
            "assetSelection": [{"path": ["chunk_results"]}],
            "partitionNames": [document.id for document in done.documents],
        },
    )["launchPartitionBackfill"]
    assert data["__typename"] == "LaunchBackfillSuccess", data
    status = _backfill_status(done, data["backfillId"])
    assert status == "COMPLETED_SUCCESS"
    assert [done.ledger.batches.get(document.id) for document in done.documents] == before


def _backfill_status(done: Done, backfill_id: str) -> str:
    import time

    ends_at = time.monotonic() + 300
    while True:
        data = done.graphql(
            "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }",
            id=backfill_id,
        )
        status = str(data["partitionBackfillOrError"]["status"])
        if status not in ("REQUESTED", "CANCELING") or time.monotonic() > ends_at:
            return status
        time.sleep(1.0)
