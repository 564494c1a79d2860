"""The HTTP service beside the other parts of the embedded stack."""

from __future__ import annotations

import sysconfig
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from batch_pipeline.embedded.processes import Service
from batch_pipeline.settings import Settings

_PROBE_SECONDS = 5


def api_url(settings: Settings) -> str:
    """Return the address of the HTTP service, without `/v1`."""
    host = f"[{settings.api.host}]" if ":" in settings.api.host else settings.api.host
    return f"http://{host}:{settings.api.port}"


def api_service(settings: Settings, run_dir: Path, log_dir: Path, *, environment: Mapping[str, str]) -> Service:
    """Return the service. It is ready when it says that it can use the ledger and the object store."""
    url = f"{api_url(settings)}/readyz"
    return Service(
        name="api",
        command=[str(Path(sysconfig.get_path("scripts")) / "batch-pipeline"), "serve"],
        environment=environment,
        run_dir=run_dir,
        log_dir=log_dir,
        probe=lambda: _waits_for(url),
        ready_seconds=120.0,
        stop_seconds=30.0,
    )


def _waits_for(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_SECONDS):  # noqa: S310 - an address of ours
            return None
    except urllib.error.HTTPError as error:
        return f"{url} ({error.code})"
    except (urllib.error.URLError, OSError) as error:
        return f"{url} ({error})"
