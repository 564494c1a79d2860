"""How runs look as Kubernetes Jobs: read by dagster-k8s's run launcher from the tags of their jobs.

A worker's pod (`worker_tags`):

    weights   init container, where weights are fetched: fills the claim or the node's folder once
    engine    native sidecar (an init container with restartPolicy Always): vLLM from its own image, with the GPUs
    dagster   the run itself: the worker, which attaches to the engine at a loopback address

The engine has no start-up probe, on purpose: Kubernetes starts what stands behind a sidecar only when that probe has
succeeded, so nobody could say that the model is loading, and Dagster would take minutes of loading for a run that does
not start. The start-up probe is the worker's, and asks the engine: a pod whose engine is not there in time is ended
even if its worker hangs. At the end Kubernetes sends SIGTERM to the sidecar only after the worker has ended; the grace
is one for both. Elsewhere than on Kubernetes the tags mean nothing.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from batch_pipeline.models import FETCH_ENVIRONMENT, Model
from batch_pipeline.pods import Runs
from batch_pipeline.settings import Settings, Worker

ENGINE_PORT = 8000
ENGINE_URL = f"http://127.0.0.1:{ENGINE_PORT}"
ENGINE_URL_VARIABLE = "BATCH_PIPELINE__WORKER__ENGINE_URL"
"""Overrides `worker.engine_url`, in a worker's pod only."""
CONFIG_TAG = "dagster-k8s/config"
"""dagster_k8s's own name of it, which is not imported: that loads Kubernetes' client in every run, a second of it."""
ROLE_LABEL = "batch-pipeline/role"
"""Of every pod of ours, for network policies: worker, intake or merge."""
MODEL_LABEL = "batch-pipeline/model"
DEADLINE_MARGIN_SECONDS = 600
_PROBE_SECONDS = 10
_DEAD_PROBES = 12
"""After so many failed probes in a row Kubernetes starts the engine again: two minutes without an answer to /health."""
_CACHE_FOLDER = "/weights"
_HOME = "/home/engine"
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
_TOKENIZER_MEMORY = "512Mi"
_NO_RIGHTS: dict[str, Any] = {
    "allow_privilege_escalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccomp_profile": {"type": "RuntimeDefault"},
}


