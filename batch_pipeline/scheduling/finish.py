"""When each waiting batch of a model will be done: the order of `scheduling.order` run ahead as a fluid (pure).

Instead of chunks it lets tokens flow, as the weighted fair queue would in the limit of small chunks (generalized
processor sharing: Parekh and Gallager, 1993): customers whose counter is least share the speed by their weights, a
customer's batches go one after the other by their rank, and a batch at risk gets the share of help where its customer's
turns give it less. What is not fluid is the end: the last chunk is run by one worker, at that one's speed.

Service is counted in tokens since now (`delivered`), and becomes time only through `Supply`: so workers that are still
to come bend the time and not the order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from batch_pipeline.scheduling.order import (
    SLIP,
    Conditions,
    CustomerShare,
    WaitingBatch,
    latest_start,
    lost_from,
    rank,
)

_EPSILON = 1e-9
_MOST_HELP = 0.99
_MOMENT = 1e-3
"""Seconds that do not matter."""
_LOOKS = 3
"""So often at most it is looked whether a batch has come to be at risk: one that is being worked on comes nearer to it
ever more slowly."""


class QueuedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of which something is not done yet. Its tokens are as they are expected to be used."""

    waiting: WaitingBatch
    """Its pending chunks, which may be none."""
    leased_chunks: int = 0
    leased_tokens: float = 0.0
    """What is left of the chunks that workers have."""


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's workers do, now and from some moments on."""

    steps: list[tuple[float, float]]
    """From when (UTC seconds, ascending, the first is now) they do how many tokens a second together."""
    worker_tokens_per_second: float
    """Of one of them; above 0."""

    def at(self, delivered: float) -> float:
        """Return when so many tokens are done (UTC seconds); infinity where they never are."""
        for (since, speed), (until, _) in zip(self.steps, [*self.steps[1:], (float("inf"), 0.0)], strict=True):
            if delivered <= 0:
                return since
            if speed > 0 and delivered <= speed * (until - since):
                return since + delivered / speed
            delivered -= speed * (until - since) if speed > 0 else 0.0
        return float("inf")

    def delivered(self, moment: float) -> float:
        """Return how many tokens are done at a moment."""
        ends = [*(since for since, _ in self.steps[1:]), float("inf")]
        done = [
            speed * (min(until, moment) - since)
            for (since, speed), until in zip(self.steps, ends, strict=True)
            if since < moment
        ]
        return sum(done)


def estimated_finishes(
    queued: Sequence[QueuedBatch],
    shares: Mapping[str, CustomerShare],
    supply: Supply,
    conditions: Conditions,
    help_share: float,
) -> dict[str, float]:
    """Return when each batch will be done (UTC seconds), by its id; those that never will be are left out.

    `conditions` are what the order is judged by, without its credit, `help_share` of the service may go to batches at
    risk. Cost: O(n log n) for n batches.
    """
    fluid = _Fluid(queued, shares, supply, conditions, help_share)
    fluid.run()
    finishes = {}
    for batch in queued:
        waiting = batch.waiting
        if waiting.pending_chunks:
            begun = fluid.begun.get(waiting.batch_id, float("inf"))
            finish = begun + _last_chunk(waiting) / supply.worker_tokens_per_second
        else:
            finish = supply.at(_EPSILON) + _in_hands_seconds(batch, supply)
        if finish < float("inf"):
            finishes[waiting.batch_id] = finish
    return finishes


def _last_chunk(waiting: WaitingBatch) -> float:
    return waiting.pending_tokens / waiting.pending_chunks


def _in_hands_seconds(batch: QueuedBatch, supply: Supply) -> float:
    """Return how long the last of a batch's leased chunks takes, all of which run at once: the longest of so many that
    are each drawn evenly between nothing and twice the mean.
    """
    chunks = max(batch.leased_chunks, 1)
    return batch.leased_tokens / chunks * 2 * chunks / (chunks + 1) / supply.worker_tokens_per_second


class _Piece:
    """A part of a batch that is served as one: all that waits but its last chunk, or that."""

    __slots__ = ("begins_last", "left", "size", "waiting")

    def __init__(self, waiting: WaitingBatch, size: float, *, begins_last: bool = False) -> None:
        self.waiting = waiting
        self.size = self.left = size
        self.begins_last = begins_last
        """Whether the batch's last chunk is begun when this is done."""


