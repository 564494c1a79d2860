"""The HTTP service: doors for the `openai` and `anthropic` SDKs, beside the drop folder and the command line.

app          the application: its routes, what each request passes through
services     what the routes share: ledger, store, settings, the rate of each key
auth         whose request it is
problems     errors as each SDK expects them
gathering    lookups that come at the same time, read together
statuses     the statuses of batches, read together
receiving    files on their way in, in bounded memory
openai_...   /v1/files, /v1/uploads, /v1/batches
beyond       results while a batch runs; retry
requests     each request's id, and bounds of what it may send
serving      `batch-pipeline serve`

Every lookup names the customer of the key: what is another's is not found (I8). Calls to the ledger and the store are
synchronous and run in a bounded pool of threads: FastAPI uses it for every route that is no coroutine, and coroutines
ask for it by themselves.
"""

from batch_pipeline.api.app import create_app

__all__ = ["create_app"]
