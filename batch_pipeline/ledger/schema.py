"""The tables. Times are UTC seconds since the epoch by the database's clock; lists and tables of a row are JSON text.

Locks are always taken in the order out_of_turn, customers, batches, chunks, lanes, quotas, service, and rows of one
table in the order of their keys, so that no two transactions wait for each other. A commit touches its chunk and its
lane, never the batch's row. Lanes, quotas and service are the rows that many transactions want: they are written last.

The conditions of the partial indexes are written out as literals, here and in every query that is to use them: neither
database can prove that a parameter implies them.
"""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 10
"""`upgrade` brings older tables to it."""

metadata = sa.MetaData()

schema_info = sa.Table(
    "schema_info",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, comment="Version of these tables; the code refuses another one"),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("customer", sa.String(64), nullable=False),
    sa.Column("name", sa.String(200), nullable=False, comment="File name without .jsonl; names the outbox folder"),
    sa.Column("door", sa.String(16), nullable=False, comment="drop, cli, api or dagster"),
    sa.Column("endpoint", sa.String(64), nullable=False, comment="The one url of all its requests"),
    sa.Column("window_seconds", sa.Integer, nullable=False, comment="Completion window that was asked for"),
    sa.Column("on_invalid", sa.String(8), nullable=False, comment="skip or fail"),
    sa.Column(
        "creation_key", sa.String(512), nullable=False, unique=True, comment="Two creations with it are one batch"
    ),
    sa.Column("input_key", sa.String(512), nullable=False, comment="Our own copy of the bytes"),
    sa.Column("input_bytes", sa.BigInteger, nullable=False),
    sa.Column("input_etag", sa.String(128), nullable=False),
    sa.Column("metadata", sa.Text, nullable=False, comment="The customer's pairs"),
    sa.Column("status", sa.String(16), nullable=False, comment="BatchStatus"),
    sa.Column("outcome", sa.String(16), comment="Final status it is on its way to, once known"),
    sa.Column("priority", sa.Integer, nullable=False, default=0, comment="Higher first within a customer"),
    sa.Column("revision", sa.BigInteger, nullable=False, default=1, comment="Grows with every change of the row"),
    sa.Column(
        "published", sa.Text, nullable=False, default="", comment="Revision and reason that its status.json shows"
    ),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("deadline_at", sa.Double, nullable=False),
    sa.Column("in_progress_at", sa.Double),
    sa.Column("finalizing_at", sa.Double),
    sa.Column("cancelling_at", sa.Double),
    sa.Column("ended_at", sa.Double, comment="When its final status became visible"),
    sa.Column("input_sha256", sa.String(64), comment="Set when intake is recorded, and only then"),
    sa.Column("invalid_key", sa.String(512), comment="Error lines that intake found"),
    sa.Column("models", sa.Text, nullable=False, default="[]"),
    sa.Column("total", sa.BigInteger, nullable=False, default=0, comment="Lines that are not blank"),
    sa.Column("invalid", sa.BigInteger, nullable=False, default=0),
    sa.Column(
        "completed", sa.BigInteger, nullable=False, default=0, comment="Counted in the final files, as the next three"
    ),
    sa.Column("failed", sa.BigInteger, nullable=False, default=0),
    sa.Column("expired", sa.BigInteger, nullable=False, default=0),
    sa.Column("cancelled", sa.BigInteger, nullable=False, default=0),
    sa.Column("errors", sa.Text, nullable=False, default="[]", comment="First errors of its lines, or of the whole"),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, default=0, comment="Final sums over its results"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("output_key", sa.String(512)),
    sa.Column("error_key", sa.String(512)),
    sa.Column("manifest_key", sa.String(512)),
    sa.Column("intake_attempts", sa.Integer, nullable=False, default=0, comment="Runs requested so far"),
    sa.Column("intake_run_id", sa.String(64), comment="The run that recorded the intake"),
    sa.Column("merge_attempts", sa.Integer, nullable=False, default=0),
    sa.Column("merge_run_id", sa.String(64), comment="The run that finished the batch"),
    sa.Column("run_due_at", sa.Double, nullable=False, default=0.0, comment="Earliest time of the next run request"),
    sa.Column("archived_at", sa.Double, comment="When its chunks left the ledger: from then on the manifest has them"),
    sa.Column("archived_lanes", sa.Text, comment="Its lanes as they were then"),
    sa.Column("work_removed_at", sa.Double, comment="From then on what the files were made from may be gone"),
    sa.Column("files_removed_at", sa.Double, comment="From then on its files are not given out any more"),
    sa.Column(
        "stored", sa.String(8), nullable=False, server_default="all", comment="What may still lie in the bucket: Stored"
    ),
    sa.Column(
        "enqueued",
        sa.Text,
        nullable=False,
        server_default="{}",
        comment="Prompt tokens by model that it holds of its customer's quotas",
    ),
    sa.Column("input_file_id", sa.String(64), comment="The file that the API made it from"),
    sa.Column("announced", sa.BigInteger, comment="Requests, where its door has counted them"),
    sa.Column("deleted_at", sa.Double, comment="When its customer deleted it: the message batches show it no more"),
    sa.Column("window_asked", sa.String(16), comment="The window in the customer's words, where the API was asked"),
    sa.Column("output_expires_seconds", sa.Integer, comment="After its end: how long the API gives out its files"),
    sa.Column("sent_sha256", sa.String(64), comment="Of the bytes that its door was sent, where that read them all"),
    sa.Column(
        "observed_step",
        sa.Integer,
        nullable=False,
        server_default="0",
        comment="Progress that the operator's desk was shown last, in steps of 5 %",
    ),
    sa.Column("observed_at", sa.Double, comment="When that was"),
    sa.Column("at_risk_at", sa.Double, comment="Since when it is said to miss its deadline; null where it is not"),
    sa.Column("estimates", sa.Text, comment="Estimates of its finish that are kept to be judged, by their milestone"),
)
is_open = batches.c.status.in_(
    [sa.literal_column(f"'{status}'") for status in ("validating", "in_progress", "finalizing", "cancelling")]
)
"""Batches without a final status."""
is_undecided = batches.c.outcome.is_(None)
"""Batches whose chunks may be leased, or are still to be made."""
is_unshown = batches.c.published != sa.literal_column("'final'")
"""Batches whose status.json does not show their end yet."""
is_unarchived = batches.c.archived_at.is_(None)
"""Batches whose chunks are in the ledger."""
has_work = batches.c.stored == sa.literal_column("'all'")
"""Batches of which chunk inputs, checkpoints and results may lie in the bucket."""
has_objects = batches.c.stored != sa.literal_column("'nothing'")
"""Batches of which anything may lie in the bucket."""
sa.Index("batches_open", batches.c.created_at, postgresql_where=is_open, sqlite_where=is_open)
sa.Index("batches_undecided", batches.c.deadline_at, postgresql_where=is_undecided, sqlite_where=is_undecided)
sa.Index("batches_unshown", batches.c.batch_id, postgresql_where=is_unshown, sqlite_where=is_unshown)
sa.Index("batches_unarchived", batches.c.ended_at, postgresql_where=is_unarchived, sqlite_where=is_unarchived)
sa.Index("batches_with_work", batches.c.ended_at, postgresql_where=has_work, sqlite_where=has_work)
sa.Index("batches_with_objects", batches.c.ended_at, postgresql_where=has_objects, sqlite_where=has_objects)
sa.Index("batches_by_name", batches.c.customer, batches.c.name, batches.c.created_at)
sa.Index("batches_by_customer", batches.c.customer, batches.c.created_at)
sa.Index("batches_by_time", batches.c.created_at)
sa.Index(
    "batches_open_by_customer", batches.c.customer, batches.c.created_at, postgresql_where=is_open, sqlite_where=is_open
)
sa.Index("batches_by_end", batches.c.ended_at, batches.c.batch_id)
is_at_risk = batches.c.at_risk_at.is_not(None)
"""Batches of which it is said that they miss their deadline."""
sa.Index("batches_at_risk", batches.c.at_risk_at, postgresql_where=is_at_risk, sqlite_where=is_at_risk)

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.batch_id"), primary_key=True),
    sa.Column("chunk", sa.Integer, primary_key=True, comment="0-based number within the batch"),
    sa.Column("model", sa.String(64), nullable=False),
    sa.Column("input_key", sa.String(512), nullable=False),
    sa.Column("requests", sa.Integer, nullable=False),
    sa.Column("first_index", sa.BigInteger, nullable=False),
    sa.Column("last_index", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, comment="Estimate for the scheduler"),
    sa.Column("max_output_tokens", sa.BigInteger, nullable=False, comment="Estimate for the scheduler"),
    sa.Column("state", sa.String(16), nullable=False, comment="ChunkState"),
    sa.Column("token", sa.Integer, nullable=False, default=0, comment="Fencing token of the newest lease"),
    sa.Column("failures", sa.Integer, nullable=False, default=0, comment="Leases that ran out or failed"),
    sa.Column("worker_id", sa.String(128), comment="Holder of the newest lease"),
    sa.Column("run_id", sa.String(64), comment="Dagster run of the newest lease"),
    sa.Column("expires_at", sa.Double, comment="When the lease may be taken away"),
    sa.Column("parts", sa.Text, nullable=False, default="[]", comment="Checkpoints of all its attempts"),
    sa.Column("result", sa.Text, comment="What the commit pointed it at"),
    sa.Column("committed_at", sa.Double),
    sa.Column("last_error", sa.Text, comment="Why the newest lease ended without a commit"),
    sa.Column("charged", sa.Double, comment="Tokens that its customer was charged for it so far; null for none"),
    sa.Column(
        "prefix_group", sa.Integer, comment="First of the chunks with its long prefix; null where it has its own"
    ),
)
is_pending = chunks.c.state == sa.literal_column("'pending'")
is_leased = chunks.c.state == sa.literal_column("'leased'")
sa.Index(
    "chunks_pending",
    chunks.c.batch_id,
    chunks.c.model,
    chunks.c.chunk,
    postgresql_where=is_pending,
    sqlite_where=is_pending,
)
sa.Index("chunks_leased", chunks.c.expires_at, postgresql_where=is_leased, sqlite_where=is_leased)
is_leased_of_group = is_leased & chunks.c.prefix_group.is_not(None)
sa.Index(
    "chunks_leased_of_group",
    chunks.c.batch_id,
    chunks.c.model,
    chunks.c.worker_id,
    chunks.c.prefix_group,
    postgresql_where=is_leased_of_group,
    sqlite_where=is_leased_of_group,
)

