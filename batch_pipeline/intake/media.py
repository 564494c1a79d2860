"""From where the engine may fetch what a request names: by default from nowhere.

An engine that fetched any URL would let a customer reach what only the inside of the network can: the cloud's metadata
service, the object store, the engine's own neighbours. So a URL passes only where the model's `allowed_media_hosts`
name its host, letter by letter, and only in a form that no two parsers read differently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from batch_pipeline.models import INLINE_MEDIA

_URL = re.compile(r"https?://([A-Za-z0-9.-]+(?::[0-9]{1,5})?)(?:[/?#][!-\[\]-~]*)?")
"""Printable ASCII without a backslash, a space or a user name in front of the host."""
MAX_URL_CHARACTERS = 2_048
_INLINE = "data:"


def problem_of(url: str, allowed: Sequence[str]) -> str | None:
    """Return what is wrong with the URL of an image, audio or video, or None where the engine may fetch it."""
    if not allowed:
        return "this model takes texts only (images, audio and files are not taken)"
    if url[: len(_INLINE)].lower() == _INLINE:
        return None if INLINE_MEDIA in allowed else "media may not stand in the request itself (data:)"
    if len(url) > MAX_URL_CHARACTERS:
        return f"the URL has {len(url)} characters, and at most {MAX_URL_CHARACTERS} are allowed"
    match = _URL.fullmatch(url)
    if match is None:
        return "write a plain http:// or https:// URL in ASCII, without a user name, a backslash or a space"
    if match[1].lower() not in allowed:
        hosts = ", ".join(host for host in allowed if host != INLINE_MEDIA) or "none"
        return f"media may not be fetched from that host; the hosts of this model are: {hosts}"
    return None
