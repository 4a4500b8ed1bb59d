"""Tell systemd that this process is ready, what it does, and that it is alive (sd_notify).

Each message is a datagram of `NAME=value` lines to the socket in NOTIFY_SOCKET
(https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html). Without that variable, nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Self

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Systemd:
    """The service manager, if there is one."""

    address: str = ""  # of its socket; empty: there is no service manager
    interval: float = 0.0  # seconds between two signs of life; 0: systemd wants none

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """Read the variables and remove them: a child must not send messages in this process's name.

        A sign of life is due at half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises. WATCHDOG_PID is the process
        that must send it.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = address and usec.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 2e6 if watched else 0.0)

    def ready(self, status: str) -> None:
        """The service works from now on. Later calls change the status only."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(f"STATUS={_line(text)}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def watch(self) -> None:
        """Send signs of life while the event loop runs: systemd restarts a process whose loop is blocked."""
        # The signs continue if the bucket or the head is missing, because a restart would not help.
        while self.interval > 0:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.interval)

    def _send(self, text: str) -> None:
        if not self.address:
            return
        # An abstract address begins with a zero byte, which is written as @ (unix(7)).
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), address)
        except OSError as error:  # the work goes on without systemd
            log.warning("systemd was not told %r: %s", text.partition("\n")[0], error)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
