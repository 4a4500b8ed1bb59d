"""What AWS's errors mean to spotrun. Pure.

EC2's codes: https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-error-codes.html
Auto Scaling's words: https://docs.aws.amazon.com/autoscaling/ec2/userguide/CHAP_Troubleshooting.html
"""

from __future__ import annotations

import re
from typing import Literal

from botocore import exceptions as sdk

from spotrun.errors import CloudError, CredentialsError, QuotaError, StockoutError

STOCKOUT = {
    "InsufficientCapacity",
    "InsufficientHostCapacity",
    "InsufficientInstanceCapacity",
    "InsufficientReservedInstanceCapacity",
    "UnfulfillableCapacity",
}
QUOTA = {
    "InstanceLimitExceeded",
    "LimitExceeded",
    "MaxConfigLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "ServiceQuotaExceededException",
    "VcpuLimitExceeded",
    "VolumeLimitExceeded",
}
THROTTLED = {"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException"}
_UNKNOWN = {
    "AuthFailure",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "MissingAuthenticationToken",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}

# Words about a request whose time differs from AWS's by more than 15 minutes:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-troubleshooting.html
_SKEWED = re.compile(r"Signature (expired|not yet current)")
# Auto Scaling's words where it does not give a code.
_WORDS: tuple[tuple[Literal["stockout", "quota"], str], ...] = (
    ("stockout", r"(no Spot|insufficient|not have enough) capacity|not? (currently )?have sufficient .{1,40} capacity"),
    ("quota", r"vCPU limit|spot instance count exceeded|instance\(s\) are already running|quota allows for \d+ more"),
)
_SIGN_IN = "sign in again (`aws sso login`, `aws configure`, or in your own way)"
_NO_CREDENTIALS = (sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.ProfileNotFound)
_NO_ANSWER = (sdk.ConnectionError, sdk.HTTPClientError)
_STALE: tuple[type[sdk.BotoCoreError], ...] = (
    sdk.SSOError,
    sdk.TokenRetrievalError,
    sdk.CredentialRetrievalError,
    getattr(sdk, "LoginError", sdk.SSOError),  # of `aws login`: the oldest supported boto3 lacks it
)
_LONGEST = 300  # characters of AWS's own words


def refusal(error: sdk.ClientError | sdk.BotoCoreError) -> CloudError:
    """The exception for an error of the SDK, in one line: what went wrong and, if known, what to do."""
    if isinstance(error, sdk.ClientError):
        detail = error.response.get("Error", {})
        return _answer(detail.get("Code", "unknown"), tidy(detail.get("Message", "")), error.operation_name)
    said = tidy(str(error))
    if isinstance(error, _NO_CREDENTIALS):
        return CredentialsError(
            f"AWS: no credentials here ({said}): sign in with `aws sso login` or `aws configure`, or name a profile in"
            " AWS_PROFILE"
        )
    if isinstance(error, _STALE):
        return CredentialsError(f"AWS: the credentials no longer work ({said}): {_SIGN_IN}")
    if isinstance(error, _NO_ANSWER):
        return CloudError(f"AWS does not answer ({type(error).__name__}): {said}")
    return CloudError(f"AWS: {said}")


def about(what: str, error: CloudError) -> CloudError:
    """The same exception with the pool or the machine in its message: AWS's own words may name none."""
    return type(error)(f"{what}: {error}")


def cause(message: str) -> Literal["stockout", "quota", "other"]:
    """Why a launch failed, from Auto Scaling's message."""
    words = set(re.findall(r"\w+", message))
    if words & STOCKOUT:
        return "stockout"
    if words & QUOTA:
        return "quota"
    return next((kind for kind, pattern in _WORDS if re.search(pattern, message, re.IGNORECASE)), "other")


def tidy(message: str) -> str:
    """AWS's message in one line, without the part that only AWS can read."""
    line = " ".join(message.split())
    line = line.partition(" Encoded authorization failure message")[0].removesuffix(" Launching EC2 instance failed.")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _answer(code: str, message: str, operation: str) -> CloudError:
    said = f"{operation}: {code}: {message}"
    if code in STOCKOUT:
        return StockoutError(f"AWS: {said}")
    if code in QUOTA:
        return QuotaError(f"AWS: {said}; ask for more in Service Quotas")
    if _SKEWED.match(message):
        return CredentialsError(f"AWS: the clock of this machine is wrong ({message}): set it, for example with NTP")
    if code == "RequestExpired":  # EC2 says this of both
        why = f"the credentials have expired, or the clock of this machine is wrong ({code})"
        return CredentialsError(f"AWS: {why}: {_SIGN_IN}, or set the clock")
    if code in _EXPIRED:
        return CredentialsError(f"AWS: the credentials have expired ({code}): {_SIGN_IN}")
    if code in _UNKNOWN:
        return CredentialsError(f"AWS does not know these credentials ({code}): {_SIGN_IN}")
    if code in _DENIED:
        action = re.search(r"perform:? ([a-z0-9-]+:\w+)", message)
        user = re.search(r"User: (\S+)", message)
        who, what = user[1] if user else "your account", action[1] if action else operation
        return CredentialsError(f"AWS: {who} may not do {what} ({code}): grant it in IAM")
    if code in THROTTLED:
        return CloudError(f"AWS: too many requests, {operation} was delayed each time ({code}); try again later")
    return CloudError(f"AWS: {said}")
