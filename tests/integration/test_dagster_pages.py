"""What operators do on Dagster's pages, by clicks in a real browser, and what the ledger and Dagster then hold.

The tests are the steps of one operator at one stack, in their order. Dagster's daemon starts on the way: before that
nothing is launched by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import dagster as dg
import httpx
import pytest
from dagster._core.scheduler.instigation import InstigatorStatus
from playwright.sync_api import Page, expect, sync_playwright

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.store import ObjectStore
from deploy.browser import FLAGS, required
from tests.fakes import desk
from tests.fakes.code_location import CodeLocation
from tests.fakes.waiting import wait_until

PATIENCE_SECONDS = 120.0
until = partial(wait_until, timeout_seconds=PATIENCE_SECONDS, pause_seconds=0.1)
WORKER = "gpu_worker_smollm2_135m"


class Operator:
    """Somebody at a browser."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self._url = url

    def open(self, path: str, *texts: str) -> None:
        """Open a page, and see these texts on it."""
        self.page.goto(f"{self._url}{path}")
        self.see(*texts)

    def see(self, *texts: str) -> None:
        for text in texts:
            self.page.get_by_text(text).first.wait_for()

    def click(self, text: str, *, exact: bool = False) -> None:
        self.page.get_by_text(text, exact=exact).first.click()

    def press(self, button: str) -> None:
        self.page.get_by_role("button", name=button, exact=True).click()

    def write_configuration(self, text: str) -> None:
        """Replace what stands in the editor."""
        self.page.locator(".CodeMirror").first.click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(text)


class Desk(NamedTuple):
    """The stack, what it holds, and who sits before it."""

    operator: Operator
    instance: dg.DagsterInstance
    ledger: Ledger
    batches: dict[str, Batch]
    """By name: `questions` and `reviews` are completed, `waiting` has chunks and no worker."""
    dagster: desk.Dagster

    def runs(self, **tags: str) -> list[dg.DagsterRun]:
        return list(self.instance.get_runs(dg.RunsFilter(tags=tags)))

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Send what the pages send."""
        body = {"query": query, "variables": variables}
        answer = httpx.post(f"{self.dagster.url}/graphql", json=body, timeout=PATIENCE_SECONDS).raise_for_status()
        data: dict[str, Any] = answer.json()["data"]
        return data


@pytest.fixture(scope="module")
def at_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with desk.dagster(tmp_path_factory.mktemp("pages")) as dagster:
        instance = dg.DagsterInstance.from_config(str(dagster.home))
        ledger, store = Ledger.from_settings(dagster.settings), ObjectStore.open(dagster.settings.store)
        fill(CodeLocation(dagster.settings, instance), store)
        batches = {batch.name: batch for batch in ledger.batches.recent()}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=required(), args=list(FLAGS))
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.set_default_timeout(1000 * PATIENCE_SECONDS)
            yield Desk(Operator(page, dagster.url), instance, ledger, batches, dagster)
            browser.close()
        ledger.close()
        instance.dispose()


def fill(location: CodeLocation, store: ObjectStore) -> None:
    """Bring two files through all their runs, and a third one through its intake."""
    store.put("inbox/acme/questions.jsonl", desk.file_of(8, bad=2))
    store.put("inbox/initech/reviews.jsonl", desk.file_of(8, seed=2))
    for sensor in ("drop_folder", "gpu_workers", "batch_progress"):
        for request in location.tick(sensor):
            location.execute(request)
    store.put("inbox/acme/waiting.jsonl", desk.file_of(8, seed=3))
    for request in location.tick("drop_folder"):
        location.execute(request)


def test_the_partition_of_a_batch_shows_its_figures_its_checks_and_where_it_came_from(at_desk: Desk) -> None:
    operator, batch = at_desk.operator, at_desk.batches["questions"]
    operator.open(
        f"/assets/batch_results?view=partitions&partition={batch.batch_id}",
        "10 of 10 requests (100%)",
        "time_line_of_chunks",
        str(batch.input_sha256),
    )
    operator.click("Checks", exact=True)
    operator.see("exactly_one_result", "nothing_unknown", "manifest_agrees", "Passed")
    operator.click("Lineage", exact=True)
    operator.see("uploads", "request_chunks", "chunk_results")


def test_other_bytes_of_an_upload_show_what_was_made_from_them_as_out_of_date(at_desk: Desk) -> None:
    operator, batch_id = at_desk.operator, at_desk.batches["reviews"].batch_id
    page = f"/assets/request_chunks?view=partitions&partition={batch_id}"
    operator.open(page, "input_sha256")
    expect(operator.page.get_by_text("Unsynced")).to_have_count(0)
    other = dg.AssetObservation("uploads", partition=batch_id, tags={"dagster/data_version": "other bytes"})
    at_desk.instance.report_runless_asset_event(other)
    operator.open(page, "Unsynced (1)")


def test_the_form_of_a_launch_explains_each_field_and_refuses_wrong_values(at_desk: Desk) -> None:
    operator, batch_id = at_desk.operator, at_desk.batches["waiting"].batch_id
    operator.open(f"/assets/chunk_results?view=partitions&partition={batch_id}", "Materialize…")
    operator.click("Materialize…")
    operator.click("Config", exact=True)
    operator.click("Add config")
    operator.see("chunk_results_checks")
    operator.write_configuration(
        "ops:\n  chunk_results:\n    config:\n      run_agan: true\n      wait_minutes: soon\n"
    )
    operator.see(
        'unexpected config entry "run_agan" at path root:ops:chunk_results:config',
        'Invalid scalar at path root:ops:chunk_results:config:wait_minutes. Value "soon"',
    )
    expect(operator.page.get_by_role("button", name="Save config")).to_be_disabled()
    operator.write_configuration("ops:\n  chunk_results:\n    config:\n      priority: 3\n")
    for key in ("ArrowUp", "ArrowUp", "End"):
        operator.page.keyboard.press(key)  # into the fields, which are then explained beside the editor
    operator.see("Runs before the customer's other batches", "How long the run waits for the workers")
    assert at_desk.runs(**{"dagster/partition": batch_id, "dagster/asset_partition_range_start": batch_id}) == []


LAUNCH = """
mutation ($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
  __typename ... on RunConfigValidationInvalid { errors { message reason } } ... on PythonError { message } } }
