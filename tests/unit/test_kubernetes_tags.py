"""The tags with which dagster-k8s shapes the Jobs of runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dagster._utils.tags import normalize_tags
from dagster_k8s.job import (
    USER_DEFINED_K8S_CONFIG_KEY,
    DagsterK8sJobConfig,
    construct_dagster_k8s_job,
    get_user_defined_k8s_config,
)

import assets
from batch_pipeline.models import Kubernetes, Model
from batch_pipeline.pods import Runs
from batch_pipeline.settings import Settings, Worker, check
from resources.kubernetes import CONFIG_TAG, ENGINE_PORT, ENGINE_URL_VARIABLE, intake_tags, merge_tags, worker_tags

POD = Kubernetes(
    gpus=2,
    node_selector={"gpu": "l4"},
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    grace_seconds=45,
    keep_ended_seconds=900,
)
MODEL = Model(source="/models/small", context_length=2048, engine_arguments=["--dtype", "bfloat16"], kubernetes=POD)
FETCHED = {"weights_url": "s3://weights/small", "weights_image": "orchestrator:1", "weights_secret": "weights"}


def with_pod(**fields: Any) -> Model:
    return msgspec.structs.replace(MODEL, kubernetes=msgspec.structs.replace(POD, **fields))


def render(tags: dict[str, Any]) -> dict[str, Any]:
    """Return the Job as the run launcher makes it, with what its own configuration adds to the run's container."""
    config = DagsterK8sJobConfig(
        job_image="orchestrator:1", dagster_home="/opt/dagster/home", env_secrets=["batch-pipeline-secrets"]
    )
    job = construct_dagster_k8s_job(
        config,
        args=["dagster", "api", "execute_run"],
        job_name="worker",
        user_defined_k8s_config=get_user_defined_k8s_config(normalize_tags(tags)),
    )
    rendered: dict[str, Any] = job.to_dict()
    return rendered


def worker_job(model: Model = MODEL, worker: Worker | None = None) -> dict[str, Any]:
    tags = dict(assets.gpu_worker_job("small-model", model, worker or Worker()).tags)
    return render(tags)["spec"]  # type: ignore[no-any-return]


def worker_pod(model: Model = MODEL) -> dict[str, Any]:
    return worker_job(model)["template"]["spec"]  # type: ignore[no-any-return]


def engine_of(model: Model = MODEL) -> dict[str, Any]:
    return worker_pod(model)["init_containers"][-1]  # type: ignore[no-any-return]


def test_the_tag_is_dagsters_own() -> None:
    assert CONFIG_TAG == USER_DEFINED_K8S_CONFIG_KEY


def test_the_engine_is_a_native_sidecar_with_the_gpus() -> None:
    engine = engine_of()
    assert engine["restart_policy"] == "Always"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert engine["image"] == MODEL.kubernetes.engine_image
    assert "--dtype" in engine["args"]
    assert engine["args"][engine["args"].index("--served-model-name") + 1] == "small-model"


def test_the_worker_is_there_while_the_model_loads_and_says_so() -> None:
    """A start-up probe of the sidecar would hold the worker back: it is the worker's, and asks the engine."""
    pod = worker_pod()
    (worker,) = pod["containers"]
    engine = engine_of()
    assert engine["startup_probe"] is None
    assert engine["readiness_probe"]["http_get"] == worker["startup_probe"]["http_get"]
    probe = worker["startup_probe"]
    assert probe["period_seconds"] * probe["failure_threshold"] > MODEL.engine_start_seconds
    assert engine["liveness_probe"]["initial_delay_seconds"] >= MODEL.engine_start_seconds


def test_the_worker_finds_its_engine_by_what_only_its_pod_says() -> None:
    (worker,) = worker_pod()["containers"]
    (variable,) = [entry for entry in worker["env"] if entry["name"] == ENGINE_URL_VARIABLE]
    assert variable["value"] == f"http://127.0.0.1:{ENGINE_PORT}"


