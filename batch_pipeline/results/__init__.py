"""From committed chunks to the customer's files: merge, proof, manifest, audit, and the outbox in which they appear."""
