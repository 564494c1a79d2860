"""Dagster assets, from upload to results: `uploads` > `request_chunks` > `chunk_results` > `batch_results`, each
partitioned by batch; the jobs of the GPU workers, which fill `chunk_results`; and `usage_report`, partitioned by day.
"""

from assets.batch_results import batch_results
from assets.chunk_results import chunk_results
from assets.gpu_workers import gpu_worker_job
from assets.partitions import batches
from assets.request_chunks import request_chunks
from assets.uploads import uploads
from assets.usage_report import usage_report

__all__ = ["batch_results", "batches", "chunk_results", "gpu_worker_job", "request_chunks", "uploads", "usage_report"]
