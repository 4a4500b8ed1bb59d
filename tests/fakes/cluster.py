"""A stand-in for a cluster's machines: one SSH server, whose `spotrun` command answers from files.

status.json and jobs.json are what `ctl status` and `ctl jobs` print, follow-1, follow-2 … what the first, second …
`ctl follow` prints (the last one ends well, the others as if the head had died), refuse what every other verb is
refused with.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncssh

from scripts.ssh import Access
from scripts.transports import Direct
from spotrun.cloud.local.layout import Layout, ensure_key
from spotrun.store import Store, host_key
from spotrun.wire import HostRecord

CLUSTER = "name: c\ncloud: local\npools:\n- {name: spot, zone: local-a, max: 2}\n"
_SPOTRUN = """#!/bin/sh
cd "$STANDIN"
shift
echo "$*" >> calls
case "$1" in
status) cat status.json ;;
jobs) cat jobs.json ;;
follow)
    n=$(cat n 2>/dev/null || echo 1)
    cat "follow-$n"
    echo $((n + 1)) > n
    [ -e hang ] && exec sleep 600
    [ -e "follow-$((n + 1))" ] && kill -9 $$
    exit 0 ;;
*)
    if [ -e refuse ]; then cat refuse >&2; exit 2; fi
    [ "$1" = submit ] && cat > submitted
    while [ -e slow ]; do sleep 0.1; done
    [ -e die ] && kill -9 $PPID
    echo '{"job": "digits-1", "node": "spot-1", "jobs": ["digits-1", "digits-2"]}' ;;
esac
"""


class Machines:
    """The server, as head and as node `spot-1`; and an operator's home that knows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.cluster = folder / "cluster.yaml"
        self.cluster.write_text(CLUSTER)
        layout = Layout.of(self.home, "c")
        layout.state.mkdir(parents=True)
        layout.record.write_text("{}")
        ensure_key(layout.key)
        self.store = Store(str(layout.bucket))
        self.access = Access("c", self.store, Direct("spotrun", layout.key), layout.state)
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "spotrun").write_text(_SPOTRUN)
        (programs / "spotrun").chmod(0o755)
        self.write(jobs_json=[])
        self.port = 0
        self.groups: set[int] = set()
        self.sessions: set[asyncio.Task[None]] = set()
        self.connections: list[asyncssh.SSHServerConnection] = []

    def publish(self, node: str, *keys: asyncssh.SSHKey) -> None:
        """Put a host record with these keys into the bucket."""
        lines = tuple(key.export_public_key().decode().strip() for key in keys)
        record = HostRecord(node=node, address="127.0.0.1", port=self.port, keys=lines)
        self.store.put(host_key("c", node), record.model_dump_json().encode())

    def write(self, **files: object) -> None:
        """What the stand-in answers: status_json=…, follow_1=[…], refuse="…"."""
        for name, value in files.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if name.startswith("follow"):
                text = "".join(json.dumps(each) + "\n" for each in value)  # type: ignore[attr-defined]
            stem, _, ending = name.partition("_")
            file = {"follow": f"follow-{ending}", "status": "status.json", "jobs": "jobs.json"}.get(stem, stem)
            (self.folder / file).write_text(text)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    async def session(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.sessions.add(task)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_shell(
            channel.command or "true",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PATH": path, "STANDIN": str(self.folder)}, start_new_session=True,
        )  # fmt: skip
        self.groups.add(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        entry = asyncio.create_task(_copy(channel.stdin, process.stdin))
        await asyncio.gather(_copy(process.stdout, channel.stdout), _copy(process.stderr, channel.stderr))
        code = await process.wait()
        entry.cancel()
        await asyncio.gather(entry, return_exceptions=True)
        process.stdin.close()
        self.groups.discard(process.pid)
        with suppress(OSError, asyncssh.Error):
            channel.exit(code) if code >= 0 else channel.exit_with_signal(signal.Signals(-code).name[3:])


async def _copy(source: Any, target: Any) -> None:
    with suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        if isinstance(target, asyncio.StreamWriter):
            target.close()


class _Jump(asyncssh.SSHServer):
    def __init__(self, connections: list[asyncssh.SSHServerConnection]) -> None:
        self._connections = connections

    def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
        self._connections.append(connection)

    def begin_auth(self, username: str) -> bool:
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """A stand-in that runs in a thread of its own, because the operator's commands block."""
    found = Machines(folder)
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncssh.create_server(
            lambda: _Jump(found.connections), "127.0.0.1", 0, server_host_keys=[found.key],
            process_factory=found.session, encoding=None,
            authorized_client_keys=str(found.access.transport.key) + ".pub",
        )  # fmt: skip
        found.port = server.get_port()
        started.set()
        await stop.wait()
        for group in list(found.groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        server.close()
        await server.wait_closed()
        await asyncio.gather(*found.sessions, return_exceptions=True)
        for connection in found.connections:
            connection.abort()
        await asyncio.gather(*(each.wait_closed() for each in found.connections))
        await loop.shutdown_asyncgens()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(30)
    found.publish("head", found.key)
    found.publish("spot-1", found.key)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
