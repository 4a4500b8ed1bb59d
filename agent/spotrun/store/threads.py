"""Calls that wait for the bucket, many at once."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def at_once(function: Callable[[Item], Answer], items: Iterable[Item], most: int) -> Iterator[Answer]:
    """As `map`, in `most` threads. After Ctrl-C or an error, the calls under way are left behind.

    `ThreadPoolExecutor` waits for them, also at the end of the process. A call to a silent bucket takes minutes.
    """
    calls: list[tuple[Item, Future[Answer]]] = [(item, Future()) for item in items]
    waiting = deque(calls)

    def work() -> None:
        with contextlib.suppress(IndexError):  # no call waits any more
            while True:
                item, answer = waiting.popleft()
                try:
                    answer.set_result(function(item))
                except BaseException as error:
                    answer.set_exception(error)

    for _ in range(min(most, len(calls))):
        Thread(target=work, daemon=True).start()
    try:
        for _, answer in calls:
            yield answer.result()
    finally:
        waiting.clear()
