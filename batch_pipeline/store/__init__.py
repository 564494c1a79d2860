"""The object store: S3 through boto3, and the layout of its keys."""

from batch_pipeline.store.objects import ObjectInfo, ObjectMissing, ObjectStore, PreconditionFailed

__all__ = ["ObjectInfo", "ObjectMissing", "ObjectStore", "PreconditionFailed"]
