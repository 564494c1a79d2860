"""From what the engine answered, or did not, to the line that the customer gets."""

from __future__ import annotations

import hashlib
from enum import Enum

import msgspec

from batch_pipeline import ids
from batch_pipeline.engine.client import Answer, with_member
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest
from batch_pipeline.wire.lines import EngineResponse, LineError, ResultLine, decode_result, encode_result

_REFUSALS = frozenset({401, 403, 407, 408, 425, 429, 503})
"""Statuses that say nothing about the request: the engine as a whole is busy, away, or does not know us."""


_NO_RESULT = frozenset({"failed", "cancelled", "queued", "in_progress"})
"""What a response (/v1/responses) with status 200 says of itself where the engine broke off, or has not begun.
`completed` is a result, and so is `incomplete`: it ends at max_output_tokens, as a chat with `finish_reason: length`.
"""


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
        return Meaning.FAILED if answer.state in _NO_RESULT else Meaning.FINAL
    if 400 <= answer.status < 500:
        return Meaning.FINAL
    return Meaning.FAILED


def salted(body: bytes, customer: str) -> bytes:
    """Return a request's body with the salt of its customer's prefix cache (vLLM's `cache_salt`).

    What was cached for one customer is then never a hit for another: the cached tokens that a result tells would say
    what others have asked. Intake lets no customer set a salt.
    """
    salt = hashlib.sha256(f"batch-pipeline:{customer}".encode()).hexdigest()[:32]
    return with_member(body, b'"cache_salt":"%s"' % salt.encode())


def unstored(body: bytes) -> bytes:
    """Return a body of /v1/responses that tells the engine to keep nothing.

    vLLM would keep each response for ever where VLLM_ENABLE_RESPONSES_API_STORE is set. Intake takes the customer's own
    `store` out.
    """
    return with_member(body, b'"store":false')


def said(answer: Answer) -> str:
    """Return what the engine answered, for a message."""
    state = f'with a response that is "{answer.state}"' if answer.state in _NO_RESULT else ""
    return " ".join(word for word in (str(answer.status), answer.message, state) if word)


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


def shared(batch_id: str, request: ChunkRequest, ran: FinishedRequest) -> FinishedRequest:
    """Return the result of a request that takes the one of another; its tokens count there."""
    line = msgspec.structs.replace(
        decode_result(ran.line),
        id=ids.request_id(batch_id, request.index),
        custom_id=request.custom_id,
        shared_with=ids.request_id(batch_id, ran.index),
    )
    return FinishedRequest(request.index, ran.is_error, encode_result(line), 0, 0, 0)
