"""Which chunk next: a weighted fair queue over customers, least slack first inside a customer, and batches at risk out
of turn as far as a credit allows (docs/scheduling.md).

Service is counted in virtual tokens: the tokens of a leased chunk over its customer's weight. The customer with the
least goes next; each pick is charged before the next one is made, so that one call of several picks is as fair as
several calls. (The queue is start-time fair queueing with the counter of Sheng et al., "Fairness in Serving Large
Language Models", 2024.) A pick out of turn is charged as well: who was helped gives the turns back.
"""

from __future__ import annotations

import msgspec

SLIP = 0.1
"""Share of its work by which a batch may miss its deadline, as measured, and still be thought to be able to make it:
speeds are measured, and vary."""


class WaitingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with pending chunks of the model in question."""

    batch_id: str
    customer: str
    pending_chunks: int
    pending_tokens: float
    """As they are expected to be used, prompt and answer (see `estimates`)."""
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
    out_of_turn: int = 0
    """So many of them go ahead of other customers' turns, because the batch is at risk."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's queue is judged by at one moment."""

    now: float = 0.0
    """UTC seconds, as deadlines."""
    tokens_per_second: float = 0.0
    """Of the model's workers together, 0 where it is not known: slack is then the time to the deadline alone."""
    margin_seconds: float = 0.0
    """A batch with less slack than this is at risk."""
    credit: float = 0.0
    """Tokens that may go out of turn now, to batches at risk; while it is above 0 one more chunk may."""


NO_CONDITIONS = Conditions()


def choose(
    waiting: list[WaitingBatch],
    shares: dict[str, CustomerShare],
    limit: int,
    conditions: Conditions = NO_CONDITIONS,
) -> list[Pick]:
    """Return which chunks to lease, in order, `limit` in all; fewer only where nothing more is waiting.

    Cost: O(n log n) in batches, O(limit * customers).
    """
    queues: dict[str, list[WaitingBatch]] = {}
    for batch in sorted(waiting, key=lambda batch: rank(batch, conditions)):
        queues.setdefault(batch.customer, []).append(batch)
    at_risk = sorted(
        (batch for batch in waiting if is_at_risk(batch, conditions)),
        key=lambda batch: (latest_start(batch, conditions.tokens_per_second), batch.batch_id),
    )
    served = {customer: shares.get(customer, CustomerShare()).served for customer in queues}
    credit = conditions.credit
    taken: dict[str, tuple[int, int]] = {}
    for _ in range(limit):
        if not queues:
            break
        batch = queues[min(queues, key=lambda name: (served[name], name))][0]
        tokens = chunk_tokens(batch)
        is_out_of_turn = bool(at_risk) and at_risk[0].customer != batch.customer and credit > 0
        if is_out_of_turn:
            batch = at_risk[0]
            tokens = chunk_tokens(batch)
            credit -= tokens
        chunks, out_of_turn = taken.get(batch.batch_id, (0, 0))
        taken[batch.batch_id] = (chunks + 1, out_of_turn + is_out_of_turn)
        served[batch.customer] += tokens / shares.get(batch.customer, CustomerShare()).weight
        if chunks + 1 >= batch.pending_chunks:
            at_risk = [other for other in at_risk if other is not batch]
            queues[batch.customer].remove(batch)
            if not queues[batch.customer]:
                del queues[batch.customer]
    return [
        Pick(batch_id=batch_id, chunks=chunks, out_of_turn=out_of_turn)
        for batch_id, (chunks, out_of_turn) in taken.items()
    ]


def slack(batch: WaitingBatch, conditions: Conditions) -> float:
    """Return the seconds that a batch may still wait, if all workers of the model were then its own."""
    return latest_start(batch, conditions.tokens_per_second) - conditions.now


def latest_start(batch: WaitingBatch, tokens_per_second: float) -> float:
    """Return until when a batch may wait, in UTC seconds. Unlike slack it does not change as time goes by."""
    return batch.deadline_at - work_seconds(batch, tokens_per_second)


def is_at_risk(batch: WaitingBatch, conditions: Conditions) -> bool:
    """Whether a batch has less slack than the margin, and can still make its deadline.

    One that cannot is not: helping it would cost others their deadlines and save none.
    """
    starts_by = latest_start(batch, conditions.tokens_per_second)
    return not _is_lost(batch, conditions) and starts_by - conditions.margin_seconds < conditions.now


def lost_from(batch: WaitingBatch, tokens_per_second: float) -> float:
    """Return the UTC second after which a batch cannot make its deadline any more, unless its workers become faster."""
    return latest_start(batch, tokens_per_second) + SLIP * work_seconds(batch, tokens_per_second)


def work_seconds(batch: WaitingBatch, tokens_per_second: float) -> float:
    """Return how long the model's workers together need for what is pending; 0 where their speed is not known."""
    return batch.pending_tokens / tokens_per_second if tokens_per_second > 0 else 0.0


def _is_lost(batch: WaitingBatch, conditions: Conditions) -> bool:
    return conditions.now > lost_from(batch, conditions.tokens_per_second)


def chunk_tokens(batch: WaitingBatch) -> float:
    """Return what a chunk of the batch is charged."""
    # Nothing is free, or its owner had all turns.
    return max(batch.pending_tokens / max(batch.pending_chunks, 1), 1.0)


def rank(batch: WaitingBatch, conditions: Conditions) -> tuple[int, bool, float, float, str]:
    """Order within a customer: an operator's priority, then what can be in time, then least slack, then first come."""
    starts_by = latest_start(batch, conditions.tokens_per_second)
    return (-batch.priority, _is_lost(batch, conditions), starts_by, batch.created_at, batch.batch_id)
