"""The merge: exactly one line per request, in input order, and the same bytes however it is interrupted."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batch_pipeline.errors import NotAllowedInState, ProofFailed
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, OnInvalid
from batch_pipeline.results import manifest
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import answered
from tests.fakes.clock import SteppedClock
from tests.fakes.faults import Faults, Killed

FINAL = ("output.jsonl", "errors.jsonl", "manifest.json")


@pytest.fixture
def sqlite_ledger(sqlite_url: str) -> Ledger:
    """For tests whose subject does not depend on the database."""
    return Ledger.open(sqlite_url)


def final_bytes(store: ObjectStore, batch_id: str) -> dict[str, bytes]:
    """The final files that there are."""
    found = {}
    for file in FINAL:
        if store.head(keys.final(batch_id, file)) is not None:
            found[file] = store.get(keys.final(batch_id, file))
    return found


def lines_of(data: bytes | None) -> list[dict[str, Any]]:
    """The lines of a result file."""
    return [json.loads(line) for line in (data or b"").splitlines()]


def indexes_of(data: bytes | None) -> list[int]:
    """The requests of a result file's lines, in their order."""
    return [int(line["id"].rpartition("_")[2]) for line in lines_of(data)]


def test_interleaved_chunks_come_back_in_input_order(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    chunks = [[8, 0, 4], [1, 9, 5], [20, 21], [15, 14]]
    batch, leases = answered.in_progress(ledger, store, chunks, invalid=[3, 6, 22])
    answered.commit_all(ledger, store, leases, chunks, refused=[4, 9, 15])

    files = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="run-1")

    found = final_bytes(store, batch.batch_id)
    assert indexes_of(found["output.jsonl"]) == [0, 1, 5, 8, 14, 20, 21]
    assert indexes_of(found["errors.jsonl"]) == [3, 4, 6, 9, 15, 22]
    assert found["output.jsonl"] == b"".join(
        answered.answer(batch.batch_id, index).line for index in [0, 1, 5, 8, 14, 20, 21]
    )
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.completed, ended.failed, ended.invalid, ended.total) == ("completed", 7, 3, 3, 13)
    assert ended.merge_run_id == "run-1"
    assert (ended.output_key, ended.error_key, ended.manifest_key) == (
        files.output_key,
        files.error_key,
        files.manifest_key,
    )
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_all_requests_failed_gives_completed_without_an_output_file(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    """Fault 13."""
    chunks = [[0, 1, 2], [3, 4]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    answered.commit_all(ledger, store, leases, chunks, refused=range(5))

    files = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)

    assert files.output_key is None
    assert store.head(keys.final(batch.batch_id, "output.jsonl")) is None
    assert indexes_of(store.get(str(files.error_key))) == [0, 1, 2, 3, 4]
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 0, 5)
    assert verify(batch.batch_id, ledger=ledger, store=store).holds


