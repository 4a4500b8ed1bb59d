"""The exceptions of this package. All derive from `SpotrunError`; their texts are written for users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SpotrunError(Exception):
    """Root of the tree. The message says what is wrong and what to do about it."""


class MisuseError(SpotrunError):
    """The script uses spotrun in a way that cannot work: each node and each try finds this, so the job ends at once.

    Raise it only for what follows from the script and the job file, not if one machine or its files may be the reason.
    """


class SpecError(SpotrunError):
    """A cluster file or a job file is wrong. The message names file, key, value and what is allowed."""


class StoreError(SpotrunError):
    """The bucket could not be read or written."""


class UploadStopped(SpotrunError):
    """The caller has stopped an upload. The bucket has no object of it."""


class NotFound(StoreError):
    """There is no object of that key in the bucket."""


class TooLargeError(StoreError):
    """An object of the bucket has more bytes than the caller reads."""


class BadKeyError(StoreError):
    """A folder of the bucket cannot be listed: it has an object whose key is no path. The message names the key."""


class ConflictError(SpotrunError):
    """Another process has written an object of the bucket that only this process should write."""


class UnreadableError(SpotrunError):
    """A document in the bucket cannot be read. The message names the key and what is wrong."""


class JobNotFound(SpotrunError):
    """The bucket has no state of that job: it never existed, or it has been deleted."""


class CorruptError(SpotrunError):
    """A snapshot, checkpoint or bundle differs from its record. The message names the file."""


class SetupError(SpotrunError):
    """A node could not prepare the job's code or packages. Unless a subclass says something else, try again."""


class RequirementsError(SetupError):
    """A job's requirements cannot be met: no such version exists, or two packages conflict. Each node finds this."""


class InstallError(SetupError):
    """pip failed, but not because the index did not answer: a build may have failed. A long try is not made again."""


class HungError(SetupError):
    """A step of the preparation took too long, and was ended."""


class LinkError(SpotrunError):
    """Head and agent could not agree: wrong certificate, wrong secret, malformed message."""


class CloudError(SpotrunError):
    """The cloud refused. Callers treat the subclasses differently."""


class PartialError(CloudError):
    """The cloud did not answer for some pools, because a zone is out, for example.

    known: the answer for the other pools, of the type that the method returns. missing: pool → the reason.
    """

    def __init__(self, known: Any, missing: Mapping[str, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(missing.values())))
        self.known, self.missing = known, dict(missing)


class StockoutError(CloudError):
    """The zone has no such machine at the moment. Another zone may have one, or this zone later."""


class GoneError(CloudError):
    """The requested object does not exist."""


class QuotaError(CloudError):
    """The account may not have that many. Retrying does not help."""


class CredentialsError(CloudError):
    """The credentials are missing, or have no right to do this. The message says what to do."""
