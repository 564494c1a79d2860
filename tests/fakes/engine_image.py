"""The fake engine as an image of an engine would start it: with vLLM's arguments, told what to do by its environment.

python -m tests.fakes.engine_image --model DIR --served-model-name m --host 0.0.0.0 --port 8000 ...

FAKE_ENGINE_OPTIONS    further options of tests/fakes/engine.py, for instance "--delay 0.1 --start-seconds 2"
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from tests.fakes import engine


def main() -> None:
    """Become the fake engine."""
    parser = argparse.ArgumentParser()
    for option in ("--served-model-name", "--host", "--port"):
        parser.add_argument(option, required=True)
    known, _ = parser.parse_known_args()
    options = ["--host", known.host, "--model", known.served_model_name]
    words = [*options, "--port", known.port, *shlex.split(os.environ.get("FAKE_ENGINE_OPTIONS", ""))]
    sys.argv = [sys.argv[0], *words]
    engine.main()


if __name__ == "__main__":
    main()
