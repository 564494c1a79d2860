"""What a row of each asset has, for Dagster's catalogue: lines of JSONL as the SDKs have them, columns of tables."""

import dagster as dg

_COLUMN_SCHEMA = "dagster/column_schema"


def _schema(*columns: tuple[str, str, str]) -> dict[str, dg.TableSchema]:
    return {
        _COLUMN_SCHEMA: dg.TableSchema(
            columns=[dg.TableColumn(name, kind, description=description) for name, kind, description in columns]
        )
    }


REQUEST_LINES = _schema(
    ("custom_id", "string", "The customer's label; unique in the file, carried along and never interpreted"),
    ("method", "string", "POST"),
    ("url", "string", "The endpoint, the same for every request of a batch"),
    ("body", "json", "The request as the endpoint takes it: model, messages or prompt, parameters"),
)
REQUEST_TABLE = _schema(
    ("index", "int64", "0-based number of the line in the upload: what identifies a request"),
    ("custom_id", "string", "The customer's label"),
    ("body", "binary", "The body, byte for byte"),
    ("prompt_tokens", "int32", "Tokens of the prompt, estimated for the scheduler"),
    ("max_tokens", "int32", "The largest answer reckoned with, in tokens"),
)
RESULT_LINES = _schema(
    ("id", "string", "Identifies the result"),
    ("custom_id", "string", "The customer's label; null in an error of a line that could not be read"),
    ("response", "json", "status_code, request_id and body as the engine answered; null where it did not"),
    (
        "error",
        "json",
        "code, message and, for lines that could not run, the line number; null where there is a response",
    ),
)
USAGE_TABLE = _schema(
    ("day", "date", "UTC day on which the batch ended"),
    ("customer", "string", "Who handed the batch in, and is charged"),
    ("batch_id", "string", "The batch's id: the key of its partition"),
    ("name", "string", "The file's name"),
    ("status", "string", "completed, failed, expired or cancelled"),
    ("requests", "int64", "Requests in the file: billed and not"),
    ("billed", "int64", "Answered requests: the only ones that are charged"),
    ("invalid", "int64", "Not billed: the line was no valid request"),
    ("expired", "int64", "Not billed: the deadline passed first"),
    ("cancelled", "int64", "Not billed: the customer cancelled first"),
    ("failed", "int64", "Not billed: ended as an error"),
    ("input_tokens", "int64", "Of the billed requests, as the next two"),
    ("cached_tokens", "int64", "Of the input tokens, those that the prefix cache had"),
    ("output_tokens", "int64", "What was generated for the billed requests"),
    ("cost_usd", "decimal(38, 18)", "At the batch price; empty where a model had no price"),
)
