"""The small Kubernetes as a server of its own: `python -m tests.fakes.kubernetes FOLDER IMAGE`.

Prints the path of a kubeconfig once it answers, and runs until its input ends. IMAGE is the name by which pods are
started from this very Python and this repository. For whatever takes a kubeconfig.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from pathlib import Path

from tests.fakes.kubernetes import Image, Node, running

REPOSITORY = Path(__file__).resolve().parents[3]
GPU_NODES = 4


def this_machine(home: Path) -> Image:
    """Return an image that has what this Python and this repository have."""
    programs = sysconfig.get_path("scripts")
    return Image({"PATH": f"{programs}:{os.defpath}", "HOME": str(home), "PYTHONPATH": str(REPOSITORY)})


def gpu_nodes() -> list[Node]:
    """Return some nodes with a GPU each."""
    return [Node(f"gpu-{number}", gpus=1) for number in range(GPU_NODES)]


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the kubeconfig, volumes and logs")
    parser.add_argument("image", help="the image of every pod")
    options = parser.parse_args()
    with running(options.folder, {options.image: this_machine(options.folder)}, gpu_nodes()) as cluster:
        print(cluster.kubeconfig, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