def test_only_answers_gives_no_error_file(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    chunks = [[0, 1]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    answered.commit_all(ledger, store, leases, chunks)
    files = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    assert files.error_key is None
    assert store.head(keys.final(batch.batch_id, "errors.jsonl")) is None
    assert verify(batch.batch_id, ledger=ledger, store=store).holds


def test_cancelled_batch_keeps_what_is_finished(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """Fault 4: each id once, finished ones kept, the others batch_cancelled."""
    chunks = [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9], [10, 11]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    batch_id = batch.batch_id
    answered.commit(ledger, store, leases[0], [answered.answer(batch_id, index) for index in chunks[0]])
    answered.checkpoint(ledger, store, leases[1], [answered.answer(batch_id, 5), answered.refusal(batch_id, 1)])
    answered.checkpoint(ledger, store, leases[2], [answered.answer(batch_id, 9)])
    ledger.batches.cancel(batch_id)
    for number in (1, 2, 3):
        ledger.chunks.release(leases[number].ref, "the batch was cancelled")

    merge(batch_id, ledger=ledger, store=store, settings=settings, run_id=None)

    found = final_bytes(store, batch_id)
    assert indexes_of(found["output.jsonl"]) == [0, 2, 4, 5, 6, 9]
    codes = {line["custom_id"]: (line["error"] or {}).get("code") for line in lines_of(found["errors.jsonl"])}
    assert codes == {
        answered.label(1): None,
        **{answered.label(index): "batch_cancelled" for index in (3, 7, 8, 10, 11)},
    }
    ended = ledger.batches.get(batch_id)
    assert (ended.status, ended.completed, ended.failed, ended.cancelled) == (BatchStatus.CANCELLED, 6, 1, 5)
    assert ended.output_tokens == 6 * 3, "what was not answered is not billed"
    assert verify(batch_id, ledger=ledger, store=store).problems == []


def test_expired_batch_returns_the_rest_as_expired(ledger_url: str, store: ObjectStore, settings: Settings) -> None:
    """Fault 6."""
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    chunks = [[0, 1], [2, 3]]
    batch, leases = answered.in_progress(ledger, store, chunks, window_seconds=3600)
    answered.commit(ledger, store, leases[0], [answered.answer(batch.batch_id, index) for index in chunks[0]])
    answered.checkpoint(ledger, store, leases[1], [answered.answer(batch.batch_id, 2)])
    clock.advance(3601)
    ledger.batches.expire_due()
    ledger.chunks.expire_leases()

    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)

    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.completed, ended.expired) == (BatchStatus.EXPIRED, 3, 1)
    (line,) = lines_of(store.get(str(ended.error_key)))
    assert (line["custom_id"], line["error"]["code"]) == (answered.label(3), "batch_expired")
    assert ended.input_tokens == sum(answered.answer("", index).input_tokens for index in (0, 1, 2))
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_chunk_that_was_given_up_leaves_errors_for_its_rest_only(
    ledger_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(ledger_url, max_failures=1)
    chunks = [[0, 1, 2]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    answered.checkpoint(ledger, store, leases[0], [answered.answer(batch.batch_id, 1)])
    ledger.chunks.release(leases[0].ref, "the engine would not start", failed=True)
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 1, 2)
    assert {line["error"]["code"] for line in lines_of(store.get(str(ended.error_key)))} == {"chunk_failed"}


def test_strict_batch_with_a_bad_line_fails_and_accounts_for_every_line(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0, 2]], invalid=[1], on_invalid=OnInvalid.FAIL)
    assert not leases
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.failed, ended.invalid, ended.output_key) == (BatchStatus.FAILED, 2, 1, None)
    lines = lines_of(store.get(str(ended.error_key)))
    assert [line["error"]["code"] for line in lines] == ["invalid_lines", "invalid_json_line", "invalid_lines"]
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_batch_without_a_valid_line_fails_with_all_of_them(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch, _ = answered.in_progress(ledger, store, [], invalid=[0, 1, 3])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.invalid, ended.output_key) == (BatchStatus.FAILED, 3, None)
    assert indexes_of(store.get(str(ended.error_key))) == [0, 1, 3]
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_empty_file_ends_with_a_manifest_alone(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    batch, _ = answered.in_progress(ledger, store, [])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    assert list(final_bytes(store, batch.batch_id)) == ["manifest.json"]
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_large_results_are_copied_inside_the_store(
    sqlite_ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    """Large, small and stopped chunks, with errors between: the file is the same as if all had passed through us."""
    size = 1100
    chunks = [list(range(begin, begin + size)) for begin in range(0, 4 * size, size)]
    batch, leases = answered.in_progress(sqlite_ledger, store, chunks, invalid=[4 * size + 1])
    batch_id = batch.batch_id
    fillers = {0: 6000, 1: 10, 2: 6000, 3: 5000}
    expected = b""
    for number, lease in leases.items():
        finished = [answered.answer(batch_id, index, fillers[number]) for index in chunks[number]]
        finished[7] = answered.refusal(batch_id, chunks[number][7])
        expected += b"".join(request.line for request in finished if not request.is_error)
        answered.commit(sqlite_ledger, store, lease, finished)
    merge(batch_id, ledger=sqlite_ledger, store=store, settings=settings, run_id=None)
    found = final_bytes(store, batch_id)
    assert found["output.jsonl"] == expected
    assert indexes_of(found["errors.jsonl"]) == [7, size + 7, 2 * size + 7, 3 * size + 7, 4 * size + 1]
    assert verify(batch_id, ledger=sqlite_ledger, store=store).problems == []


def test_running_batch_is_not_merged(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    batch, _ = answered.in_progress(ledger, store, [[0, 1]])
    with pytest.raises(NotAllowedInState, match="in_progress"):
        merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    assert final_bytes(store, batch.batch_id) == {}


@pytest.mark.parametrize("reply_lost", [False, True], ids=["before", "after"])
def test_merge_killed_at_any_call_is_repeated_with_the_same_bytes(
    ledger: Ledger, store: ObjectStore, settings: Settings, reply_lost: bool
) -> None:
    """Killed before or after each call of store and ledger in turn: never a wrong file, one final status."""
    chunks = [[0, 2], [1, 3], [4, 5], [6, 7]]
    batch, leases = answered.in_progress(ledger, store, chunks, invalid=[8])
    answered.commit_all(ledger, store, {number: leases[number] for number in (0, 1, 2)}, chunks, refused=[3])
    answered.checkpoint(ledger, store, leases[3], [answered.answer(batch.batch_id, 6)])
    ledger.batches.cancel(batch.batch_id)
    ledger.chunks.release(leases[3].ref, "the batch was cancelled")

    call = 0
    seen: dict[str, bytes] = {}
    while True:
        faults = Faults(at_call=call, after=reply_lost)
        try:
            merge(
                batch.batch_id,
                ledger=faults.around(ledger),
                store=faults.around(store),
                settings=settings,
                run_id=f"run-{call}",
            )
        except Killed:
            call += 1
            found = final_bytes(store, batch.batch_id)
            assert {file: seen.get(file, data) for file, data in found.items()} == found
            seen |= found
            status = ledger.batches.get(batch.batch_id).status
            assert status in (BatchStatus.FINALIZING, BatchStatus.CANCELLED)
            if status == BatchStatus.CANCELLED:
                assert set(found) == set(FINAL)
            continue
        break
    assert call > 15, "the merge makes more calls than that"
    ended = ledger.batches.get(batch.batch_id)
    assert ended.status == BatchStatus.CANCELLED
    assert final_bytes(store, batch.batch_id) == seen | final_bytes(store, batch.batch_id)
    assert [event.event for event in ledger.events.of(batch.batch_id)].count("cancelled") >= 1
    assert sum(event.event == "cancelled" and event.chunk is None for event in ledger.events.of(batch.batch_id)) == 1
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_two_merges_at_once_are_one(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    chunks = [[0, 2, 4], [1, 3, 5], [6, 7]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    answered.commit_all(ledger, store, leases, chunks, refused=[3])
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(merge, batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=f"run-{number}")
            for number in range(3)
        ]
        results = {str(job.result()) for job in jobs}
    assert len(results) == 1
    assert sum(event.event == "completed" for event in ledger.events.of(batch.batch_id)) == 1
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_rebuild_restores_a_damaged_file_and_changes_nothing_else(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    chunks = [[0, 2], [1, 3]]
    batch, leases = answered.in_progress(ledger, store, chunks, invalid=[4])
    answered.commit_all(ledger, store, leases, chunks)
    first = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="run-1")
    before = final_bytes(store, batch.batch_id)
    ended = ledger.batches.get(batch.batch_id)

    store.put(str(first.output_key), b"damaged")
    assert merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="run-2") == first
    assert store.get(str(first.output_key)) == b"damaged", "without rebuild a final batch is left alone"
    again = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="run-3", rebuild=True)

    assert again == first
    assert final_bytes(store, batch.batch_id) == before
    assert ledger.batches.get(batch.batch_id) == ended
    assert list(store.list(keys.batch(batch.batch_id) + "rebuild/")) == []


def test_rebuild_from_damaged_chunks_does_not_touch_the_files(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0, 1]])
    answered.commit_all(ledger, store, leases, [[0, 1]])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    before = final_bytes(store, batch.batch_id)
    (chunk,) = ledger.chunks.of(batch.batch_id)
    assert chunk.result is not None
    store.put(chunk.result.result_key, store.get(chunk.result.result_key).replace(b"answer", b"ANSWER"))
    with pytest.raises(ProofFailed, match="sha256"):
        merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None, rebuild=True)
    assert final_bytes(store, batch.batch_id) == before