lanes = sa.Table(
    "lanes",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.batch_id"), primary_key=True),
    sa.Column("model", sa.String(64), primary_key=True),
    sa.Column("pending", sa.Integer, nullable=False, comment="Chunks, as the next three"),
    sa.Column("leased", sa.Integer, nullable=False, default=0),
    sa.Column("committed", sa.Integer, nullable=False, default=0),
    sa.Column("stopped", sa.Integer, nullable=False, default=0),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("pending_tokens", sa.BigInteger, nullable=False, comment="Estimate, prompt and answer"),
    sa.Column("completed", sa.BigInteger, nullable=False, default=0, comment="Requests with a response so far"),
    sa.Column("failed", sa.BigInteger, nullable=False, default=0),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("revision", sa.BigInteger, nullable=False, default=1),
    sa.Column("tokens", sa.BigInteger, comment="Estimate of all its requests, prompt and answer"),
    sa.Column("customer", sa.String(64), nullable=False, server_default="", comment="Its batch's, as the next"),
    sa.Column("deadline_at", sa.Double, nullable=False, server_default="0"),
    sa.Column("prefix_groups", sa.Integer, nullable=False, server_default="0", comment="Of its chunks; 0 for one"),
)
is_waiting = lanes.c.pending > sa.literal_column("0")
"""Lanes with chunks that wait for a lease: only of batches in progress without an outcome."""
sa.Index(
    "lanes_waiting_in_turn",
    lanes.c.model,
    lanes.c.customer,
    lanes.c.deadline_at,
    postgresql_where=is_waiting,
    sqlite_where=is_waiting,
)

