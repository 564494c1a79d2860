"""A browser for the tests of Dagster's pages: finds Chromium, and installs Debian's where it may. `make test` runs it.

Standard library only, as set-up is. It does nothing where there is one. Killed half-way, apt says what to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

VARIABLE = "CHROMIUM"
"""The variable that may name the program."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""For pages of our own on loopback: as any user, in a container, and without calling anybody."""
INSTALL = (("apt-get", "update"), ("apt-get", "install", "-y", "chromium"))


class BrowserError(Exception):
    """One clear line for the person at the terminal."""


def main() -> int:
    """See that there is a browser, and return the exit status."""
    try:
        if find(os.environ) is None:
            install()
    except BrowserError as error:
        print(f"browser: {error}", file=sys.stderr)
        return 1
    return 0


def find(environment: Mapping[str, str]) -> str | None:
    """Return the browser's program; None where there is none. Raises BrowserError where the variable names none."""
    named = environment.get(VARIABLE)
    if named:
        program = shutil.which(named)
        if program is None:
            raise BrowserError(f"{VARIABLE} names {named}, which is no program")
        return program
    return next(filter(None, map(shutil.which, NAMES)), None)


def required() -> str:
    """Return the browser's program. Raises BrowserError, which says what to do, where there is none."""
    found = find(os.environ)
    if found is None:
        raise BrowserError(
            f"no Chromium here: install it (Debian, as root: apt-get install chromium), or name one in {VARIABLE}"
        )
    return found


def install() -> None:
    """Install Debian's Chromium. Raises BrowserError where that cannot be done by this user, here, or at all."""
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        print("Installing Chromium for the tests of Dagster's pages (a minute or two) ...", flush=True)
        for command in INSTALL:
            run(command)
    required()


def run(command: tuple[str, ...]) -> None:
    """Run a command quietly. Raises BrowserError with the last line that it said."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing said"]
        raise BrowserError(f"`{' '.join(command)}` failed: {said[-1]}")


if __name__ == "__main__":
    sys.exit(main())
