"""The few questions and commands that the embedded stack has for Dagster, over its webserver's GraphQL.

GraphQL and not Dagster's Python interface, because the domain does not import Dagster and because importing it takes
seconds that `make up` does not have.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import msgspec

from batch_pipeline.errors import OperatorError

_TIMEOUT_SECONDS = 30.0

_LOCATIONS = """
{ workspaceOrError {
    __typename
    ... on PythonError { message }
    ... on Workspace { locationEntries { name loadStatus locationOrLoadError {
        __typename ... on PythonError { message causes { message } } } } } } }
"""
_DAEMONS = """
{ instance { daemonHealth { allDaemonStatuses {
    daemonType required healthy lastHeartbeatTime lastHeartbeatErrors { message } } } } }
"""
_RUNS_IN_PROGRESS = """
{ runsOrError(filter: {statuses: [STARTING, STARTED, CANCELING]}) {
    __typename ... on PythonError { message } ... on Runs { results { runId } } } }
"""
_TERMINATE = """
mutation ($ids: [String!]!, $policy: TerminateRunPolicy!) {
  terminateRuns(runIds: $ids, terminatePolicy: $policy) {
    __typename
    ... on PythonError { message }
    ... on TerminateRunsResult { terminateRunResults {
        __typename ... on PythonError { message } ... on TerminateRunFailure { message } } } } }
"""
_RELOAD = """
mutation ($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) {
    __typename
    ... on PythonError { message }
    ... on ReloadNotSupported { message }
    ... on RepositoryLocationNotFound { message } } }
"""
_SET_LIMIT = "mutation ($pool: String!, $limit: Int!) { setConcurrencyLimit(concurrencyKey: $pool, limit: $limit) }"


class DagsterClient:
    """A Dagster webserver at `url`. Every method raises OperatorError where it cannot be reached or refuses."""

    def __init__(self, url: str) -> None:
        self._url = url

    def version(self) -> str:
        """Return the version of the webserver."""
        return str(self._call("/server_info", None)["dagster_webserver_version"])

    def location_errors(self) -> list[str] | None:
        """Return what keeps code locations from being used, one text each; None while one is still loading."""
        workspace = self._query(_LOCATIONS)["workspaceOrError"]
        if workspace["__typename"] != "Workspace":
            return [str(workspace["message"])]
        entries = workspace["locationEntries"]
        if not entries or any(e["loadStatus"] != "LOADED" or e["locationOrLoadError"] is None for e in entries):
            return None
        failed = [e for e in entries if e["locationOrLoadError"]["__typename"] == "PythonError"]
        return [f"{e['name']}: {_innermost(e['locationOrLoadError'])}" for e in failed]

    def reload_location(self, name: str) -> None:
        """Look at a code location afresh: the webserver keeps the error of a code server that was away."""
        answer = self._query(_RELOAD, {"name": name})["reloadRepositoryLocation"]
        if answer["__typename"] != "WorkspaceLocationEntry":
            raise OperatorError(f"Dagster cannot load {name} again: {answer['message']}")

    def sick_daemons(self, since: float = 0.0) -> list[str]:
        """Return the names of the daemons that should run and have no recent heartbeat, or report an error.

        A heartbeat from before `since` (UTC seconds since the epoch) is one of a process that has ended.
        """
        statuses = self._query(_DAEMONS)["instance"]["daemonHealth"]["allDaemonStatuses"]
        return [
            ": ".join([s["daemonType"], *(e["message"].strip() for e in s["lastHeartbeatErrors"])])
            for s in statuses
            if s["required"] and (not s["healthy"] or (s["lastHeartbeatTime"] or 0.0) < since)
        ]

    def runs_in_progress(self) -> list[str]:
        """Return the ids of the runs that are starting, started or being cancelled."""
        runs = self._query(_RUNS_IN_PROGRESS)["runsOrError"]
        if runs["__typename"] != "Runs":
            raise OperatorError(f"Dagster cannot list its runs: {runs['message']}")
        return [str(run["runId"]) for run in runs["results"]]

    def terminate(self, run_ids: list[str], *, lost: bool = False) -> None:
        """Ask for the end of these runs; they end as cancelled once their processes have gone.

        `lost` is for runs whose processes are known to have gone: they are cancelled at once.
        """
        policy = "MARK_AS_CANCELED_IMMEDIATELY" if lost else "SAFE_TERMINATE"
        answer = self._query(_TERMINATE, {"ids": run_ids, "policy": policy})["terminateRuns"]
        if answer["__typename"] != "TerminateRunsResult":
            raise OperatorError(f"Dagster cannot end runs: {answer['message']}")

    def set_pool_limit(self, pool: str, limit: int) -> None:
        """Set how many runs of a pool may be in progress at once."""
        self._query(_SET_LIMIT, {"pool": pool, "limit": limit})

    def _query(self, query: str, variables: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._call("/graphql", msgspec.json.encode({"query": query, "variables": variables or {}}))
        if answer.get("errors"):
            raise OperatorError(f"{self._url}/graphql refused a query: {answer['errors'][0]['message']}")
        data: dict[str, Any] = answer["data"]
        return data

    def _call(self, path: str, body: bytes | None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - an address of our own making
            self._url + path, data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
                return msgspec.json.decode(answer.read(), type=dict[str, Any])
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise OperatorError(f"{self._url}{path} answered {error.code}: {said}") from error
        except (OSError, msgspec.DecodeError) as error:
            raise OperatorError(f"{self._url}{path} cannot be reached: {error}") from error


def _innermost(error: dict[str, Any]) -> str:
    """Return the message of the error that caused the others: the one that says what to mend."""
    causes = error.get("causes") or []
    return str((causes[-1] if causes else error)["message"]).strip()
