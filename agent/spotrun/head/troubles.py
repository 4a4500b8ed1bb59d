"""Errors that nobody expected, in what the head does for the whole cluster.

An error about one job parks that job. For an error in here no job can be parked, and a head that ends helps nobody: the
next one would end too. So the head keeps what it decided last, tells operators, and tries again in each turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Troubles:
    """What fails at the moment. add_event: tells operators."""

    def __init__(self, add_event: Callable[[str, str], None]) -> None:
        self._found: dict[str, str] = {}  # by what fails: the error
        self._add_event = add_event

    @property
    def texts(self) -> list[str]:
        """What fails, and what that means, a line each."""
        return [f"unexpected error in the head: {what}: {error}" for what, error in self._found.items()]

    def __contains__(self, what: str) -> bool:
        return what in self._found

    def attempt(self, what: str, work: Callable[[], T], before: T) -> T:
        """What `work` returns; `before` if it fails. what: what a failure means."""
        try:
            found = work()
        except Exception as error:
            self.note(what, error)
            return before
        self.clear(what)
        return found

    def note(self, what: str, error: Exception) -> None:
        """This has failed. Operators are told when the error is another one than before."""
        text = repr(error)[:500]
        if self._found.get(what) != text:
            self._found[what] = text
            log.error("%s", what, exc_info=error)
            self._add_event("head", self.texts[list(self._found).index(what)])

    def clear(self, what: str) -> None:
        """This has not failed."""
        if self._found.pop(what, None):
            self._add_event("head", f"no error in the head any more: {what}")
