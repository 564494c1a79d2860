"""The object store: S3 through boto3, and the layout of its keys."""

from batch_pipeline.store.client import ObjectMissing, PreconditionFailed
from batch_pipeline.store.objects import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectMissing", "ObjectStore", "PreconditionFailed"]
