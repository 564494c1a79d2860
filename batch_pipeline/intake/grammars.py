"""Schemas, regular expressions and grammars that an engine would compile: refused where a few bytes mean much work.

An engine turns them into automata before it generates a token, in the one thread that schedules everybody's requests.
`(a{1,9999}){1,9999}` has 21 bytes and a hundred million states. So besides the size of what is written, the size of
what is meant is bounded: repetitions count as often as they repeat.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

MAX_BYTES = 64 * 1024
MAX_MEMBERS = 2_000
"""Members of a schema's objects, all levels together: 5,000 properties held up every guided request for minutes."""
MAX_PATTERN_CHARACTERS = 4_096
MAX_STATES = 10_000
"""Characters of all patterns and bounds of one request, each counted as often as it is repeated."""

_BOUNDS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_PATTERNS = frozenset({"pattern", "regex", "whitespace_pattern"})
_GRAMMARS = frozenset({"grammar", "ebnf"})
_QUANTIFIER = re.compile(r"\{\s*(\d+)?\s*(,)?\s*(\d+)?\s*\}")
_MOST_DIGITS = 9


class _TooMuch(Exception):
    """What is meant is larger than an engine should be given."""


def problem_of(field: str, raw: bytes) -> str | None:
    """Return what is wrong with a field of a body that holds schemas, patterns or grammars, as JSON; or None."""
    wrong = _size_problem(raw)
    if wrong is None and any(word in raw for word in (b"{", b"[", b"}", b"\\")):
        wrong = _meaning_problem(field, raw)
    return None if wrong is None else f"body.{field} {wrong}"


def _size_problem(raw: bytes) -> str | None:
    mend = "larger ones hold up the engine for minutes; make it smaller"
    if len(raw) > MAX_BYTES:
        return f"has {len(raw)} bytes, and at most {MAX_BYTES} are allowed: {mend}"
    members = raw.count(b":")
    if members > MAX_MEMBERS:
        return f"has about {members} members, and at most {MAX_MEMBERS} are allowed: {mend}"
    return None


@lru_cache(maxsize=64)
def _meaning_problem(field: str, raw: bytes) -> str | None:
    """Remembers the last few, of MAX_BYTES at most: a file often has the same schema in every line."""
    try:
        value = msgspec.json.decode(raw)
        states = _states(field.removeprefix("guided_"), value)
    except _TooMuch as error:
        return str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"cannot be read: {error}"
    if states > MAX_STATES:
        return (
            f"has patterns, repetitions or bounds that amount to more than {MAX_STATES} characters; engines compile "
            "each repetition: lower them"
        )
    return None


def _states(name: str, value: Any) -> int:
    """Return the size of what a value of this name means. Raises _TooMuch. The JSON's depth is bounded before."""
    if isinstance(value, dict):
        return sum(_states(str(key), inner) for key, inner in value.items())
    if isinstance(value, list):
        return sum(_states(name, inner) for inner in value)
    if name in _BOUNDS and isinstance(value, int | float):
        return min(int(value), MAX_STATES + 1) if 0 <= value < 1e15 else MAX_STATES + 1
    return _text_states(name, value) if isinstance(value, str) else 0


def _text_states(name: str, text: str) -> int:
    if name in _PATTERNS:
        if len(text) > MAX_PATTERN_CHARACTERS:
            raise _TooMuch(f"has a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARACTERS} are allowed")
        return expanded(text)
    if name in _GRAMMARS:
        return expanded(text) - len(text)
    # A schema may also stand there as a text (vLLM: structured_outputs.json, structural_tag).
    if name in ("json", "structural_tag") and text.lstrip().startswith(("{", "[")):
        try:
            return _states("", msgspec.json.decode(text))
        except (msgspec.DecodeError, RecursionError):
            return 0  # the engine will say that it is no JSON
    return 0


def expanded(pattern: str) -> int:
    """Return how many characters a regular expression has when its bounded repetitions are written out.

    Needs no valid pattern: one that is wrong is the engine's to refuse. Cost: linear in its length.
    """
    total, last = [0], 0
    position = 0
    while position < len(pattern):
        character = pattern[position]
        repeat = _QUANTIFIER.match(pattern, position) if character == "{" else None
        if repeat is not None:
            times = max(_number(repeat[3]), _number(repeat[1]), 1)
            total[-1] += last * (times - 1)
            last *= times
            position = repeat.end()
            continue
        if character == "(":
            total.append(0)
        elif character == ")" and len(total) > 1:
            last = max(total.pop(), 1)
            total[-1] += last
        else:
            end = _atom_end(pattern, position)
            last = 1
            total[-1] += 1
            position = end - 1
        position += 1
        if total[-1] > MAX_STATES:
            return total[-1]
    return sum(total)


def _atom_end(pattern: str, start: int) -> int:
    """Return where one character, escape or class ends."""
    if pattern[start] == "\\":
        return min(start + 2, len(pattern))
    if pattern[start] == "[":
        end = start + 1
        while end < len(pattern) and (pattern[end] != "]" or end == start + 1):
            end += 2 if pattern[end] == "\\" else 1
        return min(end + 1, len(pattern))
    return start + 1


def _number(digits: str | None) -> int:
    if digits is None:
        return 0
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS
