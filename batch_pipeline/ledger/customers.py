"""Customers: their share, their limits, and the keys by which the API knows them.

A key is random and shown once, when it is made; the ledger keeps its sha256, which is enough for 256 random bits, and
its first letters, by which people tell keys apart. A key that was revoked opens nothing from the next request on.

Each function is one transaction: killed before its commit nothing has changed, after it all has.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from batch_pipeline import ids
from batch_pipeline.errors import CustomerError, NotFound
from batch_pipeline.ledger import counters
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import api_keys, customers
from batch_pipeline.ledger.transitions import ensure_customer
from batch_pipeline.settings import Limits
from batch_pipeline.wire import codes

KEY_MARK = "bp-"
_KEY_BYTES = 32
_PREFIX_CHARACTERS = 10
_MOST_LABEL_CHARACTERS = 200
_LIMITS = Limits.__struct_fields__
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1_000_000.0
"""A counter of the fair queue is tokens over weight: it has to stay a number that a token changes."""

# Built once: it is asked for with every request to the API.
_BY_SECRETS = (
    sa.select(api_keys.c.sha256, api_keys.c.key_id, api_keys.c.prefix, api_keys.c.label, api_keys.c.revoked_at)
    .add_columns(api_keys.c.created_at.label("key_created_at"), *customers.c)
    .join_from(api_keys, customers, customers.c.customer == api_keys.c.customer)
    .where(api_keys.c.sha256.in_(sa.bindparam("hashes", expanding=True)), api_keys.c.revoked_at.is_(None))
)


class Customer(msgspec.Struct, frozen=True, kw_only=True):
    """A customer as the ledger has it. `own_limits` names those that were set for it; `limits` are what counts."""

    customer: str
    weight: float
    """Its share of a model's service where several wait: twice the weight, twice the tokens."""
    created_at: float
    limits: Limits
    own_limits: dict[str, int]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a key; not the key."""

    key_id: str
    customer: str
    prefix: str
    label: str
    created_at: float
    revoked_at: float | None


class NewKey(NamedTuple):
    """A key that was just made: `secret` is not to be had again."""

    key: ApiKey
    secret: str


class Known(NamedTuple):
    """Whose a key is, and what its owner may."""

    key: ApiKey
    customer: Customer


class Customers:
    """Customers and their keys. `defaults` are the limits of those for whom none were set."""

    def __init__(self, database: Database, defaults: Limits) -> None:
        self._database = database
        self.defaults = defaults

    def add(self, customer: str, *, weight: float | None = None, limits: dict[str, int] | None = None) -> Customer:
        """Add a customer. One that is there already (by a file dropped, for instance) gets the values that are given.

        Raises CustomerError where the name, the weight or a limit cannot be.
        """
        if not ids.CUSTOMER_PATTERN.fullmatch(customer):
            raise CustomerError(
                codes.INVALID_NAME,
                f"customer {customer!r}: 1 to 64 lower-case letters, digits, '-' and '_', a letter or digit at both "
                "ends",
            )
        values = _checked(weight, limits or {})
        with self._database.write() as tx:
            ensure_customer(tx, customer)
            return self._set(tx, customer, values)

    def set(self, customer: str, *, weight: float | None = None, limits: dict[str, int | None]) -> Customer:
        """Change what is given; a limit of None means the configured one again. Raises NotFound, CustomerError."""
        values = _checked(weight, limits)
        with self._database.write() as tx:
            return self._set(tx, customer, values)

    def _set(self, tx: Transaction, customer: str, values: dict[str, Any]) -> Customer:
        if values:
            if "weight" in values:
                # Locked, or of two changes at once each would see the same weight before it. Rows may refer to it.
                mine = sa.select(customers.c.weight).where(customers.c.customer == customer)
                before = tx.connection.execute(mine.with_for_update(key_share=True)).scalar_one_or_none()
                if before is not None:
                    counters.reweigh(tx, customer, before, values["weight"])
            tx.connection.execute(customers.update().where(customers.c.customer == customer).values(**values))
        return self._get(tx, customer)

    def get(self, customer: str) -> Customer:
        """Return a customer. Raises NotFound."""
        with self._database.read() as tx:
            return self._get(tx, customer)

    def limits_of(self, customer: str) -> Limits:
        """Return what counts for a customer, also for one that has never been seen."""
        with self._database.read() as tx:
            row = tx.connection.execute(sa.select(customers).where(customers.c.customer == customer)).one_or_none()
        return self.defaults if row is None else limits_in(row, self.defaults)

    def _get(self, tx: Transaction, customer: str) -> Customer:
        row = tx.connection.execute(sa.select(customers).where(customers.c.customer == customer)).one_or_none()
        if row is None:
            raise NotFound(f"no customer {customer}")
        return self._customer(row)

    def _customer(self, row: Any) -> Customer:
        own = {name: int(getattr(row, name)) for name in _LIMITS if getattr(row, name) is not None}
        return Customer(
            customer=row.customer,
            weight=row.weight,
            created_at=row.created_at,
            limits=limits_in(row, self.defaults),
            own_limits=own,
        )

    def all(self) -> list[Customer]:
        """Return every customer, by name."""
        with self._database.read() as tx:
            found = tx.connection.execute(sa.select(customers).order_by(customers.c.customer))
            return [self._customer(row) for row in found]

    def add_key(self, customer: str, label: str = "") -> NewKey:
        """Make a key. Killed before the commit there is none; where only the answer is lost, revoke it, make another.

        Raises NotFound, CustomerError where the label is too long.
        """
        if len(label) > _MOST_LABEL_CHARACTERS or not label.isprintable():
            raise CustomerError(
                codes.INVALID_OPTION, f"a label has at most {_MOST_LABEL_CHARACTERS} printable characters"
            )
        secret = f"{KEY_MARK}{secrets.token_urlsafe(_KEY_BYTES)}"
        with self._database.write() as tx:
            self._get(tx, customer)
            key = ApiKey(
                key_id=f"key_{secrets.token_hex(8)}",
                customer=customer,
                prefix=secret[:_PREFIX_CHARACTERS],
                label=label,
                created_at=tx.now,
                revoked_at=None,
            )
            tx.connection.execute(api_keys.insert().values(**msgspec.structs.asdict(key), sha256=_sha256(secret)))
        return NewKey(key, secret)

    def keys(self, customer: str) -> list[ApiKey]:
        """Return a customer's keys, the oldest first, revoked ones too. Raises NotFound."""
        query = sa.select(api_keys).where(api_keys.c.customer == customer)
        with self._database.read() as tx:
            self._get(tx, customer)
            found = tx.connection.execute(query.order_by(api_keys.c.created_at, api_keys.c.key_id))
            return [_key(row) for row in found]

    def revoke_key(self, customer: str, key_id: str) -> ApiKey:
        """Revoke a key; again changes nothing. Raises NotFound, also where it is another customer's."""
        mine = (api_keys.c.key_id == key_id) & (api_keys.c.customer == customer)
        with self._database.write() as tx:
            tx.connection.execute(
                api_keys.update().where(mine, api_keys.c.revoked_at.is_(None)).values(revoked_at=tx.now)
            )
            row = tx.connection.execute(sa.select(api_keys).where(mine)).one_or_none()
        if row is None:
            raise NotFound(f"customer {customer} has no key {key_id}")
        return _key(row)

    def by_secret(self, secret: str) -> Known | None:
        """Return whose key this is; None where it is none, or was revoked."""
        return self.by_secrets([secret]).get(secret)

    def by_secrets(self, asked: Sequence[str]) -> dict[str, Known]:
        """Return whose keys these are; those that are none, or were revoked, are left out."""
        of_hash = {_sha256(secret): secret for secret in asked}
        with self._database.look() as connection:
            found = connection.execute(_BY_SECRETS, {"hashes": list(of_hash)}).all()
        return {of_hash[row.sha256]: Known(_known_key(row), self._customer(row)) for row in found}


