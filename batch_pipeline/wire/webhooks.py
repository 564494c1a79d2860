"""Webhooks on the wire: OpenAI's event objects, signed as Standard Webhooks says; and where they may be sent.

The signature is the one of https://www.standardwebhooks.com: `v1,` and the base64 of the HMAC-SHA256, under the bytes
behind `whsec_`, of `ID.TIMESTAMP.BODY`. Both SDKs and the libraries of that standard check it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

import msgspec

SECRET_MARK = "whsec_"  # noqa: S105
MOST_URL_CHARACTERS = 2000
_SECRET_BYTES = 32
_LIKE_AN_ADDRESS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?")
"""Hosts that systems take for an IPv4 address: hexadecimal, octal, with fewer than four numbers."""
_NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses that a gateway translates into those of IPv4 (RFC 6052)."""


class EventData(msgspec.Struct, frozen=True):
    """What an event is about."""

    id: str


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's event object, with which a batch's final status is told."""

    id: str
    object: str = "event"
    created_at: int
    """When the batch ended, in Unix seconds."""
    type: str
    """`batch.completed`, `batch.failed`, `batch.expired` or `batch.cancelled`."""
    data: EventData


def event_id(batch_id: str) -> str:
    """Return the id of the event of a batch's end: it has one, so a repeated delivery has the same id."""
    return f"evt_{batch_id.removeprefix('batch_')}"


def new_secret() -> str:
    """Return a random signing secret: `whsec_` and the base64 of 32 bytes."""
    return SECRET_MARK + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def headers(event: str, body: bytes, *, secret: str, timestamp: int) -> dict[str, str]:
    """Return the headers under which a body is sent at a time (Unix seconds)."""
    key = base64.b64decode(secret.removeprefix(SECRET_MARK), validate=True)
    signed = b".".join((event.encode(), str(timestamp).encode(), body))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "Content-Type": "application/json",
        "webhook-id": event,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }


def url_problem(url: str, *, allow_private: bool) -> str | None:
    """Return what is wrong with an address to send webhooks to; None where nothing is.

    The names in it are not looked up here: what they stand for is checked when a connection is made.
    """
    if len(url) > MOST_URL_CHARACTERS or not url.isascii() or not url.isprintable() or " " in url:
        return f"an address has at most {MOST_URL_CHARACTERS} printable ASCII characters without spaces"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"not an address: {error}"
    if not host or parts.scheme not in (("https", "http") if allow_private else ("https",)):
        return "write it as https://HOST/PATH"
    if "@" in parts.netloc or parts.fragment:
        return "no user, password or #fragment can be in it"
    return _host_problem(host, allow_private=allow_private)


def _host_problem(host: str, *, allow_private: bool) -> str | None:
    literal = _literal(host)
    if literal is not None and not allow_private and not is_public(literal):
        return f"{host} is no public address"
    if literal is None and "" in host.removesuffix(".").split("."):
        return f"{host} is no name of a host"
    if literal is None and _LIKE_AN_ADDRESS.fullmatch(host):
        return f"{host}: write an address in full, as four numbers"
    return None


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet.

    Private, loopback, link-local, shared, multicast, unspecified and reserved ones are not, and neither are IPv6
    addresses that stand for such an IPv4 one (mapped, 6to4, Teredo, NAT64). Raises ValueError on what is no address.
    """
    parsed = ip_address(address.partition("%")[0])
    return "%" not in address and _is_public(parsed)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        inner = _inside(address)
        if inner:
            return all(_is_public(one) for one in inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inside(address: IPv6Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that an IPv6 one stands for."""
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    if address in _NAT64 or int(address) >> 32 == 0:
        return [IPv4Address(int(address) & 0xFFFF_FFFF)]
    return []


def _literal(host: str) -> str | None:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return host
