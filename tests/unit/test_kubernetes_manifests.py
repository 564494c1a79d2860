"""Every manifest and overlay is one that Kubernetes takes; rights, network and quota are what the service needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.settings import Settings
from deploy import objects
from tests.fakes.dagster_chart import images_of_the_chart
from tests.fakes.dagster_launcher import calls_of_the_launcher
from tests.fakes.kubernetes_objects import VALUES, environment, nowhere, problems, repeated

CALLS = {
    "create_namespaced_job": ("batch", "jobs", "create"),
    "delete_namespaced_job": ("batch", "jobs", "delete"),
    "list_namespaced_job": ("batch", "jobs", "list"),
    "read_namespaced_job_status": ("batch", "jobs/status", "get"),
    "delete_namespaced_pod": ("", "pods", "delete"),
    "list_namespaced_pod": ("", "pods", "list"),
    "read_namespaced_pod_log": ("", "pods/log", "get"),
    "list_namespaced_event": ("", "events", "list"),
}


def test_every_version_of_kubernetes_takes_every_manifest(manifests: list[objects.Object]) -> None:
    apart = [objects.BASE / "secret.example.yaml", objects.BASE.parent / "load-model.yaml"]
    assert problems([*manifests, *(one for file in apart for one in objects.read(file))]) == []


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in objects.BASE.parent.glob("*/kustomization.yaml"))
)
def test_every_overlay_is_whole_and_valid(folder: str) -> None:
    found = objects.kustomized(objects.BASE.parent / folder)
    assert problems(found) == []
    assert nowhere(found, found) == set()
    assert not repeated(objects.Name(one["kind"], one["metadata"]["name"]) for one in found)


@pytest.mark.parametrize(
    "file", sorted(objects.BASE.parent.glob("*/batch-pipeline.toml")), ids=lambda file: file.parent.name
)
def test_every_configuration_can_be_read(file: Path) -> None:
    read = configuration.load(file, environment=environment())
    assert all(model.source.startswith("/models/") for model in read.models.values())
    assert read.intake.scratch_dir == "/tmp/scratch"  # noqa: S108 - a pod's own


def test_no_pod_of_ours_may_do_more_than_it_must(manifests: list[objects.Object]) -> None:
    for pod in objects.pods(manifests):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_who_starts_and_ends_runs_may_do_just_what_that_takes(manifests: list[objects.Object]) -> None:
    """Compared with the calls in dagster-k8s's client that the launcher's methods come to."""
    roles = {one["metadata"]["name"]: allowed(one) for one in manifests if one["kind"] == "Role"}
    assert roles == {
        "batch-pipeline-launcher": {CALLS[call] for call in calls_of_the_launcher()},
        # Its sensor asks what keeps a pod from starting, without logs, and terminates runs that never start.
        "batch-pipeline-code": {
            CALLS[call]
            for call in calls_of_the_launcher("terminate", "get_run_worker_debug_info", "end_of_pod")
            - {"read_namespaced_pod_log"}
        },
    }


def test_nobody_else_has_rights(manifests: list[objects.Object]) -> None:
    bindings = [one for one in manifests if one["kind"] == "RoleBinding"]
    bound = {subject["name"]: one["roleRef"]["name"] for one in bindings for subject in one["subjects"]}
    assert bound == {name: name for name in ("batch-pipeline-launcher", "batch-pipeline-code")}
    assert VALUES["serviceAccount"] == {"create": False, "name": "batch-pipeline-launcher"}
    assert VALUES["rbacEnabled"] is False


def test_everything_is_closed_but_what_is_opened(
    manifests: list[objects.Object], jobs: dict[str, objects.Object]
) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for job in jobs.values():
        labels = job["spec"]["template"]["metadata"]["labels"]
        # "names" and "default-deny" are for every pod. Nobody reaches an engine.
        mine = {name for name, policy in policies.items() if objects.selects(policy["podSelector"], labels)}
        assert mine == {"default-deny", "names", "database-and-object-store"}
        assert not any("ingress" in policies[name] for name in mine)


def test_gpus_of_the_quota_are_those_of_the_scheduler(manifests: list[objects.Object], deployed: Settings) -> None:
    [quota] = [one["spec"]["hard"] for one in manifests if one["kind"] == "ResourceQuota"]
    assert quota == {"requests.nvidia.com/gpu": str(deployed.scheduling.total_gpus)}


def test_no_image_is_the_latest(jobs: dict[str, objects.Object]) -> None:
    folders = [path.parent for path in objects.BASE.parent.glob("*/kustomization.yaml")]
    everything = [*jobs.values(), *(one for folder in folders for one in objects.kustomized(folder))]
    named = {image for one in everything for image in objects.images(one)} - {"batch-pipeline"}  # set by the overlay
    named |= {f"{image['repository']}:{image['tag']}" for image in images_of_the_chart(VALUES)}
    assert named
    assert [image for image in named if ":" not in image or image.endswith(":latest")] == []


def allowed(role: objects.Object) -> set[tuple[str, str, str]]:
    """Return a role's group, resource and verb, each combination that it allows."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
