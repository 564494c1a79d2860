"""Dagster accepts the instance files, embedded and at scale, and reads in them what we mean."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
import pytest
import yaml
from dagster._core.instance.config import ConcurrencyConfig, PoolGranularity, dagster_instance_config

from batch_pipeline.embedded.dagster_services import DEFINITIONS, prepare_home
from batch_pipeline.models import Model
from batch_pipeline.settings import CONFIG_VARIABLE, Settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_code_location_loads_as_the_code_server_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(DEPLOY.parent / "batch-pipeline.toml"))
    importlib.import_module(DEFINITIONS).defs.get_repository_def().load_all_definitions()


def test_embedded_instance_has_a_place_for_every_worker_and_some_more(tmp_path: Path) -> None:
    models = {name: Model(source="weights", context_length=1, pool_limit=3) for name in ("a", "b")}
    workspace = prepare_home(msgspec.structs.replace(Settings(), models=models), tmp_path)
    config, _ = dagster_instance_config(str(tmp_path))
    pools = ConcurrencyConfig.from_concurrency_settings(config["concurrency"], None).pool_config
    assert (pools.pool_granularity, pools.default_pool_limit) == (PoolGranularity.RUN, 1)
    assert config["concurrency"]["runs"]["max_concurrent_runs"] >= 6 + 2
    assert config["telemetry"] == {"enabled": False}
    assert config["run_monitoring"]["enabled"] is True
    [location] = yaml.safe_load(workspace.read_text(encoding="utf-8"))["load_from"]
    assert location["grpc_server"]["host"] == "127.0.0.1"


def test_instance_at_scale_is_valid_and_agrees_with_the_embedded_one(tmp_path: Path) -> None:
    scale, _ = dagster_instance_config(str(DEPLOY))
    prepare_home(Settings(), tmp_path)
    embedded, _ = dagster_instance_config(str(tmp_path))
    assert scale["concurrency"]["pools"] == embedded["concurrency"]["pools"]
    for field in ("enabled", "poll_interval_seconds", "free_slots_after_run_end_seconds", "max_resume_run_attempts"):
        assert scale["run_monitoring"][field] == embedded["run_monitoring"][field]
    assert scale["telemetry"] == embedded["telemetry"]
