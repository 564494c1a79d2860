"""Configuration: one TOML file, overridable by environment variables; everything has a default that suits one machine.

The file is the one named by `BATCH_PIPELINE_CONFIG`, else `batch-pipeline.toml` in the working folder, else none.
A variable `BATCH_PIPELINE__SECTION__FIELD` overrides one field, for instance `BATCH_PIPELINE__STORE__BUCKET=results`;
in lists and tables its value is read as TOML. Relative paths are relative to the file's folder.

A configuration that cannot be used raises one SettingsError whose message names the field and the mend.
"""

from __future__ import annotations

import base64
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from batch_pipeline.errors import SettingsError
from batch_pipeline.live import LiveHours, problem_of
from batch_pipeline.models import ENDPOINTS, INLINE_MEDIA, Model, Prices, job_name
from batch_pipeline.pods import Runs, check_kubernetes, check_runs

CONFIG_VARIABLE = "BATCH_PIPELINE_CONFIG"
LEAST_SECRET_BYTES = 24
"""Of the key that alarms are signed with, as the Standard Webhooks have it."""
OVERRIDE_PREFIX = "BATCH_PIPELINE__"
DEFAULT_FILE = "batch-pipeline.toml"
MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
MEDIA_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,252}[a-z0-9])?(?::[0-9]{1,5})?")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
LEDGER_URL = re.compile(r"sqlite(?:\+\w+)?:///.|postgresql(?:\+\w+)?://.")
STORE_URL = re.compile(rf"https?://(?:{_LABEL}(?:\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?(?:/\S*)?")
"""Hosts as boto3 takes them: without `_`."""
MEBIBYTE = 1024 * 1024
MOST_DOLLARS = 1_000_000
DECIMALS = 6
"""Of a price and of the discount: so every bill is exact in the 18 decimals of the reports."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: unknown fields are errors, because a misspelt one would silently do nothing."""


class Store(_Section, frozen=True):
    """The object store: any S3."""

    bucket: str = "batch-pipeline"
    endpoint_url: str | None = "http://127.0.0.1:8433"
    """Address of the S3 server; leave empty ("") for AWS itself."""
    region: str = "us-east-1"
    access_key_id: str | None = None
    """Leave both keys out to use boto3's own chain (environment, profile, instance role)."""
    secret_access_key: str | None = None
    console_url: str | None = None
    """Where people look at an object in a browser, with {bucket} and {key}: for Dagster's UI. AWS's is known."""


class Ledger(_Section, frozen=True):
    """The metadata database."""

    url: str = "sqlite:///var/ledger.sqlite"
    """A SQLAlchemy URL: sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE."""


class Intake(_Section, frozen=True):
    """Limits of what is accepted, and how it is cut into chunks."""

    max_file_bytes: int = 20 * 1024 * MEBIBYTE
    max_line_bytes: int = 4 * MEBIBYTE
    max_requests: int = 20_000_000
    max_custom_id_characters: int = 512
    max_depth: int = 64
    """Deepest nesting of a body's JSON."""
    chunk_requests: int = 1000
    chunk_tokens: int = 4_000_000
    """Estimated tokens (prompt and answer) after which a chunk is full."""
    chunk_bytes: int = 32 * MEBIBYTE
    segment_requests: int = 1_000_000
    """Requests that are ordered together; bounds memory at any size of file."""
    scratch_dir: str = "var/scratch"
    """Local folder for a copy of the file while it is worked on: as many bytes as the file."""
    default_window_seconds: int = 86_400
    min_window_seconds: int = 3_600
    max_window_seconds: int = 604_800


