"""What Dagster's pages, our sensors and a backfill cost with many batches, on Postgres.

    python -m benchmarks.partitions [--partitions 1000 10000]

Starts Postgres, an object store, Dagster's code server and webserver on loopback, with data in a temporary folder, runs
one batch, and copies what it left (`_many_partitions`) until there are so many. Then it evaluates every sensor, opens
the pages that operators use in a headless Chromium, once cold and once warm, and starts a backfill over all partitions,
until Dagster has requested its first run. Nothing else is in the queue and no run is launched. Processor seconds are of
all parts but the browser; they say more than seconds where the machine is busy with other things as well.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import httpx
import psutil
from dagster._core.execution.backfill import BulkActionStatus
from playwright.sync_api import Browser, Page, Request, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.ledger import Ledger
from batch_pipeline.store import ObjectStore
from benchmarks._many_partitions import PARTITIONS, Copies, run_one
from deploy.browser import FLAGS, required
from sensors.housekeeping import delete_partitions
from tests.fakes import desk
from tests.fakes.code_location import CodeLocation
from tests.fakes.databases import new_database

LONGEST_SECONDS = 90.0
"""After so long a measurement is given up."""
SLOW_SECONDS = 2.0
"""A query that takes longer is named on the way."""
SENSORS = ("drop_folder", "batch_progress", "gpu_workers", "batch_observations", "alarms")
TICKS = 5
PAGES = (
    ("lineage", "/asset-groups", "usage_report"),
    ("partitions of an asset", "/assets/batch_results?view=partitions", "batch_"),
    ("one batch", "/assets/batch_results?view=partitions&partition={}", "requests_completed"),
    ("checks", "/assets/batch_results?view=checks", "exactly_one_result"),
    ("runs", "/runs", "batch_pipeline/customer"),
    ("backfills", "/runs?view=backfills", "Launched by"),
    ("launch", "/assets/chunk_results?view=partitions", "batch_"),
)
"""What operators look at: its name, where it is, and a text that is there once it is usable."""
INSTANCE = """
telemetry: {{enabled: false}}
nux: {{enabled: false}}
storage: {{postgres: {{postgres_url: "{url}"}}}}
concurrency: {{runs: {{max_concurrent_runs: 0}}}}
sensors: {{use_threads: true, num_workers: 4}}
backfills: {{use_threads: true, num_workers: 2}}
"""
BACKFILL = """
mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }
"""


class Cost(NamedTuple):
    """What something took."""

    seconds: float
    processor_seconds: float


class Bench:
    """The parts, and what one measures with."""

    def __init__(self, dagster: desk.Dagster, dagster_url: str) -> None:
        self.settings = dagster.settings
        self.instance = dg.DagsterInstance.from_config(str(dagster.home))
        self.location = CodeLocation(dagster.settings, self.instance)
        self.ledger = Ledger.from_settings(dagster.settings)
        self.dagster_url = dagster_url
        self.url, self.daemon = dagster.url, dagster.daemon

    @contextmanager
    def measured(self, costs: dict[str, Cost], name: str) -> Iterator[None]:
        """Note what stands within under a name."""
        began, before = time.perf_counter(), _processor_seconds()
        yield
        costs[name] = Cost(time.perf_counter() - began, _processor_seconds() - before)
        print(f"  {name}: {_cell(costs[name])}", file=sys.stderr)

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        """Send what the UI would send."""
        body = {"query": text, "variables": variables}
        answer = httpx.post(f"{self.url}/graphql", json=body, timeout=LONGEST_SECONDS).raise_for_status().json()
        if "errors" in answer:
            raise RuntimeError(str(answer["errors"]))
        data: dict[str, Any] = answer["data"]
        return data

    def sensors(self) -> dict[str, Cost]:
        """Evaluate every sensor a few times, for the median, and let housekeeping say which partitions are to go."""
        costs: dict[str, Cost] = {}
        for name in SENSORS:
            self.location.tick(name)
            ticks: dict[str, Cost] = {}
            for number in range(TICKS):
                with self.measured(ticks, f"tick {number} of {name}"):
                    self.location.tick(name)
            seconds, processor_seconds = (statistics.median(column) for column in zip(*ticks.values(), strict=True))
            costs[f"tick of {name}"] = Cost(seconds, processor_seconds)
        with self.measured(costs, "housekeeping: which partitions are to go"):
            delete_partitions(self.instance, self.ledger, self.settings.retention, dry_run=True)
        return costs

    def pages(self, batch_id: str) -> dict[str, Cost]:
        """Open every page twice, in a new window each."""
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=required(), args=list(FLAGS))
            costs = self._open_all(browser, batch_id)
            browser.close()
        return costs

    def _open_all(self, browser: Browser, batch_id: str) -> dict[str, Cost]:
        costs: dict[str, Cost] = {}
        for name, path, text in PAGES:
            for when in ("first", "again"):
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                page.on("requestfinished", _tell_slow_query)
                with self.measured(costs, f"{name}, {when}"):
                    page.goto(f"{self.url}{path.format(batch_id)}")
                    _until(page, text)
                if name == "launch" and when == "again":
                    with self.measured(costs, "dialog of a launch"):
                        page.get_by_text("Materialize…").first.click()
                        _until(page, "Partition selection")
                page.close()
        return costs

    def backfills(self) -> dict[str, Cost]:
        """Start a backfill of each kind over all partitions, and end it once its first run is requested.

        Dagster's daemon runs only meanwhile: its sensors would launch what is measured elsewhere.
        """
        self.daemon.start()
        self.daemon.wait_ready()
        try:
            return self._backfill_all()
        finally:
            self.daemon.stop()

    def _backfill_all(self) -> dict[str, Cost]:
        keys = list(self.instance.get_dynamic_partitions(PARTITIONS))
        costs: dict[str, Cost] = {}
        for asset, kind in (("batch_results", "a run for each"), ("chunk_results", "one run")):
            params = {"assetSelection": [{"path": [asset]}], "partitionNames": keys, "tags": []}
            with self.measured(costs, f"backfill of {asset} ({kind}): accepted"):
                answer = self.query(BACKFILL, params=params)["launchPartitionBackfill"]
            backfill_id = answer["backfillId"]
            with self.measured(costs, f"backfill of {asset} ({kind}): first run requested"):
                self._wait_for_run(backfill_id)
            backfill = self.instance.get_backfill(backfill_id)
            assert backfill is not None
            self.instance.update_backfill(backfill.with_status(BulkActionStatus.CANCELED))
        return costs

    def _wait_for_run(self, backfill_id: str) -> None:
        ours = dg.RunsFilter(tags={"dagster/backfill": backfill_id})
        until = time.monotonic() + LONGEST_SECONDS
        while not self.instance.get_runs_count(ours) and time.monotonic() < until:
            time.sleep(0.1)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, nargs="+", default=[1000, 10_000])
    options = parser.parse_args()
    sizes = sorted(options.partitions)
    columns: list[dict[str, Cost]] = []
    with bench() as parts:
        batch_id = run_one(parts.location, ObjectStore.open(parts.settings.store))
        copies, there = Copies(parts.dagster_url, parts.ledger, batch_id), 1
        for size in sizes:
            began = time.perf_counter()
            copies.add(there, size - there)
            there = size
            print(f"{size} partitions, made in {time.perf_counter() - began:.0f} s", file=sys.stderr)
            costs = {**parts.sensors(), **parts.pages(batch_id), **parts.backfills()}
            columns.append(costs)
    print(f"| seconds (processor seconds) with | {' | '.join(f'{size:,}' for size in sizes)} |")
    print(f"| --- |{' --- |' * len(sizes)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(_cell(column[name]) for column in columns)} |")


@contextmanager
def bench() -> Iterator[Bench]:
    """Everything but the browser, with data in a temporary folder; stopped at the end."""
    with tempfile.TemporaryDirectory() as name, PostgresServer(Path(name) / "postgres") as server:
        ledger_url, dagster_url = (new_database(server, database) for database in ("ledger", "dagster"))
        dagster_url = dagster_url.replace("+psycopg:", "+psycopg2:")
        of_ledger = f'\n[ledger]\nurl = "{ledger_url}"\n'
        instance = INSTANCE.format(url=dagster_url)
        with desk.dagster(Path(name), configuration_more=of_ledger, instance=instance) as dagster:
            yield Bench(dagster, dagster_url)


def _until(page: Page, text: str) -> None:
    """Wait until a text is to be seen, or the measurement is given up."""
    with contextlib.suppress(PlaywrightTimeoutError):
        page.get_by_text(text).first.wait_for(timeout=1000 * LONGEST_SECONDS)


def _tell_slow_query(request: Request) -> None:
    seconds = request.timing["responseEnd"] / 1000
    if seconds > SLOW_SECONDS and request.post_data_json:
        print(f"    {request.post_data_json.get('operationName')}: {seconds:.1f} s", file=sys.stderr)


def _cell(cost: Cost) -> str:
    seconds = f"{cost.seconds:.1f}" if cost.seconds < LONGEST_SECONDS else f"> {LONGEST_SECONDS:.0f}"
    return f"{seconds} ({cost.processor_seconds:.2f})"


def _processor_seconds() -> float:
    """Return the processor seconds so far of this process and its children that are no browser."""
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0.0
    for process in everyone:
        try:
            if not process.name().startswith(("chrom", "node")):
                total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # its seconds are its parent's now
    return total


if __name__ == "__main__":
    main()
