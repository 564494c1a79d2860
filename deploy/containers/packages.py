"""Print the packages that the service needs, each at its version in constraints.txt: what goes into its image.

Those are the dependencies of pyproject.toml and what these depend on; not the engine (vLLM has its own image), not what
only the embedded stack or the tests need. The list of names is in packages.txt beside this file, since what depends on
what is known only where everything is installed: `python deploy/containers/packages.py --renew`, in that environment,
writes it anew, and a test holds it to that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("packages.txt")


def main() -> int:
    """Write the list anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--renew", action="store_true", help="write packages.txt from what is installed here")
    if parser.parse_args().renew:
        LIST.write_text("".join(f"{line}\n" for line in wanted()), encoding="utf-8")
    else:
        print(*wanted(), sep="\n")
    return 0


def wanted() -> list[str]:
    """Return NAME==VERSION for each package, sorted, as constraints.txt pins them.

    Raises KeyError where one is not pinned, and importlib.metadata.PackageNotFoundError where one is not installed.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}
    return sorted(pins[name] for name in needed())


def needed() -> set[NormalizedName]:
    """Return the canonical names of the service's dependencies and of everything below them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    open_ones = [Requirement(line) for line in project["dependencies"]]
    extras: dict[NormalizedName, set[str]] = {}
    while open_ones:
        requirement = open_ones.pop()
        name = canonicalize_name(requirement.name)
        if name in extras and requirement.extras <= extras[name]:
            continue
        chosen = extras.setdefault(name, set())
        chosen |= requirement.extras
        for line in importlib.metadata.requires(name) or []:
            below = Requirement(line)
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in {"", *chosen}):
                open_ones.append(below)
    return set(extras)


if __name__ == "__main__":
    sys.exit(main())