def test_a_model_on_a_shared_server_gets_neither_engine_nor_gpu() -> None:
    pod = worker_pod(msgspec.structs.replace(MODEL, engine_url="http://live:8000"))
    assert pod["init_containers"] == []
    assert not [entry for entry in pod["containers"][0]["env"] if entry["name"] == ENGINE_URL_VARIABLE]


def test_the_pod_is_placed_and_ended_as_the_catalogue_says() -> None:
    spec = worker_job()
    pod = spec["template"]["spec"]
    assert pod["node_selector"] == {"gpu": "l4"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["priority_class_name"] == "batch-inference"
    assert pod["termination_grace_period_seconds"] == 45
    assert pod["restart_policy"] == "Never"
    assert spec["backoff_limit"] == 0
    assert spec["ttl_seconds_after_finished"] == 900
    assert spec["pod_replacement_policy"] == "Failed"


def test_a_job_outlives_the_longest_life_of_its_worker_and_not_by_much() -> None:
    worker = Worker(lifetime_seconds=7200.0)
    needed = POD.start_seconds + MODEL.engine_start_seconds + 7200 + POD.grace_seconds
    assert needed < worker_job(worker=worker)["active_deadline_seconds"] <= needed + 900


def test_several_gpus_share_the_model_and_memory() -> None:
    engine = engine_of()
    assert engine["args"][engine["args"].index("--tensor-parallel-size") + 1] == "2"
    assert "shared-memory" in [mount["name"] for mount in engine["volume_mounts"]]
    (memory,) = [volume for volume in worker_pod()["volumes"] if volume["name"] == "shared-memory"]
    assert memory["empty_dir"] == {"medium": "Memory", "size_limit": POD.shared_memory}
    told = msgspec.structs.replace(MODEL, engine_arguments=["--pipeline-parallel-size=2"])
    assert "--tensor-parallel-size" not in engine_of(told)["args"]
    assert "--tensor-parallel-size" not in engine_of(with_pod(gpus=1))["args"]


def test_the_engine_has_no_rights_and_no_secrets() -> None:
    pod = worker_pod(with_pod(**FETCHED))
    fetching, engine = pod["init_containers"]
    (worker,) = pod["containers"]
    assert pod["automount_service_account_token"] is False
    assert [source["secret_ref"]["name"] for source in worker["env_from"]] == ["batch-pipeline-secrets"]
    assert [source["secret_ref"]["name"] for source in fetching["env_from"]] == ["weights"]
    assert engine["env_from"] is None
    assert all(entry["value_from"] is None for entry in engine["env"])
    for container in (fetching, engine, worker):
        assert container["security_context"]["allow_privilege_escalation"] is False
        assert container["security_context"]["run_as_non_root"] is True
        assert container["security_context"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({}, "persistent_volume_claim"),
        ({"model_volume_claim": "", "node_cache": "/var/cache/models"}, "host_path"),
        ({"model_volume_claim": ""}, "empty_dir"),
    ],
)
def test_weights_are_fetched_before_the_engine_starts_into_what_the_engine_reads(
    fields: dict[str, str], source: str
) -> None:
    pod = worker_pod(with_pod(**FETCHED, **fields))
    fetching, engine = pod["init_containers"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
    assert volume[source] is not None
    assert fetching["restart_policy"] is None
    assert fetching["args"][-2:] == ["s3://weights/small", "/weights/small"]
    (target,) = fetching["volume_mounts"]
    (mounted,) = [mount for mount in engine["volume_mounts"] if mount["mount_path"] == MODEL.source]
    assert (target["name"], mounted["name"]) == ("models", "models")
    assert (target["mount_path"], mounted["sub_path"]) == ("/weights", "small")
    assert mounted["read_only"] is True


def test_a_claim_that_has_the_weights_is_only_read() -> None:
    (volume,) = [volume for volume in worker_pod()["volumes"] if volume["name"] == "models"]
    assert volume["persistent_volume_claim"] == {"claim_name": "models", "read_only": True}


def test_intake_and_merge_are_pods_without_a_gpu_and_with_scratch() -> None:
    fetched = msgspec.structs.replace(with_pod(**FETCHED), source="/models/fetched")
    settings = Settings(models={"a": MODEL, "b": msgspec.structs.replace(MODEL, source="/models/b"), "c": fetched})
    for tags in (intake_tags(settings), merge_tags(settings)):
        pod = render(tags)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert "nvidia.com/gpu" not in str(pod)
        assert pod["automount_service_account_token"] is False
        mounts = {mount["mount_path"]: mount["name"] for mount in container["volume_mounts"]}
        assert settings.intake.scratch_dir in mounts
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


def test_intake_has_the_tokenizer_of_every_model() -> None:
    fetched = msgspec.structs.replace(with_pod(**FETCHED), source="/models/fetched")
    pod = render(intake_tags(Settings(models={"a": MODEL, "b": fetched})))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"/models/small", "/models/fetched"} <= {mount["mount_path"] for mount in container["volume_mounts"]}
    (fetching,) = pod["init_containers"]
    assert fetching["args"][-1] == "--only-tokenizer"


