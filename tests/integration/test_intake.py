"""Intake on the real S3 server and both databases: from the uploaded bytes to recorded chunks."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from batch_pipeline import ids
from batch_pipeline.errors import ProofFailed
from batch_pipeline.intake import chunks as chunking
from batch_pipeline.intake import ops, spool
from batch_pipeline.intake.blocks import BYTE_ORDER_MARK
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, ChunkState, IntakeResult, OnInvalid
from batch_pipeline.results import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectMissing, ObjectStore, keys
from tests.fakes.faults import Faults, Killed
from tests.fakes.intake_files import (
    BAD,
    file_of,
    intake_settings,
    objects_below,
    request_line,
    requests_in,
    uploaded,
)
from tests.fakes.small_model import write_model

MOST_CALLS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The scratch folder."""
    return tmp_path / "scratch"


@pytest.fixture
def small(settings: Settings, model: Path, scratch: Path) -> Settings:
    """Settings with chunks of at most 10 requests, ordered 50 at a time."""
    return intake_settings(settings, model, scratch, chunk_requests=10, segment_requests=50)


def run(batch: Batch, ledger: Ledger, store: ObjectStore, settings: Settings, run_id: str = "run") -> IntakeResult:
    """Both ops, as one Dagster run makes them."""
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=run_id)
    return ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=run_id)


def mixed_file(requests: int = 120) -> bytes:
    """Requests of two shared prefixes and none, bad lines, duplicates, blank lines."""
    chance = random.Random(5)
    lines = []
    for number in range(requests):
        system = chance.choice([None, "A system prompt that many share. " * 8, "Another system prompt. " * 8])
        lines.append(request_line(number, system=system))
        if number % 20 == 7:
            lines += [BAD, b"", request_line(number - 3)]
    return file_of(lines)


def test_good_lines_are_in_chunks_and_bad_ones_in_the_error_object(
    ledger: Ledger, store: ObjectStore, small: Settings, scratch: Path
) -> None:
    data = mixed_file()
    batch = uploaded(ledger, store, data)

    result = run(batch, ledger, store, small)

    lines = data.split(b"\n")[:-1]
    assert (result.total, result.invalid) == (132, 12)
    assert result.input_sha256 == hashlib.sha256(data).hexdigest()
    errors = [json.loads(line) for line in store.get(str(result.invalid_key)).splitlines()]
    assert [error["error"]["line"] for error in errors] == sorted(error["error"]["line"] for error in errors)
    assert Counter(error["error"]["code"] for error in errors) == {"invalid_json_line": 6, "duplicate_custom_id": 6}
    for error in errors:
        assert ids.index_of(batch.batch_id, error["id"]) == error["error"]["line"] - 1
        assert error["response"] is None
    found = {request.index: request for request in requests_in(store, result.chunks)}
    bad = {error["error"]["line"] - 1 for error in errors}
    assert set(found) == {index for index, line in enumerate(lines) if line.strip()} - bad
    for index, request in found.items():
        given_ = json.loads(lines[index])
        assert (request.custom_id, json.loads(request.body)) == (given_["custom_id"], given_["body"])
    recorded = ledger.batches.get(batch.batch_id)
    assert (recorded.status, recorded.total, recorded.invalid) == (BatchStatus.IN_PROGRESS, 132, 12)
    assert recorded.intake_run_id == "run"
    assert [error.line for error in recorded.errors] == sorted(bad_line + 1 for bad_line in bad)
    assert not list(scratch.rglob("*"))


def test_requests_that_share_a_prefix_are_neighbours(ledger: Ledger, store: ObjectStore, small: Settings) -> None:
    systems = [f"Prompt {number}. " * 30 for number in range(3)]
    data = file_of(request_line(number, system=systems[number % 3]) for number in range(30))
    result = run(uploaded(ledger, store, data), ledger, store, small)
    assert [{request.index % 3 for request in requests_in(store, [chunk])} for chunk in result.chunks] == [
        {0},
        {1},
        {2},
    ]


def test_unshared_prompts_make_contiguous_chunks(ledger: Ledger, store: ObjectStore, small: Settings) -> None:
    result = run(uploaded(ledger, store, file_of(map(request_line, range(95)))), ledger, store, small)
    assert all(chunk.last_index - chunk.first_index == chunk.requests - 1 for chunk in result.chunks)
    assert [chunk.requests for chunk in result.chunks] == [10] * 9 + [5]


def test_bodies_arrive_as_they_were_written_but_for_what_is_taken_out(
    ledger: Ledger, store: ObjectStore, small: Settings
) -> None:
    plain = request_line(0, user='ü \\ " 😀', temperature=1e-7)
    with_field = request_line(1, priority=-999, request_id="x", unheard_of=[1], user="u", seed=5)
    escaped = json.dumps({**json.loads(request_line(2)), "custom_id": 'q"\\ü'}).encode()
    data = BYTE_ORDER_MARK + plain + b"\r\n" + with_field + b"\n" + escaped
    result = run(uploaded(ledger, store, data), ledger, store, small)
    first, second, third = sorted(requests_in(store, result.chunks), key=lambda request: request.index)
    assert first.body in plain
    body = json.loads(with_field)["body"]
    assert json.loads(second.body) == {
        k: v for k, v in body.items() if k not in ("priority", "request_id", "unheard_of")
    }
    assert third.custom_id == 'q"\\ü'