"""
BACKFILL = """
mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on PartitionKeysNotFoundError { message } ... on PythonError { message } } }
"""


@pytest.mark.parametrize(
    ("job", "op", "config", "message"),
    [
        ("__ASSET_JOB", "chunk_results", {"run_again": "perhaps"}, 'Value "perhaps" of type'),
        ("__ASSET_JOB", "batch_results", {"rebuid": True}, 'unexpected config entry "rebuid"'),
        (WORKER, "run_chunks_smollm2_135m", {"batches": "batch_1"}, "must be list"),
        ("housekeeping", "tidy_up", {"dry_run": 1}, 'Value "1" of type'),
    ],
)
def test_a_launch_with_a_wrong_configuration_is_refused_in_words_and_makes_no_run(
    at_desk: Desk, job: str, op: str, config: dict[str, Any], message: str
) -> None:
    before = at_desk.instance.get_runs_count()
    assets = [{"path": [op]}] if job == "__ASSET_JOB" else None
    selector = {"repositoryLocationName": "batch_pipeline", "repositoryName": "__repository__", "jobName": job}
    params = {
        "selector": {**selector, "assetSelection": assets},
        "runConfigData": {"ops": {op: {"config": config}}},
    }
    answer = at_desk.ask(LAUNCH, params=params)["launchPipelineExecution"]
    assert answer["__typename"] == "RunConfigValidationInvalid"
    assert message in answer["errors"][0]["message"]
    assert at_desk.instance.get_runs_count() == before


def test_a_backfill_of_a_batch_that_is_not_there_is_refused(at_desk: Desk) -> None:
    params = {"assetSelection": [{"path": ["chunk_results"]}], "partitionNames": ["batch_nowhere"], "tags": []}
    answer = at_desk.ask(BACKFILL, params=params)["launchPartitionBackfill"]
    assert answer["__typename"] == "PartitionKeysNotFoundError"
    assert "batch_nowhere" in answer["message"]
    assert at_desk.instance.get_backfills() == []


def test_the_launching_of_workers_is_switched_off_by_a_click(at_desk: Desk) -> None:
    operator = at_desk.operator
    operator.open("/locations/batch_pipeline/sensors/gpu_workers", "Launches GPU workers where there is backlog")
    operator.page.locator("label:has(input[type=checkbox])").last.click()
    (state,) = until(at_desk.instance.all_instigator_state, "a sensor has a state")
    assert (state.origin.instigator_name, state.status) == ("gpu_workers", InstigatorStatus.STOPPED)
    at_desk.dagster.daemon.start()
    at_desk.dagster.daemon.wait_ready()


def test_results_are_assembled_again_for_one_batch_and_stay_the_same(at_desk: Desk) -> None:
    operator, batch = at_desk.operator, at_desk.batches["questions"]
    before = at_desk.ledger.batches.get(batch.batch_id)
    page = f"/assets/batch_results?view=partitions&partition={batch.batch_id}"
    operator.open(page, "View all historical events (1)")
    operator.click("Materialize…")
    operator.click("Config", exact=True)
    operator.click("Add config")
    operator.see("Errors only")
    operator.write_configuration("ops:\n  batch_results:\n    config:\n      rebuild: true\n")
    operator.press("Save config")
    operator.press("Launch 1 run")
    operator.see("Launched run")
    (run,) = at_desk.runs(**{"dagster/partition": batch.batch_id, "dagster/from_ui": "true"})
    assert run.run_config["ops"]["batch_results"]["config"] == {"rebuild": True}
    until(lambda: at_desk.instance.get_run_by_id(run.run_id).is_success, "the run succeeds")  # type: ignore[union-attr]
    operator.open(page, "View all historical events (2)")
    assert at_desk.ledger.batches.get(batch.batch_id) == before


def test_a_backfill_over_all_batches_is_one_run_which_waits_for_what_is_missing(at_desk: Desk) -> None:
    operator = at_desk.operator
    operator.open("/assets/chunk_results?view=partitions", "Materialize…")
    operator.click("Materialize…")
    operator.see("Backfills all partitions in a single run")
    operator.press("All")
    operator.see("3 partitions")
    operator.press("Launch backfill")
    (backfill,) = until(at_desk.instance.get_backfills, "the backfill is there")
    (run,) = until(lambda: at_desk.runs(**{"dagster/backfill": backfill.backfill_id}), "its run is there")
    waiting = at_desk.batches["waiting"].batch_id
    until(lambda: at_desk.ledger.batches.get(waiting).priority == 1, "the batch is wanted")
    operator.open("/runs?view=backfills", backfill.backfill_id)
    assert not at_desk.instance.get_run_by_id(run.run_id).is_finished  # type: ignore[union-attr]


def test_a_worker_launched_for_one_batch_runs_what_was_missing_and_nothing_again(at_desk: Desk) -> None:
    operator, waiting = at_desk.operator, at_desk.batches["waiting"].batch_id
    operator.open(f"/locations/batch_pipeline/jobs/{WORKER}/playground", "No errors")
    operator.write_configuration(f"ops:\n  run_chunks_smollm2_135m:\n    config:\n      batches: [{waiting}]\n")
    operator.click("Launch Run")
    operator.see("Re-execute all")
    (backfill,) = at_desk.instance.get_backfills()
    (run,) = at_desk.runs(**{"dagster/backfill": backfill.backfill_id})
    until(lambda: at_desk.instance.get_run_by_id(run.run_id).is_success, "the run succeeds")  # type: ignore[union-attr]
    assert at_desk.instance.get_materialized_partitions(dg.AssetKey("chunk_results")) == {
        batch.batch_id for batch in at_desk.batches.values()
    }
    until(lambda: at_desk.ledger.batches.get(waiting).status == BatchStatus.COMPLETED, "the batch is completed")
    assert at_desk.dagster.engine.stats().answered == 24
    operator.open(f"/assets/chunk_results?view=partitions&partition={waiting}", "8 of 8 requests (100%)")
