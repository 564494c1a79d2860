"""One tree of errors that says whose fault it is.

`CustomerError` and below: what a customer sent; its message says what, where and how to mend it.
`OperatorError` and below: configuration or a part that is missing; one clear line at start.
`LeaseLost`: nobody's fault; the work is no longer ours.
"""

from __future__ import annotations


class BatchPipelineError(Exception):
    """Root of everything that this project raises on purpose."""


class CustomerError(BatchPipelineError):
    """Something a customer sent cannot be accepted.

    `code` is a stable word from `wire.codes`; the message is for the customer's eyes; `param` is the field or the
    option that it is about, where it is about one.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class NotFound(CustomerError):
    """No such batch or file, or it belongs to somebody else (the two are indistinguishable on purpose)."""

    def __init__(self, message: str) -> None:
        super().__init__("not_found", message)


class NotAllowedInState(CustomerError):
    """The batch is in a state in which this cannot be done (for instance a cancel after the end)."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_state", message)


class LimitReached(CustomerError):
    """What this customer may have at once is used up; the message has the figures."""


class OperatorError(BatchPipelineError):
    """The service is configured or deployed wrongly; the message says what to mend."""


class SettingsError(OperatorError):
    """The configuration cannot be used."""


class EngineError(BatchPipelineError):
    """The inference engine cannot be started or has died."""


class LeaseLost(BatchPipelineError):
    """The ledger refused a write because the lease behind it is no longer valid (invariant I3)."""


class StoreError(BatchPipelineError):
    """The object store refused or could not be reached after the client's own retries."""


class ProofFailed(BatchPipelineError):
    """Files do not hold exactly one result per request. `problems` lists what was found, each as one sentence."""

    def __init__(self, problems: list[str]) -> None:
        shown = "; ".join(problems[:5])
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        super().__init__(f"{shown}{more}")
        self.problems = problems