@pytest.mark.parametrize("reply_lost", [False, True])
def test_killed_anywhere_and_run_again_gives_the_same_chunks(
    ledger: Ledger, store: ObjectStore, small: Settings, reply_lost: bool
) -> None:
    """Fault 10."""
    data = mixed_file(40)
    calm = uploaded(ledger, store, data)
    expected = run(calm, ledger, store, small)
    contents = {key.replace(calm.batch_id, ""): value for key, value in objects_below(store, calm.batch_id).items()}
    for call in range(MOST_CALLS):
        batch = uploaded(ledger, store, data)
        faults = Faults(at_call=call, after=reply_lost)
        try:
            run(batch, faults.around(ledger), faults.around(store), small, run_id="killed")
        except Killed:
            pass
        else:
            break
        again = run(batch, ledger, store, small, run_id="again")
        assert _described(again, batch) == _described(expected, calm)
        found = objects_below(store, batch.batch_id)
        mended = {key.replace(batch.batch_id, ""): value for key, value in found.items()}
        assert _without_ids(mended, batch) == _without_ids(contents, calm), call
        recorded = ledger.batches.get(batch.batch_id)
        assert (recorded.status, recorded.total) == (BatchStatus.IN_PROGRESS, expected.total)
        assert len(ledger.chunks.of(batch.batch_id)) == len(expected.chunks)
    else:
        pytest.fail("the calls of an intake have no end")
    assert call > 10


def _described(result: IntakeResult, batch: Batch) -> bytes:
    return msgspec.json.encode(result).replace(batch.batch_id.encode(), b"")


def _without_ids(contents: dict[str, bytes], batch: Batch) -> dict[str, bytes]:
    digits = batch.batch_id.removeprefix("batch_").encode()
    return {key: value.replace(digits, b"") for key, value in contents.items()}


def test_running_it_again_changes_nothing(ledger: Ledger, store: ObjectStore, small: Settings) -> None:
    batch = uploaded(ledger, store, mixed_file(40))
    first = run(batch, ledger, store, small)
    revision = ledger.batches.get(batch.batch_id).revision
    again = run(batch, ledger, store, small, run_id="another")
    assert again == first
    recorded = ledger.batches.get(batch.batch_id)
    assert (recorded.revision, recorded.intake_run_id) == (revision, "run")


def test_chunks_are_written_where_this_machine_has_no_copy_of_the_input(
    ledger: Ledger, store: ObjectStore, small: Settings, scratch: Path
) -> None:
    data = mixed_file(40)
    batch = uploaded(ledger, store, data)
    expected = run(uploaded(ledger, store, data), ledger, store, small)
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=small)
    assert spool.copy_of(str(scratch), batch.batch_id).read_bytes() == data
    spool.discard(str(scratch), batch.batch_id)
    result = ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=small)
    assert [chunk.requests for chunk in result.chunks] == [chunk.requests for chunk in expected.chunks]
    assert not list(scratch.rglob("*"))


def test_a_batch_that_was_not_validated_cannot_be_cut(ledger: Ledger, store: ObjectStore, small: Settings) -> None:
    batch = uploaded(ledger, store, mixed_file(3))
    with pytest.raises(ObjectMissing):
        ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=small)


def test_another_input_than_the_validated_one_is_noticed(
    ledger: Ledger, store: ObjectStore, small: Settings, scratch: Path
) -> None:
    batch = uploaded(ledger, store, file_of([request_line(1)]))
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=small)
    copy = spool.copy_of(str(scratch), batch.batch_id)
    copy.write_bytes(b"x" * batch.input_bytes)
    with pytest.raises(ProofFailed, match="another line 1"):
        ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=small)
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.VALIDATING


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (["empty_batch"], 0, 0)),
        (b"\n \r\n\t\n", (["empty_batch"], 0, 0)),
        (b"{bad\n{worse", (["invalid_json_line"] * 2, 2, 2)),
        (file_of([request_line(1), BAD]), (["invalid_json_line"], 2, 1)),
    ],
)
def test_a_strict_batch_that_cannot_run_fails_with_its_reasons_and_its_files(
    ledger: Ledger, store: ObjectStore, small: Settings, data: bytes, expected: tuple[list[str], int, int]
) -> None:
    batch = uploaded(ledger, store, data, on_invalid=OnInvalid.FAIL)
    result = run(batch, ledger, store, small)
    assert ([error.code for error in result.errors], result.total, result.invalid) == expected
    assert ledger.batches.get(batch.batch_id).outcome == BatchStatus.FAILED
    merge.merge(batch.batch_id, ledger=ledger, store=store, settings=small, run_id=None)
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.FAILED
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


