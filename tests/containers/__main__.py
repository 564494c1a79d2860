"""Build the container file and run the service from it: `python -m tests.containers [--base IMAGE]`.

Needs podman and runc (and debootstrap, as root, where no base image is given): on Debian
`apt-get install podman runc debootstrap`. Takes some minutes, so it is no part of the tests that `make test` runs.

The image runs as it does on Kubernetes: not as root, on a read-only file system, without capabilities, with the
environment of deploy/kubernetes/base and the instance of deploy/dagster.yaml; only its launcher is left out, so that
runs are processes of the code location. A batch goes through all of it, on a fake engine. Exit status 1 where a step
fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.containers.image import Engine, Image, build, build_for_tests, make_base
from tests.containers.trial import Trial, TrialError

NAME = "localhost/batch-pipeline:trial"


def main() -> int:
    """Build, run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="podman --runtime runc", help="default: %(default)s")
    parser.add_argument("--base", help="base image; default: a Debian made by debootstrap")
    parser.add_argument("--image", help="this image, instead of building one")
    options = parser.parse_args()
    engine = Engine(options.engine)
    with tempfile.TemporaryDirectory(prefix="containers-") as text:
        folder = Path(text)
        image = options.image
        if image is None:
            base = options.base
            if base is None:
                made = make_base(engine, folder)
                say_of("base", made)
                base = made.name
            built = build(engine, base, NAME)
            say_of("image", built)
            image = built.name
        say_of("image for the tests on a cluster", build_for_tests(engine, image, f"{NAME}-tests"))
        began = time.monotonic()
        try:
            Trial(engine, image, folder / "trial", say).run()
        except TrialError as error:
            say(f"FAILED: {error}")
            return 1
    say(f"all of it works ({time.monotonic() - began:.0f} s)")
    return 0


def say_of(what: str, image: Image) -> None:
    say(f"{what}: {image.name}, {image.bytes / 1e6:.0f} MB, made in {image.seconds:.0f} s")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