service = sa.Table(
    "service",
    metadata,
    sa.Column("model", sa.String(64), primary_key=True),
    sa.Column("customer", sa.String(64), primary_key=True),
    sa.Column(
        "tokens",
        sa.Double,
        nullable=False,
        comment="Virtual tokens of service over the weight: as used of what has ended, as expected of what is leased",
    ),
    sa.Column(
        "floor",
        sa.Double,
        nullable=False,
        default=0.0,
        server_default="0",
        comment="What `tokens` were at least when the customer last came to the queue: they are not corrected below it",
    ),
    sa.Column(
        "estimated_tokens",
        sa.Double,
        nullable=False,
        default=0.0,
        server_default="0",
        comment="Of its finished batches, fading, as the next",
    ),
    sa.Column(
        "real_tokens", sa.Double, nullable=False, default=0.0, server_default="0", comment="As the engine counted them"
    ),
)

out_of_turn = sa.Table(
    "out_of_turn",
    metadata,
    sa.Column("model", sa.String(64), primary_key=True),
    sa.Column("credit", sa.Double, nullable=False, comment="Tokens that batches at risk might have ahead of others"),
    sa.Column("at", sa.Double, nullable=False, comment="When there were so many: they grow with time"),
)

customers = sa.Table(
    "customers",
    metadata,
    sa.Column("customer", sa.String(64), primary_key=True),
    sa.Column("weight", sa.Double, nullable=False, default=1.0, comment="Share of a model's service"),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("max_requests", sa.BigInteger, comment="Requests in a file; null for the configured limit, as the next"),
    sa.Column("max_file_bytes", sa.BigInteger),
    sa.Column("max_open_batches", sa.BigInteger, comment="Batches without a final status"),
    sa.Column("max_enqueued_tokens", sa.BigInteger, comment="Prompt tokens of a model in batches that wait or run"),
    sa.Column("requests_per_minute", sa.BigInteger, comment="Requests to the API with one key"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("customer", sa.String(64), sa.ForeignKey("customers.customer"), nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False, unique=True, comment="Of the key; the key itself is not kept"),
    sa.Column("prefix", sa.String(16), nullable=False, comment="Its first letters, to tell keys apart"),
    sa.Column("label", sa.String(200), nullable=False, comment="What it is for, in its owner's words"),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
)
sa.Index("api_keys_by_customer", api_keys.c.customer, api_keys.c.created_at)

quotas = sa.Table(
    "quotas",
    metadata,
    sa.Column("customer", sa.String(64), primary_key=True),
    sa.Column("model", sa.String(64), primary_key=True),
    sa.Column("tokens", sa.BigInteger, nullable=False, comment="Sum of what the customer's batches hold (enqueued)"),
)

files = sa.Table(
    "files",
    metadata,
    sa.Column("file_id", sa.String(64), primary_key=True),
    sa.Column("customer", sa.String(64), nullable=False),
    sa.Column("purpose", sa.String(16), nullable=False, comment="batch or batch_output"),
    sa.Column("filename", sa.String(255), nullable=False),
    sa.Column("object_key", sa.String(512), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("batch_id", sa.String(64), comment="The batch whose file it is: then its bytes go when the batch's do"),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, comment="From then on it is not given out any more"),
    sa.Column("sha256", sa.String(64), comment="Of its bytes, where they came in one piece"),
)
sa.Index("files_by_customer", files.c.customer, files.c.created_at, files.c.file_id)
sa.Index("files_by_expiry", files.c.expires_at)
sa.Index("files_by_batch", files.c.batch_id)

uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("upload_id", sa.String(64), primary_key=True),
    sa.Column("customer", sa.String(64), nullable=False),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("filename", sa.String(255), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False, comment="As announced: its parts must have so many together"),
    sa.Column("status", sa.String(16), nullable=False, comment="pending, completed or cancelled"),
    sa.Column("file_id", sa.String(64), comment="What it has become"),
    sa.Column("file_expires_seconds", sa.Integer),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)
