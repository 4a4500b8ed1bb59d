"""Errors in what the head does for the whole cluster: those that nobody expected, and a bucket that refuses.

An error about one job parks that job. These errors are about no single job. The head does not end because of them: the
next head would end too. It keeps what it decided last, tells operators, and tries again in each turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from spotrun.errors import StoreError

T = TypeVar("T")
log = logging.getLogger(__name__)

BUCKET = "the bucket refuses what the head writes, so the head decides nothing, and tries again"

READS = "the bucket refuses what the head reads first, so the head decides nothing, and tries again"
AGAIN = 1.0  # seconds between two tries to read


class Troubles:
    """What fails at the moment. add_event: tells operators."""

    def __init__(self, add_event: Callable[[str, str], None]) -> None:
        self._found: dict[str, str] = {}  # a line for each error, by what the error means
        self._add_event = add_event

    @property
    def texts(self) -> list[str]:
        """A line for each error, with what it means."""
        return list(self._found.values())

    def __contains__(self, what: str) -> bool:
        return what in self._found

    def attempt(self, what: str, work: Callable[[], T], before: T) -> T:
        """What `work` returns; `before` if it fails. what: what a failure means, for operators."""
        try:
            found = work()
        except Exception as error:
            self.note(what, error)
            return before
        self.clear(what)
        return found

    def note(self, what: str, error: Exception) -> None:
        """Something has failed. Operators are told, unless they know this error already."""
        text = f"unexpected error in the head: {what}: {repr(error)[:500]}"
        if self._found.get(what) != text:
            self._found[what] = text
            log.error("%s", what, exc_info=error)
            self._add_event("head", text)

    def once(self, what: str, error: StoreError) -> str:
        """The bucket refuses. Operators are told of the first error only: the next ones name other keys. Its text."""
        if what not in self._found:
            self._found[what] = f"{what}: {str(error)[:500]}"
            self._add_event("head", self._found[what])
        return self._found[what]

    async def insist(self, *reads: Callable[[], Awaitable[object]]) -> None:
        """Read what earlier heads have left, again and again while the bucket refuses. Raises other errors.

        If this head ended instead, so would the next ones: operators would only see that no head runs.
        """
        while True:
            found = await asyncio.gather(*(read() for read in reads), return_exceptions=True)
            failed = [each for each in found if isinstance(each, BaseException)]
            for error in failed:
                if not isinstance(error, StoreError):
                    raise error
                self.once(READS, error)
            if not failed:
                return self.clear(READS)
            await asyncio.sleep(AGAIN)

    def clear(self, *succeeded: str) -> None:
        """The same has succeeded."""
        for text in [self._found.pop(what) for what in succeeded if what in self._found]:
            self._add_event("head", f"over now: {text}")
