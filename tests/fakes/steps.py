"""Intake or merge of one batch in a process of its own, so that its memory can be measured.

    python -m tests.fakes.steps intake|merge CONFIG LEDGER_URL BATCH

It prints the largest resident set of itself plus that of the largest process that it started, in bytes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from batch_pipeline import settings as configuration
from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.results import merge
from batch_pipeline.store import ObjectStore
from tests.fakes.memory import peak_bytes

REPOSITORY = Path(__file__).resolve().parents[2]


def run(step: str, config: Path, ledger_url: str, batch_id: str) -> int:
    """Run a step in a process of its own to its end; return its largest resident set in bytes."""
    command = [sys.executable, "-m", "tests.fakes.steps", step, str(config), ledger_url, batch_id]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Run one step, and print what it held."""
    step, config, ledger_url, batch_id = sys.argv[1:5]
    settings = configuration.load(Path(config), environment={})
    ledger, store = Ledger.open(ledger_url), ObjectStore.open(settings.store)
    if step == "intake":
        ops.validate(batch_id, ledger=ledger, store=store, settings=settings, run_id="intake")
        ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings, run_id="intake")
    else:
        merge.merge(batch_id, ledger=ledger, store=store, settings=settings, run_id="merge")
    started_ones = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(peak_bytes() + started_ones, flush=True)


if __name__ == "__main__":
    main()
