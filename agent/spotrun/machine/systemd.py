"""What systemd is told of this process: that it serves, how it fares, and that it is alive (sd_notify).

The protocol is a datagram of `NAME=value` lines to the socket in NOTIFY_SOCKET
(https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html). Without that variable nothing happens.
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
    """The service manager, if there is one. interval: seconds between two signs of life, 0 if none are wanted."""

    address: str = ""
    interval: float = 0.0

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """Takes the variables out of the environment: what this process starts must not speak in its name.

        A sign of life is due at half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises; WATCHDOG_PID says whose.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = address and usec.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 2e6 if watched else 0.0)

    def ready(self, status: str) -> None:
        """The service does what it is for, from now on. May be said again."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_line(text)}")

    def stopping(self) -> None:
        """The service has been told to end."""
        self._send("STOPPING=1")

    async def watch(self) -> None:
        """Give signs of life for as long as this event loop turns; a loop that is blocked misses them.

        Returns at once if none are wanted. It is about this process alone: neither a bucket nor a head that is away
        is a reason to be started again, which would help with neither.
        """
        while self.interval > 0:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.interval)

    def _send(self, text: str) -> None:
        if not self.address:
            return
        # An abstract name is written with @ where the kernel has a zero byte (unix(7)).
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), address)
        except OSError as error:  # of no importance to the work itself
            log.warning("systemd was not told %r: %s", text.partition("\n")[0], error)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
