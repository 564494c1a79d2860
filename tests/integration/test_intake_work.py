"""How much intake asks of the object store: every byte of the input once, and one request for each chunk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batch_pipeline.intake import ops, spool
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes.intake_files import file_of, intake_settings, request_line, uploaded
from tests.fakes.small_model import write_model


def test_the_input_is_read_once_and_each_chunk_is_one_request(
    sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_PIECE_BYTES", 64 * 1024)
    small = intake_settings(settings, write_model(tmp_path / "model"), tmp_path / "scratch", chunk_requests=100)
    ledger = Ledger.open(sqlite_url)
    data = file_of(request_line(number, system="A prompt that all share. " * 4) for number in range(1000))
    batch = uploaded(ledger, store, data)
    asked: list[tuple[str, dict[str, Any]]] = []

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        asked.append((model.name, params))

    events = store._client.meta.events
    events.register("before-parameter-build.s3", note)
    try:
        ops.validate(batch.batch_id, ledger=ledger, store=store, settings=small)
        of_validation = Counter(name for name, _ in asked)
        ranges = [params["Range"] for name, params in asked if name == "GetObject"]
        asked.clear()
        result = ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=small)
        of_chunks = Counter(name for name, _ in asked)
        of_input = [params for _, params in asked if params.get("Key") == batch.input_key]
    finally:
        events.unregister("before-parameter-build.s3", note)
        ledger.close()
    assert sorted(ranges, key=lambda wanted: int(wanted[6:].split("-")[0])) == [
        f"bytes={start}-{start + 65_535}" for start in range(0, len(data), 65_536)
    ]
    # The request table, and nothing else, is written by the one and read by the other.
    assert of_validation == {"GetObject": len(ranges), "PutObject": 1}
    assert len(result.chunks) == 10
    assert of_chunks == {"PutObject": 10, "HeadObject": 1, "GetObject": 1}
    assert of_input == []
