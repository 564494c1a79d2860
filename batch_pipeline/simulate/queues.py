"""The queue of one model, kept in order as it changes: the picks of `scheduling.order.choose` without sorting all that
waits for each of a million chunks, and the orders that ours is compared with.

A property test holds FairQueue to `choose`, pick for pick. Cost of a pick: O(log n) for n waiting batches, and a
memory move within a sorted list; of another measured speed: O(n log n).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from batch_pipeline.scheduling.estimates import refilled
from batch_pipeline.scheduling.order import CustomerShare, Pick, WaitingBatch, chunk_tokens, latest_start, lost_from


class Charge(NamedTuple):
    """What a customer has got by a pick."""

    customer: str
    tokens: float
    out_of_turn_tokens: float = 0.0
    """What of it went ahead of others."""


class Queue(Protocol):
    """What waits for workers of one model. A batch is put again whenever what is known of it changes."""

    def look(self, now: float) -> None:
        """It is so late now; time does not go back."""

    def join(self, customer: str) -> None:
        """A customer comes to the queue: to be called before a batch of it is put."""

    def put(self, batch: WaitingBatch) -> None:
        """Add a batch that has pending chunks, or replace what is known of it."""

    def remove(self, batch_id: str) -> None:
        """Forget a batch that has no pending chunks any more; nothing where it is not there."""

    def set_speed(self, tokens_per_second: float) -> None:
        """Judge slack by another speed of all workers together."""

    def pick(self, limit: int) -> list[Pick]:
        """Return the next chunks; changes nothing."""

    def charge(self, had: Charge) -> None:
        """Count what was picked."""

    def correct(self, customer: str, tokens: float) -> None:
        """A customer's chunk has used so many tokens more than was charged for it; less where they are negative."""

    def __len__(self) -> int:
        """Return how many batches wait."""

    def waiting(self) -> Iterator[WaitingBatch]:
        """Yield them in no order."""


class Rules(NamedTuple):
    """The numbers of our order; see `ledger.leasing.Policy`, whose names they have."""

    margin_seconds: float = 0.0
    share: float = 0.0
    most_tokens: float = 0.0
    has_slack: bool = True
    """Whether slack orders the batches of a customer (it always does in the service), or who came first."""
    has_floor: bool = True
    """Whether a customer that comes is lifted to those that wait (it always is in the service)."""
    has_corrections: bool = True
    """Whether charges are corrected by what was used (they always are in the service)."""


_Entry = TypeVar("_Entry", bound=tuple[Any, ...])
_Rank = tuple[int, bool, float, float, str]
_Urgent = tuple[float, str]


class _Place(NamedTuple):
    """Where a batch stands in the sorted lists."""

    batch: WaitingBatch
    rank: _Rank
    urgent: _Urgent | None
    """None where its deadline is lost."""


