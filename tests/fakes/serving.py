"""A fake cloud's HTTP server on a thread of its own: tests, synchronous ones too, and other processes reach it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T")
Build = Callable[[], Awaitable[web.Application]]
# What a process needs that must not ask a proxy for loopback.
DIRECT = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_PATIENCE = 30.0  # seconds


class Loop:
    """An event loop that runs on another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake cloud", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the other thread. Not to be called from that thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    def do(self, work: Callable[[], T]) -> T:
        """The result of a function that is called on the other thread, between the steps of its tasks."""

        async def call() -> T:
            return work()

        return self.run(call())

    def stop(self) -> None:
        self.run(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def serve(build: Build) -> Iterator[tuple[Loop, str]]:
    """Serve an application on a free port of loopback; its loop and its URL, without a slash at the end."""
    loop = Loop()
    try:
        runner, url = loop.run(_start(build))
        try:
            yield loop, url
        finally:
            loop.run(runner.cleanup())
    finally:
        loop.stop()


async def _start(build: Build) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(await build(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"
