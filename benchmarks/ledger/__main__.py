"""How fast the ledger leases and commits: with eight workers on one database, and with very many batches in it.

    python -m benchmarks.ledger [--workers 1 8] [--chunks 4000] [--batches 16] [--at-once 1 8]
    python -m benchmarks.ledger --scale [--active 10000] [--per-batch 100] [--finished 10000] [--plans FILE]

Each run starts a Postgres on loopback (fsync on) with its data in a temporary folder; the first kind makes a SQLite
file as well. In the first, each worker is a process that leases, commits, and begins again, until nothing is left: the
ledger is all that is measured. In the second, one process does it in a ledger of 10,000 batches in progress with
1,000,000 chunks, of 190 customers; then as many finished ones are added, and it is done again: nothing may take longer.
`--plans` keeps the plans of the statements.

The clients and the database share this machine's processors. Processor seconds are told apart, and say more than
seconds where the machine is busy with other things as well.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from batch_pipeline.embedded.postgres import PostgresServer
from benchmarks.ledger import scale, throughput


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chunks", type=int, default=4000, help="in all")
    parser.add_argument("--batches", type=int, default=16, help="that the chunks are spread over")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="chunks of each lease and each commit")
    parser.add_argument("--scale", action="store_true", help="measure with very many batches instead")
    parser.add_argument("--active", type=int, default=10_000, help="batches in progress")
    parser.add_argument("--finished", type=int, default=10_000, help="finished batches that are added")
    parser.add_argument("--per-batch", type=int, default=100, help="chunks of each batch")
    parser.add_argument("--plans", type=Path, help="file for the plans")
    options = parser.parse_args()
    if options.scale:
        size = scale.Size(active=options.active, finished=options.finished, chunks=options.per_batch)
        scale.measure(size, options.plans)
        return
    print(throughput.HEAD)
    for workers in options.workers:
        for at_once in options.at_once:
            load = throughput.Load(workers, at_once, options.chunks, options.batches)
            with tempfile.TemporaryDirectory() as folder:
                print(throughput.measure("SQLite", f"sqlite:///{folder}/ledger.sqlite", load), flush=True)
                with PostgresServer(Path(folder) / "postgres") as url:
                    print(throughput.measure("Postgres", url, load), flush=True)


if __name__ == "__main__":
    main()
