"""The orders for one connection. Only the newest one that waits is sent, without what the agent is known to have."""

from __future__ import annotations

import asyncio

from spotrun.changes import Texts
from spotrun.wire import VERSION, Order

KEPT = 16  # orders that the agent has not taken yet; with more, a whole one is sent


class Outbox:
    """Orders wait here until the connection takes them. texts: shared by all connections."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._version = VERSION  # of the orders that the agent reads
        self._waiting: Order | None = None
        self._wake = asyncio.Event()
        self._sent: dict[int, Order] = {}  # by number: the one that the agent has, if it has one, and all later ones
        self._number = self._taken = 0

    def put(self, order: Order) -> None:
        """Send this order next."""
        self._waiting = order
        self._wake.set()

    def taken(self, number: int, version: int) -> None:
        """The agent has this order, and reads this version. number: 0 if it has none, or does not say which one."""
        self._version = version
        if number != self._taken:
            self._taken = number
            self._sent = {sent: order for sent, order in self._sent.items() if sent >= number}

    async def next(self) -> str:
        """Wait for an order; its text."""
        await self._wake.wait()
        self._wake.clear()
        assert self._waiting is not None
        self._number += 1
        order, base = self._waiting.replace(number=self._number), self._sent.get(self._taken)
        if self._version < 2:
            return order.text(self._version)
        self._sent[self._number] = order
        if len(self._sent) > KEPT:
            del self._sent[next(iter(self._sent))]
        return self._texts.change(order, base) if base else self._texts.whole(order)
