"""What a customer may choose for a batch, the same at every door: how each choice is written and what is allowed.

A choice that cannot be granted raises CustomerError with the code `invalid_option`; its message names the option, what
was given and what is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from batch_pipeline import settings as configuration
from batch_pipeline.errors import CustomerError
from batch_pipeline.ledger.records import OnInvalid
from batch_pipeline.models import ENDPOINTS
from batch_pipeline.plain import printable
from batch_pipeline.wire import codes

DEFAULT_ENDPOINT = "/v1/chat/completions"
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512
"""The three limits are those of OpenAI's batch API."""
SHARE_IDENTICAL = "share-identical"
"""The pair of the metadata that says whether identical requests are to share one call of the engine."""

_WINDOW = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN_CHARACTERS = 60
_PARAMS = {"completion window": "completion_window", "endpoint": "endpoint", "on-invalid": "on_invalid"}
"""Options as the API's bodies name them; the rest are parts of the metadata."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of one batch, checked."""

    endpoint: str
    window_seconds: int
    """From the creation of the batch to its deadline."""
    on_invalid: OnInvalid
    metadata: dict[str, str]


def choose(
    limits: configuration.Intake,
    *,
    endpoint: str | None = None,
    window: str | None = None,
    on_invalid: str | None = None,
    share_identical: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Options:
    """Return checked options, with the default for each that is None. Raises CustomerError.

    `share_identical` is kept as a pair of the metadata, which says the same where it is given there: so every client of
    OpenAI's API can ask for it.
    """
    chosen = {} if share_identical is None else {SHARE_IDENTICAL: share_identical}
    return Options(
        endpoint=parse_endpoint(DEFAULT_ENDPOINT if endpoint is None else endpoint),
        window_seconds=limits.default_window_seconds if window is None else parse_window(window, limits),
        on_invalid=OnInvalid.SKIP if on_invalid is None else parse_on_invalid(on_invalid),
        metadata=check_metadata({**(metadata or {}), **chosen}),
    )


def shares_identical(metadata: Mapping[str, str]) -> bool:
    """Return whether identical requests of the batch with this metadata share one call of the engine."""
    return metadata.get(SHARE_IDENTICAL) == "yes"


def parse_window(text: str, limits: configuration.Intake) -> int:
    """Return the seconds of a completion window such as 24h, 90m, 3600s or 7d. Raises CustomerError."""
    match = _WINDOW.fullmatch(text.strip())
    if match is None:
        raise _refused("completion window", text, "write a whole number and a unit: 90m, 24h or 7d")
    seconds = int(match[1]) * _SECONDS[match[2]]
    if not limits.min_window_seconds <= seconds <= limits.max_window_seconds:
        shortest, longest = format_window(limits.min_window_seconds), format_window(limits.max_window_seconds)
        raise _refused("completion window", text, f"it may be from {shortest} to {longest}")
    return seconds


def format_window(seconds: int) -> str:
    """Return a window as it is written: the largest unit that leaves a whole number, days only from two on (24h)."""
    for unit, least in (("d", 2), ("h", 1), ("m", 1)):
        if seconds % _SECONDS[unit] == 0 and seconds // _SECONDS[unit] >= least:
            return f"{seconds // _SECONDS[unit]}{unit}"
    return f"{seconds}s"


def parse_endpoint(text: str) -> str:
    """Return the endpoint. Raises CustomerError where no model could be served on it."""
    if text not in ENDPOINTS:
        raise _refused("endpoint", text, f"it may be {', '.join(ENDPOINTS)}")
    return text


def parse_on_invalid(text: str) -> OnInvalid:
    """Return what a bad line is to do to the batch. Raises CustomerError."""
    try:
        return OnInvalid(text)
    except ValueError as error:
        accepted = "skip (the good lines run) or fail (nothing runs if a line is bad)"
        raise _refused("on-invalid", text, f"it may be {accepted}") from error


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata. Raises CustomerError where there is too much of it."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise _refused("metadata", f"{len(metadata)} pairs", f"at most {MAX_METADATA_PAIRS} are kept")
    for key, value in metadata.items():
        if not 1 <= len(key) <= MAX_METADATA_KEY_CHARACTERS:
            raise _refused("metadata", key, f"a key has 1 to {MAX_METADATA_KEY_CHARACTERS} characters")
        if not (key + value).isprintable():
            # Also lone surrogates (bytes of a command line that are not UTF-8), which no database and no JSON can hold.
            raise _refused(f"metadata {key}", value, "only printable text is kept")
        if len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise _refused(f"metadata {key}", value, f"a value has at most {MAX_METADATA_VALUE_CHARACTERS} characters")
    if metadata.get(SHARE_IDENTICAL, "no") not in ("yes", "no"):
        raise _refused(SHARE_IDENTICAL, metadata[SHARE_IDENTICAL], "it may be yes or no")
    return dict(metadata)


def _refused(option: str, given: str, accepted: str) -> CustomerError:
    shown = given if len(given) <= _SHOWN_CHARACTERS else f"{given[:_SHOWN_CHARACTERS]}…"
    return CustomerError(
        codes.INVALID_OPTION,
        f"{printable(option[: _SHOWN_CHARACTERS * 2])}: {shown!r} is not accepted; {accepted}",
        param=_PARAMS.get(option, "metadata"),
    )
