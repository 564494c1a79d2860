"""The measured speed that the order of chunks goes by is looked up again when it is old."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.leasing import Policy
from batch_pipeline.ledger.records import WorkerState
from tests.fakes.ledger_values import CHUNK_TOKENS, MODEL, submitted


class AnyClock:
    """A `ledger.database.Clock` that may be set back as well, as a machine's is by hand."""

    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def now(self, connection: sa.Connection) -> float:
        """Return the time that the test has set."""
        assert not connection.closed
        return self.time


@pytest.mark.parametrize(("seconds", "is_known"), [(4.0, False), (6.0, True), (-6.0, True), (-300.0, True)])
def test_a_speed_counts_for_some_seconds_and_no_longer_where_the_clock_is_set_back(
    sqlite_url: str, seconds: float, is_known: bool
) -> None:
    clock = AnyClock()
    ledger = Ledger.open(sqlite_url, clock=clock, policy=Policy(margin_seconds=600.0))
    # With a chunk in ten seconds the large one cannot be in time, and the small one goes first.
    hopeless = submitted(ledger, "hopeless", [MODEL] * 200, window_seconds=600)
    small = submitted(ledger, "small", [MODEL], window_seconds=86_400)
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    assert lease.ref.batch_id == hopeless.batch_id, "nobody knows a speed, and its deadline is the nearer one"
    clock.time += seconds
    ledger.workers.register("w", MODEL, None, "here")
    ledger.workers.set_state("w", WorkerState.READY)
    ledger.workers.heartbeat("w", tokens_per_second=CHUNK_TOKENS / 10.0)
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    assert lease.ref.batch_id == (small if is_known else hopeless).batch_id
    ledger.close()
