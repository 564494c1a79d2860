"""What requests may share: hashes of the beginning of what an engine reads first, at four depths."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

PREFIX_BYTES = (64, 256, 1024, 4096)
"""Depths at which requests are compared: two that agree in so many bytes of what is rendered first share that prefix.
"""
COLUMNS = tuple(f"prefix_{size}" for size in PREFIX_BYTES)
_LONGEST = PREFIX_BYTES[-1]
_hash = xxhash.xxh3_64_digest


def beginnings(all_texts: Sequence[Sequence[str]], is_conversation: bool) -> list[bytes]:
    """Return for the texts of each body the beginning of its messages, in turn, or of its first prompt."""
    return [
        ("\0".join(texts[:_LONGEST]) if is_conversation and len(texts[0]) < _LONGEST else texts[0])[:_LONGEST].encode()[
            :_LONGEST
        ]
        for texts in all_texts
    ]


def hashes(text: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return a hash (8 bytes, the first one the highest) of the first bytes of a text of at most the deepest depth.

    A text that ends before a depth stands for itself.
    """
    of_64 = _hash(text[:64])
    if len(text) <= 64:
        return of_64, of_64, of_64, of_64
    of_256 = _hash(text[:256])
    if len(text) <= 256:
        return of_64, of_256, of_256, of_256
    of_1024 = _hash(text[:1024])
    return of_64, of_256, of_1024, of_1024 if len(text) <= 1024 else _hash(text)
