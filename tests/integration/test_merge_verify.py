"""The proof counts the files: whatever is done to one of them after the merge is found, under the right finding."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from batch_pipeline import ids
from batch_pipeline.errors import NotAllowedInState, NotFound
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results.audit import audit
from batch_pipeline.results.findings import Finding
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.lines import EngineResponse, ResultLine, encode_result
from tests.fakes import answered

ONE, UNKNOWN, AGREES = Finding.EXACTLY_ONE, Finding.NOTHING_UNKNOWN, Finding.MANIFEST_AGREES


@pytest.fixture
def ledger(sqlite_url: str) -> Ledger:
    """What is proved does not depend on the database."""
    return Ledger.open(sqlite_url)


@pytest.fixture
def merged(ledger: Ledger, store: ObjectStore, settings: Settings) -> Batch:
    """A batch with answers 0 to 9, refusals of 4 and 5, invalid line 10, in two interleaved chunks."""
    chunks = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    batch, leases = answered.in_progress(ledger, store, chunks, invalid=[10])
    answered.commit_all(ledger, store, leases, chunks, refused=[4, 5])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    return ledger.batches.get(batch.batch_id)


def lost(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[3:]


def doubled(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[2], *lines[3:]]


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


def foreign(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[0].replace(b"batch_req_", b"batch_req_00")]


def beyond(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[0].replace(b"_00000000", b"_00000099")]


def flipped(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b"answer", b"ansver"), *lines[2:]]


def relabelled(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b"request-0", b"request-1"), *lines[1:]]


def unlabelled(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b'"' + answered.label(0).encode() + b'"', b"null"), *lines[1:]]


def truncated(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:-20]]


def unended(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:-1]]


def garbled(lines: list[bytes]) -> list[bytes]:
    return [b"{}\n", *lines[1:]]


def refused(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b'"status_code":200', b'"status_code":500'), *lines[1:]]


def more_tokens(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b'"prompt_tokens": 10', b'"prompt_tokens": 11'), *lines[1:]]


def emptied(lines: list[bytes]) -> list[bytes]:
    return []


@pytest.mark.parametrize(
    "case",
    [
        (lost, ONE, "request 2 .* no line in either"),
        (doubled, ONE, "request 2 stands there a second time"),
        (swapped, ONE, "request 0 comes after request 1"),
        (foreign, UNKNOWN, "is not one of this batch"),
        (beyond, UNKNOWN, "no request 99"),
        (flipped, AGREES, "sha256 of the output file"),
        (relabelled, ONE, "custom_id"),
        (unlabelled, ONE, "custom_id null"),
        (truncated, UNKNOWN, "not a result line"),
        (unended, ONE, "cut off"),
        (garbled, UNKNOWN, "line 1: not a result line"),
        (refused, UNKNOWN, "not an answer of success"),
        (more_tokens, AGREES, "tokens"),
        (emptied, ONE, "request 9 .* no line"),
    ],
)
def test_tampered_output_file_is_found(
    merged: Batch,
    ledger: Ledger,
    store: ObjectStore,
    case: tuple[Callable[[list[bytes]], list[bytes]], Finding, str],
) -> None:
    tamper, finding, words = case
    key = str(merged.output_key)
    before = store.get(key)
    after = b"".join(tamper(before.splitlines(keepends=True)))
    assert after != before
    store.put(key, after)
    proof = verify(merged.batch_id, ledger=ledger, store=store)
    assert not proof.holds
    assert not proof.verdicts[finding].holds
    assert_one_matches(words, proof.verdicts[finding].problems)
    assert not proof.verdicts[AGREES].holds, "the manifest has the hash of the right file"


def test_missing_files_are_found(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    for key in (merged.output_key, merged.error_key, merged.manifest_key):
        store.delete(str(key))
    proof = verify(merged.batch_id, ledger=ledger, store=store)
    assert_one_matches("output file is missing", proof.problems)
    assert_one_matches("error file is missing", proof.problems)
    assert_one_matches("manifest is missing", proof.problems)


def test_request_in_both_files_is_found(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    errors = store.get(str(merged.error_key)).splitlines(keepends=True)
    extra = errors[0].replace(b"_00000004", b"_00000003").replace(*labels(4, 3))
    store.put(str(merged.error_key), extra + b"".join(errors))
    proof = verify(merged.batch_id, ledger=ledger, store=store)
    assert_one_matches("request 3 .* both files", proof.verdicts[ONE].problems)


def test_changed_input_is_found(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    store.put(merged.input_key, store.get(merged.input_key).replace(b"question 3", b"question 4"))
    proof = verify(merged.batch_id, ledger=ledger, store=store)
    assert proof.verdicts[ONE].holds
    assert_one_matches("sha256 of the input", proof.verdicts[AGREES].problems)


@pytest.mark.parametrize(
    "case",
    [
        (b'"completed":8', b'"completed":9', "completed requests: the files have 8"),
        (b'"invalid":1', b'"invalid":2', "invalid requests"),
        (b'"input_tokens":', b'"input_tokens":1', "tokens"),
        (b'"requests":5', b'"requests":6', "valid requests"),
        (b'"status":"completed"', b'"status":"expired"', "status"),
        (b'"lines":8', b'"lines":7', "lines of the output file"),
        (b'{"format":', b'{"format":x', "cannot be read"),
    ],
)
def test_wrong_manifest_is_found(
    merged: Batch, ledger: Ledger, store: ObjectStore, case: tuple[bytes, bytes, str]
) -> None:
    old, new, words = case
    key = str(merged.manifest_key)
    before = store.get(key)
    assert old in before
    store.put(key, before.replace(old, new, 1))
    proof = verify(merged.batch_id, ledger=ledger, store=store)
    assert proof.verdicts[ONE].holds
    assert proof.verdicts[UNKNOWN].holds
    assert_one_matches(words, proof.verdicts[AGREES].problems)


def test_many_problems_are_all_counted_and_some_are_told(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    chunk = list(range(250))
    batch, leases = answered.in_progress(ledger, store, [chunk])
    answered.commit_all(ledger, store, leases, [chunk])
    files = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    store.put(str(files.output_key), b"")
    verdict = verify(batch.batch_id, ledger=ledger, store=store).verdicts[ONE]
    assert (verdict.count, len(verdict.problems)) == (250, 100)


def test_proof_needs_an_end(ledger: Ledger, store: ObjectStore) -> None:
    batch, _ = answered.in_progress(ledger, store, [[0]])
    with pytest.raises(NotAllowedInState):
        verify(batch.batch_id, ledger=ledger, store=store)


def test_first_line_with_a_byte_order_mark_and_crlf_lines_are_proved(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    lines = [b"\xef\xbb\xbf" + answered.input_line(0) + b"\r", b"\r", answered.input_line(2) + b"\r"]
    batch = answered.create(ledger, store, lines)
    answered.take_in(ledger, store, batch.batch_id, [[0, 2]])
    answered.commit_all(ledger, store, answered.lease_all(ledger), [[0, 2]])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_answer_of_unusual_form_is_a_result_without_usage(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0, 1]])
    usual, odd = (answered.answer(batch.batch_id, index) for index in (0, 1))
    response = EngineResponse(200, "1", msgspec.Raw(b"[1, 2]"))
    line = encode_result(ResultLine(ids.request_id(batch.batch_id, 1), answered.label(1), response, None))
    odd = replace(odd, line=line, input_tokens=0, cached_tokens=0, output_tokens=0)
    answered.commit(ledger, store, leases[0], [usual, odd])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    proof = verify(batch.batch_id, ledger=ledger, store=store)
    assert proof.problems == []
    assert proof.counted.usage.input_tokens == usual.input_tokens


def test_audit_leads_from_a_result_to_the_upload(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    trail = audit(merged.batch_id, ledger=ledger, store=store, custom_id=answered.label(3))
    (request,) = trail.requests
    assert (request.index, request.line, request.custom_id) == (3, 4, answered.label(3))
    assert read(store, request.input) == answered.input_line(3)
    assert read(store, request.result) == answered.answer(merged.batch_id, 3).line[:-1]
    assert read(store, request.source) == answered.answer(merged.batch_id, 3).line[:-1]
    assert request.source_is_identical
    assert request.chunk is not None
    assert (request.chunk.chunk, request.chunk.worker, request.chunk.attempt) == (1, answered.WORKER, 1)
    assert (trail.input.sha256, trail.input.etag) == (merged.input_sha256, merged.input_etag)
    names = [event.event for event in trail.events]
    assert names == ["created", "in_progress", "leased", "committed", "finalizing", "completed"]
    assert [event.sequence for event in trail.events] == sorted(event.sequence for event in trail.events)


def test_audit_of_an_invalid_line_names_no_chunk(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    (request,) = audit(merged.batch_id, ledger=ledger, store=store, index=10).requests
    assert (request.chunk, request.source, request.source_is_identical) == (None, None, None)
    assert b"invalid_json_line" in read(store, request.result)


def test_audit_tells_a_changed_result(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    store.put(str(merged.output_key), store.get(str(merged.output_key)).replace(b"answer answer answer", b"forged"))
    (request,) = audit(merged.batch_id, ledger=ledger, store=store, index=3).requests
    assert request.source_is_identical is False


def test_audit_of_a_checkpointed_request_names_the_checkpoint(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0, 1]])
    answered.checkpoint(ledger, store, leases[0], [answered.answer(batch.batch_id, 1)])
    ledger.batches.cancel(batch.batch_id)
    ledger.chunks.release(leases[0].ref, "cancelled")
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    (finished,) = audit(batch.batch_id, ledger=ledger, store=store, index=1).requests
    assert finished.source is not None
    assert finished.source.key == ledger.chunks.of(batch.batch_id)[0].parts[0].key
    assert finished.source_is_identical
    (dropped,) = audit(batch.batch_id, ledger=ledger, store=store, index=0).requests
    assert dropped.source is None
    assert b"batch_cancelled" in read(store, dropped.result)


def test_audit_finds_any_line_of_a_large_file(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """By bisection: lines much shorter and much longer than what one probe reads."""
    chunk = list(range(1500))
    batch, leases = answered.in_progress(ledger, store, [chunk])
    finished = [answered.answer(batch.batch_id, index, 700_000 if index in (3, 1499) else 900) for index in chunk]
    answered.commit(ledger, store, leases[0], finished)
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    for index in (0, 1, 2, 3, 4, 700, 701, 1498, 1499):
        (request,) = audit(batch.batch_id, ledger=ledger, store=store, index=index).requests
        assert read(store, request.result) == finished[index].line[:-1]


def test_audit_of_the_whole_batch_has_every_chunk(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    trail = audit(merged.batch_id, ledger=ledger, store=store)
    assert [chunk.chunk for chunk in trail.chunks] == [0, 1]
    assert trail.requests == []
    assert trail.output is not None
    assert trail.output.lines == 8
    assert trail.status == BatchStatus.COMPLETED


def test_audit_of_an_unknown_request_says_so(merged: Batch, ledger: Ledger, store: ObjectStore) -> None:
    with pytest.raises(NotFound, match="nobody"):
        audit(merged.batch_id, ledger=ledger, store=store, custom_id="nobody")
    with pytest.raises(NotFound, match="line 100"):
        audit(merged.batch_id, ledger=ledger, store=store, index=99)
    assert store.head(keys.final(merged.batch_id, "output.jsonl")) is not None


def read(store: ObjectStore, place: Any) -> bytes:
    """The bytes that a trail points at."""
    assert place is not None
    return store.get_range(place.key, place.offset, place.length)


def labels(old: int, new: int) -> tuple[bytes, bytes]:
    """The custom_ids of two requests, as they stand in a result line."""
    return answered.label(old).encode(), answered.label(new).encode()


def assert_one_matches(words: str, problems: list[str]) -> None:
    """One problem at least reads like this."""
    assert any(re.search(words, problem) for problem in problems), problems
