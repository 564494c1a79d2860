"""What an operator should look at in a batch, as checks with a verdict. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results.demand import ChunkSummary
from batch_pipeline.scheduling.risk import duration

MOST_INVALID = 0.1
"""Share of lines that may be invalid: more looks like a file of another format, or a customer's broken export."""
MOST_FAILED = 0.05
"""Share of requests that may end as errors: more looks like an engine's fault, and not like some odd requests."""


class Check(StrEnum):
    """The checks by name; they are evidence, and hold nothing up."""

    LINES_ACCOUNTED_FOR = "every_line_accounted_for"
    LINES_VALID = "lines_valid"
    NOTHING_GIVEN_UP = "no_chunk_given_up"
    REQUESTS_ANSWERED = "requests_answered"
    ON_TIME = "on_time"
    WORKERS = "every_model_has_workers"


MEANING = {
    Check.LINES_ACCOUNTED_FOR: "Every line of the upload is in exactly one chunk, or among the invalid lines.",
    Check.LINES_VALID: (
        f"At most {MOST_INVALID:.0%} of the lines are invalid. More looks like a broken export: tell the customer, "
        "with the errors in the metadata."
    ),
    Check.NOTHING_GIVEN_UP: (
        "No chunk was given up after too many attempts. If one was: see its attempts and the logs of their workers, "
        "mend the cause, and launch chunk_results while the batch is in progress."
    ),
    Check.REQUESTS_ANSWERED: (
        f"At most {MOST_FAILED:.0%} of the requests ended as errors. More looks like a fault of the engine or the "
        "model: see top_errors of batch_results."
    ),
    Check.ON_TIME: (
        "The batch ends, or is expected to end, before its deadline. If not: more workers, a higher priority (launch "
        "chunk_results), or dedicated capacity (launch the model's worker with the batch's id)."
    ),
    Check.WORKERS: (
        "Every model with waiting work has a worker, or has waited for one for a short time only. If not: see the runs "
        "of its worker job, and the pool."
    ),
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found."""

    check: Check
    passed: bool
    text: str
    figures: dict[str, int | float] = {}


def intake_verdicts(batch: Batch, in_chunks: int) -> list[Verdict]:
    """Return the verdicts on a batch whose intake is done; `in_chunks` requests are in its chunks."""
    invalid = batch.invalid / batch.total if batch.total else 0.0
    return [
        Verdict(
            check=Check.LINES_ACCOUNTED_FOR,
            passed=batch.total == batch.invalid + in_chunks,
            text=f"{batch.total} lines = {batch.invalid} invalid + {in_chunks} in chunks",
            figures={"lines": batch.total, "invalid": batch.invalid, "in_chunks": in_chunks},
        ),
        Verdict(
            check=Check.LINES_VALID,
            passed=invalid <= MOST_INVALID,
            text=f"{batch.invalid} of {batch.total} lines are invalid ({invalid:.1%})",
            figures={"invalid": batch.invalid, "lines": batch.total},
        ),
    ]


def chunk_verdicts(batch: Batch, chunks: ChunkSummary) -> list[Verdict]:
    """Return the verdicts on a batch whose chunks have all stopped."""
    done = chunks.completed + chunks.failed
    failed = chunks.failed / done if done else 0.0
    return [
        Verdict(
            check=Check.NOTHING_GIVEN_UP,
            passed=chunks.given_up == 0,
            text=f"{chunks.given_up} chunks were given up, {chunks.committed} are committed",
            figures={"given_up": chunks.given_up, "committed": chunks.committed},
        ),
        Verdict(
            check=Check.REQUESTS_ANSWERED,
            passed=failed <= MOST_FAILED,
            text=f"{chunks.failed} of {done} requests ended as errors ({failed:.1%})",
            figures={"failed": chunks.failed, "ended": done},
        ),
        on_time(batch),
    ]


def on_time(batch: Batch) -> Verdict:
    """Return the verdict on a batch whose chunks have all stopped: a cancelled one is not late."""
    ended = batch.finalizing_at or batch.ended_at or batch.deadline_at
    expired = BatchStatus.EXPIRED in (batch.status, batch.outcome)
    left = batch.deadline_at - ended
    text = f"its chunks ended {duration(abs(left))} {'before' if left >= 0 else 'after'} its deadline"
    return Verdict(check=Check.ON_TIME, passed=not expired, text="it has expired" if expired else text)
