"""What an engine's answer says of the tokens it took: read in one way wherever it is read.

The worker counts an answer when it comes, the proof counts it again from the file; an answer that the two understood
differently would be a batch that never ends. An engine is not to be trusted with sums either: a number that no request
can have used counts as nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_MOST = 2**31 - 1


class Details(msgspec.Struct, gc=False):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct, gc=False):
    """The `usage` of an answer's body, as it was sent."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    # As Anthropic's messages have it: the parts of the prompt that a cache had, or was given, are not in the first.
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    # As OpenAI's responses have it: the cached ones are in the first. Only they have this one.
    input_tokens_details: Details | None = None


class AnswerBody(msgspec.Struct, gc=False):
    """An answer's body, as far as tokens are concerned. One that does not decode into this tells no usage."""

    usage: ReportedUsage | None = None


class Tokens(NamedTuple):
    """Tokens that count: each from 0 to 2^31 - 1, and no more cached ones than there are."""

    input: int
    cached: int
    output: int


NO_TOKENS = Tokens(0, 0, 0)


def tokens_of(usage: ReportedUsage | None) -> Tokens:
    """Return the tokens that count."""
    if usage is None:
        return NO_TOKENS
    if usage.prompt_tokens is None and usage.input_tokens is not None and usage.input_tokens_details is not None:
        whole = _counted(usage.input_tokens)
        cached = _counted(usage.input_tokens_details.cached_tokens)
        return Tokens(whole, min(cached, whole), _counted(usage.output_tokens))
    if usage.prompt_tokens is None and usage.input_tokens is not None:
        read, made = _counted(usage.cache_read_input_tokens), _counted(usage.cache_creation_input_tokens)
        whole = _counted(_counted(usage.input_tokens) + read + made)
        return Tokens(whole, min(read, whole), _counted(usage.output_tokens))
    details = usage.prompt_tokens_details
    given = _counted(usage.prompt_tokens)
    cached = _counted(None if details is None else details.cached_tokens)
    return Tokens(given, min(cached, given), _counted(usage.completion_tokens))


def _counted(reported: int | None) -> int:
    return reported if reported is not None and 0 <= reported <= _MOST else 0
