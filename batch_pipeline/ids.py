"""Identifiers: how they are made and what they may look like.

Batch ids of dropped files are derived from the drop, so that taking the same drop twice makes the same batch; all
others are random. A request's id is its identity (batch, index) in writing (invariant I1, docs/invariants.md).
"""

from __future__ import annotations

import hashlib
import re
import secrets

CUSTOMER_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")
"""1 to 64 of lower-case letters, digits, `-` and `_`, starting and ending with a letter or digit. Safe in keys and
paths.
"""

NAME_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,198}[A-Za-z0-9_-])?")
"""1 to 200 of letters, digits, `.`, `_` and `-`; no leading dot, so neither `..` nor a hidden file."""

BATCH_ID_PATTERN = re.compile(r"batch_[0-9a-f]{32}")


def new_batch_id() -> str:
    """Return a random batch id, `batch_` and 32 hexadecimal digits."""
    return f"batch_{secrets.token_hex(16)}"


def batch_id_from(creation_key: str) -> str:
    """Return the batch id that belongs to a creation key: the same key always gives the same id."""
    return f"batch_{hashlib.sha256(creation_key.encode()).hexdigest()[:32]}"


def new_file_id() -> str:
    """Return a random id of an uploaded file, `file-` and 32 hexadecimal digits."""
    return f"file-{secrets.token_hex(16)}"


def input_file_id(batch_id: str) -> str:
    """Return the file id of the input of a batch that was not made from a file."""
    return f"file-{batch_id.removeprefix('batch_')}-input"


def output_file_id(batch_id: str) -> str:
    """Return the file id of a batch's output."""
    return f"file-{batch_id.removeprefix('batch_')}-output"


def error_file_id(batch_id: str) -> str:
    """Return the file id of a batch's error file."""
    return f"file-{batch_id.removeprefix('batch_')}-errors"


def new_upload_id() -> str:
    """Return a random id of an upload in parts."""
    return f"upload_{secrets.token_hex(16)}"


def new_part_id() -> str:
    """Return a random id of a part of an upload."""
    return f"part_{secrets.token_hex(16)}"


def new_worker_id(model: str) -> str:
    """Return a random worker id that starts with the model's name, for people who read logs."""
    return f"worker-{model}-{secrets.token_hex(4)}"


def new_nonce() -> str:
    """Return a word that makes a key unique to one attempt (invariant I4)."""
    return secrets.token_hex(4)


def request_id(batch_id: str, index: int) -> str:
    """Return the id of request `index` (0-based line number) of a batch: deterministic, so that merges repeat (I5)."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{index:08d}"


def index_of(batch_id: str, request: str) -> int | None:
    """Return the index in a request id of this batch, or None where it is not one."""
    prefix = f"batch_req_{batch_id.removeprefix('batch_')}_"
    digits = request[len(prefix) :]
    if not request.startswith(prefix) or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits)