@pytest.mark.parametrize("filler", [0, 6000], ids=["small", "copied inside the store"])
@pytest.mark.parametrize(
    "case",
    [
        (range(1, 1000), "has no line"),
        ([0, *range(999)], "second time|double|no line"),
        ([*range(999), 5000], "no request 5000|no line"),
    ],
    ids=["missing", "double", "foreign"],
)
def test_wrong_result_is_never_given_out(
    sqlite_ledger: Ledger, store: ObjectStore, settings: Settings, filler: int, case: tuple[Sequence[int], str]
) -> None:
    """A worker that commits the wrong lines: the merge says which request, and the batch stays as it is."""
    indexes, problem = case
    batch, leases = answered.in_progress(sqlite_ledger, store, [list(range(1000))])
    finished = [answered.answer(batch.batch_id, index, filler) for index in dict.fromkeys(indexes)]
    result = answered.write_result(store, leases[0], finished)
    data = b"".join(answered.answer(batch.batch_id, index, filler).line for index in indexes)
    store.put(result.result_key, data)
    changed = {"output_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sqlite_ledger.chunks.commit(leases[0].ref, replace(result, **changed))
    with pytest.raises(ProofFailed, match=problem):
        merge(batch.batch_id, ledger=sqlite_ledger, store=store, settings=settings, run_id=None)
    ended = sqlite_ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.output_key) == (BatchStatus.FINALIZING, None)


