"""A command as a connection: its standard input and output behind a socket, which SSH then runs over."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile

_END = 5.0  # seconds that the command has to end once its connection is closed


class Tunnel:
    """Started at once; `close` ends the command and all it has started."""

    def __init__(self, command: list[str]) -> None:
        self.sock, theirs = socket.socketpair()  # sock is for paramiko, which owns it and closes it
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        try:
            # In a session of its own, a Ctrl-C at the terminal does not reach it, and `close` can end its whole group.
            end = theirs.fileno()
            self._process = subprocess.Popen(
                command, stdin=end, stdout=end, stderr=self._errors, start_new_session=True
            )
        except OSError:
            self.sock.close()
            self._errors.close()
            raise
        finally:
            theirs.close()

    def said(self) -> str:
        """The last line that the command wrote to its standard error."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def close(self) -> None:
        """Returns when the command has ended. May be called again."""
        self.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                self._process.wait(_END)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
