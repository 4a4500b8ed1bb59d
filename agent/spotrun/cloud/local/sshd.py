"""A machine's SSH server: commands, shells, SFTP, and forwarded connections (the head is the jump host)."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

import asyncssh

from spotrun.cloud.local.layout import SSH_PORT

_CHUNK = 65536
_LINGER = 0.5  # seconds to wait for more output after a command ends; a daemon that it left may keep the pipe open
log = logging.getLogger("sshd")
Channel: TypeAlias = "asyncssh.SSHServerProcess[bytes]"


class Server(asyncssh.SSHServer):
    """Forwards connections, as a jump host does."""

    def begin_auth(self, username: str) -> bool:
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True


async def serve(address: str, host_keys: Sequence[Path], operator: Path) -> asyncssh.SSHAcceptor:
    """Listen at the machine's address. Accepts every user name, but only the operator's key."""
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


async def _session(channel: Channel) -> None:
    """Run what the client asks for and end the channel with its exit status."""
    shell = shutil.which("bash") or "/bin/sh"
    command = [shell] if channel.command is None else [shell, "-c", channel.command]
    try:
        code = await (_with_terminal if channel.term_type else _with_pipes)(channel, command)
    except OSError as error:
        channel.stderr.write(f"cannot run {command[0]}: {error}\n".encode())
        code = 255
    except Exception:  # asyncssh would silently end the channel
        log.exception("%s", command)
        code = 255
    with suppress(OSError, asyncssh.Error):  # the client is gone
        if code < 0:
            channel.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"), False, "")
        else:
            channel.exit(code)


# Not asyncio's processes: until Python 3.13, their wait() also waits for the end of the pipes. A daemon that the
# command left behind may keep these open for ever.


async def _with_pipes(channel: Channel, command: list[str]) -> int:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
    async with AsyncExitStack() as ends:
        stdin = await _writer(process.stdin, ends)
        outputs = [
            _Output(await _reader(process.stdout, ends), channel.stdout),
            _Output(await _reader(process.stderr, ends), channel.stderr),
        ]
        return await _attend(channel, process, stdin, outputs, None)


async def _with_terminal(channel: Channel, command: list[str]) -> int:
    ours, theirs = os.openpty()
    with os.fdopen(ours, "wb", 0) as entry:
        with os.fdopen(theirs, "wb", 0):
            _resize(ours, channel.term_size)
            process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                env={**os.environ, "TERM": channel.term_type or "dumb"},
            )
        async with AsyncExitStack() as ends:
            reader = await _reader(os.fdopen(os.dup(ours), "rb", 0), ends)
            stdin = await _writer(entry, ends)
            return await _attend(channel, process, stdin, [_Output(reader, channel.stdout)], ours)


class _Output:
    """Copies output to the client. `moves` grows with each piece."""

    def __init__(self, source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
        self._source, self._target = source, target
        self.moves = 0
        self.blocked = False
        self.task = asyncio.create_task(self._carry())

    async def _carry(self) -> None:
        with suppress(OSError, asyncssh.Error):  # EIO: the terminal's other side is closed; or the client is gone
            while data := await self._source.read(_CHUNK):
                self._target.write(data)
                self.moves += 1
                self.blocked = True
                await self._target.drain()
                self.blocked = False


async def _attend(
    channel: Channel,
    process: subprocess.Popen[bytes],
    stdin: asyncio.StreamWriter,
    outputs: list[_Output],
    terminal: int | None,
) -> int:
    """Copy input and output until the process ends. If the client leaves, the process gets SIGHUP."""
    entry = asyncio.create_task(_copy_in(channel, process, stdin, terminal))
    gone = asyncio.create_task(channel.channel.wait_closed())
    end = asyncio.create_task(_exit_code(process))
    try:
        await asyncio.wait({end, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            _signal_group(process, signal.SIGHUP)
            return -signal.SIGHUP
        await _finish(outputs, gone)
        return end.result()
    finally:
        tasks = [entry, gone, end, *(output.task for output in outputs)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _finish(outputs: list[_Output], gone: asyncio.Task[None]) -> None:
    """Copy the rest of a process's output. A daemon that it left may keep the pipe open for ever."""
    tasks, moves = {output.task for output in outputs}, -1
    while not gone.done() and not all(task.done() for task in tasks):
        before, moves = moves, sum(output.moves for output in outputs)
        if before == moves and not any(output.blocked for output in outputs):
            return
        everything = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait({everything, gone}, timeout=_LINGER, return_when=asyncio.FIRST_COMPLETED)
        everything.cancel()


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    loop = asyncio.get_running_loop()
    handle = os.pidfd_open(process.pid)
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()


async def _reader(pipe: IO[bytes] | None, ends: AsyncExitStack) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    ends.callback(transport.close)
    return reader


async def _writer(pipe: IO[bytes] | None, ends: AsyncExitStack) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)

    def end() -> None:
        if not transport.is_closing() or transport.get_write_buffer_size():
            transport.abort()

    ends.callback(end)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _copy_in(
    channel: Channel, process: subprocess.Popen[bytes], target: asyncio.StreamWriter, terminal: int | None
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


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(OSError):
        os.killpg(process.pid, number)
