"""The first process of a local machine: its init and its SSH server.

    python -m spotrun.cloud.local.init <address> <ssh keys folder> <operator's public key> -- <role command…>

It starts the role, restarts it when it ends, serves SSH, and reaps orphans. It prints a line when SSH answers. All
processes of the machine inherit its environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from spotrun.cloud.local import procs
from spotrun.machine.processes import adopt_orphans

_FIRST_PAUSE, _LONGEST_PAUSE, _STEADY = 0.2, 5.0, 10.0  # seconds; like systemd's RestartSteps=
log = logging.getLogger("node")


async def run(address: str, keys: Path, operator: Path, command: list[str]) -> None:
    """Serve until killed."""
    adopt_orphans()
    collect_orphans(asyncio.get_running_loop())
    role = asyncio.create_task(keep_running(command))
    await asyncio.sleep(0)  # the role starts first, because importing the SSH server is slow
    from spotrun.cloud.local import sshd

    server = await sshd.serve(address, sorted(keys.glob("ssh_host_*_key")), operator)
    print("ready", flush=True)
    await asyncio.gather(role, server.wait_closed())


async def keep_running(command: list[str]) -> None:
    """Run a command again and again. The pause before a restart grows while the command ends soon after its start."""
    pause = _FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            # Its own session, so that a signal to its group reaches nothing else.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
            )
            code: int | str = await process.wait()
        except OSError as error:
            code = str(error)
        pause = _FIRST_PAUSE if time.monotonic() - began > _STEADY else min(pause * 2, _LONGEST_PAUSE)
        log.warning("%s ended: %s; again in %g s", command, code, pause)
        await asyncio.sleep(pause)


def collect_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Reap dead children that asyncio does not know. They are those seen twice: asyncio reaps its own sooner."""
    seen: set[int] = set()
    planned: list[asyncio.TimerHandle] = []

    def look() -> None:
        nonlocal seen
        planned.clear()
        dead = {pid for pid in procs.pids() if procs.status(pid) == ("Z", os.getpid())}
        procs.reap(dead & seen)
        seen = dead - seen
        if seen:
            plan()

    def plan() -> None:
        if not planned:
            planned.append(loop.call_later(1.0, look))

    loop.add_signal_handler(signal.SIGCHLD, plan)


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    address, keys, operator, _, *command = argv
    with suppress(KeyboardInterrupt):
        asyncio.run(run(address, Path(keys), Path(operator), command))


if __name__ == "__main__":
    main(sys.argv[1:])
