"""The tests of the Kubernetes path run on whatever cluster a kubeconfig names: here a small one that is a server of its
own, with pods that reach this machine at another address than its loopback and fetch their weights from S3.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kubernetes

from tests.fakes.kubernetes_stack import REPOSITORY

IMAGE = "registry.example.com/batch-pipeline-tests:1"
NAMESPACE = "batch-pipeline-trial"
HOST = "127.0.0.2"


def test_the_scenarios_run_on_a_cluster_that_is_known_by_its_kubeconfig_alone(tmp_path: Path) -> None:
    server = [sys.executable, "-m", "tests.fakes.kubernetes", str(tmp_path), IMAGE]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as cluster:
        assert cluster.stdout is not None
        kubeconfig = os.path.relpath(cluster.stdout.readline().strip(), REPOSITORY)
        options = {"kubeconfig": kubeconfig, "kubernetes-image": IMAGE, "kubernetes-host": HOST}
        options |= {"kubernetes-namespace": NAMESPACE, "basetemp": str(tmp_path / "tests")}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "dropped_file or killed_pod"]
        command += [f"--{name}={value}" for name, value in options.items()]
        ran = subprocess.run(
            [*command, "tests/integration/test_kubernetes_runs.py"],
            check=False,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout
        assert "2 passed" in ran.stdout
        client = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(REPOSITORY / kubeconfig)))
        left = client.list_namespaced_pod(NAMESPACE).items
        assert [pod.metadata.name for pod in left if pod.metadata.deletion_timestamp is None] == []
        cluster.communicate(timeout=60)
