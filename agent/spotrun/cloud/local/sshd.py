"""A machine's SSH server: commands, shells with a terminal, SFTP, connections onward (the head is the jump host)."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import struct
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncssh

from spotrun.cloud.local.layout import SSH_PORT

_CHUNK = 65536
_LINGER = 0.5  # seconds that output is waited for after a command's end: a daemon it left may hold the pipe for ever
log = logging.getLogger("sshd")


class Server(asyncssh.SSHServer):
    """Lets whoever holds the operator's key connect onward, as a jump host does."""

    def begin_auth(self, username: str) -> bool:
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True


async def serve(address: str, host_keys: Sequence[Path], operator: Path) -> asyncssh.SSHAcceptor:
    """Listen at the machine's address. Any user name will do; only the operator's key opens."""
    return await asyncssh.create_server(
        Server,
        address,
        SSH_PORT,
        server_host_keys=[str(key) for key in host_keys],
        authorized_client_keys=str(operator),
        process_factory=_session,
        sftp_factory=True,
        allow_scp=True,
        encoding=None,
        line_editor=False,
        reuse_address=True,
    )


async def _session(channel: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run what the client asks for and end the channel with its exit status."""
    shell = shutil.which("bash") or "/bin/sh"
    command = [shell] if channel.command is None else [shell, "-c", channel.command]
    try:
        code = await (_with_terminal if channel.term_type else _with_pipes)(channel, command)
    except OSError as error:
        channel.stderr.write(f"cannot run {command[0]}: {error}\n".encode())
        code = 255
    with suppress(OSError, asyncssh.Error):  # the client is gone
        if code < 0:
            name = signal.Signals(-code).name.removeprefix("SIG")
            channel.exit_with_signal(name, False, "")
        else:
            channel.exit(code)


async def _with_pipes(channel: asyncssh.SSHServerProcess[bytes], command: list[str]) -> int:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = [
        asyncio.create_task(_copy_out(process.stdout, channel.stdout)),
        asyncio.create_task(_copy_out(process.stderr, channel.stderr)),
    ]
    return await _attend(channel, process, process.stdin, outputs, None)


async def _with_terminal(channel: asyncssh.SSHServerProcess[bytes], command: list[str]) -> int:
    loop = asyncio.get_running_loop()
    ours, theirs = os.openpty()
    try:
        _resize(ours, channel.term_size)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": channel.term_type or "dumb"},
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    reader = asyncio.StreamReader()
    from_terminal, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(ours), "rb", 0)
    )
    to_terminal, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours, "wb", 0))
    writer = asyncio.StreamWriter(to_terminal, flow, None, loop)
    outputs = [asyncio.create_task(_copy_out(reader, channel.stdout))]
    try:
        return await _attend(channel, process, writer, outputs, ours)
    finally:
        from_terminal.close()
        to_terminal.close()


async def _attend(
    channel: asyncssh.SSHServerProcess[bytes],
    process: asyncio.subprocess.Process,
    stdin: asyncio.StreamWriter,
    outputs: list[asyncio.Task[None]],
    terminal: int | None,
) -> int:
    """Carry input and output until the process ends. A client that goes away hangs up, as a terminal's does."""
    entry = asyncio.create_task(_copy_in(channel, process, stdin, terminal))
    gone = asyncio.create_task(channel.channel.wait_closed())
    end = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({end, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            _signal_group(process, signal.SIGHUP)
            return -signal.SIGHUP
        await asyncio.wait(outputs, timeout=_LINGER)
        return await end
    finally:
        for task in (entry, gone, *outputs):
            task.cancel()
        await asyncio.gather(entry, gone, *outputs, return_exceptions=True)
        with suppress(OSError):
            stdin.close()


async def _copy_out(source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
    with suppress(OSError, asyncssh.Error):  # EIO: the terminal's other side is closed; or the client is gone
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()


async def _copy_in(
    channel: asyncssh.SSHServerProcess[bytes],
    process: asyncio.subprocess.Process,
    target: asyncio.StreamWriter,
    terminal: int | None,
) -> None:
    with suppress(OSError, asyncssh.Error):
        while True:
            try:
                data = await channel.stdin.read(_CHUNK)
            except asyncssh.TerminalSizeChanged as change:
                if terminal is not None:
                    _resize(terminal, change.term_size)
                continue
            except asyncssh.BreakReceived:
                _signal_group(process, signal.SIGINT)
                continue
            except asyncssh.SignalReceived as received:
                _signal_group(process, getattr(signal, f"SIG{received.signal}", signal.SIGTERM))
                continue
            if not data:
                break
            target.write(data)
            await target.drain()
        if terminal is None:
            target.close()


def _resize(terminal: int, size: Sequence[Any]) -> None:
    columns, rows, *_ = size
    with suppress(OSError, struct.error):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(OSError):
        os.killpg(process.pid, number)
