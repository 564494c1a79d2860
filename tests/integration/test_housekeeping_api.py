"""What the API has received goes when nobody may have it any more, and never before."""

from __future__ import annotations

import time

import openai
import pytest

from batch_pipeline import housekeeping
from batch_pipeline.housekeeping import Report, Step
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes.openai_client import Run, create, line, upload

DAY = 86_400.0


def tidy(
    ledger: Ledger, store: ObjectStore, settings: Settings, *, later_seconds: float = 0.0, dry_run: bool = False
) -> Report:
    now = time.time() + later_seconds
    return housekeeping.tidy(ledger=ledger, store=store, settings=settings, clock=lambda: now, dry_run=dry_run)


def expire(ledger: Ledger, file_id: str) -> None:
    with ledger._database.write() as tx:
        one = schema.files.c.file_id == file_id
        tx.connection.execute(schema.files.update().where(one).values(expires_at=tx.now))


def test_an_expired_file_goes_and_its_batch_goes_on(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch, kept = create(client, line("a")), upload(client, line("kept"))
    expire(ledger, batch.input_file_id)
    assert len(tidy(ledger, store, settings, dry_run=True).of(Step.API_FILE)) == 1
    (removal,) = tidy(ledger, store, settings).of(Step.API_FILE)
    assert (removal.subject, removal.bytes) == (batch.input_file_id, len(line("a")))
    assert [info.key for info in store.list(keys.FILES)] == [keys.uploaded_file("acme", kept.id)]
    run(batch.id)
    assert client.batches.retrieve(batch.id).status == "completed"


def test_objects_that_no_file_points_at_go_when_they_are_old(
    client: openai.OpenAI, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    kept = upload(client, line("kept"))
    store.put(keys.uploaded_file("acme", "file-lost"), b"lost")
    begun = store.multipart(keys.uploaded_file("acme", "file-begun"))
    begun.write(b"x" * 20_000_000)
    assert tidy(ledger, store, settings).removals == []
    report = tidy(ledger, store, settings, later_seconds=DAY + 60)
    assert [removal.subject for removal in report.of(Step.ORPHAN)] == [keys.uploaded_file("acme", "file-lost")]
    assert len(report.of(Step.UPLOAD)) == 1
    assert client.files.content(kept.id).content == line("kept")


def test_an_upload_that_nobody_completes_goes_with_its_parts(
    client: openai.OpenAI, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    begun = client.uploads.create(bytes=9, filename="a", mime_type="text/plain", purpose="batch")
    client.uploads.parts.create(begun.id, data=b"x")
    done = client.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="batch")
    part = client.uploads.parts.create(done.id, data=b"x")
    completed = client.uploads.complete(done.id, part_ids=[part.id])
    with ledger._database.write() as tx:
        tx.connection.execute(schema.uploads.update().values(expires_at=tx.now - 1))
    with pytest.raises(openai.BadRequestError, match="expired"):
        client.uploads.parts.create(begun.id, data=b"x")
    assert tidy(ledger, store, settings).of(Step.API_UPLOAD) == []
    with ledger._database.write() as tx:
        tx.connection.execute(schema.uploads.update().values(expires_at=tx.now - DAY - 1))
    gone = tidy(ledger, store, settings).of(Step.API_UPLOAD)
    assert sorted((removal.subject, removal.objects) for removal in gone) == sorted([(begun.id, 1), (done.id, 0)])
    assert list(store.list(keys.UPLOADS)) == []
    assert completed.file is not None
    assert client.files.content(completed.file.id).content == b"x"


def test_the_files_of_a_batch_go_with_the_batch(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch = create(client, line("a"))
    run(batch.id)
    done = client.batches.retrieve(batch.id)
    with ledger._database.write() as tx:
        tx.connection.execute(schema.batches.update().values(ended_at=tx.now - 31 * DAY))
    report = tidy(ledger, store, settings)
    assert len(report.of(Step.FILES)) == 1
    shown = client.batches.retrieve(batch.id)
    assert (shown.status, shown.output_file_id) == ("completed", done.output_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)
    with pytest.raises(openai.BadRequestError, match="were removed"):
        client.get(f"/batches/{batch.id}/results", cast_to=object)
