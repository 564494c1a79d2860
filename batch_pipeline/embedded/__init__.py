"""What makes one machine enough: an S3 server, a Postgres server, a small real model and the Dagster services.

Every server here is the real program, bound to loopback. At scale the same settings name other addresses instead.
"""
