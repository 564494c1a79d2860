"""The configuration from its file and the environment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from batch_pipeline.errors import SettingsError
from batch_pipeline.settings.checks import check
from batch_pipeline.settings.sections import Settings
from batch_pipeline.settings.tables import converted

CONFIG_VARIABLE = "BATCH_PIPELINE_CONFIG"
OVERRIDE_PREFIX = "BATCH_PIPELINE__"
DEFAULT_FILE = "batch-pipeline.toml"


def load(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Read the configuration from `path` (default: see the package) and the environment.

    Raises SettingsError, whose message is one line that names the file or variable, the field and the mend.
    """
    variables = os.environ if environment is None else environment
    file, must_exist = _file(path, variables)
    raw: dict[str, Any] = {}
    if file.is_file():
        try:
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{file}: not valid TOML: {error}") from error
    elif must_exist:
        raise SettingsError(f"{file}: no such file; set {CONFIG_VARIABLE} to your configuration, or leave it unset")
    where = " with ".join([str(file)] * file.is_file() + _apply_overrides(raw, variables))
    settings = converted(raw, Settings, where)
    problems = check(settings)
    if problems:
        raise SettingsError(f"{where}: {'; '.join(problems)}")
    return _absolute(settings, file.parent.resolve())


def _file(path: Path | None, variables: Mapping[str, str]) -> tuple[Path, bool]:
    if path is not None:
        return path, True
    if variables.get(CONFIG_VARIABLE):
        return Path(variables[CONFIG_VARIABLE]), True
    return Path(DEFAULT_FILE), False


def _apply_overrides(raw: dict[str, Any], variables: Mapping[str, str]) -> list[str]:
    """Put the variables' values in their places and return the variables' names."""
    overriding = sorted(variable for variable in variables if variable.startswith(OVERRIDE_PREFIX))
    for variable in overriding:
        parts = variable.removeprefix(OVERRIDE_PREFIX).lower().split("__")
        table = raw
        for part in parts[:-1]:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"{variable}: {part} is not a table")
            table = inner
        table[parts[-1]] = _value(variable, variables[variable])
    return overriding


def _value(variable: str, text: str) -> Any:
    if not text.startswith(("[", "{")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{variable}: not a TOML value: {error}") from error


def _absolute(settings: Settings, base: Path) -> Settings:
    """Return the settings with every relative path made absolute, so that no part depends on its working folder."""
    url = settings.ledger.url
    prefix = "sqlite:///"
    if url.startswith(prefix) and not url.startswith("sqlite:////") and url != "sqlite:///:memory:":
        url = f"{prefix}{base / url.removeprefix(prefix)}"
    models = {
        name: msgspec.structs.replace(model, source=str(base / model.source)) for name, model in settings.models.items()
    }
    return msgspec.structs.replace(
        settings,
        store=msgspec.structs.replace(settings.store, endpoint_url=settings.store.endpoint_url or None),
        ledger=msgspec.structs.replace(settings.ledger, url=url),
        intake=msgspec.structs.replace(settings.intake, scratch_dir=str(base / settings.intake.scratch_dir)),
        embedded=msgspec.structs.replace(settings.embedded, data_dir=str(base / settings.embedded.data_dir)),
        models=models,
    )
