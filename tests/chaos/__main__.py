"""Kill everything, again and again, and count what comes back: `python -m tests.chaos --kills 50 --seed 1`.

Exit status 0 where every request of every file has exactly one line, 1 where one is lost or doubled.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos import account
from tests.chaos.files import workload
from tests.chaos.plan import LONG, SHORT, make_plan
from tests.chaos.run import Chaos, Outcome

_PAUSE_SECONDS = 2.2
_REQUESTS_A_KILL = 50


def run(folder: Path, kills: int, seed: int, *, long: bool = False) -> Outcome:
    """Make one chaos run in an empty folder, which afterwards holds the logs of all parts."""
    plan = make_plan(kills, seed, LONG if long else SHORT, _PAUSE_SECONDS)
    chaos = Chaos(folder, workload(kills * _REQUESTS_A_KILL), plan, _say)
    return chaos.run(limit_seconds=1200.0)


def main() -> int:
    """Run as the arguments say; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="Dagster's code server is among the victims")
    parser.add_argument("--folder", type=Path, help="an empty folder for data and logs, which is kept")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return _report(run(options.folder.resolve(), options.kills, options.seed, long=options.long))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        return _report(run(Path(folder), options.kills, options.seed, long=options.long))


def _report(outcome: Outcome) -> int:
    whole = outcome.whole
    for what in ("lost", "doubled", "unknown", "unproved"):
        for entry in getattr(whole, what)[:20]:
            print(f"{what}: {entry}")
    for entry in outcome.calls.needless[:20]:
        print(f"called although checkpointed: {entry}")
    print(account.table(outcome.kills, whole, outcome.calls, outcome.seconds))
    return 0 if outcome.holds else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
