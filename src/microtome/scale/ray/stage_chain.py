"""Call the replicas of consecutive stages, and retry requests that were lost with a replica or a node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from microtome.errors import RemoteError, describe_error
from microtome.remote.error_kinds import Late
from microtome.remote.inference_backend import EncodedOutput

log = logging.getLogger("microtome.scale")

#: Seconds after which a waiting call looks whether there are replicas, and between calls of lost requests, at most.
_POLL_S, _MAX_BACKOFF_S = 1.0, 1.0


class StageChain:
    """Handles of the deployments of consecutive stages.

    What crosses a cut goes from replica to replica through Ray's object store: the caller only has a reference to it.

    Attributes:
        retries: How often requests were sent again, since they were lost with a replica, a node or an object.
    """

    def __init__(self, handles: Sequence[DeploymentHandle], retry_s: float) -> None:
        """Take the handles in order.

        Args:
            retry_s: Seconds for which requests are sent again, and wait while a stage has no replica.
        """
        self._handles = tuple(handles)
        self._retry_s = retry_s
        self.retries = 0

    def compute(self, requests: list[EncodedOutput], first: int, deadline: float | None = None) -> list[EncodedOutput]:
        """Run the stages from the first one on, in one call of a replica each.

        Args:
            deadline: When nobody waits for the outputs any more, a time of `perf_counter`; None: never.

        Raises:
            Late: If the deadline passes.
            RemoteError: If no replica can be reached.
        """
        outputs: list[EncodedOutput] = self._call("compute", requests, first, deadline)
        return outputs

    def compute_one(self, request: EncodedOutput, first: int, deadline: float | None = None) -> EncodedOutput:
        """Run the stages on a request that the replicas may batch with those of other callers."""
        output: EncodedOutput = self._call("compute_one", request, first, deadline)
        return output

    def _call(self, method: str, argument: Any, first: int, deadline: float | None) -> Any:
        retry_until, backoff_s = None, 0.05
        while True:
            try:
                return self._wait(self._send(method, argument, first), first, deadline)
            except (RayError, RayServeException) as error:
                if not _is_lost(error):
                    raise
                now = perf_counter()
                retry_until = now + self._retry_s if retry_until is None else retry_until
                _check_deadline(deadline)
                if now > retry_until:
                    raise self._unreachable(describe_error(error)) from error
                self.retries += 1
                log.warning("sending lost requests again", extra={"reason": describe_error(error)})
            sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _send(self, method: str, argument: Any, first: int) -> Any:
        response = argument
        for handle in self._handles[first:]:
            response = getattr(handle, method).remote(response)
        return response

    def _wait(self, response: Any, first: int, deadline: float | None) -> Any:
        """Return the result of the last stage."""
        absent_since = None
        while True:
            left_s = _POLL_S if deadline is None else min(max(deadline - perf_counter(), 0.0), _POLL_S)
            try:
                return response.result(timeout_s=left_s)
            except TimeoutError:
                pass
            try:
                _check_deadline(deadline)
                absent = self._find_absent(first)
                absent_since = None if absent is None else absent_since or perf_counter()
                if absent_since is not None and perf_counter() - absent_since > self._retry_s:
                    raise self._unreachable(f"{absent} has no running replica")
            except BaseException:
                response.cancel()
                raise

    def _find_absent(self, first: int) -> str | None:
        """Return the name of a deployment that has no running replica; None: each has one, or it is not known."""
        try:
            applications = serve.status().applications
        except (RayError, RayServeException):  # the controller is down: replicas may answer without it
            return None
        for handle in self._handles[first:]:
            application = applications.get(handle.app_name)
            deployment = None if application is None else application.deployments.get(handle.deployment_name)
            if deployment is None or not deployment.replica_states.get("RUNNING"):
                return str(handle.deployment_name)
        return None

    def _unreachable(self, reason: str) -> RemoteError:
        return RemoteError(f"no replica answered within {self._retry_s:g} s: {reason}", "UNREACHABLE")


def _check_deadline(deadline: float | None) -> None:
    if deadline is not None and perf_counter() >= deadline:
        raise Late("the deadline of the request has passed, and no replica has answered")


def _is_lost(error: BaseException) -> bool:
    """Whether a request was lost with a replica, a node or an object, so that it can be sent again."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, RayError | RayServeException) and not isinstance(cause, RayTaskError)
