"""What `doctor` looks at: each check looks at one part and says that it is well, or what to mend.

A check changes nothing that lasts: the one object that it writes it removes again, and tables that are missing in the
ledger are created as by any other command. Killed in between, it may leave that object, which nobody reads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path

import msgspec
from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy.exc import SQLAlchemyError

from batch_pipeline import ids
from batch_pipeline.cli.app import App
from batch_pipeline.embedded.dagster_client import DagsterClient
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.errors import BatchPipelineError
from batch_pipeline.models import Model
from batch_pipeline.store import ObjectStore, PreconditionFailed, keys
from batch_pipeline.store.client import make_client

MAX_SKEW_SECONDS = 5.0
"""More than this between two clocks makes times in status and logs misleading; at 15 minutes S3 refuses signatures."""
_LEAST_FREE_BYTES = 1024**3
_ENGINE_IMPORT_SECONDS = 300
_HTTP_SECONDS = 5
_IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets it in every container. There each part has pods of its own, and none holds all of them."""


class State(StrEnum):
    """How a part is."""

    OK = "ok"
    NOTE = "note"
    """Works, but somebody may want to know."""
    MEND = "mend"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found. `mend` says what to do, where something must be done."""

    part: str
    state: State
    detail: str
    mend: str | None = None


Check = Callable[[App], Iterator[Finding]]


def run_all(app: App) -> Iterator[Finding]:
    """Yield the findings of every check, in the order in which one would mend them. Raises SettingsError."""
    for part, check in _CHECKS.items():
        try:
            yield from check(app)
        except (BatchPipelineError, SQLAlchemyError, BotoCoreError, ClientError, OSError) as error:
            yield Finding(part=part, state=State.MEND, detail=_short(error), mend=_ADVICE[part])


def _configuration(app: App) -> Iterator[Finding]:
    where = str(app.config_file) if app.config_file else "no file: the defaults count"
    if not app.settings.models:
        mend = "add a [models.NAME] table; batch-pipeline.example.toml shows one"
        yield Finding(part="configuration", state=State.MEND, detail=f"{where}; it has no model", mend=mend)
        return
    yield Finding(part="configuration", state=State.OK, detail=f"{where}; models: {', '.join(app.settings.models)}")


def _object_store(app: App) -> Iterator[Finding]:
    store = app.settings.store
    answer = make_client(store).head_bucket(Bucket=store.bucket)
    # The header has whole seconds: half of one is the best guess of what it left out.
    told = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp() + 0.5
    skew = told - time.time()
    yield Finding(part="object store", state=State.OK, detail=f"bucket {store.bucket} at {store.endpoint_url or 'AWS'}")
    yield _clock("object store", skew)
    yield _conditional_puts(app.store)


def _conditional_puts(store: ObjectStore) -> Finding:
    """Whether of two puts that ask for an absent object the second is refused: races are decided by that."""
    part, key = "conditional puts", keys.probe(ids.new_nonce())
    store.put(key, b"first", if_absent=True)
    try:
        store.put(key, b"second", if_absent=True)
    except PreconditionFailed:
        return Finding(part=part, state=State.OK, detail="the second of two writers was refused")
    finally:
        store.delete(key)
    mend = "use an S3 server that honours If-None-Match on PutObject (AWS S3, SeaweedFS 4.48, MinIO, Ceph do)"
    return Finding(part=part, state=State.MEND, detail="two writers both won", mend=mend)


def _ledger(app: App) -> Iterator[Finding]:
    skew = app.ledger.now() - time.time()
    count = len(app.ledger.batches.recent(limit=1))
    detail = f"{_masked_url(app.settings.ledger.url)}{'' if count else ' (no batch yet)'}"
    yield Finding(part="ledger", state=State.OK, detail=detail)
    yield _clock("ledger", skew)


def _clock(whose: str, skew_seconds: float) -> Finding:
    """Whether a part's clock agrees with this machine's; `skew_seconds` above 0 where the part's is ahead."""
    part = f"clock of the {whose}"
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return Finding(part=part, state=State.OK, detail=f"within {MAX_SKEW_SECONDS:.0f} s of this machine's")
    detail = f"{skew_seconds:+.1f} s off this machine's"
    return Finding(part=part, state=State.MEND, detail=detail, mend="let both keep their time by NTP")


def _models(app: App) -> Iterator[Finding]:
    for name, model in app.settings.models.items():
        yield _attached(name, model.engine_url) if model.engine_url else _folder(name, model)


def _attached(name: str, url: str) -> Finding:
    part = f"model {name}"
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_HTTP_SECONDS) as answer:  # noqa: S310
            detail = f"the engine at {url} answers {answer.status}"
            return Finding(part=part, state=State.OK, detail=detail)
    except (urllib.error.URLError, OSError) as error:
        mend = f"start the engine, or set models.{name}.engine_url to its address"
        return Finding(part=part, state=State.MEND, detail=f"{url}/health: {_short(error)}", mend=mend)


