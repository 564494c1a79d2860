"""The pictures in docs/images: pages of Dagster's UI that docs/operating.md explains, of a stack with a fake engine.

    python -m docs.screenshots

Needs Chromium (Debian: apt-get install chromium). Takes about two minutes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from deploy.browser import FLAGS, required
from tests.fakes import desk

IMAGES = Path(__file__).resolve().parent / "images"
_SECONDS = 180.0
_PAGE_MS = 60_000


def main() -> int:
    """Take all pictures; return the exit status."""
    browser = required()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, desk.stack(Path(folder), "--delay", "0.3") as (stack, settings, _, _):
        batches = _finished(settings)
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=list(FLAGS))
            page = chromium.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(_PAGE_MS)
            _take(page, stack.addresses().dagster, batches)
            chromium.close()
    return 0


def _finished(settings: Settings) -> dict[str, Batch]:
    """Drop three files and wait for the ends of their batches; return these by name."""
    store, ledger = ObjectStore.open(settings.store), Ledger.from_settings(settings)
    store.put("inbox/acme/questions.jsonl", desk.file_of(120, bad=3))
    store.put("inbox/initech/reviews.jsonl", desk.file_of(400, seed=2))
    store.put("inbox/acme/broken-export.jsonl", desk.file_of(10, bad=5, seed=3))
    until = time.monotonic() + _SECONDS
    while True:
        found = {batch.name: batch for batch in ledger.batches.recent()}
        if len(found) == 3 and all(batch.status.is_final for batch in found.values()):
            ledger.close()
            return found
        if time.monotonic() > until:
            raise TimeoutError(f"not all batches have ended: {found}")
        time.sleep(1.0)


def _take(page: Page, url: str, batches: dict[str, Batch]) -> None:
    reviews, questions = batches["reviews"].batch_id, batches["questions"].batch_id
    results, chunks = f"{url}/assets/batch_results?view", f"{url}/assets/chunk_results?view"
    _open(page, f"{url}/asset-groups", "usage_report")
    _shoot(page, "lineage")
    _open(page, f"{results}=partitions&partition={questions}", "requests_completed")
    _shoot(page, "batch")
    _open(page, f"{results}=partitions&partition={reviews}", "[Show Markdown]")
    page.get_by_text("[Show Markdown]").first.click()
    page.locator("img[src^='data:image/png']").first.wait_for()
    _shoot(page, "time-line")
    _open(page, f"{results}=checks", "Passed")
    _shoot(page, "checks")
    _open(page, f"{chunks}=partitions&partition={reviews}", "requests_completed")
    page.get_by_text("Materialize…").first.click()
    _until(page, "Partition selection")
    _shoot(page, "launch")
    _open(page, f"{url}/runs", "gpu_workers")
    _shoot(page, "runs")
    _open(page, f"{url}/automation", "drop_folder")
    _shoot(page, "automation")


def _open(page: Page, address: str, text: str) -> None:
    page.goto(address)
    _until(page, text)


def _until(page: Page, text: str) -> None:
    page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)


def _shoot(page: Page, name: str) -> None:
    page.wait_for_timeout(2000)  # what moves into its place has done so
    file = IMAGES / f"{name}.png"
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)
    print(file.name, f"{file.stat().st_size // 1024} KiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
