"""How many batch requests may be in flight on an engine that live traffic uses too: live traffic first.

    blind ──all is known──> open ──live near its budget──> careful ──at the most again──> open
      ^                      └──────────┬───────────────────┘   ^
      │                       live suffers                      │ live well again
      │                                 v                       │
      └──metrics or probe fail──     stopped  ──────────────────┘

Pure: `govern` goes from one share and one snapshot to the next share; the caller reads the engine about once a second.
It is TCP's way with a network that others use (additive increase, multiplicative decrease; D.-M. Chiu, R. Jain, 1989;
slow start up to half of what was too much, RFC 5681), with one more rule: where live traffic suffers, nothing is fed.

What is live: requests that the engine has and that are not our own. Ours are those that this worker has in flight;
those of other workers on the same engine count as live, so that together they are careful rather than bold.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

NEAR = 0.8
"""From this share of the budget on, live traffic is near it: less, before it is missed."""
BADLY = 2.0
"""From so many budgets on it is missed badly: what is in flight is taken back too."""
_KEPT = 0.7
"""What a decrease leaves."""
_HEADROOM = 0.9
"""From this share of the cache's mark on nothing is added: answers grow while they are written."""
_USED = 0.75
"""The allowance grows only where so much of it is used: otherwise nothing was learnt about more."""
_STEPS = 32
"""So many increases lead from nothing to the most."""
_SOON = 2
"""A stop within so many measures after an increase is that increase's doing,"""
_PATIENCE = 15
"""and so many good measures have to come before as much is tried again: each try that fails costs a live request."""
_START = 4
"""The first doubling ends at this part of the most."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the catalogue says about a shared engine."""

    budget_seconds: float
    """Longest time to first token that live traffic is to have."""
    kv_cache_mark: float
    """Share of the KV cache in use (0 to 1) from which on batch work is too much."""
    least: int
    """Requests in flight where nothing is known, and where a stop ends; at least 1."""
    most: int
    """Requests in flight at most; at least `least`."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. Requests of everybody are counted together."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: int
    """Since the engine's start."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine and of the live traffic on it at one moment."""

    load: Load | None
    """None where its metrics cannot be read."""
    own_in_flight: int
    """Batch requests of this worker."""
    live_ttft_seconds: float | None
    """Time to first token of a live request, the newest measured; where one has waited for longer and has none yet,
    that; infinite where it was refused, None where it cannot be measured.
    """
    measures: int
    """How many times that was measured: tells a new measure from an old one."""
    trouble: str = ""
    """Why something is not known, in words."""


class Mode(Enum):
    """How much batch work has of the engine."""

    OPEN = "open"
    """All that it may have, or on the way there for the first time."""
    CAREFUL = "careful"
    """Less, because of live traffic."""
    STOPPED = "stopped"
    """Nothing: live traffic suffers."""
    BLIND = "blind"
    """The least, because nothing is known."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What batch work may have of the engine now, why, and what the next decision builds on."""

    in_flight: int
    """Most requests in flight; 0 means that nothing is fed."""
    mode: Mode
    reason: str
    """In words, with figures: for logs and, where it holds work up, for the status (invariant I9)."""
    keep: int | None = None
    """Where set: of those in flight now, only so many (the oldest) go on; the others are taken back."""
    allowance: float
    """Before rounding; meaningful while stopped as well: what it was."""
    threshold: float
    """Up to this the allowance doubles, above it goes up in steps."""
    ceiling: float = math.inf
    """An allowance that was too much."""
    measures: int = 0
    """Measures of live latency that the last change was made by; the next change waits for a newer one."""
    preemptions: int | None = None


def first_share(rules: Rules) -> Share:
    """Return the share before anything is known: the least."""
    return Share(
        in_flight=rules.least,
        mode=Mode.BLIND,
        reason="nothing is known yet of the live traffic on its engine",
        allowance=float(rules.least),
        threshold=max(float(rules.least), rules.most / _START),
    )


def govern(share: Share, now: Snapshot, rules: Rules) -> Share:
    """Return the share that follows from the last one and from what is seen now."""
    if (suffering := _suffering(now, rules)) is not None:
        return _stop(share, now, rules, suffering)
    load, ttft = now.load, now.live_ttft_seconds
    if load is None or ttft is None:
        why = now.trouble or "the time to first token of live requests is not measured yet"
        return _changed(share, now, rules, rules.least, mode=Mode.BLIND, reason=f"{why}: {_few(rules.least)} at a time")
    if share.mode is Mode.STOPPED:
        return _resume(share, now, rules, load, ttft)
    if (near := _near(share, load, ttft, rules)) is not None:
        return _decrease(share, now, rules, near)
    return _increase(share, now, rules, load, ttft)


def _resume(share: Share, now: Snapshot, rules: Rules, load: Load, ttft: float) -> Share:
    seen = f"live requests have their first token after {ttft:.2f} s"
    is_well = ttft <= NEAR * rules.budget_seconds and load.kv_cache_usage < rules.kv_cache_mark
    if now.measures > share.measures and is_well:
        return _changed(share, now, rules, rules.least, mode=Mode.CAREFUL, reason=f"live traffic is well again: {seen}")
    reason = f"live traffic first, until it is well again: {seen}, {_cache(load)}"
    return msgspec.structs.replace(share, keep=None, reason=reason)


