"""Commits that come while one is under way go together: small chunks end in crowds, and a transaction has its price."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger.records import ChunkResult, CommitReply, LeaseRef
from batch_pipeline.worker.outages import is_outage

CommitAll = Callable[[Mapping[LeaseRef, ChunkResult]], Mapping[LeaseRef, CommitReply | LeaseLost]]


class _Waiting(NamedTuple):
    """One commit."""

    ref: LeaseRef
    result: ChunkResult
    reply: Future[CommitReply]


class Commits:
    """One transaction at a time, with all that wait for it. Called by threads, each for one chunk."""

    def __init__(self, commit_all: CommitAll) -> None:
        self._commit_all = commit_all
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []

    def commit(self, ref: LeaseRef, result: ChunkResult) -> CommitReply:
        """Commit a chunk as `Chunks.commit` does, alone or with others; an outage is raised to all that it met.

        Killed before the transaction's commit none of them is committed, after it all are; each may be repeated.
        """
        mine = _Waiting(ref, result, Future())
        with self._lock:
            self._waiting.append(mine)
        with self._turn:
            if not mine.reply.done():
                self._commit_waiting()
        return mine.reply.result()

    def _commit_waiting(self) -> None:
        with self._lock:
            together, self._waiting = self._waiting, []
        self._commit_together(together)

    def _commit_together(self, together: list[_Waiting]) -> None:
        try:
            replies = self._commit_all({each.ref: each.result for each in together})
        except BaseException as error:  # noqa: BLE001 - it is raised to whom it concerns
            if len(together) > 1 and not is_outage(error):
                # One of them cannot be written: that is not to cost the others their work.
                for each in together:
                    self._commit_together([each])
            else:
                for each in together:
                    each.reply.set_exception(error)
            return
        for each in together:
            reply = replies[each.ref]
            if isinstance(reply, LeaseLost):
                each.reply.set_exception(reply)
            else:
                each.reply.set_result(reply)
