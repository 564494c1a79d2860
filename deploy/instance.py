"""Reads a dagster.yaml down to what it means, so that one written by hand and one made by a chart can be compared."""

from __future__ import annotations

import re
from typing import Any

import yaml

Table = dict[str, Any]

_LAUNCHER_DEFAULTS = {"load_incluster_config": True}
_LOG_DEFAULTS = {"verify": True}
_WHOSE = {"hostname", "username", "db_name"}
"""Of the database: each installation has its own."""


def read(text: str) -> Table:
    """Return the instance's fields by one spelling each, without defaults that are spelt out and without what each
    installation sets for itself (the database's host, user and name; the namespace).
    """
    raw = yaml.safe_load(text)
    fields = {
        "database": _database(raw),
        "launcher": _launcher(raw.pop("run_launcher")),
        "queue": raw.pop("run_queue", None) or raw.pop("run_coordinator")["config"],
        "logs": {**raw.pop("compute_logs")},
    }
    logs = fields["logs"]
    logs["config"] = {key: value for key, value in logs["config"].items() if _LOG_DEFAULTS.get(key) != value}
    raw.pop("scheduler", None)  # the chart names the one that is the default
    retention = raw.pop("retention")
    retention.pop("auto_materialize", None)  # nothing here is materialized by conditions
    return {**fields, "retention": retention, **raw}


def _database(raw: Table) -> list[Table]:
    """Return the different databases that the three storages are in: one, if all is well."""
    storages = [raw.pop(f"{kind}_storage") for kind in ("run", "event_log", "schedule") if f"{kind}_storage" in raw]
    configs = [storage["config"]["postgres_db"] for storage in storages] or [
        raw.pop("storage")["postgres"]["postgres_db"]
    ]
    different: list[Table] = []
    for config in configs:
        meant: Table = {key: value for key, value in config.items() if key not in _WHOSE and value}
        if meant not in different:
            different.append(meant)
    return different


def _launcher(launcher: Table) -> Table:
    """Return the launcher and its configuration, with Kubernetes' fields as its Python client spells them."""
    config = {key: value for key, value in launcher["config"].items() if _LAUNCHER_DEFAULTS.get(key) != value}
    config.pop("job_namespace")
    meant: Table = {}
    for key in ("volumes", "volume_mounts", "run_k8s_config"):
        meant[key] = snake_case(config.pop(key))
    for name in ("volumes", "volume_mounts"):
        meant[name] = sorted(meant[name], key=lambda entry: str(entry["name"]))
    return {"is": f"{launcher['module']}.{launcher['class']}", **config, **meant}


def snake_case(value: Any) -> Any:
    """Return a piece of Kubernetes' YAML with its fields in snake_case; names and labels stay as they are."""
    if isinstance(value, list):
        return [snake_case(inner) for inner in value]
    if isinstance(value, dict):
        return {
            key if re.search(r"[^A-Za-z]", key) else re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower(): snake_case(
                inner
            )
            for key, inner in value.items()
        }
    return value
