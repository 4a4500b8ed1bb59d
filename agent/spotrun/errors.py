"""The exceptions a user or a caller may meet. All derive from `SpotrunError`; its text is fit to print as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SpotrunError(Exception):
    """Root of the tree: something went wrong that the message explains, with what to do about it."""


class SpecError(SpotrunError):
    """A cluster file or a job file is wrong. The message names file, key, value and what is allowed."""


class StoreError(SpotrunError):
    """The bucket could not be read or written."""


class NotFound(StoreError):
    """There is no object of that key in the bucket."""


class ConflictError(SpotrunError):
    """Another process has written an object of the bucket that only this process should write."""


class UnreadableError(SpotrunError):
    """A document in the bucket cannot be read. The message names the key and what is wrong."""


class CorruptError(SpotrunError):
    """A snapshot, checkpoint or bundle is not what its record says. The message names the file."""


class SetupError(SpotrunError):
    """A node could not prepare the job's code or packages. Another try may succeed."""


class LinkError(SpotrunError):
    """Head and agent could not agree: wrong certificate, wrong token, malformed message."""


class CloudError(SpotrunError):
    """The cloud refused. Subclasses tell apart what the caller must treat differently."""


class PartialError(CloudError):
    """Some pools could not be asked about, as when a zone is out.

    known: the answer as far as it goes, of the type that the method returns. missing: pool → why it is not in it.
    """

    def __init__(self, known: Any, missing: Mapping[str, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(missing.values())))
        self.known, self.missing = known, dict(missing)


class StockoutError(CloudError):
    """The zone has no such machine at the moment; another zone or a later try may have."""


class GoneError(CloudError):
    """What was asked for is not there."""


class QuotaError(CloudError):
    """The account may not have that many; trying again changes nothing."""


class CredentialsError(CloudError):
    """The cloud does not know who asks, or that one may not do this. The message says what to do about it."""
