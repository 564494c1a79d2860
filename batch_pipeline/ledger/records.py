"""What the ledger holds, as values. The life of a batch and of a chunk is drawn here; `batches` and `chunks`
implement it.

    batch   validating ──> in_progress ──> finalizing ──> completed | expired | cancelled
                └──> failed (nothing valid, or strict)       in_progress ──cancel──> cancelling ──> finalizing
    chunk   pending ──lease──> leased ──commit──> committed
                ^                 ├── lease expired / released (parts kept) ──> pending
                │                 │       (or failed, after too many attempts)
                └─────────────────┘      pending | leased ──cancel, deadline──> cancelled | expired

A batch that is to stop carries its `outcome` (expired, cancelled or failed) before its status changes: its pending
chunks stop at once, its leased ones when their worker lets go or their lease runs out, and then it is finalizing.

Times are UTC seconds since the epoch by the database's clock (invariant I3). Tokens, bytes and counts are whole
numbers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec


class BatchStatus(StrEnum):
    """Where a batch is. The words are those of OpenAI's batch API."""

    VALIDATING = "validating"
    """Its bytes are ours; intake has not finished."""
    IN_PROGRESS = "in_progress"
    """Its chunks are waiting for workers or being run."""
    FINALIZING = "finalizing"
    """Every chunk has stopped; the results file is being assembled."""
    COMPLETED = "completed"
    FAILED = "failed"
    """Nothing was valid, or its owner asked for strict and a line was bad."""
    EXPIRED = "expired"
    """The deadline passed; what was finished is in the files."""
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether no status follows this one."""
        return self in FINAL_STATUSES


FINAL_STATUSES = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class ChunkState(StrEnum):
    """Where a chunk is."""

    PENDING = "pending"
    LEASED = "leased"
    COMMITTED = "committed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    """Given up after too many attempts; what its attempts had finished is kept, the rest become errors."""


class WorkerState(StrEnum):
    """Where a worker is."""

    STARTING = "starting"
    """Its engine is loading."""
    READY = "ready"
    DRAINING = "draining"
    """It was told to leave and is handing back its leases."""
    STOPPED = "stopped"
    FAILED = "failed"
    """It could not start or could not go on; `detail` says why."""


class Door(StrEnum):
    """By which way a batch came in."""

    DROP = "drop"
    CLI = "cli"
    API = "api"
    DAGSTER = "dagster"


class OnInvalid(StrEnum):
    """What a bad line does to the batch."""

    SKIP = "skip"
    """It goes to the error file; the good lines run."""
    FAIL = "fail"
    """The batch fails, and nothing runs."""


class Stored(StrEnum):
    """What of a batch may still lie in the bucket."""

    ALL = "all"
    FILES = "files"
    """Its input, invalid lines and final files; what they were made from is gone."""
    NOTHING = "nothing"


class BatchError(msgspec.Struct, frozen=True):
    """One entry of a batch's `errors`, as OpenAI's batch object has it; `line` is 1-based, null for the whole batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known to create a batch. Its bytes already lie at `input_key` (docs/architecture.md)."""

    batch_id: str
    customer: str
    name: str
    """The file's name without `.jsonl`; the outbox folder is named after it."""
    door: Door
    endpoint: str
    window_seconds: int
    on_invalid: OnInvalid
    creation_key: str
    """Two creations with one key are one batch."""
    input_key: str
    input_bytes: int
    input_etag: str
    metadata: dict[str, str] = {}
    input_file_id: str | None = None
    """The file of the API that it was made from, if it was."""
    window_asked: str | None = None
    """The window in the customer's words, where the API gives it back as it was asked for."""
    output_expires_seconds: int | None = None
    """After its end: how long the API gives out its files, where its customer has chosen that."""
    announced: int | None = None
    """Its requests, where the door has counted them."""
    sent_sha256: str | None = None
    """Of the bytes that its door was sent, where that read them all: what tells one creation from another."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch as the ledger has it."""

    batch_id: str
    customer: str
    name: str
    door: Door
    endpoint: str
    window_seconds: int
    on_invalid: OnInvalid
    creation_key: str
    input_key: str
    input_bytes: int
    input_etag: str
    metadata: dict[str, str]

    status: BatchStatus
    outcome: BatchStatus | None
    """The final status that it is on its way to, once that is known."""
    priority: int
    """An operator's word: higher goes first within its customer. 0 unless asked."""
    revision: int
    """Grows with every change of this row."""
    created_at: float
    deadline_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    cancelling_at: float | None
    ended_at: float | None

    input_sha256: str | None
    """Of the input's bytes; known after intake."""
    invalid_key: str | None
    """The error lines that intake found, or None where it found none."""
    models: list[str]
    """Models that its valid requests name; known after intake."""
    total: int
    """Requests in the file: lines that are not blank. 0 until intake has finished."""
    invalid: int
    completed: int
    failed: int
    expired: int
    cancelled: int
    """The last four are the final counts, taken from the files; 0 before the end. `Progress` counts on the way."""
    errors: list[BatchError]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    output_key: str | None
    error_key: str | None
    manifest_key: str | None

    intake_attempts: int
    intake_run_id: str | None
    merge_attempts: int
    merge_run_id: str | None

    archived_at: float | None = None
    """When its chunks left the ledger: from then on the manifest has them."""
    work_removed_at: float | None = None
    """From then on what its files were made from (chunk inputs, checkpoints, chunk results) may be gone."""
    files_removed_at: float | None = None
    """From then on its files are not given out any more, and may be gone."""
    stored: Stored = Stored.ALL
    input_file_id: str | None = None
    """The file of the API that it was made from, if it was."""
    window_asked: str | None = None
    """The window in the customer's words, where the API gives it back as it was asked for."""
    output_expires_seconds: int | None = None
    """After its end: how long the API gives out its files, where its customer has chosen that."""
    announced: int | None = None
    """Its requests, where its door has counted them: known before intake."""
    deleted_at: float | None = None
    """When its customer deleted it: the message batches show it no more."""
    sent_sha256: str | None = None
    """Of the bytes that its door was sent, where that read them all."""


class NewChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that intake has written."""

    chunk: int
    """0-based number within the batch."""
    model: str
    input_key: str
    requests: int
    first_index: int
    last_index: int
    """Smallest and largest request index in it; it is contiguous where they are `requests` - 1 apart."""
    prompt_tokens: int
    max_output_tokens: int
    """Both are estimates for the scheduler, of all its requests together."""
    prefix_group: int | None = None
    """Number of the first chunk whose requests mostly have the same long prefix; None where no other chunk has it."""


class IntakeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What intake found and wrote. total = invalid + the requests of all chunks (invariant I2)."""

    total: int
    invalid: int
    input_sha256: str
    invalid_key: str | None
    errors: list[BatchError]
    """The first errors found, for the status; the file at `invalid_key` has them all."""
    chunks: list[NewChunk]


class LeaseRef(NamedTuple):
    """Names one lease of one chunk: the token grows with each attempt, and a stale one is refused (invariant I3)."""

    batch_id: str
    chunk: int
    token: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: finished requests of an unfinished chunk, at a key that only one attempt uses."""

    key: str
    requests: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that a worker holds until `expires_at`, with what earlier attempts had finished in `parts`."""

    ref: LeaseRef
    customer: str
    endpoint: str
    model: str
    input_key: str
    requests: int
    parts: list[Part]
    expires_at: float
    deadline_at: float
    attempts: int
    """Leases of this chunk so far, this one included."""
    tokens: int
    """Estimated tokens of all its requests, prompt and answer."""


class Standing(StrEnum):
    """What a heartbeat learns about a lease."""

    HELD = "held"
    LOST = "lost"
    """It ran out, or somebody else has the chunk: drop everything, write nothing."""
    STOP = "stop"
    """The batch was cancelled or is past its deadline: checkpoint what is finished and release."""


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger tells a worker that reports itself."""

    standings: dict[LeaseRef, Standing]
    leave: bool
    """The worker is asked to give way: hand back and end."""


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit points the chunk at: one object, the output lines in index order and after them the error lines."""

    result_key: str
    lines_key: str
    """Parquet of (index, is_error, length) for the lines of the result object, in their order there."""
    output_bytes: int
    error_bytes: int
    sha256: str
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    engine_version: str
    model_version: str


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk as the ledger has it."""

    batch_id: str
    chunk: int
    model: str
    input_key: str
    requests: int
    first_index: int
    last_index: int
    prompt_tokens: int
    max_output_tokens: int
    state: ChunkState
    token: int
    """Of its newest lease, and so the number of leases that it has had."""
    failures: int
    """Leases that ran out or failed; a worker that merely gave way is not counted."""
    worker_id: str | None
    run_id: str | None
    expires_at: float | None
    parts: list[Part]
    result: ChunkResult | None
    committed_at: float | None
    last_error: str | None
    prefix_group: int | None = None
    """As in NewChunk; not known any more once it has left the ledger."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one batch on one model: sums over its chunks, kept with every transition so that nothing scans
    chunks.
    """

    batch_id: str
    model: str
    pending: int
    leased: int
    committed: int
    stopped: int
    """Chunks that are cancelled, expired or failed."""
    requests: int
    pending_tokens: int
    """Estimated tokens (prompt and answer) of the pending chunks."""
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    revision: int
    tokens: int | None = None
    """Estimate of all its requests, prompt and answer."""


class CommitReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit, or a release of a stopped chunk, tells the worker."""

    batch_drained: bool
    """This was the batch's last chunk that was pending or leased."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the ledger has it."""

    worker_id: str
    model: str
    run_id: str | None
    host: str
    state: WorkerState
    detail: str | None
    batches: list[str]
    """Where not empty, the only batches that it serves: dedicated capacity."""
    started_at: float
    seen_at: float
    leave: bool
    ready_at: float | None = None
    """When its engine had loaded, for the first time."""
    tokens_per_second: float | None = None
    """Of requests that it has finished lately, prompt and answer."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One transition, for the audit trail."""

    sequence: int
    at: float
    batch_id: str
    chunk: int | None
    event: str
    """The transition's name, for instance `committed`."""
    actor: str
    """Who did it: a worker's id, a sensor, a customer's door, an operator."""
    token: int | None
    run_id: str | None
    detail: str | None


class FinalFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the merge counted in the files that it wrote, and where they are (invariants I6, I7)."""

    output_key: str | None
    error_key: str | None
    manifest_key: str
    completed: int
    failed: int
    expired: int
    cancelled: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    output_bytes: int = 0
    error_bytes: int = 0
    """Sizes of the two files."""
