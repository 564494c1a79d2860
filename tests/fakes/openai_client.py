"""What a customer does with the `openai` SDK, in few words, and what brings its batches to an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
from openai.types import Batch, FileObject

from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"

Connect = Callable[[str], openai.OpenAI]
"""Returns the SDK's client of a customer."""
Run = Callable[[str], None]
"""Brings a batch from `validating` to its end: intake, a worker on a fake engine, the merge."""


def line(custom_id: str, prompt: str = "one two three", **body: object) -> bytes:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": whole}).encode() + b"\n"


def validate(batch_id: str, ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    ops.validate(batch_id, ledger=ledger, store=store, settings=settings, run_id="intake")
    ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings, run_id="intake")


def upload(client: openai.OpenAI, data: bytes, name: str = "requests.jsonl") -> FileObject:
    return client.files.create(file=(name, data), purpose="batch")


def create(client: openai.OpenAI, data: bytes, **more: Any) -> Batch:
    given = {"endpoint": CHAT, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=upload(client, data).id, **given)
