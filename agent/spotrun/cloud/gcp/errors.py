"""What Google's errors mean, and what to do about each. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import requests
from google.api_core import exceptions as google
from google.auth import exceptions as auth

from spotrun.errors import CloudError, CredentialsError, GoneError, QuotaError, StockoutError

Kind = Literal["stockout", "quota", "other"]

_EXCEPTIONS: dict[Kind, type[CloudError]] = {"stockout": StockoutError, "quota": QuotaError, "other": CloudError}
_THROTTLED = {"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"}
_DISABLED = {"accessNotConfigured", "SERVICE_DISABLED"}
_PASSING = (
    google.TooManyRequests,
    google.InternalServerError,
    google.BadGateway,
    google.ServiceUnavailable,
    google.GatewayTimeout,
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
)
_SIGN_IN = "sign in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
_LONGEST = 400  # characters of Google's own message in one of our lines


def kind_of(code: str) -> Kind:
    """The kind of an error code of an operation or a managed instance, or of a reason in an HTTP error.

    Kubernetes' autoscaler and SkyPilot distinguish the same codes on this API. The list is at
    https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation.
    """
    if code.endswith("RESOURCE_POOL_EXHAUSTED") or code in (
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "GPU_STOCKOUT",
        "insufficientCapacity",
    ):
        return "stockout"
    return "quota" if "QUOTA" in code or code == "quotaExceeded" else "other"


def transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    return isinstance(error, _PASSING) or bool(_reasons(error) & _THROTTLED)


def refusal(what: str, code: str, message: str) -> CloudError:
    """The exception for an operation that ended with an error. what: the request, for the message."""
    return _EXCEPTIONS[kind_of(code)](f"{what}: {code}: {one_line(message)}")


def explain(error: BaseException, what: str, project: str) -> CloudError:
    """The exception for a request that failed, in one line. what: the request, for the message."""
    if isinstance(error, google.RetryError) and error.cause is not None:
        error = error.cause
    if isinstance(error, auth.DefaultCredentialsError):
        return CredentialsError(f"{what}: there are no Google Cloud credentials here; {_SIGN_IN}")
    if isinstance(error, auth.RefreshError):
        return CredentialsError(
            f"{what}: the Google Cloud credentials found here are refused ({one_line(error)}); {_SIGN_IN}"
        )
    if isinstance(error, google.GoogleAPICallError):
        return _explain_answer(error, what, project)
    if isinstance(error, auth.TransportError | requests.exceptions.RequestException | TimeoutError):
        return CloudError(
            f"{what}: Google does not answer ({_cause(error)}); check whether this machine reaches googleapis.com"
        )
    return CloudError(f"{what}: {type(error).__name__}: {one_line(error)}")


def one_line(text: object) -> str:
    """Google's message in one line, shortened if it is long."""
    words = " ".join(str(text).split()).rstrip(".")
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"


def _explain_answer(error: google.GoogleAPICallError, what: str, project: str) -> CloudError:
    reasons, said = _reasons(error), one_line(re.sub(r"^[A-Z]+ https?://\S+: ", "", error.message))
    if reasons & _DISABLED:
        enable = f"gcloud services enable compute.googleapis.com --project {project}"
        return CloudError(f"{what}: project {project} has not enabled the Compute Engine API: `{enable}`")
    if transient(error):
        return CloudError(f"{what}: Google Compute Engine is busy, try again in a moment ({error.code}: {said})")
    for kind in map(kind_of, sorted(reasons)):
        if kind != "other":
            return _EXCEPTIONS[kind](f"{what}: {said}")
    if isinstance(error, google.Unauthorized):
        return CredentialsError(f"{what}: Google does not accept the credentials ({said}); {_SIGN_IN}")
    if isinstance(error, google.Forbidden):
        return CredentialsError(f"{what}: {said}; {_grant(said, project)}")
    if isinstance(error, google.NotFound):
        return GoneError(f"{what}: there is no such thing in project {project} ({said}); `make up` makes it")
    return CloudError(f"{what}: {error.code}: {said}")


def _grant(said: str, project: str) -> str:
    """Forbidden says: Required 'compute.instances.list' permission for 'projects/demo'."""
    found = re.search(r"[Rr]equired '([\w.]+)' permission", said)
    needed = f"a role with {found[1]}" if found else "a role that allows it"
    return f"it needs {needed} in project {project}: `make up` grants the head's, a project owner grants yours"


def _cause(error: BaseException) -> str:
    """The innermost cause of a network error, without the names of the layers above it."""
    if isinstance(error, auth.TransportError) and error.__cause__ is not None:
        error = error.__cause__
    inner = getattr(error.args[0], "reason", None) if error.args else None  # urllib3's MaxRetryError
    said = one_line(inner or error)
    return said.partition("): ")[2] or said or type(error).__name__


def _reasons(error: BaseException) -> set[str]:
    """The reasons in an HTTP error, in the old form (errors[].reason) and the new one (details[].reason)."""
    if not isinstance(error, google.GoogleAPICallError):
        return set()
    old: Iterable[object] = error.errors or ()
    found = {str(each["reason"]) for each in old if isinstance(each, dict) and "reason" in each}
    return found | ({error.reason} if error.reason else set())
