"""From what the engine answered, or did not, to the line that the customer gets."""

from __future__ import annotations

import hashlib
from enum import Enum

import msgspec

from batch_pipeline import ids
from batch_pipeline.engine.client import Answer
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest
from batch_pipeline.wire.lines import EngineResponse, LineError, ResultLine, encode_result

_REFUSALS = frozenset({401, 403, 407, 408, 425, 429, 503})
"""Statuses that say nothing about the request: the engine as a whole is busy, away, or does not know us."""


class Meaning(Enum):
    """What an answer means for the request."""

    FINAL = "final"
    """It is the result: a success, or a fault of the request itself."""
    REFUSED = "refused"
    """Not now: to be tried again until the deadline, however often."""
    FAILED = "failed"
    """The engine could not do it: to be tried again a few times."""


def meaning(answer: Answer) -> Meaning:
    """Return what to do with an answer."""
    if answer.status in _REFUSALS:
        return Meaning.REFUSED
    if 200 <= answer.status < 300 and answer.is_json:
        return Meaning.FINAL
    if 400 <= answer.status < 500:
        return Meaning.FINAL
    return Meaning.FAILED


def salted(body: bytes, customer: str) -> bytes:
    """Return a request's body with the salt of its customer's prefix cache (vLLM's `cache_salt`).

    What was cached for one customer is then never a hit for another: the cached tokens that a result tells would say
    what others have asked. Intake lets no customer set a salt.
    """
    start = body.rstrip()[:-1]
    salt = hashlib.sha256(f"batch-pipeline:{customer}".encode()).hexdigest()[:32]
    return b'%s%s"cache_salt":"%s"}' % (start, b"" if start.rstrip().endswith(b"{") else b",", salt.encode())


def from_answer(batch_id: str, request: ChunkRequest, answer: Answer) -> FinishedRequest:
    """Return the output line of a success, or the error line of a 4xx with the engine's own words."""
    request_id = ids.request_id(batch_id, request.index)
    line = ResultLine(
        id=request_id,
        custom_id=request.custom_id,
        response=EngineResponse(answer.status, answer.request_id or request_id, msgspec.Raw(answer.body)),
        error=None,
    )
    is_error = answer.status >= 300
    if is_error:
        return FinishedRequest(request.index, True, encode_result(line), 0, 0, 0)
    return FinishedRequest(
        request.index,
        False,
        encode_result(line),
        answer.input_tokens,
        answer.cached_tokens,
        answer.output_tokens,
    )


def from_error(batch_id: str, request: ChunkRequest, code: str, message: str) -> FinishedRequest:
    """Return the error line of a request that got no response; it costs no tokens."""
    line = ResultLine(
        id=ids.request_id(batch_id, request.index),
        custom_id=request.custom_id,
        response=None,
        error=LineError(code, message),
    )
    return FinishedRequest(request.index, True, encode_result(line), 0, 0, 0)
