"""Every error code that can stand in a result line, a batch's errors or an API answer, with what it means.

Codes of OpenAI's batch API keep their names; ours are added where it has none.
"""

from __future__ import annotations

# Found while validating: the line is no request that can be run. Error lines carry the line number.
INVALID_JSON_LINE = "invalid_json_line"
INVALID_REQUEST = "invalid_request"
URL_MISMATCH = "url_mismatch"
MODEL_NOT_FOUND = "model_not_found"
DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
LINE_TOO_LONG = "line_too_long"

# Of a whole batch.
EMPTY_BATCH = "empty_batch"
NO_VALID_REQUEST = "no_valid_request"
TOO_MANY_REQUESTS = "too_many_requests"
FILE_TOO_LARGE = "file_too_large"
INVALID_NAME = "invalid_name"
INVALID_OPTION = "invalid_option"
INVALID_LINES = "invalid_lines"
"""The owner asked for strict and at least one line is bad."""

BATCH_LIMIT_EXCEEDED = "batch_limit_exceeded"
"""The customer has as many open batches as it may have."""
TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"  # noqa: S105 - a word for customers
"""The customer's batches would have more enqueued tokens of a model than they may have."""

# Of a request that was valid.
BATCH_EXPIRED = "batch_expired"
BATCH_CANCELLED = "batch_cancelled"
REQUEST_TIMEOUT = "request_timeout"
ENGINE_CRASH = "engine_crash"
"""The engine died each time with this request alone in flight."""
ENGINE_ERROR = "engine_error"
"""The engine answered a 5xx each time."""
ANSWER_TOO_LARGE = "answer_too_large"
"""The engine's answer had more bytes than one may have."""
CHUNK_FAILED = "chunk_failed"
"""The request's chunk was given up after too many attempts that named no culprit."""
