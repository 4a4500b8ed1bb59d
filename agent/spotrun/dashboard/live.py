"""What all open pages show now: the newest overview. A slow page skips overviews, so memory stays bounded."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from spotrun.text import to_json


class Live:
    """The newest overview, and whether it comes from the head. All methods belong to one event loop."""

    def __init__(self) -> None:
        self.live = False  # whether the head has sent the overview
        self.why = "connecting to the head"  # why the head has not
        self.overview: dict[str, Any] | None = None  # None: nothing is known yet
        self.old = False  # whether the bucket does not answer either, so that the overview is that of earlier
        self.listed: set[str] = set()  # jobs of the overviews since somebody has cleared it
        self._version = 0
        self._text = ""
        self._changed = asyncio.Event()

    def publish(self, overview: dict[str, Any]) -> None:
        """The head has sent an overview."""
        self.live, self.why, self.old = True, "", False
        self._set(overview)

    def lose(self, why: str, overview: dict[str, Any] | None = None) -> None:
        """The head does not answer. overview: what the bucket knows; None: the last overview stays."""
        self.live, self.why, self.old = False, why, overview is None
        self._set(overview if overview is not None else self.overview)

    async def next(self, seen: int, patience: float) -> tuple[int, str]:
        """The number and the text of the newest document, once its number is not `seen`.

        Raises `TimeoutError` after `patience` seconds.
        """
        async with asyncio.timeout(patience):
            while self._version == seen:
                await self._changed.wait()
        return self._version, self._text

    def _set(self, overview: dict[str, Any] | None) -> None:
        self.overview = overview
        self.listed |= {str(row["id"]) for row in (overview or {}).get("jobs", ())}
        document = {"live": self.live, "why": self.why, "old": self.old, "at": time.time(), "overview": overview}
        self._version, self._text = self._version + 1, to_json(document)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
