"""Makes the service's image, and the base below it where no registry can be reached."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "deploy" / "containers" / "Containerfile"
FOR_TESTS = ROOT / "tests" / "containers" / "Containerfile"
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
DEBIAN = "bookworm"
"""It has Python 3.11."""
_PIP = ("/etc/pip.conf", "/etc/ssl/certs")
"""How this machine's pip finds its index: the build uses the same."""


class Image(NamedTuple):
    """An image that was made here."""

    name: str
    seconds: float
    bytes: int


class Engine:
    """A container engine, called as `podman` is."""

    def __init__(self, command: str) -> None:
        self.command = command.split()

    def __call__(self, *words: str) -> str:
        """Run it and return what it prints. Raises CalledProcessError; what it says of itself goes to the terminal."""
        return subprocess.run([*self.command, *words], check=True, stdout=subprocess.PIPE, text=True).stdout

    def size(self, image: str) -> int:
        """Return the bytes of an image."""
        [about] = json.loads(self("image", "inspect", image))
        return int(about["Size"])


def make_base(engine: Engine, folder: Path) -> Image:
    """Make a Debian with Python, by debootstrap (as root), and import it."""
    began, tree = time.monotonic(), folder / "base"
    packages = "python3,python3-venv,ca-certificates,tini"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", DEBIAN, str(tree)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    archive = folder / "base.tar"
    needless = [
        f"--exclude=./{path}/*" for path in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man")
    ]
    subprocess.run(["tar", "-C", str(tree), *needless, "-cf", str(archive), "."], check=True)
    name = f"localhost/python-base:{DEBIAN}"
    engine("import", "--quiet", str(archive), name)
    return Image(name, time.monotonic() - began, engine.size(name))


def build(engine: Engine, base: str, name: str) -> Image:
    """Build the service's image on a base."""
    began = time.monotonic()
    mounts = [word for path in _PIP if Path(path).exists() for word in ("--volume", f"{path}:{path}:ro")]
    arguments = ["--build-arg", f"BASE={base}", "--file", str(CONTAINERFILE), "--tag", name]
    engine("build", "--quiet", "--network", "host", *LIMITS, *mounts, *arguments, str(ROOT))
    return Image(name, time.monotonic() - began, engine.size(name))


def build_for_tests(engine: Engine, image: str, name: str) -> Image:
    """Build the image for the tests of the Kubernetes path on a real cluster; its engine says that it starts."""
    began = time.monotonic()
    arguments = ["--build-arg", f"IMAGE={image}", "--file", str(FOR_TESTS), "--tag", name]
    engine("build", "--quiet", *LIMITS, *arguments, str(ROOT / "tests"))
    engine("run", "--rm", *LIMITS, "--user", "1000", name, "python", "-m", "tests.fakes.engine_image", "--help")
    return Image(name, time.monotonic() - began, engine.size(name))
