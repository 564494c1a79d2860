"""The feeder: leases in their order, rows in theirs, pauses aside, nothing after the deadline."""

from __future__ import annotations

import msgspec
import pytest

from batch_pipeline.engine import Answer
from batch_pipeline.errors import ProofFailed
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest
from batch_pipeline.worker import outcome
from batch_pipeline.worker.chunk import Flight, HeldChunk, Phase
from batch_pipeline.worker.feeder import Feeder
from tests.fakes.held import BATCH, held_chunk


def held(number: int, indexes: list[int], deadline_at: float = 1000.0, load: bool = True) -> HeldChunk:
    return held_chunk(number, rows(indexes), deadline_at=deadline_at, load=load)


def rows(indexes: list[int]) -> list[ChunkRequest]:
    return [ChunkRequest(index, str(index), b"{}", 1, 1) for index in indexes]


def result(index: int) -> FinishedRequest:
    return FinishedRequest(index, False, b"{}\n", 1, 0, 1)


def nobody(_chunk: HeldChunk) -> None:
    raise AssertionError("nothing is late here")


def feed_all(feeder: Feeder, now: float = 0.0) -> list[int]:
    fed = []
    while (flight := feeder.next(now, 0.0, nobody)) is not None:
        fed.append(flight.request.index)
    return fed


def test_chunks_are_fed_in_the_order_of_their_leases_and_rows_in_their_order() -> None:
    feeder = Feeder()
    feeder.add(held(0, [5, 3, 4]))
    feeder.add(held(1, [9, 1]))
    assert feeder.unfed == 5
    assert feed_all(feeder) == [5, 3, 4, 9, 1]
    assert feeder.unfed == 0


def test_a_chunk_that_is_being_loaded_counts_and_does_not_hold_up_the_next_one() -> None:
    feeder = Feeder()
    loading = held(0, [1, 2], load=False)
    feeder.add(loading)
    feeder.add(held(1, [3]))
    assert feeder.unfed == 3
    assert feed_all(feeder) == [3]
    loading.load(rows([1, 2]), [])
    assert feed_all(feeder) == [1, 2]


def test_a_request_that_pauses_never_holds_up_fresh_work_and_goes_on_when_its_pause_is_over() -> None:
    feeder = Feeder()
    chunk = held(0, [1, 2, 3])
    feeder.add(chunk)
    flight = feeder.next(0.0, 0.0, nobody)
    assert flight is not None
    feeder.pause(flight, until=10.0)
    assert feeder.next_pause_ends() == 10.0
    assert feed_all(feeder, now=9.9) == [2, 3]
    assert feed_all(feeder, now=10.0) == [1]
    assert feeder.next_pause_ends() is None


def test_pauses_end_in_the_order_of_their_ends() -> None:
    feeder = Feeder()
    chunk = held(0, [1, 2, 3])
    for request, until in zip(chunk.waiting, (3.0, 1.0, 2.0), strict=True):
        feeder.pause(Flight(chunk, request), until)
    assert feed_all(feeder, now=3.0) == [2, 3, 1]


def test_a_request_that_never_reached_the_engine_goes_first() -> None:
    feeder = Feeder()
    chunk = held(0, [1, 2])
    feeder.add(chunk)
    flight = feeder.next(0.0, 0.0, nobody)
    assert flight is not None
    feeder.again(flight)
    assert feed_all(feeder) == [1, 2]


def test_nothing_of_a_batch_past_its_deadline_is_fed_and_the_others_go_on() -> None:
    feeder = Feeder()
    late_chunk = held(0, [1, 2], deadline_at=100.0)
    feeder.add(late_chunk)
    feeder.add(held(1, [3], deadline_at=200.0))
    feeder.pause(Flight(late_chunk, rows([7])[0]), until=0.0)
    late: list[HeldChunk] = []
    flight = feeder.next(0.0, 100.0, late.append)
    assert flight is not None
    assert flight.request.index == 3
    assert set(late) == {late_chunk}


def test_a_removed_chunk_is_fed_no_more_wherever_its_requests_were() -> None:
    feeder = Feeder()
    chunk = held(0, [1, 2, 3])
    feeder.add(chunk)
    first, second = feeder.next(0.0, 0.0, nobody), feeder.next(0.0, 0.0, nobody)
    assert first is not None
    assert second is not None
    feeder.pause(first, until=0.0)
    feeder.again(second)
    feeder.remove(chunk)
    assert feed_all(feeder) == []
    assert feeder.unfed == 0