def test_result_that_changed_after_its_commit_is_refused(
    sqlite_ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    """Also where the bytes are copied inside the store and only seen when they are read back."""
    for filler in (0, 6000):
        chunk = list(range(1000))
        batch, leases = answered.in_progress(sqlite_ledger, store, [chunk], name=f"filler-{filler}")
        result = answered.commit(
            sqlite_ledger, store, leases[0], [answered.answer(batch.batch_id, index, filler) for index in chunk]
        )
        store.put(result.result_key, store.get(result.result_key).replace(b"answer", b"ANSWER"))
        with pytest.raises(ProofFailed, match=r"chunk 0 .*sha256"):
            merge(batch.batch_id, ledger=sqlite_ledger, store=store, settings=settings, run_id=None)


def test_interleaved_chunks_with_one_request_twice_are_refused(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    chunks = [[0, 2, 4], [1, 3, 5]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    answered.commit(ledger, store, leases[0], [answered.answer(batch.batch_id, index) for index in (0, 2, 4)])
    answered.commit(ledger, store, leases[1], [answered.answer(batch.batch_id, index) for index in (1, 4, 5)])
    with pytest.raises(ProofFailed, match=r"request 4 .* chunks \[0, 1\]"):
        merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)


def test_manifest_says_who_ran_what(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    chunks = [[0, 2], [1, 3]]
    batch, leases = answered.in_progress(ledger, store, chunks, invalid=[4])
    answered.commit_all(ledger, store, leases, chunks, refused=[2])
    files = merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="merge-run")
    says = manifest.decode(store.get(files.manifest_key))
    assert says.counts.total == says.counts.ended == 5
    assert says.input.sha256 == ledger.batches.get(batch.batch_id).input_sha256
    first = says.chunks[0]
    assert (first.worker, first.run_id, first.engine_version, first.model_version, first.attempt) == (
        answered.WORKER,
        answered.RUN,
        "fake-engine-1",
        "1",
        1,
    )
    prices = settings.models[answered.MODEL].prices
    assert says.cost == prices.cost(says.usage.input_tokens, says.usage.output_tokens)
    assert b"merge-run" not in store.get(files.manifest_key), "nothing in it depends on who merges"


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """A file, its partition into chunks, and how each request and each chunk ends."""
    kinds = draw(st.lists(st.sampled_from("vvvvib"), min_size=1, max_size=40))
    valid = [index for index, kind in enumerate(kinds) if kind == "v"]
    count = draw(st.integers(1, 5))
    style = draw(st.sampled_from(["contiguous", "interleaved"]))
    chunks: list[list[int]] = [[] for _ in range(count)]
    for position, index in enumerate(valid):
        number = position * count // max(len(valid), 1) if style == "contiguous" else draw(st.integers(0, count - 1))
        chunks[number].append(index)
    chunks = [draw(st.permutations(chunk)) for chunk in chunks if chunk]
    return {
        "kinds": kinds,
        "chunks": chunks,
        "refused": set(draw(st.lists(st.sampled_from(valid), max_size=10)) if valid else []),
        "unfinished": set(draw(st.lists(st.sampled_from(valid), max_size=20)) if valid else []),
        "fates": [draw(st.sampled_from(["commit", "commit", "stop", "give up"])) for _ in chunks],
        "end": draw(st.sampled_from(["cancel", "expire"])),
    }


@given(plan=plans())
@hypothesis_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_batch_merges_to_exactly_one_line_per_request(
    store: ObjectStore, settings: Settings, tmp_path: Path, plan: dict[str, Any]
) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(f"sqlite:///{tempfile.mkdtemp(dir=tmp_path)}/ledger.sqlite", max_failures=1, clock=clock)
    expected = run_plan(plan, ledger, store, clock)
    (batch,) = ledger.batches.recent()
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)

    found = final_bytes(store, batch.batch_id)
    lines = {
        index: (file, line)
        for file in ("output.jsonl", "errors.jsonl")
        for index, line in zip(indexes_of(found.get(file)), lines_of(found.get(file)), strict=True)
    }
    assert {index: (file, (line["error"] or {}).get("code")) for index, (file, line) in lines.items()} == expected
    for file in ("output.jsonl", "errors.jsonl"):
        assert indexes_of(found.get(file)) == sorted(index for index in expected if expected[index][0] == file)
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None, rebuild=True)
    assert final_bytes(store, batch.batch_id) == found
    ledger.close()


