"""The command line: submit, watch and check batches; run the parts. Each command calls the domain and prints.

program      the group of commands and what becomes of errors (exit statuses)
app          what the commands share: configuration, store and ledger, opened when first needed
batches      submit, status, list, watch, cancel, results
files        validate: offline
proofs       verify, audit
billing      usage
operating    worker, up, down, demo, config
tidying      housekeeping
customers    customers: keys and limits
webhooks     customers webhooks
serving      serve
doctor       doctor: every part, and what to mend
progress     how batches that run are shown
"""

from batch_pipeline.cli.program import main

__all__ = ["main"]