def worker_tags(name: str, model: Model, worker: Worker) -> dict[str, Any]:
    """Return the tags of a model's worker job. A model with an `engine_url` gets a pod without an engine and GPU.

    Source: Dagster's documentation of `dagster-k8s/config`; on a job it shapes the pod of the run. `backoff_limit` is
    0, because the ledger's leases hand the work on; a pod that is being ended counts as ended only once it has
    (`pod_replacement_policy`), because until then its worker saves what it has, and Dagster's run monitoring would
    call its run failed.
    """
    pod = model.kubernetes
    has_engine = model.engine_url is None
    container: dict[str, Any] = {
        "resources": _resources(pod.worker_cpu, pod.worker_memory),
        "security_context": {**_NO_RIGHTS, "run_as_non_root": True},
    }
    if has_engine:
        tries = -(-int(model.engine_start_seconds) // _PROBE_SECONDS) + _DEAD_PROBES
        container["env"] = [{"name": ENGINE_URL_VARIABLE, "value": ENGINE_URL}]
        container["startup_probe"] = {**_health_probe(), "failure_threshold": tries}
    spec = {
        **_pod_spec(pod.priority_class, pod.grace_seconds),
        "node_selector": pod.node_selector if has_engine else {},
        "tolerations": [_toleration(given) for given in pod.tolerations] if has_engine else [],
        "init_containers": [*_fetching(model), _engine(name, model)] if has_engine else [],
        "volumes": _engine_volumes(model) if has_engine else [],
    }
    if has_engine and pod.weights_url:
        # Else a fresh volume belongs to root, and nobody can fetch into it.
        spec["security_context"] = {"fs_group": pod.engine_user, "fs_group_change_policy": "OnRootMismatch"}
    longest = pod.start_seconds + model.engine_start_seconds + worker.lifetime_seconds
    deadline = int(longest) + pod.grace_seconds + DEADLINE_MARGIN_SECONDS
    labels = {MODEL_LABEL: name[:63].rstrip("-._")}
    return _tags(
        "worker",
        container,
        spec,
        deadline_seconds=deadline,
        keep_ended_seconds=pod.keep_ended_seconds,
        labels=labels,
    )


def intake_tags(settings: Settings) -> dict[str, Any]:
    """Return the tags of the intake job: a CPU pod with scratch space and the tokenizers of all models."""
    runs = settings.runs
    container, spec = _cpu_pod(runs, runs.intake_cpu, runs.intake_memory, settings.intake.scratch_dir)
    init_containers: list[dict[str, Any]] = []
    # One volume for each claim: the same claim twice in a pod keeps some kubelets waiting for ever.
    claims: dict[str, str] = {}
    # One mount for each source: entries of the catalogue may share one, and a path is mounted once.
    sources: dict[str, Model] = {}
    for model in settings.models.values():
        sources.setdefault(model.source, model)
    for number, model in enumerate(sources.values()):
        pod = model.kubernetes
        volume = f"model-{number}"
        if pod.weights_url:
            # Not the engine's cache: nothing has filled it before the first worker, and it may be on another node.
            init_containers.append(_fetch(model, volume, only_tokenizer=True))
            spec["volumes"].append({"name": volume, "empty_dir": {}})
        elif (shared := claims.setdefault(pod.model_volume_claim, volume)) != volume:
            volume = shared
        else:
            spec["volumes"].append(_claim(volume, pod.model_volume_claim, read_only=True))
        container["volume_mounts"].append(_model_mount(volume, model))
    spec["init_containers"] = init_containers
    return _tags(
        "intake", container, spec, deadline_seconds=runs.longest_seconds, keep_ended_seconds=runs.keep_ended_seconds
    )


def merge_tags(settings: Settings) -> dict[str, Any]:
    """Return the tags of the merge job: a CPU pod with scratch space."""
    runs = settings.runs
    container, spec = _cpu_pod(runs, runs.merge_cpu, runs.merge_memory, settings.intake.scratch_dir)
    return _tags(
        "merge", container, spec, deadline_seconds=runs.longest_seconds, keep_ended_seconds=runs.keep_ended_seconds
    )


def _tags(
    role: str,
    container: dict[str, Any],
    spec: dict[str, Any],
    *,
    deadline_seconds: int,
    keep_ended_seconds: int,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    config = {
        "container_config": container,
        "pod_spec_config": spec,
        "pod_template_spec_metadata": {"labels": {ROLE_LABEL: role, **(labels or {})}},
        "job_spec_config": {
            "backoff_limit": 0,
            "ttl_seconds_after_finished": keep_ended_seconds,
            "active_deadline_seconds": deadline_seconds,
            "pod_replacement_policy": "Failed",
        },
    }
    return {CONFIG_TAG: config}


def _pod_spec(priority_class: str, grace_seconds: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "termination_grace_period_seconds": grace_seconds,
        "restart_policy": "Never",
        # A run never calls Kubernetes, and an engine certainly does not.
        "automount_service_account_token": False,
        "enable_service_links": False,
    }
    return {**spec, "priority_class_name": priority_class} if priority_class else spec


def _cpu_pod(runs: Runs, cpu: str, memory: str, scratch_dir: str) -> tuple[dict[str, Any], dict[str, Any]]:
    container = {
        "resources": _resources(cpu, memory),
        "security_context": {**_NO_RIGHTS, "run_as_non_root": True},
        "volume_mounts": [{"name": "scratch", "mount_path": scratch_dir}],
    }
    volume: dict[str, Any] = {"name": "scratch", "empty_dir": {"size_limit": runs.scratch}}
    if runs.scratch_storage_class:
        claim = {
            "access_modes": ["ReadWriteOnce"],
            "storage_class_name": runs.scratch_storage_class,
            "resources": {"requests": {"storage": runs.scratch}},
        }
        volume = {"name": "scratch", "ephemeral": {"volume_claim_template": {"spec": claim}}}
    return container, {**_pod_spec(runs.priority_class, runs.grace_seconds), "volumes": [volume]}


def _engine(name: str, model: Model) -> dict[str, Any]:
    pod = model.kubernetes
    gpus = {pod.gpu_resource: str(pod.gpus)}
    environment = {"HOME": _HOME, "USER": "engine", **FETCH_ENVIRONMENT, **model.engine_environment}
    mounts = [
        _model_mount("models", model),
        {"name": "home", "mount_path": _HOME},
        {"name": "temporary", "mount_path": "/tmp"},  # noqa: S108 - the pod's own
    ]
    if pod.gpus > 1:
        mounts.append({"name": "shared-memory", "mount_path": "/dev/shm"})  # noqa: S108 - the pod's own
    return {
        "name": "engine",
        "image": pod.engine_image,
        "restart_policy": "Always",
        "command": pod.engine_command,
        "args": _engine_arguments(name, model),
        "env": [{"name": key, "value": value} for key, value in sorted(environment.items())],
        "resources": {
            "requests": {"cpu": pod.cpu, "memory": pod.memory, **gpus},
            "limits": {"memory": pod.memory, **gpus},
        },
        "readiness_probe": {**_health_probe(), "failure_threshold": 1},
        "liveness_probe": {
            **_health_probe(),
            "initial_delay_seconds": max(1, int(model.engine_start_seconds)),
            "failure_threshold": _DEAD_PROBES,
        },
        "security_context": {
            **_NO_RIGHTS,
            "run_as_user": pod.engine_user,
            "run_as_group": pod.engine_user,
            "run_as_non_root": pod.engine_user != 0,
            "read_only_root_filesystem": True,
        },
        "volume_mounts": mounts,
    }


def _engine_arguments(name: str, model: Model) -> list[str]:
    """Return the arguments of vLLM's server; they name the split over the GPUs where the catalogue does not."""
    given = {argument.partition("=")[0] for argument in model.engine_arguments}
    split = ["--tensor-parallel-size", str(model.kubernetes.gpus)]
    return [
        "--model",
        model.source,
        "--served-model-name",
        name,
        "--max-model-len",
        str(model.context_length),
        *model.fetch_arguments,
        "--host",
        "0.0.0.0",  # noqa: S104 - the kubelet probes the pod's address; a network policy keeps others out
        "--port",
        str(ENGINE_PORT),
        *(split if model.kubernetes.gpus > 1 and not given.intersection(_PARALLEL) else []),
        *model.engine_arguments,
    ]


def _engine_volumes(model: Model) -> list[dict[str, Any]]:
    pod = model.kubernetes
    models: dict[str, Any] = {"name": "models", "empty_dir": {}}
    if pod.model_volume_claim:
        models = _claim("models", pod.model_volume_claim, read_only=not pod.weights_url)
    elif pod.node_cache:
        models = {"name": "models", "host_path": {"path": pod.node_cache, "type": "Directory"}}
    volumes = [models, {"name": "home", "empty_dir": {}}, {"name": "temporary", "empty_dir": {}}]
    if pod.gpus > 1:
        # Kubernetes' own /dev/shm has 64 MiB; what is written here counts as the engine's memory.
        volumes.append({"name": "shared-memory", "empty_dir": {"medium": "Memory", "size_limit": pod.shared_memory}})
    return volumes


def _fetching(model: Model) -> list[dict[str, Any]]:
    return [_fetch(model, "models")] if model.kubernetes.weights_url else []


def _fetch(model: Model, volume: str, *, only_tokenizer: bool = False) -> dict[str, Any]:
    """Return the init container that fetches weights; see `batch_pipeline.store.weights` for what it does when."""
    pod = model.kubernetes
    target = str(PurePath(_CACHE_FOLDER) / PurePath(model.source).name)
    user = {"run_as_user": pod.engine_user, "run_as_group": pod.engine_user} if pod.engine_user else {}
    secret = {"env_from": [{"secret_ref": {"name": pod.weights_secret}}]} if pod.weights_secret else {}
    options = ["--only-tokenizer"] if only_tokenizer else []
    return {
        "name": "weights" if not only_tokenizer else volume.replace("model", "tokenizer"),
        "image": pod.weights_image,
        # No command: the image's first process passes on SIGTERM, which Python as the first one would never see.
        "args": ["python", "-m", "batch_pipeline.store.weights", pod.weights_url, target, *options],
        "resources": _resources("100m", _TOKENIZER_MEMORY if only_tokenizer else "1Gi"),
        "security_context": {**_NO_RIGHTS, "run_as_non_root": True, **user},
        "volume_mounts": [{"name": volume, "mount_path": _CACHE_FOLDER}],
        **secret,
    }


def _claim(volume: str, claim: str, *, read_only: bool) -> dict[str, Any]:
    return {"name": volume, "persistent_volume_claim": {"claim_name": claim, "read_only": read_only}}


def _model_mount(volume: str, model: Model) -> dict[str, Any]:
    folder = PurePath(model.source).name
    return {"name": volume, "mount_path": model.source, "sub_path": folder, "read_only": True}


def _resources(cpu: str, memory: str) -> dict[str, Any]:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


def _health_probe() -> dict[str, Any]:
    return {
        "http_get": {"path": "/health", "port": ENGINE_PORT},
        "period_seconds": _PROBE_SECONDS,
        "timeout_seconds": _PROBE_SECONDS,
    }


def _toleration(given: dict[str, str | int]) -> dict[str, str | int]:
    """Return a toleration with its fields as the Kubernetes client names them, also where the catalogue has YAML's."""
    return {"toleration_seconds" if key == "tolerationSeconds" else key: value for key, value in given.items()}