class Worker(_Section, frozen=True):
    """The GPU worker."""

    lease_seconds: float = 60.0
    """A lease not extended for this long is free for others."""
    heartbeat_seconds: float = 10.0
    checkpoint_seconds: float = 5.0
    """How often finished requests of an unfinished chunk are saved."""
    leases: int = 4
    """Most chunks held at once, so that the engine never drains between chunks."""
    poll_seconds: float = 1.0
    """How often an idle worker looks for work."""
    warm_seconds: float = 60.0
    """How long an idle worker keeps its engine loaded before it leaves."""
    lifetime_seconds: float = 86_400.0
    grace_seconds: float = 20.0
    """After SIGTERM: time for short requests to finish before the rest is handed back."""
    max_request_attempts: int = 3
    """Tries of one request that fails by its own fault (500s, engine deaths with it alone in flight)."""
    max_chunk_attempts: int = 8
    """Leases of one chunk that may end without a commit before its unfinished requests become errors."""
    request_timeout_seconds: float = 1800.0
    """Longest time for one answer. The usual limit is shorter: it follows from `max_tokens` and the measured speed."""
    least_request_timeout_seconds: float = 120.0
    """That limit is never shorter than this."""
    max_answer_bytes: int = 16 * MEBIBYTE
    """Largest answer of the engine to one request: a larger one ends as an error, so that no request fills the memory.
    """
    machine: str = ""
    """What kind of machine the engines run on: calibrations count for one kind. Empty: found out, which takes an engine
    whose GPUs the worker sees.
    """
    engine_url: str | None = None
    """Where the engine of this worker's own pod listens; set there by the tags of its run, and nowhere else. It stands
    behind a model's `engine_url`.
    """


class Scheduling(_Section, frozen=True):
    """The policy's numbers."""

    sensor_batch: int = 50
    """Most files taken, and most runs requested, in one tick of a sensor."""
    runs_at_once: int = 2
    """Places for runs of intake, and as many for merges. Dagster's `tag_concurrency_limits` must say the same."""
    sensor_interval_seconds: int = 5
    total_gpus: int = 1
    """GPUs of all models together."""
    at_risk_minutes: float = 15.0
    """A batch is at risk when it may wait no longer than this, by the measured speed of its model's workers."""
    at_risk_share: float = 0.25
    """Share of a model's service that batches at risk may have ahead of other customers' turns."""
    dedicated_workers_at_most: int = 0
    """Workers, of all models together, that may be launched for batches alone that would else end after their deadline.
    What they serve is beyond `at_risk_share`.
    """
    loading_seconds: float = 120.0
    """What loading a model takes, until it was measured."""
    turn: float = 10.0
    """A worker keeps its GPU for so many times the loading time of a model that waits for one."""
    chunks_per_worker: int = 4
    """Chunks of backlog for which one more worker of a model is wanted."""
    retry_run_seconds: float = 30.0
    """Pause before a run that failed is requested again; doubles with each failure up to ten minutes."""


class Live(_Section, frozen=True):
    """How many of the GPUs live traffic needs: batch holds the rest, and gives it back when it is needed."""

    schedule: list[LiveHours] = []
    """By hours and days; where entries overlap, the most of them."""
    prometheus_url: str = ""
    """A Prometheus server that is asked at each look as well; the larger of the two counts."""
    prometheus_query: str = ""
    """Gives a number of GPUs, for instance ceil(sum(vllm:num_requests_running{traffic="live"}) / 40)."""
    keep_seconds: float = 600.0
    """How long the last answer stands in for a missing one."""
    gpus_when_unknown: int = 0
    """What counts after that."""


class Retention(_Section, frozen=True):
    """How long what is over is kept. Housekeeping removes it afterwards, every half hour."""

    ledger_minutes: float = 10.0
    """Time after a batch's end until its chunks leave the ledger: from then on its manifest has them."""
    work_hours: float = 24.0
    """Time after a batch's end until what its files were made from is deleted: after that they cannot be rebuilt."""
    files_days: float = 30.0
    """Time after a batch's end until its input, its files and its outbox folder are deleted."""
    partitions_days: float = 30.0
    """Time after a batch's end until its Dagster partition is deleted, with its runs."""
    partitions_at_most: int = 20_000
    """Partitions in Dagster: where there are more, those of the batches that ended first go before their time. Its
    pages bear some ten thousand of them well.
    """
    leftovers_hours: float = 1.0
    """Least age of what an attempt has written in vain before it is deleted."""
    orphans_hours: float = 24.0
    """Least age of uploads that never became a batch, of unfinished multipart uploads, and of workers not heard of."""
    per_run: int = 1000
    """Most batches (and partitions) of each kind in one run of housekeeping."""


