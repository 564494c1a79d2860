"""Every Job that Dagster's launcher makes of the runs of our jobs is one that Kubernetes takes, and may do little.

It is made by the launcher itself, with deploy/dagster.yaml as its instance.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import msgspec
import pytest
from kubernetes.config.config_exception import ConfigException

from batch_pipeline import settings as configuration
from batch_pipeline.models import job_name
from batch_pipeline.settings import Settings
from deploy import objects
from tests.fakes.kubernetes_objects import environment, nowhere, problems, repeated


@dg.op
def nothing() -> None:
    """Does nothing."""


@dg.job
def nothing_job() -> None:
    nothing()


def test_every_version_of_kubernetes_takes_every_job(jobs: dict[str, objects.Object], deployed: Settings) -> None:
    assert {"intake", "merge", *map(job_name, deployed.models)} <= jobs.keys()
    assert problems(jobs.values()) == []


def test_a_field_that_kubernetes_does_not_know_is_found(jobs: dict[str, objects.Object]) -> None:
    job = msgspec.json.decode(msgspec.json.encode(jobs["intake"]))
    job["spec"]["template"]["spec"]["gracePeriod"] = 1
    assert any("gracePeriod" in problem for problem in problems([job]))


def test_whatever_a_job_names_is_there(jobs: dict[str, objects.Object], manifests: list[objects.Object]) -> None:
    assert nowhere(jobs.values(), manifests) == set()


def test_no_two_volumes_of_a_pod_meet(jobs: dict[str, objects.Object]) -> None:
    """Dagster puts the launcher's and the tags' volumes one after the other, and would not notice."""
    for pod in objects.pods(jobs.values()):
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert not repeated(volumes)
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            mounts = container.get("volumeMounts", [])
            assert not repeated([mount["mountPath"] for mount in mounts])
            assert {mount["name"] for mount in mounts} <= set(volumes)


def test_a_run_has_no_rights(jobs: dict[str, objects.Object]) -> None:
    for pod in objects.pods(jobs.values()):
        assert pod["serviceAccountName"] == "batch-pipeline-run"
        assert pod["automountServiceAccountToken"] is False
        [run, *_] = pod["containers"]
        context = run["securityContext"]
        assert context["runAsNonRoot"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_run_does_without_the_kubernetes_api(tmp_path: Path) -> None:
    """The launcher could not even be made here: there is no token to load."""
    config = {"service_account_name": "run", "instance_config_map": "dagster-instance"}
    launcher = {"module": "dagster_k8s", "class": "K8sRunLauncher", "config": config}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"run_launcher": launcher}) as dagster:
        assert nothing_job.execute_in_process(instance=dagster).success
        with pytest.raises(ConfigException):
            _ = dagster.run_launcher


def test_no_secret_of_the_service_reaches_an_engine(jobs: dict[str, objects.Object]) -> None:
    engines = [
        container
        for pod in objects.pods(jobs.values())
        for container in pod.get("initContainers", [])
        if container["name"] == "engine"
    ]
    assert engines
    for engine in engines:
        assert not any(name.kind == "Secret" for name in objects.wanted({"kind": "Container", "spec": engine}))


def test_a_run_from_the_page_of_an_asset_has_the_pod_of_its_job(jobs: dict[str, objects.Object]) -> None:
    """Dagster's own job of all assets has no tags: without ours there would be no tokenizers."""
    for asset, job in (("request_chunks", "intake"), ("batch_results", "merge")):
        own, usual = jobs[asset]["spec"]["template"], jobs[job]["spec"]["template"]
        assert own["metadata"]["labels"]["batch-pipeline/role"] == job
        assert own["spec"]["containers"][0]["resources"] == usual["spec"]["containers"][0]["resources"]
    [own] = objects.pods([jobs["request_chunks"]])
    assert any("persistentVolumeClaim" in volume for volume in own["volumes"])
    assert "batch-pipeline/role" not in jobs["chunk_results"]["spec"]["template"]["metadata"]["labels"]


def test_a_run_is_never_started_again_by_kubernetes_and_does_not_stay(jobs: dict[str, objects.Object]) -> None:
    for job in jobs.values():
        assert job["spec"]["backoffLimit"] == 0
        assert job["spec"]["ttlSecondsAfterFinished"] <= 3600
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_every_run_finds_its_configuration_and_a_place_to_write(
    jobs: dict[str, objects.Object], deployed: Settings
) -> None:
    config = Path(objects.read(objects.BASE / "environment.yaml")[0]["data"][configuration.CONFIG_VARIABLE])
    for pod in objects.pods(jobs.values()):
        mounts = {Path(mount["mountPath"]): mount for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts[config.parent]["readOnly"] is True
        for folder in (deployed.intake.scratch_dir, deployed.embedded.data_dir):
            holding = next(mounts[above] for above in [Path(folder), *Path(folder).parents] if above in mounts)
            assert not holding.get("readOnly")


def test_workers_stand_below_live_traffic_and_take_no_gpu_from_anybody(
    jobs: dict[str, objects.Object], manifests: list[objects.Object]
) -> None:
    classes = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "PriorityClass"}
    batch, live = classes["batch-inference"], classes["live-inference"]
    assert -10 <= batch["value"] < 0 < live["value"]  # below -10 the cluster autoscaler adds no node for it
    assert batch["preemptionPolicy"] == "Never"
    [model, *_] = configuration.load(objects.BASE / "batch-pipeline.toml", environment=environment()).models
    pod = jobs[job_name(model)]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "batch-inference"
