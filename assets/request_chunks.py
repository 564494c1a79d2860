"""`request_chunks`: the valid requests of a batch, checked, ordered and cut into chunks."""

import dagster as dg

from assets.columns import REQUEST_TABLE
from assets.failures import in_one_sentence
from assets.partitions import CODE_VERSION, GROUP, OWNERS, RUNS_ON_TAG, batches
from assets.uploads import UPLOADS
from batch_pipeline.intake import ops
from resources import Service

KIND = {"parquet", "s3"}


@dg.op(
    description="Check every line; write the bad ones to the error object and the good ones to the request table.",
    ins={"uploads": dg.In(dg.Nothing)},
    out=dg.Out(dg.Nothing),
)
def validate_requests(context: dg.OpExecutionContext, service: Service) -> None:
    """Validate one batch. Killed anywhere: run again, it writes the same bytes to the same keys."""
    parts = service.open()
    with in_one_sentence():
        found = ops.validate(
            context.partition_key,
            ledger=parts.ledger,
            store=parts.store,
            settings=parts.settings,
            run_id=context.run_id,
        )
    context.log.info(f"{found.total} requests, {found.invalid} of them invalid")


@dg.op(
    description="Order the good requests by model, shared prefix and length; cut them into chunks; record the intake.",
    ins={"validated": dg.In(dg.Nothing)},
    out=dg.Out(dg.Nothing),
)
def write_chunks(context: dg.OpExecutionContext, service: Service) -> None:
    """Chunk one batch and record its intake in the ledger. Killed anywhere: run again, the same chunks."""
    parts = service.open()
    with in_one_sentence():
        result = ops.write_chunks(
            context.partition_key,
            ledger=parts.ledger,
            store=parts.store,
            settings=parts.settings,
            run_id=context.run_id,
        )
        batch = parts.ledger.batches.get(context.partition_key)
    prompt_tokens = sum(chunk.prompt_tokens for chunk in result.chunks)
    context.add_output_metadata(
        {
            "customer": batch.customer,
            "name": batch.name,
            "status": str(batch.status),
            "dagster/partition_row_count": result.total - result.invalid,
            "requests": result.total,
            "invalid": result.invalid,
            "chunks": len(result.chunks),
            "models": dg.JsonMetadataValue(sorted({chunk.model for chunk in result.chunks})),
            "prompt_tokens_estimated": prompt_tokens,
            "output_tokens_at_most": sum(chunk.max_output_tokens for chunk in result.chunks),
            "input_sha256": result.input_sha256,
            "invalid_lines": result.invalid_key or "none",
            "first_errors": dg.TableMetadataValue(
                records=[
                    dg.TableRecord({"line": error.line or 0, "code": error.code, "message": error.message})
                    for error in result.errors[:20]
                ],
                schema=dg.TableSchema(
                    columns=[
                        dg.TableColumn("line", "int"),
                        dg.TableColumn("code", "string"),
                        dg.TableColumn("message", "string"),
                    ]
                ),
            ),
        }
    )


@dg.graph_asset(
    name="request_chunks",
    ins={"uploads": dg.AssetIn(key=UPLOADS, dagster_type=dg.Nothing)},
    description=(
        "The good requests of a batch, ordered by model, shared prefix and length, in chunks of about 1,000: the unit "
        "of scheduling, of failure and of commit. Bad lines are in the error object. Launching it again for a "
        "batch whose intake is done writes nothing and shows the same figures."
    ),
    group_name=GROUP,
    owners=OWNERS,
    kinds=KIND,
    tags={RUNS_ON_TAG: "intake"},
    metadata=REQUEST_TABLE,
    code_version=CODE_VERSION,
    partitions_def=batches,
)
def request_chunks(uploads: object) -> object:
    """From upload to chunks, as two ops."""
    validated: object = validate_requests(uploads)
    return write_chunks(validated)