sa.Index("uploads_by_expiry", uploads.c.expires_at)

upload_parts = sa.Table(
    "upload_parts",
    metadata,
    sa.Column("part_id", sa.String(64), primary_key=True),
    sa.Column("upload_id", sa.String(64), sa.ForeignKey("uploads.upload_id"), nullable=False),
    sa.Column("object_key", sa.String(512), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)
sa.Index("upload_parts_by_upload", upload_parts.c.upload_id)

charges = sa.Table(
    "charges",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.batch_id"), primary_key=True),
    sa.Column("model", sa.String(64), primary_key=True),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, comment="Of its answered requests, as the next two"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_tokens", sa.BigInteger, nullable=False),
    sa.Column("prices", sa.Text, comment="Those of the day on which the batch ended; null where none was known"),
    sa.Column("cost", sa.String(80), comment="US dollars as an exact decimal; null where no price was known"),
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("webhook_id", sa.String(64), primary_key=True),
    sa.Column("customer", sa.String(64), sa.ForeignKey("customers.customer"), nullable=False),
    sa.Column("url", sa.String(2000), nullable=False),
    sa.Column("secret", sa.String(128), nullable=False, comment="What is sent is signed with it: so it is kept itself"),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("disabled_at", sa.Double, comment="When its receiver answered that it wants nothing more"),
)
sa.Index("webhooks_by_customer", webhooks.c.customer, webhooks.c.created_at)

deliveries = sa.Table(
    "webhook_deliveries",
    metadata,
    sa.Column(
        "event_id", sa.String(64), primary_key=True, comment="The same in every try: receivers tell repeats by it"
    ),
    sa.Column("webhook_id", sa.String(64), sa.ForeignKey("webhooks.webhook_id"), primary_key=True),
    sa.Column("batch_id", sa.String(64), nullable=False),
    sa.Column("event", sa.String(32), nullable=False, comment="batch.completed and its kind"),
    sa.Column("event_at", sa.Double, nullable=False),
    sa.Column(
        "due_at", sa.Double, nullable=False, comment="Earliest time of the next try; while it is sent, the lease"
    ),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("ended_at", sa.Double, comment="When it was delivered, or given up: then there is an error"),
    sa.Column("error", sa.Text, comment="Why the newest try failed"),
)
is_undelivered = deliveries.c.ended_at.is_(None)
"""Deliveries that are still to be sent."""
sa.Index("deliveries_due", deliveries.c.due_at, postgresql_where=is_undelivered, sqlite_where=is_undelivered)
sa.Index("deliveries_by_webhook", deliveries.c.webhook_id)
sa.Index("deliveries_by_end", deliveries.c.ended_at)

tallies = sa.Table(
    "tallies",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("total", sa.BigInteger, nullable=False, comment="Since the ledger was made"),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("worker_id", sa.String(128), primary_key=True),
    sa.Column("model", sa.String(64), nullable=False),
    sa.Column("run_id", sa.String(64)),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("state", sa.String(16), nullable=False, comment="WorkerState"),
    sa.Column("detail", sa.Text, comment="Why it failed, or what it is doing"),
    sa.Column("batches", sa.Text, nullable=False, default="[]", comment="The only batches it serves, if any"),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False, comment="Its newest heartbeat"),
    sa.Column("leave", sa.Boolean, nullable=False, default=False, comment="It is asked to give way"),
    sa.Column("ready_at", sa.Double, comment="When its engine had loaded, for the first time"),
    sa.Column("tokens_per_second", sa.Double, comment="Of requests that it has finished lately, prompt and answer"),
)
sa.Index("workers_by_model", workers.c.model, workers.c.seen_at)