class _Customer:
    """Where a customer stands, and its pieces, the next one last."""

    __slots__ = ("counter", "mark", "name", "pieces", "weight")

    def __init__(self, name: str, share: CustomerShare, base: float) -> None:
        self.name = name
        self.weight = share.weight
        self.counter = share.served - base
        """While it does not take part; else it is the level."""
        self.pieces: list[_Piece] = []
        self.mark: float | None = None
        """The level at which its next piece is done; None while it does not take part."""


class _Fluid:
    """The queue as it drains. Customers that take part have their counter at the level; the others are above it."""

    def __init__(
        self,
        queued: Sequence[QueuedBatch],
        shares: Mapping[str, CustomerShare],
        supply: Supply,
        conditions: Conditions,
        help_share: float,
    ) -> None:
        self.begun: dict[str, float] = {}
        """When the last pending chunk of each batch is begun (UTC seconds)."""
        self._supply = supply
        self._conditions = conditions
        # Others flow on beside the help, however slowly.
        self._help_share = min(help_share, _MOST_HELP)
        # What workers have in hands comes first, whoever's turn it is; the counters have it already.
        self._delivered = sum(batch.leased_tokens for batch in queued)
        self._customers: dict[str, _Customer] = {}
        self._left: dict[str, float] = {}
        """Of each batch, what its pieces that are not done had at the beginning; and how many they are."""
        self._pieces: Counter[str] = Counter()
        self._fill(queued, shares)
        for customer in self._customers.values():
            self._pieces.update(piece.waiting.batch_id for piece in customer.pieces)
        self._joining = [(customer.counter, customer.name) for customer in self._customers.values()]
        heapq.heapify(self._joining)
        self._ending: list[tuple[float, str]] = []
        """The marks; with what is out of date."""
        self._level = self._joining[0][0] if self._joining else 0.0
        self._takers = 0
        """Customers that take part, and their weights together."""
        self._weight = 0.0
        self._urgent = self._may_be_at_risk(queued)
        self._helped: _Customer | None = None
        """Who has the share of help at this moment; it does not take part, and others do."""

    def _fill(self, queued: Sequence[QueuedBatch], shares: Mapping[str, CustomerShare]) -> None:
        # Counters grow for ever: only by how much they differ matters here.
        base = min((share.served for share in shares.values()), default=0.0)
        pending = [batch.waiting for batch in queued if batch.waiting.pending_chunks]
        for waiting in sorted(pending, key=lambda waiting: rank(waiting, self._conditions), reverse=True):
            share = shares.get(waiting.customer, CustomerShare())
            customer = self._customers.setdefault(waiting.customer, _Customer(waiting.customer, share, base))
            last = _last_chunk(waiting)
            customer.pieces.append(_Piece(waiting, last))
            customer.pieces.append(_Piece(waiting, waiting.pending_tokens - last, begins_last=True))
            self._left[waiting.batch_id] = waiting.pending_tokens

    def _may_be_at_risk(self, queued: Sequence[QueuedBatch]) -> list[tuple[float, str, int, WaitingBatch]]:
        """Return a heap of when batches may come to be at risk, if nothing of them is done until then."""
        conditions, speed = self._conditions, self._conditions.tokens_per_second
        if self._help_share <= 0 or speed <= 0:
            return []
        waiting = [batch.waiting for batch in queued if batch.waiting.pending_chunks]
        heap = [
            (latest_start(batch, speed) - conditions.margin_seconds, batch.batch_id, _LOOKS, batch)
            for batch in waiting
            if conditions.now <= lost_from(batch, speed)
        ]
        heapq.heapify(heap)
        return heap

    def run(self) -> None:
        """Let all of it flow."""
        while self._joining or self._takers or self._helped is not None:
            self._stop_helping()
            self._join()
            self._help()
            self._flow()
            self._end_pieces()

    # Taking part.

    def _join(self) -> None:
        """Let those take part whose counter the level has reached; where nobody does, it leaps to the next one's."""
        if not self._takers and self._joining:
            self._level = max(self._level, self._joining[0][0])
        while self._joining and self._joining[0][0] <= self._level + self._tolerance():
            customer = self._customers[heapq.heappop(self._joining)[1]]
            self._takers += 1
            self._weight += customer.weight
            self._begin_piece(customer)

    def _tolerance(self) -> float:
        """Return how near levels are the same: nearer than that, a step might be too small to change a float."""
        return _EPSILON * max(1.0, abs(self._level))

    def _begin_piece(self, customer: _Customer) -> None:
        customer.mark = self._level + customer.pieces[-1].left / customer.weight
        heapq.heappush(self._ending, (customer.mark, customer.name))

    def _leave(self, customer: _Customer) -> None:
        customer.counter, customer.mark = self._level, None
        self._takers -= 1
        self._weight = self._weight - customer.weight if self._takers else 0.0

    def _left_of(self, customer: _Customer, batch_id: str) -> float:
        """Return the tokens of a batch that are not done at this moment."""
        piece = customer.pieces[-1]
        if customer.mark is not None:
            piece.left = max((customer.mark - self._level) * customer.weight, 0.0)
        done = piece.size - piece.left if piece.waiting.batch_id == batch_id else 0.0
        return self._left[batch_id] - done

    # Help.

    def _help(self) -> None:
        """Give the share of help to the first batch at risk, where its customer's turns give it less."""
        while (batch := self._first_at_risk()) is not None:
            customer = self._customers[batch.customer]
            if customer.mark is not None:
                if customer.weight >= self._help_share * self._weight:
                    return
                self._leave(customer)
            else:
                self._joining.remove((customer.counter, customer.name))
                heapq.heapify(self._joining)
            if customer.pieces[-1].waiting is not batch:
                # It goes ahead of its customer's others, as in `choose`.
                own = [piece for piece in customer.pieces if piece.waiting is batch]
                customer.pieces = [piece for piece in customer.pieces if piece.waiting is not batch] + own
            self._helped = customer
            return

    def _first_at_risk(self) -> WaitingBatch | None:
        """Return the batch at risk that has the least slack; forgets those that are done or lost."""
        speed, margin = self._conditions.tokens_per_second, self._conditions.margin_seconds
        while self._urgent:
            at, batch_id, looks, batch = self._urgent[0]
            now = self._supply.at(self._delivered)
            if at > now + _MOMENT:
                return None
            left = self._left_of(self._customers[batch.customer], batch_id) if self._pieces[batch_id] else 0.0
            late = batch.deadline_at - left / speed
            if left <= _EPSILON or now > late + SLIP * left / speed:
                heapq.heappop(self._urgent)
            elif late - margin > now + _MOMENT and looks:
                heapq.heapreplace(self._urgent, (late - margin, batch_id, looks - 1, batch))
            else:
                return batch
        return None

    def _stop_helping(self) -> None:
        """Put whoever was helped back to those that wait for their turn: it is decided anew."""
        if self._helped is not None and self._helped.pieces:
            heapq.heappush(self._joining, (self._helped.counter, self._helped.name))
        self._helped = None

    # Flowing.

    def _flow(self) -> None:
        """Go on to the next moment at which anything changes."""
        if not self._takers:
            return
        helped = self._helped
        help_share = 0.0 if helped is None else self._help_share
        rise = (1.0 - help_share) / self._weight
        """Of the level, for each token."""
        while self._customers[self._ending[0][1]].mark != self._ending[0][0]:
            heapq.heappop(self._ending)
        steps = [(self._ending[0][0] - self._level) / rise]
        if self._joining:
            steps.append((self._joining[0][0] - self._level) / rise)
        if helped is not None:
            steps.append(helped.pieces[-1].left / help_share)
            nearer = rise - help_share / helped.weight
            if nearer > 0 and helped.counter > self._level:
                steps.append((helped.counter - self._level) / nearer)
        if self._urgent:
            until_risk = self._supply.delivered(self._urgent[0][0]) - self._delivered
            steps += [until_risk] if until_risk > 0 else []
        step = max(min(steps), 0.0)
        self._delivered += step
        self._level += step * rise
        if helped is not None:
            helped.pieces[-1].left -= step * help_share
            helped.counter += step * help_share / helped.weight

    def _end_pieces(self) -> None:
        while self._ending and self._ending[0][0] <= self._level + self._tolerance():
            mark, name = heapq.heappop(self._ending)
            customer = self._customers[name]
            if customer.mark == mark:
                self._end_piece(customer)
                if customer.pieces:
                    self._begin_piece(customer)
                else:
                    self._leave(customer)
        helped = self._helped
        while helped is not None and helped.pieces and helped.pieces[-1].left <= _EPSILON * helped.pieces[-1].size:
            self._end_piece(helped)

    def _end_piece(self, customer: _Customer) -> None:
        piece = customer.pieces.pop()
        batch_id = piece.waiting.batch_id
        self._pieces[batch_id] -= 1
        # Not what sums of floats have left over.
        self._left[batch_id] = self._left[batch_id] - piece.size if self._pieces[batch_id] else 0.0
        if piece.begins_last:
            # Not before there is a worker at all.
            self.begun[batch_id] = self._supply.at(max(self._delivered, _EPSILON))
