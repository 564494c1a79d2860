"""Very many rows for a ledger on Postgres, made by the server itself: a million chunks within a minute."""

from __future__ import annotations

from batch_pipeline.ledger import Ledger
from tests.fakes.ledger_values import MODEL

_BATCHES = """
INSERT INTO batches (batch_id, customer, name, door, endpoint, window_seconds, on_invalid, creation_key, input_key,
    input_bytes, input_etag, metadata, status, outcome, priority, revision, published, created_at, deadline_at,
    ended_at, input_sha256, models, total, invalid, completed, failed, expired, cancelled, errors, input_tokens,
    cached_tokens, output_tokens, intake_attempts, merge_attempts, run_due_at)
SELECT '{status}-' || lpad(n::text, 32, '0'), 'customer-' || mod(n, {customers}), 'file-' || n, 'drop',
    '/v1/chat/completions', 86400, 'skip', '{status}-' || n, 'inputs/' || n, 1, 'etag', '{{}}', '{status}',
    {outcome}, 0, 1, '', {now} - mod(n, 3600), {now} + 3600 + mod(n * 79, 82800), {ended_at},
    repeat('0', 64), '["{model}"]',
    {chunks} * 1000, 0, 0, 0, 0, 0, '[]', 0, 0, 0, 1, 0, 0
FROM generate_series(1, {batches}) AS n
"""
_CHUNKS = """
INSERT INTO chunks (batch_id, chunk, model, input_key, requests, first_index, last_index, prompt_tokens,
    max_output_tokens, state, token, failures, parts, committed_at)
SELECT '{status}-' || lpad(n::text, 32, '0'), c, '{model}', 'chunks/{status}-' || n || '/' || c, 1000, c * 1000,
    c * 1000 + 999, 2000, 1000, '{state}', {token}, 0, '[]', {ended_at}
FROM generate_series(1, {batches}) AS n, generate_series(0, {chunks} - 1) AS c
"""
_LANES = """
INSERT INTO lanes (batch_id, model, pending, leased, committed, stopped, requests, pending_tokens, completed, failed,
    input_tokens, cached_tokens, output_tokens, revision, tokens, customer, deadline_at)
SELECT batch_id, '{model}', {pending}, 0, {chunks} - {pending}, 0, {chunks} * 1000, {pending} * 3000, 0, 0, 0, 0, 0, 1,
    {chunks} * 3000, customer, deadline_at
FROM batches WHERE status = '{status}'
"""
_EVENTS = """
INSERT INTO events (at, batch_id, chunk, event, actor, token)
SELECT {now}, batch_id, chunk, 'committed', 'w', 1 FROM chunks WHERE state = 'committed'
"""
_CUSTOMERS = """
INSERT INTO customers (customer, weight, created_at) SELECT 'customer-' || n, 1 + mod(n, 3), {now}
FROM generate_series(0, {customers} - 1) AS n
"""
_SERVICE = """
INSERT INTO service (model, customer, tokens, floor, estimated_tokens, real_tokens)
SELECT '{model}', customer, 0, 0, 1000000, 700000 FROM customers
"""


def fill(ledger: Ledger, status: str, batches: int, chunks: int, customers: int) -> None:
    """Add batches with so many chunks each: waiting ones, or, with a status of `completed`, committed ones and their
    events.
    """
    is_done = status == "completed"
    now = ledger.now()
    words = {
        "status": status,
        "outcome": "'completed'" if is_done else "NULL",
        "ended_at": now if is_done else "NULL",
        "now": now,
        "batches": batches,
        "chunks": chunks,
        "customers": customers,
        "model": MODEL,
        "state": "committed" if is_done else "pending",
        "token": 1 if is_done else 0,
        "pending": 0 if is_done else chunks,
    }
    steps = [_BATCHES, _CHUNKS, _LANES]
    steps = [*steps, _EVENTS] if is_done else [_CUSTOMERS, *steps, _SERVICE]
    with ledger._database.engine.begin() as connection:
        for step in steps:
            connection.exec_driver_sql(step.format(**words))


def analyse(ledger: Ledger) -> None:
    """Let the planner know what is there, as Postgres does by itself after a while."""
    with ledger._database.engine.begin() as connection:
        connection.exec_driver_sql("ANALYZE")
