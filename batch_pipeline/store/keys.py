"""Where everything lies in the bucket. Nobody else builds a key.

    inbox/CUSTOMER/NAME.jsonl                                dropped by the customer, taken away by us
    inbox/CUSTOMER/NAME.cancel                               cancels the newest batch of that name
    outbox/CUSTOMER/NAME/{status.json, output.jsonl, errors.jsonl, manifest.json}
    rejected/DROP/{object, reason.json}                      a dropped file that could not be taken, and why
    batches/BATCH/input.jsonl                                the bytes as they were taken; never written again
    batches/BATCH/intake/{invalid.jsonl, requests.parquet}   error lines; the table of the valid requests
    batches/BATCH/chunks/NNNNNNNN/input.parquet              the requests of a chunk, in the order in which they run
    batches/BATCH/chunks/NNNNNNNN/TTTTTT-NONCE/...           what one attempt wrote: parts (checkpoints) and its result
    batches/BATCH/final/{output.jsonl, errors.jsonl, manifest.json}
    batches/BATCH/rebuild/NONCE/...                          final files made again, until they are proved the same
    reports/usage/DAY/...                                    what customers are charged for, and a report.json
    files/CUSTOMER/FILE                                      uploaded by the API
    uploads/CUSTOMER/UPLOAD/PART                             parts of an upload that is not complete yet
    calibrations/MODEL/HASH.json                             how many requests at once are best on a kind of machine
    doctor/NONCE                                             written and removed again by `doctor`

Numbers have a fixed width, because stores disagree on the order of a listing (SeaweedFS lists in tree order).
Customer and name are checked against `ids` before they become part of a key, so no key can leave its folder (I8).
"""

from __future__ import annotations

from datetime import date

INBOX = "inbox/"
OUTBOX = "outbox/"
BATCHES = "batches/"
REJECTED = "rejected/"
FILES = "files/"
UPLOADS = "uploads/"
REPORTS = "reports/"


def inbox(customer: str, name: str) -> str:
    """Return the key of a dropped file; `name` without its `.jsonl`."""
    return f"{INBOX}{customer}/{name}.jsonl"


def inbox_cancel(customer: str, name: str) -> str:
    """Return the key of the object by which a customer cancels the newest batch of a name."""
    return f"{INBOX}{customer}/{name}.cancel"


def outbox(customer: str, folder: str, file: str) -> str:
    """Return the key of a file that the customer reads."""
    return f"{OUTBOX}{customer}/{folder}/{file}"


def rejected(drop_id: str, file: str) -> str:
    """Return the key of what is kept of a dropped file that could not be taken; `drop_id` is a hash of the drop."""
    return f"{REJECTED}{drop_id}/{file}"


def batch(batch_id: str) -> str:
    """Return the prefix under which everything of a batch lies."""
    return f"{BATCHES}{batch_id}/"


def input_file(batch_id: str) -> str:
    """Return the key of the batch's input as it was taken."""
    return f"{batch(batch_id)}input.jsonl"


def invalid_lines(batch_id: str) -> str:
    """Return the key of the error lines that intake found, in line order."""
    return f"{batch(batch_id)}intake/invalid.jsonl"


def request_table(batch_id: str) -> str:
    """Return the key of the table of valid requests that passes from validation to chunking."""
    return f"{batch(batch_id)}intake/requests.parquet"


def chunk(batch_id: str, chunk_number: int) -> str:
    """Return the prefix under which everything of a chunk lies."""
    return f"{chunks(batch_id)}{chunk_number:08d}/"


def chunks(batch_id: str) -> str:
    """Return the prefix under which everything of the batch's chunks lies."""
    return f"{batch(batch_id)}chunks/"


def rebuilds(batch_id: str) -> str:
    """Return the prefix under which all rebuilds of a batch lie."""
    return f"{batch(batch_id)}rebuild/"


def outbox_folder(customer: str, folder: str) -> str:
    """Return the prefix under which what a customer reads of a batch lies."""
    return f"{OUTBOX}{customer}/{folder}/"


def chunk_input(batch_id: str, chunk: int) -> str:
    """Return the key of a chunk's requests."""
    return f"{batch(batch_id)}chunks/{chunk:08d}/input.parquet"


def attempt(batch_id: str, chunk: int, token: int, nonce: str) -> str:
    """Return the prefix that only this attempt writes to (invariant I4)."""
    return f"{batch(batch_id)}chunks/{chunk:08d}/{token:06d}-{nonce}/"


def final(batch_id: str, file: str) -> str:
    """Return the key of a final file."""
    return f"{batch(batch_id)}final/{file}"


def usage_report(day: date, file: str) -> str:
    """Return the key of a file of a day's usage report."""
    return f"{REPORTS}usage/{day.isoformat()}/{file}"


def uploaded_file(customer: str, file_id: str) -> str:
    """Return the key of a file that was uploaded by the API."""
    return f"{FILES}{customer}/{file_id}"


def upload(customer: str, upload_id: str) -> str:
    """Return the prefix under which the parts of an upload lie."""
    return f"{UPLOADS}{customer}/{upload_id}/"


def upload_part(customer: str, upload_id: str, part_id: str) -> str:
    """Return the key of a part of an upload."""
    return f"{upload(customer, upload_id)}{part_id}"


def calibration(model: str, digest: str) -> str:
    """Return the key of what a calibration has found; the digest is of everything that it depends on."""
    return f"calibrations/{model}/{digest}.json"


def probe(nonce: str) -> str:
    """Return the key of an object that `doctor` writes and removes again."""
    return f"doctor/{nonce}"


def rebuild(batch_id: str, nonce: str) -> str:
    """Return the prefix under which one rebuild of the final files lies until it is proved."""
    return f"{batch(batch_id)}rebuild/{nonce}/"