def _decrease(share: Share, now: Snapshot, rules: Rules, reason: str) -> Share:
    # What was fed before the last change has to be gone before its effect can be seen.
    if now.measures <= share.measures or now.own_in_flight > share.in_flight:
        return msgspec.structs.replace(share, keep=None)
    used = min(share.allowance, max(now.own_in_flight, rules.least))
    less = max(float(rules.least), _KEPT * used)
    changed = _changed(share, now, rules, less, mode=Mode.CAREFUL, reason=reason)
    return msgspec.structs.replace(changed, threshold=less)


def _increase(share: Share, now: Snapshot, rules: Rules, load: Load, ttft: float) -> Share:
    full = load.waiting > 0 or load.kv_cache_usage >= _HEADROOM * rules.kv_cache_mark
    # Whoever was blind sees now: what holds the work is the search for how much is good.
    mode = Mode.OPEN if share.mode is Mode.BLIND else share.mode
    same = msgspec.structs.replace(share, keep=None, mode=mode, preemptions=load.preemptions)
    if now.measures <= share.measures or full or now.own_in_flight < _USED * share.in_flight:
        return same
    more = share.allowance + max(1.0, rules.most / _STEPS)
    if share.allowance < share.threshold:
        more = max(more, min(2.0 * share.allowance, share.threshold))
    ceiling = share.ceiling
    if more >= ceiling:
        if now.measures - share.measures < _PATIENCE:
            return same
        ceiling = math.inf
    mode = Mode.OPEN if more >= rules.most else mode
    reason = (
        f"live requests have their first token after {ttft:.2f} s, of {rules.budget_seconds:g} s that they may wait"
    )
    changed = _changed(share, now, rules, more, mode=mode, reason=reason)
    return msgspec.structs.replace(changed, ceiling=ceiling)


def _suffering(now: Snapshot, rules: Rules) -> str | None:
    """Return in what live traffic suffers, None where it does not."""
    ttft, load = now.live_ttft_seconds, now.load
    if ttft is not None and ttft > rules.budget_seconds:
        alone = "" if now.own_in_flight else ", without any batch request in flight here"
        if math.isinf(ttft):
            return f"its engine refuses live requests{alone}"
        return (
            f"live requests wait {ttft:.2f} s for their first token, above the {rules.budget_seconds:g} s "
            f"that they may{alone}"
        )
    if load is not None and load.kv_cache_usage >= rules.kv_cache_mark and _live_waiting(load, now) > 0:
        return f"live requests wait while {_cache(load)}"
    return None


def _live_waiting(load: Load, now: Snapshot) -> int:
    """Return how many live requests may be waiting: an upper bound, since it is not told which ones wait."""
    return min(load.waiting, max(0, load.running + load.waiting - now.own_in_flight))


def _stop(share: Share, now: Snapshot, rules: Rules, suffering: str) -> Share:
    """Return a share of nothing. At once; what is in flight is taken back where it is bad, or does not get better."""
    reason = f"live traffic first: {suffering}"
    ttft = now.live_ttft_seconds
    keep = None
    if ttft is not None and ttft > BADLY * rules.budget_seconds:
        keep = rules.least
    elif share.mode is Mode.STOPPED and now.measures > share.measures:
        keep = max(rules.least, now.own_in_flight // 2)
    threshold, ceiling = share.threshold, share.ceiling
    if share.mode is not Mode.STOPPED:
        threshold = max(float(rules.least), share.allowance / 2)
        ceiling = share.allowance if now.measures - share.measures <= _SOON else ceiling
    return Share(
        in_flight=0,
        mode=Mode.STOPPED,
        reason=reason,
        keep=keep if keep is not None and keep < now.own_in_flight else None,
        allowance=share.allowance,
        threshold=threshold,
        ceiling=ceiling,
        measures=now.measures,
        preemptions=now.load.preemptions if now.load else share.preemptions,
    )


def _near(share: Share, load: Load, ttft: float, rules: Rules) -> str | None:
    """Return what says that there is too much batch work, though live traffic does not suffer yet."""
    if ttft > NEAR * rules.budget_seconds:
        seen = f"live requests have their first token after {ttft:.2f} s"
        return f"{seen}, near the {rules.budget_seconds:g} s that they may wait"
    if load.kv_cache_usage >= rules.kv_cache_mark:
        return _cache(load)
    if share.preemptions is not None and load.preemptions > share.preemptions:
        return "its engine had to take requests out of its KV cache"
    return None


def _changed(share: Share, now: Snapshot, rules: Rules, allowance: float, *, mode: Mode, reason: str) -> Share:
    bounded = min(max(allowance, float(rules.least)), float(rules.most))
    return Share(
        in_flight=math.floor(bounded),
        mode=mode,
        reason=reason,
        allowance=bounded,
        threshold=share.threshold,
        ceiling=share.ceiling,
        measures=now.measures,
        preemptions=now.load.preemptions if now.load else share.preemptions,
    )


def _cache(load: Load) -> str:
    return f"{load.kv_cache_usage:.0%} of its KV cache is in use"


def _few(requests: int) -> str:
    return "one request" if requests == 1 else f"{requests} requests"
