"""How people are told where an object is: as an S3 address, and as a link where a browser can open it."""

from __future__ import annotations

from urllib.parse import quote

from batch_pipeline.settings import Store

_AWS_CONSOLE = "https://{region}.console.aws.amazon.com/s3/object/{bucket}?region={region}&prefix={key}"


def uri(store: Store, key: str) -> str:
    """Return the address that S3 tools take."""
    return f"s3://{store.bucket}/{key}"


def link(store: Store, key: str) -> str | None:
    """Return where a browser shows the object: `store.console_url`, or AWS's console. None where neither is known."""
    template = store.console_url or (None if store.endpoint_url else _AWS_CONSOLE.replace("{region}", store.region))
    if template is None:
        return None
    # No str.format: what an operator wrote is no program.
    return template.replace("{bucket}", quote(store.bucket)).replace("{key}", quote(key))
