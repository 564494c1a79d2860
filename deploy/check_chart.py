"""Check our values against Dagster's Helm chart, as it is in a folder here (`helm pull dagster/dagster --untar`).

    python -m deploy.check_chart CHART-FOLDER [--helm PROGRAM]

It checks the values against the chart's own schemas, renders the chart, validates each object strictly against several
versions of Kubernetes, looks for names that nothing makes, and compares the instance that comes out with
deploy/dagster.yaml. The chart itself is Dagster's, and no part of this repository. Exit status 1 where something is
wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator
from kubernetes_validate import utils as schemas
from referencing import Registry, Resource

from deploy import instance, objects

VALUES = objects.DEPLOY / "helm" / "values.yaml"
SUBCHART = "dagster-user-deployments"
NAMESPACE = "batch-pipeline"
INSTANCE = objects.Name("ConfigMap", "dagster-instance")
_THEIRS = {"kubernetes-json-schema"}


def main() -> int:
    """Check, print what is wrong, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chart", type=Path, help="the folder of the chart")
    parser.add_argument("--helm", default="helm", help="the program")
    arguments = parser.parse_args()
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    wrong = [*against_schema(arguments.chart, values)]
    wrong += against_schema(arguments.chart / "charts" / SUBCHART, values[SUBCHART])
    rendered = render(arguments.chart, arguments.helm)
    version = yaml.safe_load((arguments.chart / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    print(f"chart {version}: {len(rendered)} objects")
    wrong += against_kubernetes(rendered)
    wrong += names_that_nothing_makes(rendered)
    wrong += policies_that_select_nothing(rendered)
    wrong += against_our_instance(rendered)
    print(*wrong, sep="\n") if wrong else print("the values fit")
    return 1 if wrong else 0


def against_schema(chart: Path, values: dict[str, Any]) -> Iterator[str]:
    """Yield what the chart's own schema says of the values.

    It refers to Kubernetes' schemas somewhere on the internet: the oldest ones that are installed here stand for those.
    """
    oldest = schemas.all_versions()[0]
    definitions = schemas.schema_contents(f"kubernetes-json-schema/v{oldest}-local/_definitions.json", oldest)
    definitions["definitions"] = definitions["$defs"]  # as the schemas of those days had them

    def retrieve(address: str) -> Resource[Any]:
        if not any(part in address for part in _THEIRS):
            raise LookupError(address)
        return Resource.from_contents(definitions)

    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    registry: Registry[Any] = Registry(retrieve=retrieve)  # type: ignore[call-arg]
    for error in Draft7Validator(schema, registry=registry).iter_errors(_merged(defaults, values)):
        yield f"{chart.name}: {error.json_path}: {error.message[:300]}"


def render(chart: Path, helm: str) -> list[objects.Object]:
    """Return the objects that the chart makes of our values."""
    command = [helm, "template", "dagster", str(chart), "--namespace", NAMESPACE, "--values", str(VALUES)]
    # Its schema is checked above, without the internet.
    ran = subprocess.run([*command, "--skip-schema-validation"], capture_output=True, text=True, check=True)
    return [one for one in yaml.safe_load_all(ran.stdout) if one]


def against_kubernetes(rendered: list[objects.Object]) -> Iterator[str]:
    """Yield what some version of Kubernetes would refuse."""
    for version in objects.versions():
        for one in rendered:
            yield from objects.problems(one, version)


def names_that_nothing_makes(rendered: list[objects.Object]) -> Iterator[str]:
    """Yield what the rendered objects want and neither they nor ours are."""
    there = objects.made(rendered) | objects.made(objects.kustomized(objects.BASE))
    there |= objects.made(objects.read(objects.BASE / "secret.example.yaml"))
    for one in rendered:
        for name in sorted(objects.wanted(one) - there):
            yield f"{one['kind']}/{one['metadata']['name']} names {name.kind}/{name.name}, which nothing makes"


def policies_that_select_nothing(rendered: list[objects.Object]) -> Iterator[str]:
    """Yield our network policies that none of the chart's pods, nor ours, come under: a label that is not theirs."""
    ours = objects.kustomized(objects.BASE)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in [*rendered, *ours] if one["kind"] == "Deployment"]
    for one in ours:
        if one["kind"] == "NetworkPolicy" and not any(objects.selects(one["spec"]["podSelector"], pod) for pod in pods):
            yield f"NetworkPolicy/{one['metadata']['name']} is for no pod"


def against_our_instance(rendered: list[objects.Object]) -> Iterator[str]:
    """Yield where Dagster reads another instance out of the chart's dagster.yaml than out of ours."""
    [text] = [one["data"]["dagster.yaml"] for one in rendered if objects.made([one]) == {INSTANCE}]
    theirs, ours = instance.read(text), instance.read((objects.DEPLOY / "dagster.yaml").read_text("utf-8"))
    for field in sorted(theirs.keys() | ours.keys()):
        if theirs.get(field) != ours.get(field):
            yield f"dagster.yaml: {field} is {ours.get(field)!r} in deploy/, and the chart makes {theirs.get(field)!r}"


def _merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values over the chart's defaults, as Helm puts them: tables one by one, anything else as a whole."""
    both = dict(defaults)
    for key, value in values.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


if __name__ == "__main__":
    sys.exit(main())
