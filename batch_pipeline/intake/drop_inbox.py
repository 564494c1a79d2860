"""What lies in the inbox: an object, the name that its key gives it, and how it is taken out."""

from __future__ import annotations

import logging
from typing import NamedTuple

from batch_pipeline import ids
from batch_pipeline.store import ObjectInfo, ObjectStore, PreconditionFailed, keys

ACTOR = "drop folder"
FILE = ".jsonl"
CANCEL = ".cancel"

_log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """A dropped object that is dealt with: a file became a batch, a cancel was carried out; or there is an error code.

    `batch_id` is the batch that it became, or that it was about.
    """

    key: str
    batch_id: str | None
    code: str | None = None


class Drop(NamedTuple):
    """A dropped object: the name that its key gives it, and what a HEAD tells."""

    customer: str
    name: str
    info: ObjectInfo

    @property
    def creation_key(self) -> str:
        """The same for the same bytes dropped by the same upload, another for every other."""
        return f"drop:{self.customer}/{self.name}:{self.info.etag}:{self.info.modified_at}"

    @property
    def batch_id(self) -> str:
        """The id of the batch that a file becomes."""
        return ids.batch_id_from(self.creation_key)

    @property
    def has_good_name(self) -> bool:
        """Whether customer and name may become parts of keys."""
        return bool(ids.CUSTOMER_PATTERN.fullmatch(self.customer) and ids.NAME_PATTERN.fullmatch(self.name))


def drop_of(info: ObjectInfo) -> Drop:
    """Return an object of the inbox with the name that its key gives it, without its extension."""
    folder, _, file = info.key.removeprefix(keys.INBOX).partition("/")
    return Drop(folder, file.removesuffix(CANCEL if file.endswith(CANCEL) else FILE), info)


def remove(info: ObjectInfo, store: ObjectStore) -> None:
    """Remove the object from the inbox if it is still the one that was dealt with; a newer one stays for its own
    turn.
    """
    now = store.head(info.key)
    if now is None or (now.etag, now.modified_at) != (info.etag, info.modified_at):
        return
    try:
        store.delete(info.key, if_match=info.etag)
    except PreconditionFailed:
        _log.info("%s was overwritten when its predecessor was taken; it is taken next", info.key)
