"""Text of others (customers, engines, logs) where people and terminals read it: nothing in it can act on a terminal."""

from __future__ import annotations

import re

_KEPT = "\n\t"
_ASTRAL = 0x10000


def printable(text: str, kept: str = _KEPT) -> str:
    """Return the text with every character that is not printable written as JSON writes it, `\\u001b`.

    That is control characters (an escape sequence could retitle a terminal, or hide lines), marks that reverse the
    direction of what follows, zero-width ones, and lone surrogates. Line feeds and tabs are kept, unless `kept` says
    otherwise. Inside a JSON document it changes how a text is written and not what it says.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in kept else _escaped(ord(character)) for character in text
    )


def one_line(text: str, most: int = 300) -> str:
    """Return the text as one printable line of at most `most` characters: for logs and reasons."""
    line = printable(re.sub(r"\s+", " ", text[: 4 * most]).strip(), kept="")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _escaped(code: int) -> str:
    if code < _ASTRAL:
        return f"\\u{code:04x}"
    code -= _ASTRAL
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
