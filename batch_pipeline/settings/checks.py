"""What a configuration of the right types can still have wrong: values and combinations that cannot work."""

from __future__ import annotations

import base64
import math
import re
from urllib.parse import urlsplit

import msgspec

from batch_pipeline.live import problem_of
from batch_pipeline.models import ENDPOINTS, INLINE_MEDIA, Model, Prices, job_name
from batch_pipeline.pods import check_kubernetes, check_runs
from batch_pipeline.settings.sections import Alarms, Live, Settings, Store

LEAST_SECRET_BYTES = 24
"""Of the key that alarms are signed with, as the Standard Webhooks have it."""
MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
MEDIA_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,252}[a-z0-9])?(?::[0-9]{1,5})?")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
LEDGER_URL = re.compile(r"sqlite(?:\+\w+)?:///.|postgresql(?:\+\w+)?://.")
STORE_URL = re.compile(rf"https?://(?:{_LABEL}(?:\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?(?:/\S*)?")
"""Hosts as boto3 takes them: without `_`."""
MOST_DOLLARS = 1_000_000
DECIMALS = 6
"""Of a price and of the discount: so every bill is exact in the 18 decimals of the reports."""
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