class Api(_Section, frozen=True):
    """The HTTP service of `batch-pipeline serve`."""

    host: str = "127.0.0.1"
    """Address that it listens on. It speaks plain HTTP: put a proxy with TLS before it where others can reach it."""
    port: int = 8480
    threads: int = 16
    """Most calls to the ledger and the store at once; others wait."""
    uploads: int = 8
    """Most bodies of files received at once, each with some 20 MiB of memory; others wait."""
    idle_seconds: float = 60.0
    """A client that sends nothing of a body for so long is given up."""
    metrics_key: str | None = None
    """What Prometheus has to send as a bearer to read /metrics. Unset: whoever reaches the service may."""


class Webhooks(_Section, frozen=True):
    """How customers are told of their batches' ends, at the addresses of `batch-pipeline customers webhooks`."""

    allow_private_addresses: bool = False
    """Send to http:// and to addresses that are not of the public internet too: then whoever may register a webhook can
    make this service call whatever it can reach.
    """
    timeout_seconds: float = 15.0
    attempts: int = 10
    """Tries of one event, after which it is given up."""
    first_pause_seconds: float = 5.0
    """Pause after the first try; each further one is six times as long, up to the longest."""
    longest_pause_seconds: float = 21_600.0
    poll_seconds: float = 2.0
    """How often the service looks for what is to be sent."""
    concurrent: int = 16
    """Most events on their way at once."""
    kept_days: float = 7.0
    """How long it stays in the ledger what became of an event."""


class Alarms(_Section, frozen=True):
    """How operators are told that a run failed, a batch is at risk, or a model has work and no workers."""

    url: str | None = None
    """Where alarms are posted, signed as customers' webhooks are. It is the operator's own word: any host, also http://.
    Unset: they are only in Dagster's UI and in the ledger.
    """
    secret: str | None = None
    """What messages are signed with: `whsec_` and base64 of some 32 random bytes. Unset: they are not signed."""
    timeout_seconds: float = 10.0
    attempts: int = 12
    """Tries of one message, after which it is given up."""
    first_pause_seconds: float = 10.0
    """Pause after the first try; each further one is twice as long, up to the longest."""
    longest_pause_seconds: float = 3600.0
    message_seconds: float = 60.0
    """Least time between two messages. What happens meanwhile is told together."""
    look_seconds: int = 30
    """Time between two looks at batches, models and waiting messages."""
    workerless_seconds: float = 600.0
    """How long work of a model may wait without any worker before that is an alarm."""
    progress_seconds: float = 30.0
    """Least time between two observations of one batch in Dagster; there are at most 20 of each."""
    kept_days: float = 30.0


class Limits(_Section, frozen=True):
    """What a customer may have, unless `batch-pipeline customers set` says otherwise for it."""

    max_requests: int = 20_000_000
    """Requests in one file. Never more than intake.max_requests."""
    max_file_bytes: int = 20 * 1024 * MEBIBYTE
    """Bytes of one file. Never more than intake.max_file_bytes."""
    max_open_batches: int = 10_000
    """Batches that wait or run. One that is cancelled, or past its deadline, makes room at once."""
    max_enqueued_tokens: int = 1_000_000_000_000
    """Prompt tokens of one model in the batches that wait or run."""
    requests_per_minute: int = 6000
    """Requests to the API with one key, counted in each process that serves it."""


class Embedded(_Section, frozen=True):
    """The stack that `make up` starts on this machine; every service binds to loopback."""

    data_dir: str = "var"
    s3_port: int = 8433
    dagster_port: int = 3333
    code_server_port: int = 4433
    serve_api: bool = True
    """Whether the HTTP service is one of its parts; its address is that of [api]."""


class Settings(_Section, frozen=True):
    """All of the configuration. `models` maps the name that customers use to the model."""

    store: Store = Store()
    ledger: Ledger = Ledger()
    intake: Intake = Intake()
    worker: Worker = Worker()
    scheduling: Scheduling = Scheduling()
    live: Live = Live()
    retention: Retention = Retention()
    api: Api = Api()
    limits: Limits = Limits()
    webhooks: Webhooks = Webhooks()
    alarms: Alarms = Alarms()
    embedded: Embedded = Embedded()
    runs: Runs = Runs()
    models: dict[str, Model] = {}


