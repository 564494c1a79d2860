"""What reaches a cluster, as the tests look at it: the configuration of the manifests, and what an object lacks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import yaml

from batch_pipeline import settings as configuration
from batch_pipeline.settings import Settings
from deploy import objects
from tests.fakes.dagster_launcher import IMAGE

VALUES: dict[str, Any] = yaml.safe_load((objects.DEPLOY / "helm" / "values.yaml").read_text(encoding="utf-8"))


def deployed_settings() -> Settings:
    """Return the configuration of the manifests, with models that use the other options of a pod as well."""
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


def environment() -> dict[str, str]:
    """Return what the pods have in their environment, without the secrets."""
    [data] = [one["data"] for one in objects.read(objects.BASE / "environment.yaml")]
    return {**data, configuration.CONFIG_VARIABLE: ""}


def problems(found: Any) -> list[str]:
    """Return what each version of Kubernetes would refuse."""
    return [problem for version in objects.versions() for one in found for problem in objects.problems(one, version)]


def nowhere(found: Any, there: list[objects.Object]) -> set[objects.Name]:
    """Return what is named and is neither among the manifests nor one of the secrets that the operator makes."""
    made = objects.made([*there, *objects.read(objects.BASE / "secret.example.yaml")])
    return {name for one in found for name in objects.wanted(one)} - made


def repeated(names: Any) -> list[Any]:
    """Return what is there more than once."""
    return [name for name, times in Counter(names).items() if times > 1]
