"""A stand-in for a cluster's machines: one SSH server, whose `spotrun` command answers from files.

status.json is what `ctl status` prints, follow-1, follow-2 … what the first, second … `ctl follow` prints (the last one
ends well, the others as if the head had died), refuse what every other verb is refused with.
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
    echo '{"job": "digits-1", "node": "spot-1"}' ;;
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
        self.access = Access("c", self.store, "spotrun", layout.key, layout.state)
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "spotrun").write_text(_SPOTRUN)
        (programs / "spotrun").chmod(0o755)
        self.port = 0
        self.groups: set[int] = set()

    def publish(self, node: str, key: asyncssh.SSHKey | None = None) -> None:
        """Put a host record into the bucket; with another key than the server's, if given."""
        line = (key or self.key).export_public_key().decode().strip()
        record = HostRecord(node=node, address="127.0.0.1", port=self.port, keys=(line,))
        self.store.put(host_key("c", node), record.model_dump_json().encode())

    def write(self, **files: object) -> None:
        """What the stand-in answers: status_json=…, follow_1=[…], refuse="…"."""
        for name, value in files.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if name.startswith("follow"):
                text = "".join(json.dumps(each) + "\n" for each in value)  # type: ignore[attr-defined]
            stem, _, ending = name.partition("_")
            (self.folder / {"follow": f"follow-{ending}", "status": "status.json"}.get(stem, stem)).write_text(text)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    async def session(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_shell(
            channel.command or "true",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PATH": path, "STANDIN": str(self.folder)}, start_new_session=True,
        )  # fmt: skip
        self.groups.add(process.pid)
        await channel.redirect(stdin=process.stdin, stdout=process.stdout, stderr=process.stderr)
        code = await process.wait()
        await channel.stdout.drain()
        self.groups.discard(process.pid)
        with suppress(OSError, asyncssh.Error):
            channel.exit(code) if code >= 0 else channel.exit_with_signal(signal.Signals(-code).name[3:])


class _Jump(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """A stand-in that runs in a thread of its own, since the operator's commands block."""
    found = Machines(folder)
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncssh.create_server(
            _Jump, "127.0.0.1", 0, server_host_keys=[found.key], process_factory=found.session, encoding=None,
            authorized_client_keys=str(found.access.key) + ".pub",
        )  # fmt: skip
        found.port = server.get_port()
        started.set()
        await stop.wait()
        for group in list(found.groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        server.close()
        await server.wait_closed()
        left: set[asyncio.Task[Any]] = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(30)
    found.publish("head")
    found.publish("spot-1")
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
