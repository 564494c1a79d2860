"""Reads what this folder holds as Kubernetes objects, and says what is wrong with them.

For the tests, and for check_chart.py, which checks what Dagster's Helm chart makes of our values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils as schemas
from packaging.version import Version
from referencing import Registry, Resource

DEPLOY = Path(__file__).resolve().parent
BASE = DEPLOY / "kubernetes" / "base"
OLDEST = "1.29"
"""Native sidecars are on by default from here on."""

Object = dict[str, Any]
"""A Kubernetes object as the API takes it."""


class Name(NamedTuple):
    """What one object is called, or another one calls it."""

    kind: str
    name: str


def versions() -> list[str]:
    """Return the versions of Kubernetes that there are schemas of, and that the service runs on."""
    newer = {Version(version) for version in schemas.all_versions() if Version(version) >= Version(OLDEST)}
    return [str(version) for version in sorted(newer)]


def kustomized(folder: Path) -> list[Object]:
    """Return the objects of a kustomization, as far as ours use it: resources (other ones too), files of config maps,
    the namespace. Without its patches.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    found: list[Object] = []
    for resource in kustomization.get("resources", []):
        path = folder / resource
        found += kustomized(path.resolve()) if path.is_dir() else read(path)
    for generator in kustomization.get("configMapGenerator", []):
        files = [folder / file for file in generator["files"]]
        data = {file.name: file.read_text(encoding="utf-8") for file in files}
        if generator.get("behavior") == "replace":
            found = [one for one in found if made([one]) != {Name("ConfigMap", generator["name"])}]
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data})
    if "namespace" in kustomization:
        for one in found:
            if one["kind"] not in {"Namespace", "PriorityClass"}:
                one["metadata"]["namespace"] = kustomization["namespace"]
    return found


def read(path: Path) -> list[Object]:
    """Return the objects of a file."""
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def problems(one: Object, version: str) -> list[str]:
    """Return what this version of Kubernetes would refuse, fields that it does not know included; one line each."""
    where = f"{one['kind']}/{one['metadata'].get('name')} on {version}"
    group, _, name = one["apiVersion"].rpartition("/")
    short = f"{group.split('.')[0]}-{name}" if group else name
    validator = _validator(version, f"{one['kind'].lower()}-{short}")
    return [f"{where}: {error.json_path}: {error.message[:300]}" for error in validator.iter_errors(one)]


def made(objects: Iterable[Object]) -> set[Name]:
    """Return what the objects are called."""
    return {Name(one["kind"], one["metadata"]["name"]) for one in objects}


def wanted(one: Object) -> set[Name]:
    """Return the objects that this one names and that have to be there before it can work."""
    names: set[Name] = set()
    for key, value in _fields(one):
        match key, value:
            case "configMap" | "configMapRef" | "configMapKeyRef", {"name": str(name)} if not value.get("optional"):
                names.add(Name("ConfigMap", name))
            case "secretRef" | "secretKeyRef", {"name": str(name)} if not value.get("optional"):
                names.add(Name("Secret", name))
            case "secret", {"secretName": str(name)} if not value.get("optional"):
                names.add(Name("Secret", name))
            case "persistentVolumeClaim", {"claimName": str(name)}:
                names.add(Name("PersistentVolumeClaim", name))
            case "serviceAccountName", str(name):
                names.add(Name("ServiceAccount", name))
            case "priorityClassName", str(name):
                names.add(Name("PriorityClass", name))
            case "scaleTargetRef" | "roleRef", {"kind": str(kind), "name": str(name)}:
                names.add(Name(kind, name))
    if one["kind"] == "RoleBinding":
        names |= {Name(subject["kind"], subject["name"]) for subject in one["subjects"]}
    return names


def images(one: Object) -> set[str]:
    """Return the images that the object's containers run."""
    return {value for key, value in _fields(one) if key == "image" and isinstance(value, str)}


def pods(objects: Iterable[Object]) -> Iterator[Object]:
    """Yield the specification of each object that makes pods."""
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Pod":
            yield spec
        elif "template" in spec:
            yield spec["template"]["spec"]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a selector of labels takes in a pod with these."""
    alike = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return alike and all(
        wanted["operator"] == "In" and labels.get(wanted["key"]) in wanted["values"]
        for wanted in selector.get("matchExpressions", [])
    )


def _fields(value: object) -> Iterator[tuple[str, Any]]:
    """Yield every field at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from _fields(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner)


@functools.cache
def _validator(version: str, name: str) -> Draft202012Validator:
    schema = schemas.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{name}.json", version)
    return Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    contents = schemas.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    definitions: Resource[Any] = Resource.from_contents(contents)
    return definitions @ Registry()