@pytest.mark.parametrize("data", [b"", b"\n", b"{bad"])
def test_a_batch_without_a_valid_request_fails(
    ledger: Ledger, store: ObjectStore, small: Settings, data: bytes
) -> None:
    batch = uploaded(ledger, store, data)
    run(batch, ledger, store, small)
    assert ledger.batches.get(batch.batch_id).outcome == BatchStatus.FAILED


def test_too_many_requests_fail_the_whole_batch_and_keep_nothing(
    ledger: Ledger, store: ObjectStore, settings: Settings, model: Path, scratch: Path
) -> None:
    few = intake_settings(settings, model, scratch, max_requests=20)
    data = file_of(map(request_line, range(21)))
    batch = uploaded(ledger, store, data)
    result = run(batch, ledger, store, few)
    assert (result.total, result.invalid, result.chunks) == (0, 0, [])
    assert [error.code for error in result.errors] == ["too_many_requests"]
    assert result.input_sha256 == hashlib.sha256(data).hexdigest()
    merge.merge(batch.batch_id, ledger=ledger, store=store, settings=few, run_id=None)
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.FAILED
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []
    assert not list(scratch.rglob("*"))
    at_the_limit = uploaded(ledger, store, file_of(map(request_line, range(20))))
    assert run(at_the_limit, ledger, store, few).total == 20


def test_a_batch_cancelled_before_intake_gets_its_chunks_as_cancelled(
    ledger: Ledger, store: ObjectStore, small: Settings
) -> None:
    batch = uploaded(ledger, store, file_of(map(request_line, range(15))))
    ledger.batches.cancel(batch.batch_id)
    run(batch, ledger, store, small)
    assert {chunk.state for chunk in ledger.chunks.of(batch.batch_id)} == {ChunkState.CANCELLED}
    merge.merge(batch.batch_id, ledger=ledger, store=store, settings=small, run_id=None)
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.cancelled) == (BatchStatus.CANCELLED, 15)


def test_what_a_killed_run_left_on_this_machine_is_cleared_away(
    ledger: Ledger, store: ObjectStore, small: Settings, scratch: Path
) -> None:
    dead, living, old = (scratch / ids.new_batch_id() for _ in range(3))
    for folder in (dead / "intake-1", living / "intake-2"):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "input.jsonl").write_bytes(b"x")
    old.mkdir()
    (old / "input.jsonl").touch()
    long_ago = time.time() - 86_400
    os.utime(old / "input.jsonl", (long_ago, long_ago))
    foreign = scratch / "not-a-batch" / "intake-3"
    foreign.mkdir(parents=True)
    with (living / "intake-2" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(uploaded(ledger, store, mixed_file(3)), ledger, store, small)
        assert (living / "intake-2" / "input.jsonl").is_file()
    assert [path.exists() for path in (dead, old, foreign)] == [False, False, True]


def test_a_write_that_fails_ends_the_op_and_nothing_is_recorded(
    ledger: Ledger, store: ObjectStore, small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = uploaded(ledger, store, file_of(map(request_line, range(95))))
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=small)
    written = chunking.write_chunk_input

    def fail_on_the_fifth(requests: pa.Table) -> bytes:
        if requests["index"][0].as_py() == 40:
            raise OSError("no space left on device")
        return written(requests)

    monkeypatch.setattr(chunking, "write_chunk_input", fail_on_the_fifth)
    with pytest.raises(OSError, match="no space"):
        ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=small)
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.VALIDATING


LINES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.integers(0, 9).map(request_line),
        st.integers(0, 9).map(lambda number: request_line(number, temperature=99)),
        st.integers(0, 9).map(lambda number: request_line(number)[:-1]),
        st.sampled_from([b"", b" ", b"\r", b"null", b"{}", BYTE_ORDER_MARK, b"\x00", b"\xff"]),
    ),
    max_size=30,
)


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES)
def test_of_any_file_every_line_is_in_one_chunk_or_reported_once(
    sqlite_url: str, store: ObjectStore, small: Settings, lines: list[bytes]
) -> None:
    """Invariant I2, for any bytes."""
    data = b"\n".join(lines)
    ledger = Ledger.open(sqlite_url)
    batch = uploaded(ledger, store, data)
    result = run(batch, ledger, store, small)
    given_ = data.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    not_blank = {index for index, line in enumerate(given_) if line.strip()}
    invalid = store.get(result.invalid_key).splitlines() if result.invalid_key else []
    reported = [ids.index_of(batch.batch_id, json.loads(line)["id"]) for line in invalid]
    in_chunks = [request.index for request in requests_in(store, result.chunks)]
    assert Counter(reported + in_chunks) == Counter(not_blank)
    assert result.total == len(not_blank)
    assert result.invalid == len(reported)
    labels = [request.custom_id for request in requests_in(store, result.chunks)]
    assert len(labels) == len(set(labels))
    assert store.head(keys.request_table(batch.batch_id)) is not None
    ledger.close()
