"""How deeply a JSON text is nested: where a parser gives up depends on who calls it, so it is bounded before."""

from __future__ import annotations

import re

_TEXTS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


def depth_of(text: bytes, enough: int) -> int:
    """Return how deeply a JSON text is nested, counting no further than one above `enough`. Needs no valid JSON."""
    depth = deepest = 0
    for token in _TEXTS_AND_BRACKETS.finditer(text):
        kind = text[token.start()]
        if kind in _OPENING:
            depth += 1
            if depth > deepest:
                deepest = depth
                if deepest > enough:
                    break
        elif kind in _CLOSING:
            depth -= 1
    return deepest


def is_nested_beyond(text: bytes, most: int) -> bool:
    """Return whether a JSON text is nested more than `most` levels deep; cheap where it has few brackets."""
    return text.count(b"{") + text.count(b"[") > most and depth_of(text, most) > most
