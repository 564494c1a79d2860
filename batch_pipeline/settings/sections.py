"""The sections of the configuration, each with its fields, their meaning and what counts where nothing is said."""

from __future__ import annotations

import msgspec

from batch_pipeline.live import LiveHours
from batch_pipeline.models import Model
from batch_pipeline.pods import Runs

MEBIBYTE = 1024 * 1024


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
    """Gives a number of GPUs, for instance ceil(sum(vllm:num_requests_running{traffic="live"}) / 40). One that gives no
    sample is not answered: write `... or vector(0)` where that means none.
    """
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