def test_what_earlier_attempts_had_finished_is_not_fed_and_counts_as_done() -> None:
    chunk = held(0, [4, 5, 6], load=False)
    chunk.load(rows([4, 5, 6]), [result(5), result(4)])
    assert [request.index for request in chunk.waiting] == [6]
    assert chunk.unsaved == []
    chunk.finish(result(6))
    assert chunk.is_complete
    assert sorted(finished.index for finished in chunk.results()) == [4, 5, 6]


def test_a_request_never_gets_two_results_and_no_chunk_is_committed_with_one_missing() -> None:
    chunk = held(0, [4, 5])
    chunk.finish(result(4))
    with pytest.raises(ProofFailed, match="has a result already"):
        chunk.finish(result(4))
    with pytest.raises(ProofFailed, match="not of this chunk"):
        chunk.finish(result(9))
    with pytest.raises(ProofFailed, match="1 of 2 requests have no result"):
        chunk.results()


def test_an_input_that_is_not_the_chunk_that_the_ledger_knows_is_refused() -> None:
    chunk = held(0, [4, 5], load=False)
    with pytest.raises(ProofFailed, match="holds 1 requests, not 2"):
        chunk.load(rows([4]), [])
    with pytest.raises(ProofFailed, match="holds request 9"):
        chunk.load(rows([4, 5]), [result(9)])
    assert chunk.phase is Phase.LOADING


def test_a_probe_is_a_request_that_has_not_failed_yet_and_of_another_chunk_than_the_one_before() -> None:
    feeder = Feeder()
    first, second = held(0, [1, 2]), held(1, [3])
    feeder.add(first)
    feeder.add(second)
    failed = feeder.next(0.0, 0.0, nobody)
    assert failed is not None
    feeder.pause(failed, until=0.5)

    def probe() -> int:
        flight = feeder.next_probe(1.0, 0.0, nobody)
        assert flight is not None
        return flight.request.index

    assert [probe(), probe(), probe()] == [2, 3, failed.request.index]
    assert feeder.next_probe(1.0, 0.0, nobody) is None


def shared_rows() -> list[ChunkRequest]:
    """Three requests that share the answer of the first, and one of its own."""
    same_as = {2: 1, 3: 1}
    return [ChunkRequest(index, str(index), b"{}", 1, 1, same_as.get(index, -1)) for index in (1, 2, 3, 4)]


def answered(index: int) -> FinishedRequest:
    request = ChunkRequest(index, str(index), b"{}", 1, 1)
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    answer = Answer(200, msgspec.json.encode({"usage": usage}), True, "engine-id", 5, 2, 7, None, "")
    return outcome.from_answer(BATCH, request, answer)


def test_of_identical_requests_one_is_fed_and_its_result_is_that_of_all_at_once() -> None:
    chunk = held(0, [1, 2, 3, 4], load=False)
    chunk.load(shared_rows(), [])
    feeder = Feeder()
    feeder.add(chunk)
    assert (feeder.unfed, feed_all(feeder)) == (2, [1, 4])
    chunk.finish(answered(1))
    assert [result.index for result in chunk.unsaved] == [1, 2, 3]
    lines = [msgspec.json.decode(result.line) for result in chunk.unsaved]
    assert [line["custom_id"] for line in lines] == ["1", "2", "3"]
    assert [line.get("shared_with") for line in lines] == [None, lines[0]["id"], lines[0]["id"]]
    assert lines[0]["response"] == lines[1]["response"] == lines[2]["response"]
    assert [result.output_tokens for result in chunk.unsaved] == [7, 0, 0]
    assert not chunk.is_complete
    chunk.finish(answered(4))
    assert sorted(result.index for result in chunk.results()) == [1, 2, 3, 4]


def test_the_next_attempt_runs_none_of_a_group_that_a_checkpoint_has_and_one_of_a_group_that_none_has() -> None:
    first = held(0, [1, 2, 3, 4], load=False)
    first.load(shared_rows(), [])
    first.finish(answered(1))
    second = held(0, [1, 2, 3, 4], load=False)
    second.load(shared_rows(), first.unsaved)
    assert [request.index for request in second.waiting] == [4]
    third = held(0, [1, 2, 3, 4], load=False)
    third.load(shared_rows(), [answered(4)])
    assert [request.index for request in third.waiting] == [1]


def test_a_request_whose_twin_alone_has_a_result_runs_itself() -> None:
    chunk = held(0, [1, 2, 3, 4], load=False)
    chunk.load(shared_rows(), [answered(1)])
    assert [request.index for request in chunk.waiting] == [2, 3, 4]
