"""What is proved of a batch's files, one finding at a time, and the problems that stand against it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

KEPT_PROBLEMS = 100
"""Problems of one finding that are kept in words; all are counted."""


class Finding(StrEnum):
    """What is proved. Each is one asset check."""

    EXACTLY_ONE = "exactly_one_result"
    """Every request has exactly one line, under its own custom_id, and the lines stand in input order."""
    NOTHING_UNKNOWN = "nothing_unknown"
    """Every line is a well-formed result of a request of this batch."""
    MANIFEST_AGREES = "manifest_agrees"
    """Counts, sizes, hashes and token usage of the files are those of the manifest and of the ledger."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: it holds where there are no problems. `problems` has the first ones, each as one sentence."""

    count: int
    problems: list[str]

    @property
    def holds(self) -> bool:
        """Whether nothing stands against it."""
        return self.count == 0


class Problems:
    """Problems by finding: all counted, the first ones kept."""

    def __init__(self) -> None:
        self._kept: dict[Finding, list[str]] = {finding: [] for finding in Finding}
        self._counted: dict[Finding, int] = dict.fromkeys(Finding, 0)

    def add(self, finding: Finding, sentence: str) -> None:
        """Add one problem, as one sentence."""
        self._counted[finding] += 1
        if len(self._kept[finding]) < KEPT_PROBLEMS:
            self._kept[finding].append(sentence)

    def differ(self, what: str, found: object, by: str, expected: object) -> None:
        """Add a problem to MANIFEST_AGREES where `found` is not what `by` says."""
        if found != expected:
            self.add(Finding.MANIFEST_AGREES, f"{what}: the files have {found}, {by} says {expected}")

    @property
    def verdicts(self) -> dict[Finding, Verdict]:
        """What there is against each finding."""
        return {
            finding: Verdict(count=self._counted[finding], problems=list(self._kept[finding])) for finding in Finding
        }
