"""Errors that nobody expected, in what the head does for the whole cluster.

An error about one job parks that job. These errors are about no single job. The head does not end because of them: the
next head would end too. It keeps what it decided last, tells operators, and tries again in each turn.
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
        self._found: dict[str, str] = {}  # the errors, by what they mean
        self._add_event = add_event

    @property
    def texts(self) -> list[str]:
        """A line for each error, with what it means."""
        return [_text(what, error) for what, error in self._found.items()]

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
        text = repr(error)[:500]
        if self._found.get(what) != text:
            self._found[what] = text
            log.error("%s", what, exc_info=error)
            self._add_event("head", _text(what, text))

    def clear(self, what: str) -> None:
        """The same has succeeded."""
        if error := self._found.pop(what, None):
            self._add_event("head", f"over now: {_text(what, error)}")


def _text(what: str, error: str) -> str:
    return f"unexpected error in the head: {what}: {error}"
