"""`make dashboard`: serve the dashboard on this computer. What the cluster does now comes from the head over SSH."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts import control
from scripts.home import home
from scripts.make_command import make_command
from scripts.site import Site
from spotrun.backoff import Backoff
from spotrun.dashboard import history
from spotrun.dashboard.live import Live
from spotrun.dashboard.records import Records
from spotrun.dashboard.server import Dashboard, serving
from spotrun.errors import SpotrunError

_LAST = 5.0  # seconds that the connection to the head has to end
LOOK = 5.0  # seconds between two looks at the token's file


class SshHead:
    """`spotrun.dashboard.server.Head` over SSH."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def change(self, verb: str, job: str, to: int | None) -> dict[str, Any]:
        """Each change uses a connection of its own, as `make pause` does."""
        extra = ["--to", str(to)] if to is not None else []
        found = await asyncio.to_thread(self._ask, verb, "--job", job, *extra)
        return found if isinstance(found, dict) else {}

    async def metrics(self) -> str:
        found = await asyncio.to_thread(self._ask, "metrics")
        return str(found["text"])

    def _ask(self, *words: str) -> Any:
        return control.ask(self._site.access(), *words)


class Follower:
    """A thread that receives the head's overviews. While there are none, the thread reads what the bucket knows.

    The thread ends when `close` has been called. The connection to the head is closed then.
    """

    def __init__(self, site: Site, records: Records, live: Live) -> None:
        """Call it in the event loop of `live`."""
        self._site, self._records, self._live = site, records, live
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended, after a few seconds at most."""
        self._over.set()
        if (connection := self._connection) is not None:
            connection.close()
        self._thread.join(_LAST)

    def _run(self) -> None:
        pause = Backoff(0.5, 5.0)
        self._lose("connecting to the head")
        while not self._over.is_set():
            try:
                with self._head() as head:
                    for overview in head.live():
                        pause.reset()
                        self._tell(self._live.publish, overview)
                why = "the connection to the head has ended"
            except SpotrunError as error:
                why = str(error)
            if not self._over.is_set():
                self._lose(why)
                self._over.wait(pause.next())

    @contextlib.contextmanager
    def _head(self) -> Iterator[control.Head]:
        with control.open_head(self._site.access()) as head:
            self._connection = head
            try:
                yield head
            finally:
                self._connection = None

    def _lose(self, why: str) -> None:
        try:
            overview = history.read(self._records, self._site.cluster)
        except SpotrunError as error:
            why, overview = f"{why}; {error}", None
        self._tell(self._live.lose, why, overview)

    def _tell(self, what: Callable[..., None], *values: Any) -> None:
        if not self._over.is_set():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(what, *values)


def serve(site: Site, port: int, say: Callable[[str, str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM, and end this process then.

    port: 0: any free one. say: gets the page's address and the token's file, once. Raises `SpotrunError` if the port is
    taken.
    """
    asyncio.run(_serve(site, port, say))


async def _serve(site: Site, port: int, say: Callable[[str, str], None]) -> None:
    token, stop = secrets.token_urlsafe(32), asyncio.Event()
    records, live = Records(site.bucket(), site.cluster.name), Live()
    dashboard = Dashboard(records, live, SshHead(site), token)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        try:
            actual = await stack.enter_async_context(serving(dashboard, port))
        except OSError as error:
            again = make_command(site.file, "dashboard", "PORT=0")
            raise SpotrunError(f"port {port}: {error.strerror or error}; `{again}` takes a free one") from None
        follower = Follower(site, records, live)
        try:
            with token_file(home() / "dashboard", site.cluster.name, token) as file:
                say(f"http://127.0.0.1:{actual}/?token={token}", str(file))
                await _hold(file, token, stop)
        finally:
            await asyncio.to_thread(follower.close)
    # Python would wait for threads that read from a bucket, or ask the head. That could take minutes.
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def token_file(folder: Path, cluster: str, token: str) -> Iterator[Path]:
    """A file with the token, for Prometheus, while the context is open. Only this user can read it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{cluster}.token"
    _write(path, token)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == token:  # another dashboard may have started since
                path.unlink()


async def _hold(file: Path, token: str, stop: asyncio.Event) -> None:
    """Wait for the end. Meanwhile, write the token's file again if it is gone.

    A second dashboard of the cluster takes the file over, and removes it at its own end.
    """
    while not stop.is_set():
        with contextlib.suppress(OSError):
            if not file.exists():
                _write(file, token)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK):
                await stop.wait()


def _write(file: Path, token: str) -> None:
    """Write or replace the file, whole or not at all: another dashboard may do the same now."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(token)
    partial.replace(file)
