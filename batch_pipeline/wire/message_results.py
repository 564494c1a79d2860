"""Results as Anthropic's message batches have them, made of the lines of our output and error files; pure.

| our line | result |
| --- | --- |
| a response with a status below 300 | `succeeded`, with the engine's message |
| a response with another status, or an error | `errored`, with Anthropic's type for it |
| `batch_expired` | `expired` |
| `batch_cancelled` | `canceled` |
"""

from __future__ import annotations

import re

import msgspec

from batch_pipeline.wire import codes

INVALID = "invalid_request_error"
_API_ERROR = "api_error"
_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_BY_CODE = {
    codes.MODEL_NOT_FOUND: "not_found_error",
    codes.TOKEN_LIMIT_EXCEEDED: "rate_limit_error",
    codes.REQUEST_TIMEOUT: "timeout_error",
    **dict.fromkeys(
        (
            codes.INVALID_JSON_LINE,
            codes.INVALID_REQUEST,
            codes.URL_MISMATCH,
            codes.DUPLICATE_CUSTOM_ID,
            codes.CONTEXT_LENGTH_EXCEEDED,
            codes.LINE_TOO_LONG,
            codes.INVALID_LINES,
        ),
        INVALID,
    ),
}
_BODY = re.compile(r"\bbody(?=\.| must| is )")


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class _Said(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """What an engine answers instead of a message: as Anthropic has it, or as OpenAI has it."""

    error: _Said


class _ErrorObject(msgspec.Struct):
    type: str
    message: str


class _ErrorResponse(msgspec.Struct):
    error: _ErrorObject
    type: str = "error"


class _Succeeded(msgspec.Struct, tag_field="type", tag="succeeded"):
    message: msgspec.Raw


class _Errored(msgspec.Struct, tag_field="type", tag="errored"):
    error: _ErrorResponse


class _Canceled(msgspec.Struct, tag_field="type", tag="canceled"):
    pass


class _Expired(msgspec.Struct, tag_field="type", tag="expired"):
    pass


class _Individual(msgspec.Struct):
    custom_id: str
    result: _Succeeded | _Errored | _Canceled | _Expired


_lines = msgspec.json.Decoder(_Line)
_refusals = msgspec.json.Decoder(_Refusal)
_encode = msgspec.json.Encoder().encode


def error_type(status: int) -> str:
    """Return Anthropic's word for an HTTP status."""
    return _BY_STATUS.get(status, _API_ERROR if status >= 500 else INVALID)


def result_line(line: bytes) -> bytes:
    """Return the result, with a newline, that a line of an output or error file stands for.

    Raises msgspec.DecodeError where it is no such line.
    """
    read = _lines.decode(line)
    # Lines of other doors may lack it; those of this one never do.
    return _encode(_Individual(read.custom_id or "", _result(read))) + b"\n"


def _result(read: _Line) -> _Succeeded | _Errored | _Canceled | _Expired:
    if read.response is not None:
        status = read.response.status_code
        if status < 300:
            return _Succeeded(read.response.body)
        return _errored(error_type(status), _message(read.response))
    error = read.error or _Error("", "no result")
    if error.code == codes.BATCH_EXPIRED:
        return _Expired()
    if error.code == codes.BATCH_CANCELLED:
        return _Canceled()
    kind = _BY_CODE.get(error.code, _API_ERROR)
    return _errored(kind, _BODY.sub("params", error.message) if kind == INVALID else error.message)


def _errored(kind: str, message: str) -> _Errored:
    return _Errored(_ErrorResponse(_ErrorObject(kind, message)))


def _message(response: _Response) -> str:
    try:
        return _refusals.decode(response.body).error.message
    except msgspec.DecodeError:
        return f"the engine answered {response.status_code}"