class FairQueue:
    """Ours: what `choose` gives with the conditions of the moment, and the counters that the ledger keeps."""

    def __init__(self, weights: Mapping[str, float], rules: Rules) -> None:
        self._weights = weights
        self._rules = rules
        self._now = 0.0
        self._speed = 0.0
        self._places: dict[str, _Place] = {}
        self._orders: dict[str, list[_Rank]] = {}
        """Of each customer with waiting batches: their ranks, the next one first."""
        self._urgent: list[_Urgent] = []
        """All whose deadline is not lost, the one with the least slack first."""
        self._losing: list[tuple[float, str]] = []
        """A heap of when each of these will be lost; with what is out of date."""
        self._turns: list[tuple[float, str]] = []
        """The waiting customers, the least served first."""
        self._served: dict[str, float] = {}
        self._floors: dict[str, float] = {}
        """What each customer had at least when it last came: corrections do not go below it."""
        self._credit, self._credit_at = rules.most_tokens, 0.0

    def __len__(self) -> int:
        return len(self._places)

    def waiting(self) -> Iterator[WaitingBatch]:
        """Yield what waits, in no order."""
        return (place.batch for place in self._places.values())

    def shares(self) -> dict[str, CustomerShare]:
        """Return what the customers have had, by name."""
        return {
            name: CustomerShare(weight=self._weights.get(name, 1.0), served=served)
            for name, served in self._served.items()
        }

    @property
    def served(self) -> Mapping[str, float]:
        """Virtual tokens by customer, as the ledger's table of service has them."""
        return self._served

    def look(self, now: float) -> None:
        """It is so late now: what has become lost by that is put anew."""
        self._now = now
        while self._losing and self._losing[0][0] < now:
            _, batch_id = heapq.heappop(self._losing)
            place = self._places.get(batch_id)
            if place is not None and place.urgent is not None and now > lost_from(place.batch, self._speed):
                self.put(place.batch)

    def join(self, customer: str) -> None:
        """Lift a customer that comes to the floor, as `ledger.transitions.join_queue` does."""
        if customer in self._orders:
            return
        floor = 0.0
        if self._rules.has_floor:
            floor = self._turns[0][0] if self._turns else max(self._served.values(), default=0.0)
        self._served[customer] = max(self._served.get(customer, 0.0), floor)
        self._floors[customer] = floor

    def put(self, batch: WaitingBatch) -> None:
        """Add a batch, or replace what is known of it."""
        self._take_out(batch.batch_id)
        starts_by, lost_at = latest_start(batch, self._speed), lost_from(batch, self._speed)
        is_lost = self._now > lost_at
        slack = (is_lost, starts_by) if self._rules.has_slack else (False, 0.0)
        rank = (-batch.priority, *slack, batch.created_at, batch.batch_id)
        urgent = None if is_lost else (starts_by, batch.batch_id)
        self._places[batch.batch_id] = _Place(batch, rank, urgent)
        if batch.customer not in self._orders:
            self._orders[batch.customer] = []
            insort(self._turns, (self._served.setdefault(batch.customer, 0.0), batch.customer))
        insort(self._orders[batch.customer], rank)
        if urgent is not None:
            insort(self._urgent, urgent)
            heapq.heappush(self._losing, (lost_at, batch.batch_id))

    def remove(self, batch_id: str) -> None:
        """Forget a batch; nothing where it is not there."""
        batch = self._take_out(batch_id)
        if batch is not None and not self._orders[batch.customer]:
            del self._orders[batch.customer]
            _discard(self._turns, (self._served[batch.customer], batch.customer))

    def _take_out(self, batch_id: str) -> WaitingBatch | None:
        place = self._places.pop(batch_id, None)
        if place is None:
            return None
        _discard(self._orders[place.batch.customer], place.rank)
        if place.urgent is not None:
            _discard(self._urgent, place.urgent)
        return place.batch

    def set_speed(self, tokens_per_second: float) -> None:
        """Judge slack by another speed: all are put anew."""
        if tokens_per_second == self._speed:
            return
        self._speed = tokens_per_second
        self._losing.clear()
        self._urgent.clear()
        batches = list(self.waiting())
        self._places.clear()
        for order in self._orders.values():
            order.clear()
        for batch in batches:
            self.put(batch)

    def pick(self, limit: int) -> list[Pick]:
        """Return what `choose` returns."""
        credit = self.credit
        turns = self._turns[:limit]  # a heap as well; nobody behind these can be the least served within the call
        served: dict[str, float] = {}
        left: dict[str, int] = {}
        taken: dict[str, tuple[int, int]] = {}
        for _ in range(limit):
            batch = self._next_in_turn(turns, served, left)
            if batch is None:
                break
            urgent = self._next_urgent(left)
            is_out_of_turn = urgent is not None and urgent.customer != batch.customer and credit > 0
            if is_out_of_turn and urgent is not None:
                batch = urgent
            tokens = chunk_tokens(batch)
            credit -= tokens if is_out_of_turn else 0.0
            chunks, out_of_turn = taken.get(batch.batch_id, (0, 0))
            taken[batch.batch_id] = (chunks + 1, out_of_turn + is_out_of_turn)
            left[batch.batch_id] = batch.pending_chunks - chunks - 1
            before = served.get(batch.customer, self._served[batch.customer])
            served[batch.customer] = before + tokens / self._weights.get(batch.customer, 1.0)
        return [Pick(batch_id=name, chunks=count, out_of_turn=ahead) for name, (count, ahead) in taken.items()]

    def _next_in_turn(
        self, turns: list[tuple[float, str]], served: Mapping[str, float], left: Mapping[str, int]
    ) -> WaitingBatch | None:
        """Return the first batch of the least served customer that has one left."""
        while turns:
            counted, customer = turns[0]
            now_served = served.get(customer, counted)
            if now_served != counted:
                heapq.heapreplace(turns, (now_served, customer))
                continue
            for rank in self._orders[customer]:
                if left.get(rank[-1]) != 0:
                    return self._places[rank[-1]].batch
            heapq.heappop(turns)
        return None

    def _next_urgent(self, left: Mapping[str, int]) -> WaitingBatch | None:
        """Return the batch at risk with the least slack that has a chunk left."""
        for starts_by, batch_id in self._urgent:
            if not starts_by - self._rules.margin_seconds < self._now:
                return None
            if left.get(batch_id) != 0:
                return self._places[batch_id].batch
        return None

    @property
    def credit(self) -> float:
        """Return the tokens that may go out of turn now."""
        return refilled(
            self._credit,
            self._now - self._credit_at,
            tokens_per_second=self._speed,
            share=self._rules.share,
            most=self._rules.most_tokens,
        )

    def charge(self, had: Charge) -> None:
        """Count the service, and take what went out of turn from the credit."""
        self._move(had.customer, self._served[had.customer] + had.tokens / self._weights.get(had.customer, 1.0))
        if had.out_of_turn_tokens:
            self._credit, self._credit_at = self.credit - had.out_of_turn_tokens, self._now

    def correct(self, customer: str, tokens: float) -> None:
        """Correct a counter, as `ledger.counters.correct` does."""
        if self._rules.has_corrections:
            corrected = self._served[customer] + tokens / self._weights.get(customer, 1.0)
            self._move(customer, max(corrected, self._floors.get(customer, 0.0)))

    def _move(self, customer: str, served: float) -> None:
        """Set a counter, and its customer to its place."""
        before = self._served[customer]
        self._served[customer] = served
        if customer in self._orders:
            _discard(self._turns, (before, customer))
            insort(self._turns, (served, customer))


