"""Which chunk next: a weighted fair queue over customers, least slack first inside a customer.

Service is counted in virtual tokens: the tokens of a leased chunk over its customer's weight. The customer with the
least goes next; each pick is charged before the next one is made, so that one call of several picks is as fair as
several calls. (The queue is start-time fair queueing with the counter of Sheng et al., "Fairness in Serving Large
Language Models", 2024.)
"""

from __future__ import annotations

import msgspec


class WaitingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with pending chunks of the model in question."""

    batch_id: str
    customer: str
    pending_chunks: int
    pending_tokens: int
    priority: int
    deadline_at: float
    created_at: float


class CustomerShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a customer has had of the model's service, in virtual tokens, and its weight (above 0)."""

    weight: float = 1.0
    served: float = 0.0


class Pick(msgspec.Struct, frozen=True, kw_only=True):
    """So many chunks of a batch, in the batch's own order."""

    batch_id: str
    chunks: int


def choose(
    waiting: list[WaitingBatch], shares: dict[str, CustomerShare], limit: int, tokens_per_second: float = 0.0
) -> list[Pick]:
    """Return which chunks to lease, in order, `limit` in all; fewer only where nothing more is waiting.

    `tokens_per_second` is the measured speed of the model's workers together, 0 where it is not known yet: slack is
    then the time to the deadline alone. Cost: O(n log n) in batches, O(limit * customers).
    """
    queues: dict[str, list[WaitingBatch]] = {}
    for batch in sorted(waiting, key=lambda batch: _urgency(batch, tokens_per_second)):
        queues.setdefault(batch.customer, []).append(batch)
    served = {customer: shares.get(customer, CustomerShare()).served for customer in queues}
    taken: dict[str, int] = {}
    order: list[str] = []
    for _ in range(limit):
        if not queues:
            break
        customer = min(queues, key=lambda name: (served[name], name))
        batch = queues[customer][0]
        if batch.batch_id not in taken:
            order.append(batch.batch_id)
        taken[batch.batch_id] = taken.get(batch.batch_id, 0) + 1
        weight = shares.get(customer, CustomerShare()).weight
        served[customer] += max(batch.pending_tokens / max(batch.pending_chunks, 1), 1.0) / weight
        if taken[batch.batch_id] >= batch.pending_chunks:
            queues[customer].pop(0)
            if not queues[customer]:
                del queues[customer]
    return [Pick(batch_id=batch_id, chunks=taken[batch_id]) for batch_id in order]


def _urgency(batch: WaitingBatch, tokens_per_second: float) -> tuple[int, float, float, str]:
    """Order within a customer: an operator's priority, then least slack, then first come."""
    work_seconds = batch.pending_tokens / tokens_per_second if tokens_per_second > 0 else 0.0
    return (-batch.priority, batch.deadline_at - work_seconds, batch.created_at, batch.batch_id)
