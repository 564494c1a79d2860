"""Configuration: one TOML file, overridable by environment variables; everything has a default that suits one machine.

The file is the one named by `BATCH_PIPELINE_CONFIG`, else `batch-pipeline.toml` in the working folder, else none.
A variable `BATCH_PIPELINE__SECTION__FIELD` overrides one field, for instance `BATCH_PIPELINE__STORE__BUCKET=results`;
in lists and tables its value is read as TOML. Relative paths are relative to the file's folder.

A configuration that cannot be used raises one SettingsError whose message names the field and the mend.
"""

from batch_pipeline.settings.checks import MAY_BE_NONE, MODEL_NAME, check
from batch_pipeline.settings.loading import CONFIG_VARIABLE, DEFAULT_FILE, load
from batch_pipeline.settings.sections import (
    Alarms,
    Api,
    Embedded,
    Intake,
    Ledger,
    Limits,
    Live,
    Retention,
    Scheduling,
    Settings,
    Store,
    Webhooks,
    Worker,
    limited,
)

__all__ = [
    "CONFIG_VARIABLE",
    "DEFAULT_FILE",
    "MAY_BE_NONE",
    "MODEL_NAME",
    "Alarms",
    "Api",
    "Embedded",
    "Intake",
    "Ledger",
    "Limits",
    "Live",
    "Retention",
    "Scheduling",
    "Settings",
    "Store",
    "Webhooks",
    "Worker",
    "check",
    "limited",
    "load",
]