notices = sa.Table(
    "notices",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("text", sa.Text, nullable=False, comment="What holds up every batch, for a status to say"),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False, comment="When it was last found to be so"),
)

alarms = sa.Table(
    "alarms",
    metadata,
    sa.Column("alarm_id", sa.String(64), primary_key=True, comment="The same occurrence has the same id"),
    sa.Column("kind", sa.String(32), nullable=False, comment="AlarmKind"),
    sa.Column("subject", sa.String(200), nullable=False, comment="A run's, batch's or model's name"),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("raised_at", sa.Double, nullable=False),
    sa.Column("over_at", sa.Double, comment="When what it tells of had passed"),
    sa.Column("message_id", sa.String(64), comment="The message that tells of it, once there is one"),
    sa.Column("due_at", sa.Double, nullable=False, default=0.0, comment="Next try of its message; or its lease"),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("told_at", sa.Double, comment="When it was told, or given up: then there is an error"),
    sa.Column("error", sa.Text, comment="Why the newest try failed"),
)
is_untold = alarms.c.told_at.is_(None)
"""Alarms that are still to be told."""
sa.Index("alarms_untold", alarms.c.raised_at, postgresql_where=is_untold, sqlite_where=is_untold)
sa.Index("alarms_by_time", alarms.c.raised_at)
sa.Index("alarms_by_subject", alarms.c.kind, alarms.c.subject)

events = sa.Table(
    "events",
    metadata,
    sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("batch_id", sa.String(64), nullable=False),
    sa.Column("chunk", sa.Integer),
    sa.Column("event", sa.String(32), nullable=False, comment="The transition's name"),
    sa.Column("actor", sa.String(128), nullable=False),
    sa.Column("token", sa.Integer),
    sa.Column("run_id", sa.String(64)),
    sa.Column("detail", sa.Text),
)
sa.Index("events_by_batch", events.c.batch_id, events.c.sequence)
