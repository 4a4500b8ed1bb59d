"""A head that dies before any write or order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotrun.head.fenced import FencedStore
from spotrun.wire import Order


class Killed(BaseException):
    """The head dies here."""


class Fuse:
    """Kills the head before the write or order of that number, counted from the moment when it is lit."""

    def __init__(self) -> None:
        self.left, self.lit = 0, False

    def burn(self) -> None:
        if self.lit:
            self.left -= 1
            if self.left == 0:
                raise Killed

    def put(self, put: Callable[..., Any]) -> Callable[..., Any]:
        async def put_or_die(store: FencedStore, key: str, data: bytes) -> None:
            self.burn()
            await put(store, key, data)

        return put_or_die

    def send(self, send: Callable[[Order], None]) -> Callable[[Order], None]:
        def send_or_die(order: Order) -> None:
            self.burn()
            send(order)

        return send_or_die
