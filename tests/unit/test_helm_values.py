"""Dagster's configuration, said in three places: the instance file, the Helm values, and what Dagster+ reads."""

from __future__ import annotations

import yaml
from dagster._core.instance.config import dagster_instance_config

from batch_pipeline.settings import Settings
from deploy import instance, objects
from tests.fakes.dagster_chart import as_a_deployment, as_the_chart_writes_it
from tests.fakes.kubernetes_objects import VALUES, nowhere, problems

DAGSTER = (objects.DEPLOY / "dagster.yaml").read_text(encoding="utf-8")
[CLOUD] = yaml.safe_load((objects.DEPLOY.parent / "dagster_cloud.yaml").read_text(encoding="utf-8"))["locations"]


def test_helm_values_make_the_instance_of_dagster_yaml() -> None:
    assert instance.read(yaml.safe_dump(as_the_chart_writes_it(VALUES))) == instance.read(DAGSTER)


def test_dagster_plus_makes_the_same_pods() -> None:
    ours = instance.read(DAGSTER)["launcher"]
    theirs = instance.snake_case(CLOUD["container_context"]["k8s"])
    theirs.pop("server_k8s_config")
    of_the_launcher = {"is", "instance_config_map", "postgres_password_secret", "dagster_home"}
    assert theirs == {key: value for key, value in ours.items() if key not in of_the_launcher}


def test_dagster_plus_has_the_same_places_and_patience() -> None:
    theirs = yaml.safe_load((objects.DEPLOY / "dagster_plus_settings.yaml").read_text(encoding="utf-8"))
    ours = yaml.safe_load(DAGSTER)
    assert theirs["concurrency"] == ours["concurrency"]
    assert theirs["run_monitoring"].items() <= ours["run_monitoring"].items()
    assert {"start_timeout_seconds", "cancel_timeout_seconds"} <= set(theirs["run_monitoring"])
    assert theirs["run_retries"]["max_retries"] == ours.get("run_retries", {}).get("max_retries", 0)


def test_dagster_says_what_the_settings_say(deployed: Settings) -> None:
    config, _ = dagster_instance_config(str(objects.DEPLOY))
    limits = {
        limit.get("value", limit["key"]): limit["limit"]
        for limit in config["concurrency"]["runs"]["tag_concurrency_limits"]
    }
    of_operators = {limits.pop("dagster/backfill"), limits.pop("dagster/from_ui")}
    places = deployed.scheduling.runs_at_once
    assert limits == {"intake": places, "merge": places, "worker": deployed.scheduling.total_gpus}
    assert min(of_operators) > 0
    longest = max(model.kubernetes.start_seconds for model in deployed.models.values())
    assert config["run_monitoring"]["start_timeout_seconds"] > longest
    slowest = max(model.kubernetes.grace_seconds for model in deployed.models.values())
    assert config["run_monitoring"]["cancel_timeout_seconds"] > slowest


def test_kubernetes_takes_the_pieces_in_the_helm_values() -> None:
    """The chart puts them into its Deployments as they are; here they are put into one."""
    code = VALUES["dagster-user-deployments"]["deployments"][0]
    parts = [VALUES["dagsterWebserver"], VALUES["dagsterDaemon"], code]
    assert problems([as_a_deployment(part) for part in parts]) == []


def test_whatever_the_helm_values_name_is_there(manifests: list[objects.Object]) -> None:
    code = VALUES["dagster-user-deployments"]["deployments"][0]
    parts = [VALUES["dagsterWebserver"], VALUES["dagsterDaemon"], code]
    found = nowhere([as_a_deployment(part) for part in parts], manifests)
    accounts = {VALUES["serviceAccount"]["name"], VALUES["dagster-user-deployments"]["serviceAccount"]["name"]}
    there = objects.made([*manifests, *objects.read(objects.BASE / "secret.example.yaml")])
    assert found == set()
    assert {objects.Name("ServiceAccount", account) for account in accounts} <= there
    assert objects.Name("Secret", VALUES["global"]["postgresqlSecretName"]) in there


def test_every_process_has_the_same_environment_and_secrets() -> None:
    launcher = VALUES["runLauncher"]["config"]["customRunLauncher"]["config"]
    code = VALUES["dagster-user-deployments"]["deployments"][0]
    assert launcher["env_config_maps"] == ["batch-pipeline-environment"]
    assert launcher["env_secrets"] == ["batch-pipeline"]
    for part in (VALUES["dagsterWebserver"], VALUES["dagsterDaemon"], code):
        assert part["envConfigMaps"] == [{"name": "batch-pipeline-environment"}]
        assert part["envSecrets"] == [{"name": "batch-pipeline"}]
        assert part["volumes"] == launcher["volumes"]
        assert part["volumeMounts"] == launcher["volume_mounts"]
