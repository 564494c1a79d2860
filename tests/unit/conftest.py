"""What is deployed, made once for all tests that look at it."""

from __future__ import annotations

import pytest

from batch_pipeline.settings import Settings
from deploy import objects
from tests.fakes.dagster_launcher import launched
from tests.fakes.kubernetes_objects import deployed_settings


@pytest.fixture(scope="session")
def deployed() -> Settings:
    """The configuration of the manifests, with models that use the other options of a pod as well."""
    return deployed_settings()


@pytest.fixture(scope="session")
def jobs(deployed: Settings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, objects.Object]:
    """The Jobs that the launcher sends to Kubernetes for a run of each of our jobs, as they go over the wire."""
    return dict(launched(deployed, tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="session")
def manifests() -> list[objects.Object]:
    """The objects of deploy/kubernetes/base."""
    return objects.kustomized(objects.BASE)
