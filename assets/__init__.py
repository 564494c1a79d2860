"""Dagster assets, from upload to results: `uploads` > `request_chunks` > `chunk_results` > `batch_results`, each
partitioned by batch; the jobs of the GPU workers, which fill `chunk_results`; and `usage_report`, partitioned by day.
"""

from assets.batch_results import batch_results
from assets.checks import chunk_results_checks, every_model_has_workers, request_chunks_checks
from assets.chunk_results import chunk_results, of_catalogue
from assets.gpu_workers import gpu_worker_job
from assets.partitions import batches
from assets.request_chunks import request_chunks
from assets.uploads import uploads
from assets.usage_report import usage_report

CHECKS = [request_chunks_checks, chunk_results_checks, every_model_has_workers]

__all__ = [
    "CHECKS",
    "batch_results",
    "batches",
    "chunk_results",
    "gpu_worker_job",
    "of_catalogue",
    "request_chunks",
    "uploads",
    "usage_report",
]
