"""How a worker's run looks as a Kubernetes Job: read by dagster-k8s's run launcher from the job's tags.

vLLM runs as a native sidecar (an init container with restartPolicy Always) from its own image, with the GPU; the run's
own container holds the worker, which attaches to it. Elsewhere than on Kubernetes the tags mean nothing.
"""

from __future__ import annotations

from typing import Any

from dagster_k8s.job import USER_DEFINED_K8S_CONFIG_KEY

from batch_pipeline.models import FETCH_ENVIRONMENT, Model

ENGINE_PORT = 8000
START_PROBE_SECONDS = 10


def worker_tags(name: str, model: Model) -> dict[str, Any]:
    """Return the tags of a model's worker job: GPU, node selector, tolerations, priority class, grace, sidecar.

    Source: Dagster's documentation of `dagster-k8s/config`; on a job it shapes the pod of the run. `backoff_limit` is
    0, because the ledger's leases retry the work, and the time to live is short, because the ledger has the history.
    """
    config = {
        "container_config": {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}},
        "pod_spec_config": {
            "node_selector": model.kubernetes.node_selector,
            "tolerations": model.kubernetes.tolerations,
            "priority_class_name": model.kubernetes.priority_class,
            "termination_grace_period_seconds": model.kubernetes.grace_seconds,
            "restart_policy": "Never",
            "init_containers": [_engine(name, model)],
            "volumes": [
                {
                    "name": "model",
                    "persistent_volume_claim": {"claim_name": model.kubernetes.model_volume_claim, "read_only": True},
                }
            ],
        },
        "job_spec_config": {"backoff_limit": 0, "ttl_seconds_after_finished": 3600},
    }
    return {USER_DEFINED_K8S_CONFIG_KEY: config}


def _engine(name: str, model: Model) -> dict[str, Any]:
    resources = {"cpu": model.kubernetes.cpu, "memory": model.kubernetes.memory}
    environment = {**FETCH_ENVIRONMENT, **model.engine_environment}
    limits = {"nvidia.com/gpu": str(model.kubernetes.gpus), "memory": model.kubernetes.memory}
    probe = {"http_get": {"path": "/health", "port": ENGINE_PORT}, "period_seconds": START_PROBE_SECONDS}
    return {
        "name": "engine",
        "image": model.kubernetes.engine_image,
        "restart_policy": "Always",
        "args": [
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
            *model.engine_arguments,
        ],
        "env": [{"name": key, "value": value} for key, value in sorted(environment.items())],
        "resources": {"requests": resources, "limits": limits},
        "startup_probe": {
            **probe,
            "failure_threshold": max(1, int(model.engine_start_seconds // START_PROBE_SECONDS)),
        },
        "volume_mounts": [{"name": "model", "mount_path": model.source, "read_only": True}],
    }
