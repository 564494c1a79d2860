"""Dagster accepts the instance files, embedded and at scale, and reads in them what we mean."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from dagster._config import process_config
from dagster._core.instance.config import ConcurrencyConfig, PoolGranularity, dagster_instance_config
from dagster_k8s import K8sRunLauncher
from dagster_k8s.container_context import K8sContainerContext

from batch_pipeline import settings as configuration
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


def test_launcher_at_scale_is_configured_as_dagster_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_K8S_NAMESPACE", "batch")
    launcher = yaml.safe_load((DEPLOY / "dagster.yaml").read_text(encoding="utf-8"))["run_launcher"]["config"]
    launcher_class: Any = K8sRunLauncher
    checked = process_config(launcher_class.config_type(), launcher)
    assert checked.success, checked.errors


def test_pods_write_nowhere_below_their_read_only_configuration() -> None:
    """Intake and merge need a scratch folder; by default it lies beside the configuration."""
    [location] = yaml.safe_load((DEPLOY.parent / "dagster_cloud.yaml").read_text(encoding="utf-8"))["locations"]
    pod = K8sContainerContext.create_from_config(location["container_context"]).run_k8s_config
    mounts = {mount["mount_path"]: mount for mount in pod.container_config["volume_mounts"]}
    volumes = {volume["name"]: volume for volume in pod.pod_spec_config["volumes"]}
    environment = dict(variable.split("=", 1) for variable in location["container_context"]["k8s"]["env_vars"])
    config = environment[CONFIG_VARIABLE]
    read = configuration.load(environment={**environment, CONFIG_VARIABLE: ""})
    assert mounts[str(Path(config).parent)]["read_only"] is True
    for folder in (read.intake.scratch_dir, read.embedded.data_dir):
        assert not mounts[folder].get("read_only")
        assert "empty_dir" in volumes[mounts[folder]["name"]]