def limits_in(row: Any, defaults: Limits) -> Limits:
    """Return the limits that count for a row of `customers`."""
    own = {name: int(getattr(row, name)) for name in _LIMITS if getattr(row, name) is not None}
    return msgspec.structs.replace(defaults, **own)


def _key(row: Any) -> ApiKey:
    return ApiKey(**{name: getattr(row, name) for name in ApiKey.__struct_fields__})


def _known_key(row: Any) -> ApiKey:
    return ApiKey(
        key_id=row.key_id,
        customer=row.customer,
        prefix=row.prefix,
        label=row.label,
        created_at=row.key_created_at,
        revoked_at=row.revoked_at,
    )


def _sha256(secret: str) -> str:
    # Surrogates: a header may hold any bytes.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _checked(weight: float | None, limits: dict[str, int] | dict[str, int | None]) -> dict[str, Any]:
    """Return the columns to set. Raises CustomerError."""
    values: dict[str, Any] = {}
    if weight is not None:
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise CustomerError(
                codes.INVALID_OPTION,
                f"a weight is {LEAST_WEIGHT:g} to {MOST_WEIGHT:,.0f}, where 1 is usual, not {weight}",
            )
        values["weight"] = weight
    for name, limit in limits.items():
        if name not in _LIMITS:
            raise CustomerError(codes.INVALID_OPTION, f"{name!r} is no limit; there are {', '.join(_LIMITS)}")
        if limit is not None and not 1 <= limit < 2**63:
            raise CustomerError(codes.INVALID_OPTION, f"{name} must be at least 1, not {limit}")
        values[name] = limit
    return values