def _folder(name: str, model: Model) -> Finding:
    part, folder = f"model {name}", Path(model.source)
    wanted = {
        "config.json": (folder / "config.json").is_file(),
        "weights (*.safetensors or *.bin)": any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")),
        "tokenizer.json": (folder / "tokenizer.json").is_file(),
    }
    missing = [what for what, is_there in wanted.items() if not is_there]
    if not missing:
        return Finding(part=part, state=State.OK, detail=str(folder))
    if _IN_A_POD in os.environ and not folder.exists():
        detail = f"{folder} is not mounted in this pod; it is in those of intake and of the model's workers"
        return Finding(part=part, state=State.NOTE, detail=detail)
    mend = f"put the model there, or set models.{name}.source to its folder (`make setup` makes the demo's)"
    detail = f"{folder} has no {' and no '.join(missing)}" if folder.is_dir() else f"there is no folder {folder}"
    return Finding(part=part, state=State.MEND, detail=detail, mend=mend)


def _engine(app: App) -> Iterator[Finding]:
    if app.settings.models and all(model.engine_url for model in app.settings.models.values()):
        yield Finding(part="engine", state=State.OK, detail="every model has an engine_url: none is started here")
        return
    if _IN_A_POD in os.environ:
        yield Finding(part="engine", state=State.NOTE, detail="vLLM runs in the pods of workers, from its own image")
        return
    # In a process of its own: the import takes seconds and much memory, and a broken build may end the process.
    program = "import vllm.entrypoints.openai.api_server, vllm; print(vllm.__version__)"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_ENGINE_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"vLLM is not imported after {_ENGINE_IMPORT_SECONDS} s"
        yield Finding(part="engine", state=State.MEND, detail=detail, mend="see what keeps this machine so busy")
        return
    if ran.returncode == 0:
        yield Finding(part="engine", state=State.OK, detail=f"vLLM {ran.stdout.strip().splitlines()[-1]}")
        return
    said = ran.stderr.strip().splitlines()
    detail = f"vLLM cannot be imported: {said[-1] if said else f'exit status {ran.returncode}'}"
    mend = "install the extra `cpu` or `gpu` (`make setup` does), or name an engine_url for each model"
    yield Finding(part="engine", state=State.MEND, detail=detail, mend=mend)


def _dagster(app: App) -> Iterator[Finding]:
    if _IN_A_POD in os.environ:
        yield Finding(part="dagster", state=State.NOTE, detail="has pods of its own: its UI shows how they are")
        return
    stack = Stack(app.settings, app.config_file)
    running = stack.running()
    if not any(running.values()):
        detail = "the embedded stack is not running on this machine"
        yield Finding(part="dagster", state=State.NOTE, detail=detail, mend="start it with `batch-pipeline up`")
        return
    client = DagsterClient(stack.addresses().dagster)
    version, sick, errors = client.version(), client.sick_daemons(), client.location_errors()
    problems = [f"no heartbeat of {name}" for name in sick] + (errors or [])
    if problems:
        mend = f"see the logs in {stack.addresses().logs}, then `batch-pipeline down` and `up`"
        yield Finding(part="dagster", state=State.MEND, detail="; ".join(problems), mend=mend)
        return
    detail = f"webserver {version} at {stack.addresses().dagster}, its daemon is alive, the code is loaded"
    yield Finding(part="dagster", state=State.OK, detail=detail)


def _disk(app: App) -> Iterator[Finding]:
    for what, folder in (("data", app.settings.embedded.data_dir), ("scratch", app.settings.intake.scratch_dir)):
        existing = next(path for path in (Path(folder), *Path(folder).resolve().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        part, detail = f"disk ({what})", f"{free / 1024**3:.1f} GiB free below {folder}"
        if free < _LEAST_FREE_BYTES:
            mend = "make room: at least 1 GiB, and as much as the largest file while it is worked on"
            yield Finding(part=part, state=State.MEND, detail=detail, mend=mend)
        elif free < app.settings.intake.max_file_bytes:
            mend = "lower intake.max_file_bytes, or make room, before files of that size are handed in"
            yield Finding(part=part, state=State.NOTE, detail=f"{detail}: less than intake.max_file_bytes", mend=mend)
        else:
            yield Finding(part=part, state=State.OK, detail=detail)


_CHECKS: dict[str, Check] = {
    "configuration": _configuration,
    "object store": _object_store,
    "ledger": _ledger,
    "models": _models,
    "engine": _engine,
    "dagster": _dagster,
    "disk": _disk,
}

_ADVICE = {
    "configuration": "correct the configuration",
    "object store": "start it (`batch-pipeline up` starts the embedded one), or correct [store] in the configuration",
    "ledger": "start the database, or correct ledger.url",
    "models": "correct [models] in the configuration",
    "engine": "install the extra `cpu` or `gpu`, or name an engine_url for each model",
    "dagster": "see the logs of the stack, then `batch-pipeline down` and `batch-pipeline up`",
    "disk": "correct embedded.data_dir and intake.scratch_dir",
}


def _masked_url(url: str) -> str:
    from sqlalchemy import make_url

    return make_url(url).render_as_string(hide_password=True)


def _short(error: BaseException) -> str:
    text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return text.splitlines()[0]
