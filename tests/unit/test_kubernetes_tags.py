"""The tags with which dagster-k8s shapes a worker's Job."""

from __future__ import annotations

from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job, get_user_defined_k8s_config

import assets
from batch_pipeline.models import Kubernetes, Model
from resources.kubernetes import worker_tags

MODEL = Model(
    source="/models/small",
    context_length=2048,
    engine_arguments=["--dtype", "bfloat16"],
    kubernetes=Kubernetes(
        gpus=2,
        node_selector={"gpu": "l4"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        grace_seconds=45,
    ),
)


def _rendered() -> dict[str, object]:
    tags = assets.gpu_worker_job("small-model", MODEL).tags
    job = construct_dagster_k8s_job(
        DagsterK8sJobConfig(job_image="orchestrator:1", dagster_home="/opt/dagster/home"),
        args=["dagster", "api", "execute_run"],
        job_name="worker",
        user_defined_k8s_config=get_user_defined_k8s_config(tags),
    )
    rendered: dict[str, object] = job.to_dict()
    return rendered


def test_the_engine_is_a_native_sidecar_with_the_gpus() -> None:
    pod = _rendered()["spec"]["template"]["spec"]  # type: ignore[index]
    (engine,) = pod["init_containers"]
    assert engine["restart_policy"] == "Always"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert engine["image"] == MODEL.kubernetes.engine_image
    assert "--dtype" in engine["args"]
    assert engine["args"][engine["args"].index("--served-model-name") + 1] == "small-model"


def test_the_pod_is_placed_and_ended_as_the_catalogue_says() -> None:
    spec = _rendered()["spec"]
    pod = spec["template"]["spec"]  # type: ignore[index]
    assert pod["node_selector"] == {"gpu": "l4"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["priority_class_name"] == "batch-inference"
    assert pod["termination_grace_period_seconds"] == 45
    assert pod["restart_policy"] == "Never"
    assert spec["backoff_limit"] == 0  # type: ignore[index]
    assert spec["ttl_seconds_after_finished"] == 3600  # type: ignore[index]


def test_tags_are_the_same_for_the_same_model() -> None:
    assert worker_tags("small-model", MODEL) == worker_tags("small-model", MODEL)
