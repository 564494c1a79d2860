"""The configuration as it counts, written as TOML, with secrets masked."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from batch_pipeline.settings import Settings

MASK = "***"
_SECRET_NAME = re.compile(r"(?:^|[-_])(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(?:[-_]|$)", re.IGNORECASE)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def masked(settings: Settings) -> dict[str, Any]:
    """Return the configuration as plain tables: what could open a door to somebody is masked."""
    tables: dict[str, Any] = msgspec.to_builtins(settings)
    if tables["store"]["secret_access_key"]:
        tables["store"]["secret_access_key"] = MASK
    if tables["api"]["metrics_key"]:
        tables["api"]["metrics_key"] = MASK
    # The address of a chat's hook is its key.
    for field in ("url", "secret"):
        if tables["alarms"][field]:
            tables["alarms"][field] = MASK
    tables["ledger"]["url"] = _without_password(tables["ledger"]["url"])
    for model in tables["models"].values():
        model["engine_environment"] = {
            name: MASK if _SECRET_NAME.search(name) and value else value
            for name, value in model["engine_environment"].items()
        }
        model["engine_arguments"] = _masked_arguments(model["engine_arguments"])
        if model["engine_url"]:
            model["engine_url"] = _without_password(model["engine_url"])
    return tables


def to_toml(tables: dict[str, Any]) -> str:
    """Return the tables as TOML. A value that is not set is a comment: TOML has no word for it."""
    return "\n".join(_lines(tables, "")) + "\n"


def _lines(table: dict[str, Any], path: str) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [f"[{path}]"] if path and (plain or not nested) else []
    lines += [f"# {_key(k)} is not set" if v is None else f"{_key(k)} = {_value(v)}" for k, v in plain.items()]
    if lines:
        lines.append("")
    for key, inner in nested.items():
        lines += _lines(inner, f"{path}.{_key(key)}" if path else _key(key))
    return lines


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}" if value else "{}"
    # JSON's texts, numbers and booleans are TOML's, apart from a character that JSON leaves alone.
    return json.dumps(value).replace("\x7f", "\\u007f")


def _masked_arguments(arguments: list[str]) -> list[str]:
    shown = []
    follows_secret = False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        is_secret = name.startswith("--") and _SECRET_NAME.search(name) is not None
        shown.append(MASK if follows_secret else f"{name}={MASK}" if is_secret and has_value else argument)
        follows_secret = is_secret and not has_value
    return shown


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:{MASK}@{host}"))
