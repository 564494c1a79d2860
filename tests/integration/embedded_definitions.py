"""A code location for the tests of the stack: one job whose single op holds its place until it is told to end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import dagster as dg


@dg.op(pool="test-model")
def hold() -> None:
    folder = Path(os.environ["HOLD_FOLDER"])
    (folder / str(os.getpid())).touch()
    try:
        while True:
            time.sleep(0.05)
    finally:
        (folder / f"{os.getpid()}.ended").touch()


@dg.job(executor_def=dg.in_process_executor)
def holding() -> None:
    hold()


defs = dg.Definitions(jobs=[holding])
