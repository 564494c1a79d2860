"""A chunk in a worker's hands, and the requests of it that are on their way.

loading ──read──> running ──last result──> committing ──> gone
   │                 ├──cancel, deadline, the worker ends──> stopping ──> gone
   └─────────────────┴──lease lost──> gone                (nothing is written any more)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from batch_pipeline.errors import ProofFailed
from batch_pipeline.ledger.records import Lease, LeaseRef
from batch_pipeline.store import keys
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest
from batch_pipeline.worker import outcome


class Phase(Enum):
    """Where a held chunk is."""

    LOADING = "loading"
    RUNNING = "running"
    COMMITTING = "committing"
    STOPPING = "stopping"
    """Nothing of it is fed any more; what is finished is saved, then it is handed back."""
    GONE = "gone"
    """Committed, handed back or lost."""


class HeldChunk:
    """One lease, its requests that were not fed yet, and the results so far."""

    def __init__(self, lease: Lease, nonce: str, valid_until: float) -> None:
        self.lease = lease
        self.phase = Phase.LOADING
        self.prefix = keys.attempt(lease.ref.batch_id, lease.ref.chunk, lease.ref.token, nonce)
        """Only this attempt writes there (invariant I4)."""
        self.valid_until = valid_until
        """On our own monotonic clock: when the lease has run out at the latest, unless a heartbeat extends it."""
        self.waiting: deque[ChunkRequest] = deque()
        """Requests that were not fed yet, in the order in which they run."""
        self.unsaved: list[FinishedRequest] = []
        """Results that no checkpoint holds yet."""
        self.parts_written = 0
        self.gone = asyncio.Event()
        self.writing = asyncio.Lock()
        """One writer at a time: checkpoint, commit, release."""
        self._results: dict[int, FinishedRequest] = {}
        self._expected: frozenset[int] = frozenset()
        self._sharing: dict[int, list[ChunkRequest]] = {}
        """Requests that take the result of another, which waits or is in flight: by its index."""

    @property
    def ref(self) -> LeaseRef:
        """The lease by name."""
        return self.lease.ref

    @property
    def unfed(self) -> int:
        """How many of its requests were not fed yet; an estimate while it loads."""
        return self.lease.requests if self.phase is Phase.LOADING else len(self.waiting)

    @property
    def is_complete(self) -> bool:
        """Whether every request has its result."""
        return len(self._results) == len(self._expected)

    def load(self, requests: Sequence[ChunkRequest], finished: Iterable[FinishedRequest]) -> None:
        """loading -> running: take the requests, and what earlier attempts had finished of them.

        Raises ProofFailed where the input is not the chunk that the ledger knows.
        """
        self._expected = frozenset(request.index for request in requests)
        if not len(self._expected) == len(requests) == self.lease.requests:
            raise ProofFailed([f"{self}: its input holds {len(self._expected)} requests, not {self.lease.requests}"])
        for result in finished:
            if result.index not in self._expected:
                raise ProofFailed([f"{self}: a checkpoint holds request {result.index}, which is not of this chunk"])
            self._results.setdefault(result.index, result)
        to_run = {request.index for request in requests if request.same_as < 0} - self._results.keys()
        for request in requests:
            if request.index in self._results:
                continue
            if request.same_as in to_run:
                self._sharing.setdefault(request.same_as, []).append(request)
            else:
                self.waiting.append(request)
        self.phase = Phase.RUNNING

    def finish(self, result: FinishedRequest) -> None:
        """Take the result of a request, and with it those of the requests that share it.

        All of them are in the same checkpoint, or none: killed before that is written, one of them runs again for all.
        Raises ProofFailed where one has a result already: a request has exactly one.
        """
        self._take(result)
        for request in self._sharing.pop(result.index, ()):
            self._take(outcome.shared(self.ref.batch_id, request, result))

    def _take(self, result: FinishedRequest) -> None:
        if result.index in self._results or result.index not in self._expected:
            raise ProofFailed([f"{self}: request {result.index} has a result already, or is not of this chunk"])
        self._results[result.index] = result
        self.unsaved.append(result)

    def results(self) -> list[FinishedRequest]:
        """Return the results of a complete chunk: exactly one for each of its requests. Raises ProofFailed."""
        if self._results.keys() != self._expected:
            missing = len(self._expected - self._results.keys())
            raise ProofFailed([f"{self}: {missing} of {len(self._expected)} requests have no result"])
        return list(self._results.values())

    def __str__(self) -> str:
        return f"chunk {self.ref.chunk} of {self.ref.batch_id} (lease {self.ref.token})"


@dataclass(eq=False, slots=True)
class Flight:
    """One request on its way to its result, over all of its tries."""

    chunk: HeldChunk
    request: ChunkRequest
    failures: int = 0
    """Tries that failed by its own fault, as far as one can tell."""
    refusals: int = 0
    """Tries that the engine refused: they say nothing about the request."""
    timeouts: int = 0
    """Tries without an answer in time."""
    hung: bool = False
    """Its last try got no answer in time, and nobody else did."""
    # Of the current try:
    fed_at: float = 0.0
    """On our own monotonic clock."""
    limit_seconds: float = 0.0
    """How long it may take."""
    epoch: int = 0
    """The gate's, when it was fed."""
    answers_before: int = 0
    """How many answers the engine had given when it was fed."""
    stops_before: int = 0
    """How often live traffic had stopped everything when it was fed."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def wanted(self) -> bool:
        """Whether its result still has a place to go to."""
        return self.chunk.phase is Phase.RUNNING
