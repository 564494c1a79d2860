"""What each transition of the ledger promises, one by one, on SQLite and Postgres; time is in the test's hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batch_pipeline.errors import LeaseLost, NotAllowedInState, NotFound, OperatorError, ProofFailed
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.committing import commit_chunks
from batch_pipeline.ledger.database import Database
from batch_pipeline.ledger.records import BatchStatus, ChunkState, Lease, LeaseRef, OnInvalid, Standing, WorkerState
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import (
    CHUNK_TOKENS,
    MODEL,
    counted,
    finish,
    intake_result,
    new_batch,
    part_of,
    result_of,
    submitted,
)

LEASE_SECONDS = 60.0


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, lease_seconds=LEASE_SECONDS, max_failures=3, clock=clock)
    yield opened
    opened.close()


def lease_one(ledger: Ledger, worker: str = "w1", model: str = MODEL) -> Lease:
    (lease,) = ledger.chunks.lease(worker, model, 1)
    return lease


def states(ledger: Ledger, batch_id: str) -> list[ChunkState]:
    return [chunk.state for chunk in ledger.chunks.of(batch_id)]


def told(ledger: Ledger, batch_id: str) -> list[str]:
    return [event.event for event in ledger.events.of(batch_id) if event.chunk is None]


# Creation and intake.


def test_the_same_create_call_twice_is_one_batch(ledger: Ledger, clock: SteppedClock) -> None:
    first = ledger.batches.create(new_batch("drop/a"))
    clock.advance(10)
    again = ledger.batches.create(new_batch("drop/a", customer="other", window_seconds=7200))
    assert again == first
    assert told(ledger, first.batch_id) == ["created"]
    assert ledger.batches.by_creation_key("drop/a") == first
    assert ledger.batches.by_creation_key("drop/b") is None


def test_a_second_intake_changes_nothing_even_with_other_chunks(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL, MODEL])
    again = ledger.batches.record_intake(batch.batch_id, intake_result(["model-b"] * 5, invalid=3))
    assert again == batch
    assert len(ledger.chunks.of(batch.batch_id)) == 2


def test_an_intake_that_does_not_account_for_every_line_is_refused_whole(ledger: Ledger) -> None:
    batch = ledger.batches.create(new_batch("a"))
    with pytest.raises(ProofFailed):
        ledger.batches.record_intake(batch.batch_id, intake_result([MODEL], invalid=1).__replace__(total=99))
    assert ledger.batches.get(batch.batch_id) == batch
    assert ledger.chunks.of(batch.batch_id) == []


def test_a_strict_batch_with_a_bad_line_runs_nothing_and_fails_by_its_merge(ledger: Ledger) -> None:
    batch = ledger.batches.create(new_batch("a", on_invalid=OnInvalid.FAIL))
    batch = ledger.batches.record_intake(batch.batch_id, intake_result([MODEL, MODEL], invalid=1))
    assert (batch.status, batch.outcome) == (BatchStatus.VALIDATING, BatchStatus.FAILED)
    assert ledger.chunks.lease("w1", MODEL, 9) == []
    assert states(ledger, batch.batch_id) == [ChunkState.CANCELLED] * 2
    assert ledger.batches.cancel(batch.batch_id) == batch
    assert ledger.batches.awaiting_merge(9) == [batch]
    final = finish(ledger, batch.batch_id)
    assert (final.status, final.failed, final.invalid, final.total) == (BatchStatus.FAILED, 20, 1, 21)
    assert told(ledger, batch.batch_id) == ["created", "failing", "failed"]


@pytest.mark.parametrize("invalid", [0, 4])
def test_a_batch_without_a_valid_line_fails(ledger: Ledger, invalid: int) -> None:
    batch = ledger.batches.create(new_batch("a"))
    ledger.batches.record_intake(batch.batch_id, intake_result([], invalid=invalid))
    assert [due.batch_id for due in ledger.batches.awaiting_merge(9)] == [batch.batch_id]
    assert ledger.batches.awaiting_intake(9) == []
    final = finish(ledger, batch.batch_id)
    assert (final.status, final.total) == (BatchStatus.FAILED, invalid)


# Leases.


def test_a_chunk_has_one_lease_and_a_stale_one_can_write_nothing(ledger: Ledger, clock: SteppedClock) -> None:
    submitted(ledger, "a")
    paused = lease_one(ledger, "w1")
    assert ledger.chunks.lease("w2", MODEL, 1) == []
    clock.advance(LEASE_SECONDS)
    taken_over = lease_one(ledger, "w2")
    assert taken_over.ref.token == paused.ref.token + 1
    for write in (
        lambda: ledger.chunks.checkpoint(paused.ref, part_of(paused, 1)),
        lambda: ledger.chunks.release(paused.ref, "late"),
        lambda: ledger.chunks.commit(paused.ref, result_of(paused)),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert ledger.workers.heartbeat("w1", [paused.ref]).standings == {paused.ref: Standing.LOST}
    assert ledger.chunks.commit(taken_over.ref, result_of(taken_over)).batch_drained
    with pytest.raises(LeaseLost):
        ledger.chunks.commit(paused.ref, result_of(paused))


def test_a_heartbeat_keeps_a_lease_and_tells_which_chunks_to_stop(ledger: Ledger, clock: SteppedClock) -> None:
    kept, cancelled, due = (submitted(ledger, key, window_seconds=window) for key, window in
                            (("a", 3600), ("b", 3600), ("c", 90)))  # fmt: skip
    held = {lease.ref.batch_id: lease.ref for lease in ledger.chunks.lease("w1", MODEL, 3)}
    clock.advance(50)
    ledger.workers.heartbeat("w1", list(held.values()))
    ledger.batches.cancel(cancelled.batch_id)
    clock.advance(50)
    assert ledger.chunks.expire_leases() == 0
    standings = ledger.workers.heartbeat("w1", list(held.values())).standings
    assert standings == {
        held[kept.batch_id]: Standing.HELD,
        held[cancelled.batch_id]: Standing.STOP,
        held[due.batch_id]: Standing.STOP,
    }


def test_a_worker_that_asks_for_more_before_its_heartbeat_keeps_what_has_run_out(
    ledger: Ledger, clock: SteppedClock
) -> None:
    batch = submitted(ledger, "a", [MODEL] * 3)
    mine = lease_one(ledger)
    (lost,) = ledger.chunks.lease("w2", MODEL, 1)
    clock.advance(LEASE_SECONDS + 1)
    # The answer to an earlier ask was lost: of that lease the worker knows nothing.
    (other,) = ledger.chunks.lease("w1", MODEL, 1, held=[mine.ref, LeaseRef(batch.batch_id, 2, 7)])
    assert (other.ref.chunk, other.ref.token) == (lost.ref.chunk, 2)
    assert states(ledger, batch.batch_id) == [ChunkState.LEASED, ChunkState.LEASED, ChunkState.PENDING]
    ledger.chunks.commit(mine.ref, result_of(mine))
    with pytest.raises(LeaseLost):
        ledger.chunks.commit(lost.ref, result_of(lost))


def test_nothing_of_a_batch_past_its_deadline_is_leased_even_before_the_sweep(
    ledger: Ledger, clock: SteppedClock
) -> None:
    batch = submitted(ledger, "a", [MODEL, MODEL], window_seconds=30)
    lease = lease_one(ledger)
    clock.advance(30)
    assert ledger.chunks.lease("w2", MODEL, 1) == []
    ledger.chunks.release(lease.ref, "past the deadline")
    assert ledger.batches.expire_due() == [batch.batch_id]
    assert states(ledger, batch.batch_id) == [ChunkState.EXPIRED] * 2


def test_a_worker_limited_to_a_batch_gets_chunks_of_that_one_only(ledger: Ledger) -> None:
    submitted(ledger, "a")
    wanted = submitted(ledger, "b")
    assert {lease.ref.batch_id for lease in ledger.chunks.lease("w1", MODEL, 9, [wanted.batch_id])} == {wanted.batch_id}


def test_a_chunk_that_fails_again_and_again_is_given_up_and_can_be_wanted_again(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL, "model-b"])
    for attempt in range(3):
        lease = lease_one(ledger)
        assert lease.attempts == attempt + 1
        ledger.chunks.checkpoint(lease.ref, part_of(lease, attempt))
        ledger.chunks.release(lease.ref, "the engine dies", failed=True)
    assert states(ledger, batch.batch_id) == [ChunkState.FAILED, ChunkState.PENDING]
    assert ledger.chunks.lease("w1", MODEL, 1) == []
    assert ledger.chunks.want_again(batch.batch_id, "operator") == 1
    assert ledger.chunks.want_again(batch.batch_id, "operator") == 0
    assert [part.key for part in lease_one(ledger).parts] == [part_of(lease, n).key.replace("/3/", f"/{n + 1}/")
                                                              for n in range(3)]  # fmt: skip


def test_a_worker_that_gives_way_is_not_counted_against_the_chunk(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    for _ in range(5):
        ledger.chunks.release(lease_one(ledger).ref, "asked to leave")
    assert states(ledger, batch.batch_id) == [ChunkState.PENDING]


# Lost acknowledgements.


def test_a_checkpoint_repeated_after_a_lost_acknowledgement_counts_once(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    lease = lease_one(ledger)
    for _ in range(2):
        ledger.chunks.checkpoint(lease.ref, part_of(lease, 1, completed=3, failed=1))
    assert len(ledger.chunks.of(batch.batch_id)[0].parts) == 1
    (lane,) = ledger.batches.lanes(batch.batch_id)
    assert (lane.completed, lane.failed, lane.output_tokens) == (3, 1, 28)


def test_a_commit_repeated_after_a_lost_acknowledgement_is_one_commit(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL, MODEL])
    lease = lease_one(ledger)
    for _ in range(2):
        assert not ledger.chunks.commit(lease.ref, result_of(lease)).batch_drained
    with pytest.raises(LeaseLost, match="another result"):
        ledger.chunks.commit(lease.ref, result_of(lease, name="other"))
    (lane,) = ledger.batches.lanes(batch.batch_id)
    assert (lane.pending, lane.leased, lane.committed, lane.completed) == (1, 0, 1, 10)


def test_the_sweep_settles_what_a_worker_left_that_died_right_after_its_commit(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    lease = lease_one(ledger)
    with ledger._database.write() as tx:  # The commit's first transaction, without its second.
        commit_chunks(tx, {lease.ref: result_of(lease)})
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.IN_PROGRESS
    assert ledger.batches.settle_all() == [batch.batch_id]
    assert ledger.batches.settle_all() == []
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.FINALIZING


def test_a_worker_is_registered_once_however_often_it_says_so(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.workers.register("w1", MODEL, "run", "host", ["batch_a"])
    ledger.workers.set_state("w1", WorkerState.FAILED, "no such option --foo")
    (worker,) = ledger.workers.of_models([MODEL])
    assert (worker.state, worker.detail, worker.batches) == (WorkerState.FAILED, "no such option --foo", ["batch_a"])
    ledger.workers.ask_to_leave("w1")
    assert ledger.workers.heartbeat("w1").leave
    with pytest.raises(NotFound):
        ledger.workers.set_state("w2", WorkerState.READY)


# Ends.


def test_a_cancelled_batch_waits_behind_those_whose_answers_are_wanted_but_not_for_ever(
    ledger: Ledger, clock: SteppedClock
) -> None:
    def turns() -> list[str]:
        return [due.creation_key for due in ledger.batches.awaiting_intake(9)]

    for key, advance in (("first", 1.0), ("second", 900.0), ("late", 1.0)):
        ledger.batches.create(new_batch(key))
        clock.advance(advance)
    first = next(due for due in ledger.batches.awaiting_intake(9) if due.creation_key == "first")
    ledger.batches.cancel(first.batch_id)
    assert turns() == ["second", "first", "late"]


def test_cancel_while_validating_still_accounts_for_every_line(ledger: Ledger) -> None:
    batch = ledger.batches.create(new_batch("a"))
    assert ledger.batches.cancel(batch.batch_id).status == BatchStatus.CANCELLING
    assert [due.batch_id for due in ledger.batches.awaiting_intake(9)] == [batch.batch_id]
    after = ledger.batches.record_intake(batch.batch_id, intake_result([MODEL, MODEL], invalid=2))
    assert (after.status, after.outcome) == (BatchStatus.FINALIZING, BatchStatus.CANCELLED)
    final = finish(ledger, batch.batch_id)
    assert (final.status, final.cancelled, final.invalid) == (BatchStatus.CANCELLED, 20, 2)
    assert told(ledger, batch.batch_id) == ["created", "cancelling", "validated", "finalizing", "cancelled"]


def test_cancel_keeps_what_is_finished_and_waits_for_what_runs(ledger: Ledger, clock: SteppedClock) -> None:
    batch = submitted(ledger, "a", [MODEL] * 4)
    done, running, silent = ledger.chunks.lease("w1", MODEL, 3)
    ledger.chunks.commit(done.ref, result_of(done))
    assert ledger.batches.cancel(batch.batch_id).status == BatchStatus.CANCELLING
    assert ledger.batches.cancel(batch.batch_id).status == BatchStatus.CANCELLING
    ledger.chunks.checkpoint(running.ref, part_of(running, 1, completed=4))
    assert not ledger.chunks.release(running.ref, "stop").batch_drained
    clock.advance(LEASE_SECONDS)
    assert ledger.chunks.expire_leases() == 1
    assert states(ledger, batch.batch_id) == [ChunkState.COMMITTED] + [ChunkState.CANCELLED] * 3
    assert ledger.batches.cancel(batch.batch_id).status == BatchStatus.FINALIZING
    final = finish(ledger, batch.batch_id)
    assert (final.status, final.completed, final.cancelled) == (BatchStatus.CANCELLED, 14, 26)
    with pytest.raises(NotAllowedInState, match="cancelled already"):
        ledger.batches.cancel(batch.batch_id)
    assert silent.ref.chunk == 2


def test_a_chunk_committed_while_its_batch_is_cancelling_counts(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL, MODEL])
    lease = lease_one(ledger)
    ledger.batches.cancel(batch.batch_id)
    assert ledger.chunks.commit(lease.ref, result_of(lease)).batch_drained
    assert finish(ledger, batch.batch_id).completed == 10


def test_cancel_during_the_merge_ends_as_completed(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    lease = lease_one(ledger)
    ledger.chunks.commit(lease.ref, result_of(lease))
    assert ledger.batches.cancel(batch.batch_id).status == BatchStatus.FINALIZING
    assert finish(ledger, batch.batch_id).status == BatchStatus.COMPLETED


def test_the_deadline_while_validating_still_accounts_for_every_line(ledger: Ledger, clock: SteppedClock) -> None:
    batch = ledger.batches.create(new_batch("a", window_seconds=60))
    clock.advance(60)
    assert ledger.batches.expire_due() == [batch.batch_id]
    assert ledger.batches.expire_due() == []
    after = ledger.batches.record_intake(batch.batch_id, intake_result([MODEL], invalid=1))
    assert (after.status, after.outcome) == (BatchStatus.FINALIZING, BatchStatus.EXPIRED)
    final = finish(ledger, batch.batch_id)
    assert (final.status, final.expired, final.invalid) == (BatchStatus.EXPIRED, 10, 1)


def test_the_deadline_leaves_alone_what_is_cancelling_finalizing_or_final(ledger: Ledger, clock: SteppedClock) -> None:
    cancelling = submitted(ledger, "a", window_seconds=60)
    lease_one(ledger)
    ledger.batches.cancel(cancelling.batch_id)
    finalizing = submitted(ledger, "b", window_seconds=60)
    lease = lease_one(ledger)
    ledger.chunks.commit(lease.ref, result_of(lease))
    clock.advance(1000)
    assert ledger.batches.expire_due() == []
    assert finish(ledger, finalizing.batch_id).status == BatchStatus.COMPLETED
    assert ledger.batches.expire_due() == []
    assert ledger.batches.get(cancelling.batch_id).outcome == BatchStatus.CANCELLED


def test_a_batch_whose_chunks_were_all_given_up_completes_with_errors_only(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    for _ in range(3):
        drained = ledger.chunks.release(lease_one(ledger).ref, "dies", failed=True).batch_drained
    assert drained
    final = finish(ledger, batch.batch_id)
    assert (final.status, final.failed, final.output_key) == (BatchStatus.COMPLETED, 10, None)


def test_a_final_status_and_its_files_are_set_once_and_only_where_the_counts_add_up(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    with pytest.raises(NotAllowedInState, match="have not stopped"):
        finish(ledger, batch.batch_id)
    lease = lease_one(ledger)
    ledger.chunks.commit(lease.ref, result_of(lease, failed=2))
    files = counted(ledger.batches.get(batch.batch_id), ledger.chunks.of(batch.batch_id))
    with pytest.raises(ProofFailed):
        ledger.batches.finish(batch.batch_id, files.__replace__(completed=0))
    assert ledger.batches.get(batch.batch_id).output_key is None
    final = ledger.batches.finish(batch.batch_id, files)
    assert (final.completed, final.failed, final.output_key) == (8, 2, files.output_key)
    assert ledger.batches.finish(batch.batch_id, files.__replace__(output_key="another")) == final


def test_a_stranger_finds_nothing(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", customer="acme")
    with pytest.raises(NotFound):
        ledger.batches.get(batch.batch_id, customer="bolt")
    with pytest.raises(NotFound):
        ledger.batches.cancel(batch.batch_id, customer="bolt")
    assert ledger.batches.get(batch.batch_id, customer="acme") == batch
    assert ledger.batches.recent(customer="bolt") == []
    assert ledger.batches.newest_named("bolt", "a") is None


# What sensors ask.


def test_a_run_that_was_requested_is_not_requested_again_before_its_pause(ledger: Ledger, clock: SteppedClock) -> None:
    batch = ledger.batches.create(new_batch("a"))
    assert ledger.batches.note_intake_requested(batch.batch_id, 30) == 1
    assert ledger.batches.awaiting_intake(9) == []
    clock.advance(30)
    assert ledger.batches.note_intake_requested(batch.batch_id, 60) == 2
    ledger.batches.record_intake(batch.batch_id, intake_result())
    lease = lease_one(ledger)
    ledger.chunks.commit(lease.ref, result_of(lease))
    assert [due.batch_id for due in ledger.batches.awaiting_merge(9)] == [batch.batch_id]  # at once, whatever the pause
    assert ledger.batches.note_merge_requested(batch.batch_id, 30) == 1
    assert ledger.batches.awaiting_merge(9) == []


def test_every_status_that_is_not_shown_has_its_turn_and_shown_ends_have_none(ledger: Ledger) -> None:
    ids = sorted(submitted(ledger, f"b{number}").batch_id for number in range(5))

    def page(after: str = "") -> list[tuple[str, str]]:
        return [(moment.batch.batch_id, shown) for moment, shown in ledger.moments.publishable(2, after=after)]

    pages = [page()]
    while pages[-1]:
        pages.append(page(after=pages[-1][-1][0]))
    assert [batch_id for page in pages for batch_id, _ in page] == ids
    ledger.batches.mark_published(ids[0], "3 waiting")
    ledger.batches.mark_published(ids[1], "final")
    assert page() == [(ids[0], "3 waiting"), (ids[2], "")]


def test_the_backlog_counts_what_may_still_be_leased(ledger: Ledger) -> None:
    first = submitted(ledger, "a", [MODEL, MODEL, "model-b"], window_seconds=100)
    submitted(ledger, "b", [MODEL], window_seconds=50)
    ledger.batches.cancel(submitted(ledger, "c", [MODEL]).batch_id)
    ledger.chunks.lease("w1", "model-b", 1)
    of_a, of_b = ledger.backlog()
    assert (of_a.model, of_a.pending, of_a.leased, of_a.pending_tokens) == (MODEL, 3, 0, 3 * CHUNK_TOKENS)
    assert of_a.first_deadline_at == first.deadline_at - 50
    assert (of_b.model, of_b.pending, of_b.leased) == ("model-b", 0, 1)


def test_a_batch_of_20000_chunks_is_taken_leased_and_cancelled(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL] * 20_000)
    assert ledger.batches.get(batch.batch_id).total == 200_000
    assert [lease.ref.chunk for lease in ledger.chunks.lease("w1", MODEL, 3)] == [0, 1, 2]
    ledger.batches.cancel(batch.batch_id)
    (lane,) = ledger.batches.lanes(batch.batch_id)
    assert (lane.pending, lane.leased, lane.stopped, lane.pending_tokens) == (0, 3, 19_997, 0)


def test_counts_beyond_32_bits_are_kept(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL, MODEL], prompt_tokens=2**30)
    (lane,) = ledger.batches.lanes(batch.batch_id)
    assert lane.pending_tokens == 2 * 10 * (2**30 + 10)
    assert lease_one(ledger).tokens == 10 * (2**30 + 10)


def test_tables_of_another_release_are_refused(ledger_url: str) -> None:
    database = Database(ledger_url)
    database.set_up()
    with database.write() as tx:
        tx.connection.execute(schema.schema_info.update().values(version=schema.SCHEMA_VERSION + 1))
    with pytest.raises(OperatorError, match="use the matching release"):
        database.set_up()
    database.close()
