"""What Dagster's Helm chart makes of our values, as far as it matters; deploy/check_chart.py asks the chart itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy import instance, objects


def images_of_the_chart(values: object) -> Iterator[dict[str, str]]:
    if isinstance(values, dict):
        if {"repository", "tag"} <= values.keys():
            yield values
        for inner in values.values():
            yield from images_of_the_chart(inner)
    elif isinstance(values, list):
        for inner in values:
            yield from images_of_the_chart(inner)


def as_a_deployment(part: dict[str, Any]) -> objects.Object:
    """Return the values of one part of the chart where its templates put them."""
    container = {
        "name": "dagster",
        "image": f"{part['image']['repository']}:{part['image']['tag']}",
        "imagePullPolicy": part["image"]["pullPolicy"],
        "resources": part["resources"],
        "securityContext": part["securityContext"],
        "volumeMounts": part["volumeMounts"],
        "envFrom": [
            *({"configMapRef": given} for given in part["envConfigMaps"]),
            *({"secretRef": given} for given in part["envSecrets"]),
        ],
    }
    pod = {"containers": [container], "volumes": part["volumes"], "securityContext": part["podSecurityContext"]}
    labels = {"app": "dagster"}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "dagster"}, "spec": spec}


def as_the_chart_writes_it(values: dict[str, Any]) -> dict[str, Any]:
    """Return the dagster.yaml that the chart makes of its values; deploy/check_chart.py asks the chart itself."""
    daemon, launcher = values["dagsterDaemon"], values["runLauncher"]["config"]["customRunLauncher"]
    queue = daemon["runCoordinator"]["config"]["queuedRunCoordinator"]
    monitoring, logs = daemon["runMonitoring"], values["computeLogManager"]["config"]["s3ComputeLogManager"]
    postgres, retention = values["postgresql"], values["retention"]
    database = {
        "scheme": postgres["postgresqlScheme"],
        "password": {"env": "DAGSTER_PG_PASSWORD"},
        "port": postgres["service"]["port"],
    }
    return {
        "storage": {"postgres": {"postgres_db": database}},
        "run_launcher": launcher,
        "run_queue": instance.snake_case(queue),
        "run_monitoring": instance.snake_case(monitoring),
        "concurrency": instance.snake_case(
            {"pools": values["concurrency"]["pools"], "runs": values["concurrency"]["runs"]}
        ),
        "compute_logs": {
            "module": "dagster_aws.s3.compute_log_manager",
            "class": values["computeLogManager"]["type"],
            "config": instance.snake_case(logs),
        },
        "sensors": instance.snake_case(daemon["sensors"]),
        "schedules": instance.snake_case(daemon["schedules"]),
        "telemetry": values["telemetry"],
        "retention": instance.snake_case({key: retention[key] for key in ("schedule", "sensor")}),
        **values["additionalInstanceConfig"],
    }
