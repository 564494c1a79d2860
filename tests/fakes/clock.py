"""A clock that stands still until a test moves it: for leases and deadlines without sleeping."""

from __future__ import annotations

import sqlalchemy as sa


class SteppedClock:
    """A `ledger.database.Clock` in the test's hand. Several ledgers may share one, as workers share a database's."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start

    def now(self, connection: sa.Connection) -> float:
        """Return the time that the test has set, whatever the database's is."""
        assert not connection.closed
        return self._now

    @property
    def time(self) -> float:
        """The time that every transaction sees."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on; time does not go back."""
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} seconds")
        self._now += seconds
