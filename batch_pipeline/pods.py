"""What the configuration says of pods: a worker's (in the model catalogue), and those of intake and merge runs.

`resources/kubernetes.py` makes Jobs of it. Elsewhere than on Kubernetes it means nothing.
"""

from __future__ import annotations

import re
from pathlib import PurePath

import msgspec

HAND_BACK_SECONDS = 15
"""What a worker needs after its grace: to checkpoint, to hand its leases back, and for Dagster to note the end."""
LEAST_KEPT_SECONDS = 300
"""Run monitoring reads from an ended Job how its run ended: it must be there for several of its rounds."""
WEIGHTS_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[^/\s]+)+/?")
_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|[KMGTP]i?)?")


class Kubernetes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker of a model looks as a Kubernetes Job. Quantities as Kubernetes writes them ("500m", "16Gi")."""

    gpus: int = 1
    """More than one: the engine splits the model over them, unless its arguments say how."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the device plugin calls a GPU."""
    engine_image: str = "vllm/vllm-openai:v0.32.0"
    """vLLM's own image, run as a native sidecar."""
    engine_command: list[str] = msgspec.field(
        default_factory=lambda: ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    )
    """What starts the server in that image; its arguments follow from the model."""
    engine_user: int = 1000
    """User id that the engine runs as; 0 (root) only for an image that cannot do without."""
    model_volume_claim: str = "models"
    """The claim that holds the weights: of this model in a folder of the name of `source`'s, which is mounted there.
    Empty: no claim, the weights are fetched.
    """
    node_cache: str = ""
    """A folder of the node that keeps fetched weights, where there is no claim; it must be there, and `engine_user` may
    write to it. Empty: each pod fetches its own.
    """
    weights_url: str = ""
    """Where the weights are fetched from, s3://BUCKET/FOLDER, once for each claim or node. Empty: they are there."""
    weights_image: str = ""
    """The image of this service, for the container that fetches."""
    weights_secret: str = ""
    """The secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and perhaps AWS_ENDPOINT_URL, for that container alone.
    Empty: the role of the pod's service account or node.
    """
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, str | int]] = []
    priority_class: str = "batch-inference"
    grace_seconds: int = 60
    """Time between SIGTERM and SIGKILL, for the worker and then the engine together."""
    start_seconds: int = 1800
    """How long node, images and weights may take. Dagster's `start_timeout_seconds` must be more: the
    sensor ends the Job with the run, Dagster leaves it.
    """
    keep_ended_seconds: int = 3600
    """How long a Job that has ended stays to be looked at; the ledger and Dagster have the history."""
    memory: str = "16Gi"
    """Of the engine, `shared_memory` included."""
    cpu: str = "4"
    shared_memory: str = "8Gi"
    """Size of /dev/shm, through which the engine's processes talk where there are several GPUs."""
    worker_memory: str = "2Gi"
    worker_cpu: str = "500m"


class Runs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the runs of intake and merge look as Kubernetes Jobs: pods without a GPU."""

    intake_memory: str = "2Gi"
    intake_cpu: str = "1"
    merge_memory: str = "2Gi"
    merge_cpu: str = "1"
    scratch: str = "60Gi"
    """Local disk of such a pod, mounted at `intake.scratch_dir`: for a copy of the largest file and its table."""
    scratch_storage_class: str = ""
    """Storage class of a volume that lives as long as its pod. Empty: the node's own disk."""
    priority_class: str = ""
    """Empty: the cluster's default."""
    grace_seconds: int = 30
    longest_seconds: int = 21_600
    """A run that takes longer is ended; what it did is kept, and it is requested again."""
    keep_ended_seconds: int = 3600
    """As for a worker's Job."""


def check_kubernetes(where: str, pod: Kubernetes, worker_grace_seconds: float) -> list[str]:
    """Return what is wrong with a model's table; one sentence each, naming the field."""
    problems = []
    if pod.gpus < 1:
        problems.append(f"{where}.gpus must be at least 1")
    if pod.start_seconds < 1:
        problems.append(f"{where}.start_seconds must be at least 1")
    problems += _check_kept(where, pod.keep_ended_seconds)
    if pod.engine_user < 0:
        problems.append(f"{where}.engine_user must be 0 or more")
    if worker_grace_seconds + HAND_BACK_SECONDS > pod.grace_seconds:
        problems.append(
            f"{where}.grace_seconds is {pod.grace_seconds}, and must be at least {HAND_BACK_SECONDS} s more than "
            f"worker.grace_seconds ({worker_grace_seconds:g}): a worker that is killed first hands nothing back"
        )
    for field in ("memory", "cpu", "shared_memory", "worker_memory", "worker_cpu"):
        problems += _check_quantity(f"{where}.{field}", getattr(pod, field))
    if pod.node_cache and not PurePath(pod.node_cache).is_absolute():
        problems.append(f"{where}.node_cache must be the full path of a folder of the nodes")
    if pod.node_cache and pod.model_volume_claim:
        problems.append(f'{where}: node_cache is used without a claim: set model_volume_claim to ""')
    if not pod.weights_url and not pod.model_volume_claim:
        problems.append(f"{where}: weights_url must say where the weights come from, or model_volume_claim has them")
    if pod.weights_url and not WEIGHTS_URL.fullmatch(pod.weights_url):
        problems.append(f"{where}.weights_url must be s3://BUCKET/FOLDER, not {pod.weights_url!r}")
    if pod.weights_url and not pod.weights_image:
        problems.append(f"{where}.weights_image must name the image of this service, which fetches the weights")
    return problems


def check_runs(runs: Runs) -> list[str]:
    """Return what is wrong with the table of the other runs' pods."""
    problems = _check_kept("runs", runs.keep_ended_seconds)
    for field in ("intake_memory", "intake_cpu", "merge_memory", "merge_cpu", "scratch"):
        problems += _check_quantity(f"runs.{field}", getattr(runs, field))
    return problems


def _check_kept(where: str, seconds: int) -> list[str]:
    if seconds >= LEAST_KEPT_SECONDS:
        return []
    return [f"{where}.keep_ended_seconds must be at least {LEAST_KEPT_SECONDS}: how a run ended is read from its Job"]


def _check_quantity(field: str, text: str) -> list[str]:
    good = _QUANTITY.fullmatch(text) and text.strip("0.mkKMGTPi")
    return [] if good else [f'{field} must be an amount as Kubernetes writes it ("500m", "16Gi"), not {text!r}']
