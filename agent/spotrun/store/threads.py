"""Calls that wait for the bucket, many at once."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

LOOK = 1.0  # seconds of one wait for an answer


def at_once(
    function: Callable[[Item], Answer], items: Iterable[Item], most: int, wait: bool = False
) -> Iterator[Answer]:
    """As `map`, in `most` threads. After Ctrl-C or an error, the calls under way are left behind.

    `ThreadPoolExecutor` waits for them, also at the end of the process. A call to a silent bucket takes minutes.
    wait: after an error, return only when they have ended. The end of the process never waits for them.
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

    threads = [Thread(target=work, daemon=True) for _ in range(min(most, len(calls)))]
    for thread in threads:
        thread.start()
    try:
        for _, answer in calls:
            yield result(answer)
    finally:
        waiting.clear()
        for thread in threads if wait else ():
            thread.join()


def result(answer: Future[Answer]) -> Answer:
    """The answer of another thread. The waits are short: a Ctrl-C just before a wait does not end that wait."""
    while not answer.done():
        wait_for([answer], LOOK)
    return answer.result()
