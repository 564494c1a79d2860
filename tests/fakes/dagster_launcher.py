"""Dagster's own Kubernetes launcher without a cluster: what it would create, and which calls it makes."""

from __future__ import annotations

import ast
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes
import yaml
from dagster import AssetKey, DagsterInstance, DagsterRun
from dagster._config import process_config
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME
from dagster._core.launcher import LaunchRunContext
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster_k8s import K8sRunLauncher
from dagster_k8s.client import DagsterKubernetesClient

from batch_pipeline.definitions import make_definitions
from batch_pipeline.settings import CONFIG_VARIABLE, Settings
from deploy import objects
from resources.launcher import PodLauncher

NAMESPACE = "batch-pipeline"
IMAGE = "registry.example.com/batch-pipeline:0.1.0"


class Recorder:
    """Stands where the client of Kubernetes' batch API does, and keeps what is to be created."""

    def __init__(self) -> None:
        self.jobs: list[objects.Object] = []

    def create_namespaced_job(self, *, body: kubernetes.client.V1Job, namespace: str, **_options: Any) -> None:
        assert namespace == NAMESPACE
        self.jobs.append(kubernetes.client.ApiClient().sanitize_for_serialization(body))


def launched(settings: Settings, folder: Path) -> Iterator[tuple[str, objects.Object]]:
    """Yield the name of each of our jobs, and the Job that the launcher makes for its run."""
    recorder = Recorder()
    launcher_class: Any = PodLauncher
    instance = yaml.safe_load((objects.DEPLOY / "dagster.yaml").read_text(encoding="utf-8"))
    config = {**instance["run_launcher"]["config"], "job_namespace": NAMESPACE}
    checked = process_config(launcher_class.config_type(), config)
    assert checked.success, checked.errors
    nowhere = {"load_incluster_config": False, "kubeconfig_file": str(kubeconfig(folder))}
    launcher = launcher_class(**{**(checked.value or {}), **nowhere}, k8s_client_batch_api=recorder)
    origin = RepositoryPythonOrigin(
        executable_path="python",
        code_pointer=ModuleCodePointer("batch_pipeline.definitions", "defs"),
        container_image=IMAGE,
        entry_point=["dagster"],
    )
    # What the daemon and the webserver have in their environment.
    shared = objects.read(objects.BASE / "environment.yaml")[0]["data"]
    here = {**shared, CONFIG_VARIABLE: str(objects.BASE / "batch-pipeline.toml")}
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, here),
        DagsterInstance.local_temp(str(folder)) as dagster,
    ):
        warnings.simplefilter("ignore")
        launcher.register_instance(dagster)
        for name, run in runs(settings, origin):
            dagster.add_run(run)
            launcher.launch_run(LaunchRunContext(run, None))
            yield name, recorder.jobs[-1]


def runs(settings: Settings, origin: RepositoryPythonOrigin) -> Iterator[tuple[str, DagsterRun]]:
    """Yield a run of each of our jobs, by the job's name, and of single assets as their pages launch them."""
    for job in make_definitions(settings).get_repository_def().get_all_jobs():
        tags = {**job.tags, **job.run_tags}
        yield job.name, DagsterRun(job_name=job.name, tags=tags, job_code_origin=JobPythonOrigin(job.name, origin))
    whole = JobPythonOrigin(IMPLICIT_ASSET_JOB_NAME, origin)
    for asset in ("request_chunks", "batch_results", "chunk_results"):
        chosen = frozenset({AssetKey(asset)})
        yield asset, DagsterRun(job_name=IMPLICIT_ASSET_JOB_NAME, job_code_origin=whole, asset_selection=chosen)


def kubeconfig(folder: Path) -> Path:
    """A file that points at no cluster: what would be sent there is looked at instead."""
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    file = folder / "kubeconfig"
    users = [{"name": "none", "user": {}}]
    whole = {"clusters": [cluster], "contexts": [context], "current-context": "none", "users": users}
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **whole}), encoding="utf-8")
    return file


def calls_of_the_launcher(*only: str) -> set[str]:
    """Return the calls of Kubernetes' API that the launcher's methods (`only` these) make, from their source."""
    launcher = functions(K8sRunLauncher) | functions(PodLauncher)
    client = functions(DagsterKubernetesClient)
    todo = [used for name in only or launcher for used in attributes(launcher[name]) if used in client]
    seen: set[str] = set()
    calls: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            used = attributes(client[name])
            calls |= {each for each in used if "_namespaced_" in each and each not in client}
            todo += [each for each in used if each in client]
    return calls


def functions(of: type) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class, as they are written."""
    return {node.name: node for node in ast.walk(ast.parse(inspect.getsource(of))) if isinstance(node, ast.FunctionDef)}


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
