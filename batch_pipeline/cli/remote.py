"""The commands of a batch over HTTP, with a customer's key: nothing of the service's configuration is needed."""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from batch_pipeline.cli.doors import Submission
from batch_pipeline.errors import BatchPipelineError, CustomerError, NotFound
from batch_pipeline.intake.submission import check_is_file, file_sha256
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results import collect
from batch_pipeline.results.status import ERRORS, OUTPUT, StatusDocument
from batch_pipeline.wire import codes

_TRIES = 5
_LONGEST_PAUSE_SECONDS = 30.0
_PAGE = 100
# A large file is copied inside the store while its batch is created.
_TIMEOUT = httpx.Timeout(60.0, read=600.0)
_NOT_OVER_HTTP: dict[str, Any] = {"files": {}, "revision": 0, "progress": 0}


class ServiceUnavailable(BatchPipelineError):
    """The service does not answer, or says that it cannot at the moment."""


class Remote:
    """The service at `url`, with or without `/v1`. Close it."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not key.isascii() or not key.isprintable():
            raise CustomerError(codes.INVALID_OPTION, "the key is none: it has letters, digits, '-' and '_' only")
        try:
            self._client = httpx.Client(
                base_url=self._url, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT, follow_redirects=False
            )
        except httpx.InvalidURL as error:
            raise CustomerError(codes.INVALID_OPTION, f"--url: {url} is no address: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def submit(self, wanted: Submission) -> str:
        """Upload the file and make a batch of it; return its id.

        The upload is removed where no batch comes of it. Killed in between it is left, and expires.
        """
        if wanted.customer is not None:
            raise CustomerError(codes.INVALID_OPTION, "--customer: with --url the key says whose batch it is")
        check_is_file(wanted.file)
        before = self._made_before(wanted)
        file_id = self._upload(wanted) if before is None else before["input_file_id"]
        body = {
            "input_file_id": file_id,
            "endpoint": wanted.endpoint,
            "completion_window": wanted.window or "24h",
            "metadata": wanted.metadata or None,
            "on_invalid": wanted.on_invalid,
            "name": wanted.name,
        }
        key = {} if wanted.idempotency_key is None else {"Idempotency-Key": wanted.idempotency_key}
        try:
            return str(self._json("POST", "/v1/batches", json=body, headers=key, retry=bool(key))["id"])
        except CustomerError:
            if before is None:
                self._json("DELETE", f"/v1/files/{file_id}")
            raise

    def _upload(self, wanted: Submission) -> str:
        with wanted.file.open("rb") as opened:
            form = {"file": (f"{wanted.name}.jsonl", opened, "application/jsonl")}
            return str(self._json("POST", "/v1/files", data={"purpose": "batch"}, files=form, retry=False)["id"])

    def _made_before(self, wanted: Submission) -> dict[str, Any] | None:
        """Return the batch that the idempotency key has made, of the same file.

        The service compares the rest, when the creation is asked for once more. Raises CustomerError.
        """
        if wanted.idempotency_key is None:
            return None
        found = self._json("GET", "/v1/batches", params={"idempotency_key": wanted.idempotency_key})["data"]
        if not found:
            return None
        batch: dict[str, Any] = found[0]
        if batch["input_sha256"] != file_sha256(wanted.file):
            raise CustomerError(
                codes.INVALID_OPTION,
                f"the idempotency key has made {batch['id']} with another file: use a new key",
            )
        return batch

    def document(self, batch_id: str) -> StatusDocument:
        """Return where a batch is."""
        return _document(self._json("GET", f"/v1/batches/{batch_id}"))

    def recent(self, customer: str | None, status: str | None, limit: int) -> list[StatusDocument]:
        """Return the key's batches, newest first; reads on until there are so many of the status."""
        if customer is not None:
            raise CustomerError(codes.INVALID_OPTION, "--customer: with --url the key says whose batches are listed")
        wanted = (document for document in self._all() if status in (None, document.status))
        return list(itertools.islice(wanted, limit))

    def cancel(self, batch_id: str) -> str:
        """Cancel a batch; return its status."""
        return str(self._json("POST", f"/v1/batches/{batch_id}/cancel")["status"])

    def results(self, batch_id: str, folder: Path, *, overwrite: bool) -> list[Path]:
        """Bring a batch's files into a folder."""
        document = self.document(batch_id)
        if not BatchStatus(document.status).is_final:
            raise collect.not_there_yet(batch_id, document.status)
        files = {OUTPUT: document.output_file_id, ERRORS: document.error_file_id}
        downloads = {
            name: partial(self._download, file, f"{name} of {batch_id}")
            for name, file in files.items()
            if file is not None
        }
        manifest = partial(self._bytes, f"/v1/batches/{batch_id}/manifest")
        return collect.bring(batch_id, folder, manifest, downloads, overwrite=overwrite).files

    def _all(self) -> Any:
        after: dict[str, str] = {}
        while True:
            page = self._json("GET", "/v1/batches", params={"limit": _PAGE, **after})
            yield from map(_document, page["data"])
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}

    def _download(self, file_id: str, what: str, target: Path) -> None:
        try:
            with self._client.stream("GET", f"/v1/files/{file_id}/content") as response, target.open("wb") as file:
                if response.status_code == 404:
                    raise NotFound(f"{what} was deleted, or has expired: all of a batch's files are brought, or none")
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for block in response.iter_bytes():
                    file.write(block)
        except httpx.HTTPError as error:
            raise ServiceUnavailable(f"{self._url} broke off: {error or type(error).__name__}") from error

    def _json(self, method: str, path: str, *, retry: bool = True, **request: Any) -> Any:
        return msgspec.json.decode(self._send(method, path, retry=retry, **request).content)

    def _bytes(self, path: str) -> bytes:
        return self._send("GET", path, retry=True).content

    def _send(self, method: str, path: str, *, retry: bool, **request: Any) -> httpx.Response:
        """Return the answer. What is refused for the moment is asked again a few times, where that may be repeated."""
        for tries in itertools.count(1):
            try:
                response = self._client.request(method, path, **request)
            except httpx.HTTPError as error:
                if not retry or tries == _TRIES:
                    raise ServiceUnavailable(
                        f"{self._url} cannot be reached: {error or type(error).__name__}"
                    ) from error
                time.sleep(float(tries))
                continue
            if not response.is_error:
                return response
            # What was refused for its rate was not begun.
            may_repeat = retry or response.status_code == 429
            if not may_repeat or tries == _TRIES or not _is_passing(response):
                raise _refusal(response)
            time.sleep(_pause(response, tries))
        raise AssertionError("the loop ends by itself")


def _document(answer: dict[str, Any]) -> StatusDocument:
    whole = {**_NOT_OVER_HTTP, **answer, "metadata": answer["metadata"] or {}}
    return msgspec.convert(whole, StatusDocument, strict=False)


def _is_passing(response: httpx.Response) -> bool:
    return response.status_code in (429, 502, 503, 504) and response.headers.get("x-should-retry") != "false"


def _pause(response: httpx.Response, tries: int) -> float:
    asked = response.headers.get("Retry-After", "")
    return min(float(asked) if asked.isdigit() else float(tries), _LONGEST_PAUSE_SECONDS)


def _refusal(response: httpx.Response) -> BatchPipelineError:
    """Return what an error says, in its own words where it is in OpenAI's shape."""
    try:
        error = msgspec.json.decode(response.content)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        code, message = "invalid_answer", f"the service answered {response.status_code}"
    if response.status_code >= 500 or code == "invalid_answer":
        return ServiceUnavailable(message)
    return CustomerError(code, message)