def run_plan(
    plan: dict[str, Any], ledger: Ledger, store: ObjectStore, clock: SteppedClock
) -> dict[int, tuple[str, str | None]]:
    """Make the batch of a plan stop as planned; return the file and the error code that each request must end with."""
    chunks = plan["chunks"]
    invalid = [index for index, kind in enumerate(plan["kinds"]) if kind == "i"]
    lines = [
        {"v": answered.input_line(index), "i": b'{"custom_id": 7', "b": b" \r"}[kind]
        for index, kind in enumerate(plan["kinds"])
    ]
    batch = answered.create(ledger, store, lines, window_seconds=3600)
    batch_id = batch.batch_id
    answered.take_in(ledger, store, batch_id, chunks, invalid=invalid)
    expected: dict[int, tuple[str, str | None]] = dict.fromkeys(invalid, ("errors.jsonl", "invalid_json_line"))
    stopped = {"cancel": "batch_cancelled", "expire": "batch_expired"}[plan["end"]]
    leases = answered.lease_all(ledger)
    for number, lease in leases.items():
        fate = plan["fates"][number]
        done = [index for index in chunks[number] if fate == "commit" or index not in plan["unfinished"]]
        finished = [
            answered.refusal(batch_id, index) if index in plan["refused"] else answered.answer(batch_id, index)
            for index in done
        ]
        for index in chunks[number]:
            code = stopped if fate == "stop" else "chunk_failed"
            expected[index] = ("errors.jsonl", code)
        for request in finished:
            expected[request.index] = ("errors.jsonl" if request.is_error else "output.jsonl", None)
        if fate == "commit":
            answered.commit(ledger, store, lease, finished)
            continue
        half = len(finished) // 2
        for part in (finished[:half], finished[half:]):
            if part:
                answered.checkpoint(ledger, store, lease, part)
        if fate == "give up":
            ledger.chunks.release(lease.ref, "given up", failed=True)
    if plan["end"] == "cancel":
        if ledger.batches.get(batch_id).status != BatchStatus.FINALIZING and chunks:
            ledger.batches.cancel(batch_id)
    else:
        clock.advance(3601)
        ledger.batches.expire_due()
    for number, lease in leases.items():
        if plan["fates"][number] == "stop":
            ledger.chunks.release(lease.ref, "stopped")
    return expected