def test_entries_of_the_catalogue_with_the_same_weights_share_a_mount() -> None:
    fetched = msgspec.structs.replace(with_pod(**FETCHED), source="/models/fetched")
    settings = Settings(models={"a": MODEL, "b": MODEL, "c": fetched, "d": fetched})
    pod = render(intake_tags(settings))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = [mount["mount_path"] for mount in container["volume_mounts"]]
    assert sorted(paths) == sorted({*paths}), "Kubernetes refuses a path that is mounted twice"
    assert len(pod["init_containers"]) == 1


def test_the_other_runs_end_and_are_kept_as_their_table_says() -> None:
    runs = Runs(longest_seconds=7200, keep_ended_seconds=600)
    for tags in (intake_tags(Settings(runs=runs)), merge_tags(Settings(runs=runs))):
        spec = render(tags)["spec"]
        assert (spec["active_deadline_seconds"], spec["ttl_seconds_after_finished"]) == (7200, 600)
    (problem,) = check(Settings(models={"small": MODEL}, runs=Runs(keep_ended_seconds=60)))
    assert problem.startswith("runs.keep_ended_seconds must be at least 300")


def test_scratch_may_be_a_volume_of_its_own() -> None:
    settings = Settings()
    settings = msgspec.structs.replace(
        settings, runs=msgspec.structs.replace(settings.runs, scratch_storage_class="fast")
    )
    (volume,) = render(merge_tags(settings))["spec"]["template"]["spec"]["volumes"]
    assert volume["ephemeral"]["volume_claim_template"]["spec"]["storage_class_name"] == "fast"


def test_tags_are_the_same_for_the_same_model() -> None:
    assert worker_tags("small-model", MODEL, Worker()) == worker_tags("small-model", MODEL, Worker())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grace_seconds": 30}, "a worker that is killed first hands nothing back"),
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"memory": "16 GB"}, "memory must be an amount"),
        ({"cpu": "0"}, "cpu must be an amount"),
        ({"node_cache": "/var/cache"}, "node_cache is used without a claim"),
        ({"node_cache": "cache", "model_volume_claim": "", **FETCHED}, "full path"),
        ({"model_volume_claim": ""}, "weights_url must say where the weights come from"),
        ({"weights_url": "https://weights", "weights_image": "i"}, "weights_url must be s3://"),
        ({"weights_url": "s3://weights/small"}, "weights_image must name"),
        ({"engine_user": -1}, "engine_user must be"),
        ({"start_seconds": 0}, "start_seconds must be"),
        ({"keep_ended_seconds": 299}, "keep_ended_seconds must be at least 300"),
    ],
)
def test_a_pod_that_cannot_be_is_refused_when_the_configuration_is_read(fields: dict[str, Any], said: str) -> None:
    (problem,) = check(Settings(models={"small": with_pod(**fields)}))
    assert problem.startswith("models.small.kubernetes")
    assert said in problem