class SortedQueue:
    """First come first served, or earliest deadline first: over all customers, whoever they are."""

    def __init__(self, *, by_deadline: bool) -> None:
        self._by_deadline = by_deadline
        self._batches: dict[str, WaitingBatch] = {}
        self._order: list[tuple[float, float, str]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def waiting(self) -> Iterator[WaitingBatch]:
        """Yield what waits, in no order."""
        return iter(self._batches.values())

    def look(self, now: float) -> None:
        """Does not matter here."""

    def join(self, customer: str) -> None:
        """Does not matter here."""

    def put(self, batch: WaitingBatch) -> None:
        """Add a batch, or replace what is known of it."""
        if batch.batch_id not in self._batches:
            insort(self._order, self._key(batch))
        self._batches[batch.batch_id] = batch

    def remove(self, batch_id: str) -> None:
        """Forget a batch; nothing where it is not there."""
        batch = self._batches.pop(batch_id, None)
        if batch is not None:
            _discard(self._order, self._key(batch))

    def set_speed(self, tokens_per_second: float) -> None:
        """Does not matter here."""

    def charge(self, had: Charge) -> None:
        """Does not matter here."""

    def correct(self, customer: str, tokens: float) -> None:
        """Does not matter here."""

    def pick(self, limit: int) -> list[Pick]:
        """Return the next chunks in the order."""
        picks: list[Pick] = []
        for key in self._order:
            if limit <= 0:
                break
            chunks = min(limit, self._batches[key[-1]].pending_chunks)
            picks.append(Pick(batch_id=key[-1], chunks=chunks))
            limit -= chunks
        return picks

    def _key(self, batch: WaitingBatch) -> tuple[float, float, str]:
        return (batch.deadline_at if self._by_deadline else batch.created_at, batch.created_at, batch.batch_id)


class RoundRobinQueue:
    """A chunk of each waiting customer in turn, whatever its size; first come first served within a customer."""

    def __init__(self) -> None:
        self._of_customer: dict[str, SortedQueue] = {}
        self._customers: dict[str, str] = {}
        self._last_turn: dict[str, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._customers)

    def waiting(self) -> Iterator[WaitingBatch]:
        """Yield what waits, in no order."""
        return (batch for queue in self._of_customer.values() for batch in queue.waiting())

    def look(self, now: float) -> None:
        """Does not matter here."""

    def join(self, customer: str) -> None:
        """Does not matter here."""

    def put(self, batch: WaitingBatch) -> None:
        """Add a batch, or replace what is known of it."""
        self._customers[batch.batch_id] = batch.customer
        self._of_customer.setdefault(batch.customer, SortedQueue(by_deadline=False)).put(batch)

    def remove(self, batch_id: str) -> None:
        """Forget a batch; nothing where it is not there."""
        customer = self._customers.pop(batch_id, None)
        if customer is None:
            return
        self._of_customer[customer].remove(batch_id)
        if not len(self._of_customer[customer]):
            del self._of_customer[customer]

    def set_speed(self, tokens_per_second: float) -> None:
        """Does not matter here."""

    def charge(self, had: Charge) -> None:
        """It has had its turn."""
        self._turn += 1
        self._last_turn[had.customer] = self._turn

    def correct(self, customer: str, tokens: float) -> None:
        """A turn is a chunk, whatever it used."""

    def pick(self, limit: int) -> list[Pick]:
        """Return one chunk at most: the next customer is known once that has had its turn."""
        if not self._of_customer or limit <= 0:
            return []
        customer = min(self._of_customer, key=lambda name: (self._last_turn.get(name, 0), name))
        return self._of_customer[customer].pick(1)


def _discard(ordered: list[_Entry], entry: _Entry) -> None:
    """Take an entry, which is there, out of a sorted list."""
    del ordered[bisect_left(ordered, entry)]