def limited(intake: Intake, limits: Limits) -> Intake:
    """Return the limits of a customer's files: its own where they are below those of the service."""
    return msgspec.structs.replace(
        intake,
        max_requests=min(intake.max_requests, limits.max_requests),
        max_file_bytes=min(intake.max_file_bytes, limits.max_file_bytes),
    )


def load(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Read the configuration from `path` (default: see the module) and the environment.

    Raises SettingsError, whose message is one line that names the file or variable, the field and the mend.
    """
    variables = os.environ if environment is None else environment
    file, must_exist = _file(path, variables)
    raw: dict[str, Any] = {}
    if file.is_file():
        try:
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{file}: not valid TOML: {error}") from error
    elif must_exist:
        raise SettingsError(f"{file}: no such file; set {CONFIG_VARIABLE} to your configuration, or leave it unset")
    where = " with ".join([str(file)] * file.is_file() + _apply_overrides(raw, variables))
    try:
        settings = msgspec.convert(raw, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error
    problems = check(settings)
    if problems:
        raise SettingsError(f"{where}: {'; '.join(problems)}")
    return _absolute(settings, file.parent.resolve())


MAY_BE_NONE = frozenset({"dedicated_workers_at_most"})
"""Numbers that may be 0; all others of these sections are above it."""


def check(settings: Settings) -> list[str]:
    """Return what is wrong with values that are each of the right type; one sentence each, naming the field."""
    problems = []
    for section in (
        settings.intake,
        settings.worker,
        settings.scheduling,
        settings.retention,
        settings.api,
        settings.limits,
        settings.webhooks,
        settings.alarms,
        settings.embedded,
        settings.runs,
    ):
        for field in section.__struct_fields__:
            value = getattr(section, field)
            if field in MAY_BE_NONE and value == 0:
                continue
            # Not `value <= 0`: TOML has a nan, and an inf.
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                problems.append(f"{type(section).__name__.lower()}.{field} must be above 0, not {value}")
    problems += _check_store(settings.store)
    problems += _check_addresses(settings)
    problems += _check_alarms(settings.alarms)
    problems += _check_live(settings.live)
    if settings.scheduling.at_risk_share > 1:
        problems.append("scheduling.at_risk_share is a share: at most 1")
    problems += check_runs(settings.runs)
    intake = settings.intake
    if not intake.min_window_seconds <= intake.default_window_seconds <= intake.max_window_seconds:
        problems.append(
            "intake.default_window_seconds must lie between intake.min_window_seconds and intake.max_window_seconds, "
            f"and {intake.default_window_seconds} is not between {intake.min_window_seconds} and "
            f"{intake.max_window_seconds}"
        )
    if settings.worker.heartbeat_seconds * 2 > settings.worker.lease_seconds:
        problems.append("worker.heartbeat_seconds must be at most half of worker.lease_seconds, or leases run out")
    problems += _check_engine_url("worker", settings.worker.engine_url)
    jobs: dict[str, str] = {}
    for name, model in settings.models.items():
        problems += _check_model(name, model)
        where = f"models.{name}.kubernetes"
        problems += check_kubernetes(where, model.kubernetes, settings.worker.grace_seconds)
        if (other := jobs.setdefault(job_name(name), name)) != name:
            problems.append(f"models: {other!r} and {name!r} would share the Dagster job {job_name(name)}: rename one")
    return problems


def _check_store(store: Store) -> list[str]:
    problems = []
    if not BUCKET.fullmatch(store.bucket):
        problems.append(f"store.bucket: a bucket's name has 3 to 63 of a-z, 0-9, '.' and '-', not {store.bucket!r}")
    url = store.endpoint_url
    if url and not (STORE_URL.fullmatch(url) and _has_good_port(url)):
        problems.append(
            'store.endpoint_url must be http:// or https://, a host (without _) and perhaps a port; "" for AWS itself'
        )
    if store.console_url is not None and not store.console_url.startswith(("http://", "https://")):
        problems.append("store.console_url must start with http:// or https://")
    return problems


def _check_alarms(alarms: Alarms) -> list[str]:
    problems = []
    # Without what was written: it may hold a password or key.
    if alarms.url is not None and not re.match(r"https?://[^/?#\s]+", alarms.url):
        problems.append("alarms.url must be https://HOST/PATH, or http://")
    if alarms.secret is not None:
        try:
            key = base64.b64decode(alarms.secret.removeprefix("whsec_"), validate=True)
        except ValueError:
            key = b""
        if len(key) < LEAST_SECRET_BYTES:
            problems.append("alarms.secret must be whsec_ and the base64 of at least 24 random bytes")
    return problems


def _check_live(live: Live) -> list[str]:
    problems = []
    for number, entry in enumerate(live.schedule):
        if (problem := problem_of(entry)) is not None:
            problems.append(f"live.schedule[{number}]: {problem}")
    if bool(live.prometheus_url) != bool(live.prometheus_query):
        problems.append("live.prometheus_url and live.prometheus_query belong together: set both, or none")
    if live.prometheus_url and not (STORE_URL.fullmatch(live.prometheus_url) and _has_good_port(live.prometheus_url)):
        problems.append("live.prometheus_url must be http:// or https://, a host and perhaps a port")
    if not 0 < live.keep_seconds < math.inf:
        problems.append(f"live.keep_seconds must be above 0, not {live.keep_seconds}")
    if live.gpus_when_unknown < 0:
        problems.append(f"live.gpus_when_unknown must be 0 or more, not {live.gpus_when_unknown}")
    return problems


def _has_good_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _check_addresses(settings: Settings) -> list[str]:
    """Return what is wrong with ports, hosts, folders and the ledger's URL."""
    ports = {
        "api.port": (settings.api.port, 65_535),
        # The S3 server listens 10,000 above its port as well.
        "embedded.s3_port": (settings.embedded.s3_port, 55_535),
        "embedded.dagster_port": (settings.embedded.dagster_port, 65_535),
        "embedded.code_server_port": (settings.embedded.code_server_port, 65_535),
    }
    problems = [f"{field} must be from 1 to {most}, not {port}" for field, (port, most) in ports.items() if port > most]
    texts = {
        "api.host": settings.api.host,
        "embedded.data_dir": settings.embedded.data_dir,
        "intake.scratch_dir": settings.intake.scratch_dir,
    }
    problems += [f"{field} is empty" for field, text in texts.items() if not text.strip()]
    if not LEDGER_URL.match(settings.ledger.url):
        # Without the URL: it may hold a password.
        problems.append("ledger.url must be sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE")
    return problems


def _check_model(name: str, model: Model) -> list[str]:
    where = f"models.{name}"
    problems = []
    if not MODEL_NAME.fullmatch(name):
        problems.append(f"{where}: a model's name has 1 to 64 letters, digits, '.', '_' or '-'")
    if model.context_length < 1:
        problems.append(f"{where}.context_length must be at least 1")
    if model.pool_limit < 1:
        problems.append(f"{where}.pool_limit must be at least 1")
    if model.max_in_flight is not None and model.max_in_flight < 1:
        problems.append(f"{where}.max_in_flight must be at least 1")
    if model.calibrate and (model.max_in_flight is not None or model.shared.live_traffic):
        problems.append(
            f"{where}.calibrate is for models without max_in_flight, whose engine live traffic does not share"
        )
    if model.tokens_per_second is not None and not 0 < model.tokens_per_second < math.inf:
        problems.append(f"{where}.tokens_per_second must be above 0")
    if not model.endpoints:
        problems.append(f"{where}.endpoints is empty: name at least one of {', '.join(ENDPOINTS)}")
    problems += [
        f"{where}.endpoints: {endpoint!r} is not one of {', '.join(ENDPOINTS)}"
        for endpoint in model.endpoints
        if endpoint not in ENDPOINTS
    ]
    problems += [f"{where}.prices.{problem}" for problem in _check_prices(model.prices)]
    problems += _check_engine_url(where, model.engine_url)
    problems += [f"{where}.shared.{problem}" for problem in _check_shared(model)]
    problems += [
        f"{where}.allowed_media_hosts: {host!r} is no host in lower-case letters, as it stands in a URL, nor "
        f'"{INLINE_MEDIA}"'
        for host in model.allowed_media_hosts
        if host != INLINE_MEDIA and not MEDIA_HOST.fullmatch(host)
    ]
    return problems


def _check_shared(model: Model) -> list[str]:
    shared = model.shared
    problems = []
    if shared.live_traffic and model.engine_url is None:
        problems.append("live_traffic needs the model's engine_url: an engine that is started here has no live traffic")
    for field in ("live_ttft_budget_seconds", "probe_seconds"):
        if not 0 < getattr(shared, field) < math.inf:
            problems.append(f"{field} must be above 0, not {getattr(shared, field)}")
    if not 0 < shared.kv_cache_mark <= 1:
        problems.append(f"kv_cache_mark must be above 0 and at most 1, not {shared.kv_cache_mark}")
    if not 1 <= shared.least_in_flight <= max(1, model.most_in_flight):
        problems.append(f"least_in_flight must be from 1 to the model's max_in_flight, not {shared.least_in_flight}")
    return problems


def _check_engine_url(where: str, url: str | None) -> list[str]:
    if url is None or url.startswith(("http://", "https://")):
        return []
    return [f"{where}.engine_url must start with http:// or https://"]


def _check_prices(prices: Prices) -> list[str]:
    problems = []
    for price in ("input_per_million", "output_per_million"):
        if not 0 <= getattr(prices, price) < MOST_DOLLARS:
            problems.append(f"{price} must be 0 or more, and below {MOST_DOLLARS}")
    if not 0 <= prices.batch_discount <= 1:
        problems.append("batch_discount must be between 0 and 1")
    problems += [
        f"{name} may have at most {DECIMALS} decimals, not {value!r}"
        for name, value in msgspec.structs.asdict(prices).items()
        if math.isfinite(value) and round(value, DECIMALS) != value
    ]
    return problems


def _file(path: Path | None, variables: Mapping[str, str]) -> tuple[Path, bool]:
    if path is not None:
        return path, True
    if variables.get(CONFIG_VARIABLE):
        return Path(variables[CONFIG_VARIABLE]), True
    return Path(DEFAULT_FILE), False


def _apply_overrides(raw: dict[str, Any], variables: Mapping[str, str]) -> list[str]:
    """Put the variables' values in their places and return the variables' names."""
    overriding = sorted(variable for variable in variables if variable.startswith(OVERRIDE_PREFIX))
    for variable in overriding:
        parts = variable.removeprefix(OVERRIDE_PREFIX).lower().split("__")
        table = raw
        for part in parts[:-1]:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"{variable}: {part} is not a table")
            table = inner
        table[parts[-1]] = _value(variable, variables[variable])
    return overriding


def _value(variable: str, text: str) -> Any:
    if not text.startswith(("[", "{")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{variable}: not a TOML value: {error}") from error


def _absolute(settings: Settings, base: Path) -> Settings:
    """Return the settings with every relative path made absolute, so that no part depends on its working folder."""
    url = settings.ledger.url
    prefix = "sqlite:///"
    if url.startswith(prefix) and not url.startswith("sqlite:////") and url != "sqlite:///:memory:":
        url = f"{prefix}{base / url.removeprefix(prefix)}"
    models = {
        name: msgspec.structs.replace(model, source=str(base / model.source)) for name, model in settings.models.items()
    }
    return msgspec.structs.replace(
        settings,
        store=msgspec.structs.replace(settings.store, endpoint_url=settings.store.endpoint_url or None),
        ledger=msgspec.structs.replace(settings.ledger, url=url),
        intake=msgspec.structs.replace(settings.intake, scratch_dir=str(base / settings.intake.scratch_dir)),
        embedded=msgspec.structs.replace(settings.embedded, data_dir=str(base / settings.embedded.data_dir)),
        models=models,
    )
