"""SSH to the machines of a cluster, with strict host keys: only those that the machines put into the bucket count.

The cloud's transport leads to the head, and the head leads to every node. An unknown or changed key is an error. It is
never added silently.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from pydantic import ValidationError

from scripts.make_command import LOCAL, make_command
from scripts.transports import Transport
from scripts.tunnel import Tunnel
from spotrun.errors import SpotrunError
from spotrun.store import Store, host_key
from spotrun.wire import HostRecord

HEAD = "head"
AT_ONCE = 16  # connections at once; hundreds of threads are slower than sixteen
TIMEOUT = 10  # seconds for each stage of a connection
ALIVE = 30  # seconds between two signs of life; Session Manager ends a connection that is silent for long
GRACE = 20.0  # seconds beyond its time limit that a command's output may take to end
EXIT_TIMEOUT = 124  # of coreutils' timeout
KEPT = 1 << 20  # characters of a command's output that are kept: the last ones
LINE = 64 << 10  # characters after which an unfinished line is shown
# Only such texts go into a known_hosts file. A line break in a text could add another host or another key.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9._:-]+")
_KEY = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( [ -~]*)?")
# Without a handler, the tracebacks of its threads would be in the operator's terminal. Its errors are raised, too.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Unreachable(SpotrunError):
    """A machine does not answer over SSH, or is not the one it should be."""


@dataclass(frozen=True)
class Access:
    """How an operator gets into a cluster."""

    cluster: str  # its name
    store: Store  # its bucket
    transport: Transport  # how connections reach the head's SSH server
    scratch: Path  # a folder for known_hosts
    file: str = LOCAL  # the cluster file, which messages name in the commands that they propose


@dataclass(frozen=True)
class Outcome:
    """What a command did on a node."""

    node: str
    code: int  # the command's exit status; `EXIT_TIMEOUT` after the time limit; 255: no exit status
    output: str  # the last `KEPT` characters that the command printed, or why the node was not reached
    reached: bool = True  # whether `code` is the command's own
    left_out: int = 0  # characters before `output`


class StrictConnection(Connection):
    """A `fabric.Connection` that accepts exactly the host keys of `record`. gateway: what it runs over, if anything.

    Fabric itself adds unknown keys, and follows the user's own SSH configuration; both would undo the check.
    """

    def __init__(self, access: Access, record: HostRecord, gateway: Connection | Tunnel | None = None) -> None:
        identity = {"key_filename": str(access.transport.key), "allow_agent": False, "look_for_keys": False}
        super().__init__(
            record.address,
            user=access.transport.user,
            port=record.port,
            gateway=gateway,
            connect_timeout=TIMEOUT,
            config=Config(overrides={"load_ssh_configs": False}),
            connect_kwargs=identity | dict.fromkeys(("banner_timeout", "auth_timeout", "channel_timeout"), TIMEOUT),
        )
        self.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        known = self.client.get_host_keys()
        for line in record.keys:
            try:
                entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{host_pattern(record)} {line}")
            except Exception as error:  # each kind of key has a parser, with its own exceptions
                raise Unreachable(f"{record.node}: its host record has a broken key, {line[:60]!r}: {error}") from None
            if entry is not None and entry.key is not None:
                known.add(host_pattern(record), entry.key.get_name(), entry.key)

    def open_gateway(self) -> Any:
        """The socket of the gateway. A command is run by `Tunnel`: Fabric's own way polls, and leaves orphans."""
        return self.gateway.sock if isinstance(self.gateway, Tunnel) else super().open_gateway()


def read_host(access: Access, node: str) -> HostRecord:
    """Address and host keys of a node, or of the head, as it put them into the bucket itself.

    Raises `Unreachable` if the record is not valid, or is the head's and not there yet.
    """
    key = host_key(access.cluster, node)
    data = access.store.find(key)
    if data is None and node == HEAD:
        raise Unreachable(f"the head of cluster {access.cluster} has not started yet")
    if data is None:
        listing = make_command(access.file, "status")
        raise SpotrunError(f"{node}: there is no such machine in cluster {access.cluster}; `{listing}` lists them")
    try:
        record = HostRecord.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        raise Unreachable(f"{access.store.url}/{key}: not a host record: {problem['msg']}") from None
    bad = [line for line in record.keys if not _KEY.fullmatch(line)]
    bad += [] if _ADDRESS.fullmatch(record.address) else [record.address]
    # These go onto the command line of the cloud's own tool, which must not take them for options.
    bad += [name for name in (record.machine, record.zone) if name and not _NAME.fullmatch(name)]
    if bad:
        raise Unreachable(
            f"{access.store.url}/{key}: not a host record: {bad[0][:60]!r} is neither an address nor a key"
        )
    return record


@contextlib.contextmanager
def connect(access: Access, node: str = HEAD) -> Iterator[StrictConnection]:
    """An open connection. Raises `Unreachable` with the reason."""
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(_opened(access, read_host(access, HEAD)))
        yield head if node == HEAD else stack.enter_context(_opened(access, read_host(access, node), head))


def run(
    access: Access,
    nodes: list[str],
    command: str,
    timeout: float,
    report: Callable[[Outcome], None],
    on_output: Callable[[str, str], None] = lambda node, text: None,
) -> bool:
    """Run a shell command on nodes at once. True if all exited with 0.

    report: gets each node's outcome. on_output: gets a node's name and whole lines of its output as they come, from
    one thread at a time. An interrupt, or an error in `report`, closes the connections and waits for no command.
    """
    turn = threading.Lock()

    def tell(node: str, text: str) -> None:
        with turn:
            on_output(node, text)

    through = [node for node in nodes if node != HEAD]
    opened: set[StrictConnection] = set()
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(connect(access)) if through else None

        def one(node: str) -> Outcome:
            try:
                with _opened(access, read_host(access, node), head if node != HEAD else None) as connection:
                    opened.add(connection)
                    if over.is_set():
                        return Outcome(node, 255, "interrupted", reached=False)
                    return _run(connection, node, command, timeout, lambda text: tell(node, text))
            except SpotrunError as error:
                return Outcome(node, 255, str(error), reached=False)

        good = True
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for outcome in pool.map(one, nodes):
                    report(outcome)
                    good = good and outcome.code == 0
            except BaseException:
                over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for connection in opened.copy():
                    connection.close()
                raise
        return good


def shell(access: Access, node: str) -> None:
    """Become an interactive `ssh` to a node: replaces this process. Raises `SpotrunError` if there is no ssh."""
    arguments = shell_command(access, node)
    program = shutil.which("ssh")
    if program is None:
        other = make_command(access.file, "run", "CMD=…", "NODE=…")
        raise SpotrunError(f"no `ssh` on this machine: install OpenSSH's client, or use `{other}`")
    os.execv(program, arguments)


def shell_command(access: Access, node: str) -> list[str]:
    """The command line of `shell`. Writes the known_hosts file that it names."""
    records = {name: read_host(access, name) for name in {HEAD, node}}
    known = access.scratch / f"known_hosts-{node}"
    known.write_text("".join(f"{host_pattern(record)} {line}\n" for record in records.values() for line in record.keys))
    # ssh expands percent signs in paths, so they are escaped.
    key, hosts = (str(path).replace("%", "%%") for path in (access.transport.key, known))
    options = ["-F", "none"]
    for option in (
        f'IdentityFile="{key}"',
        "IdentitiesOnly=yes",
        "StrictHostKeyChecking=yes",
        f'UserKnownHostsFile="{hosts}"',
        "GlobalKnownHostsFile=none",
        "UpdateHostKeys=no",
        f"ConnectTimeout={TIMEOUT}",
        f"ServerAliveInterval={ALIVE}",
    ):
        options += ["-o", option]
    target, head, user = records[node], records[HEAD], access.transport.user
    for record in records.values():
        access.transport.admit(record)
    proxy = _proxy(access.transport.tunnel(head))
    if node != HEAD:  # not ProxyJump, which would not use these options for the jump
        jump = ["ssh", *options, *proxy, "-p", str(head.port), "-W", f"[{target.address}]:{target.port}"]
        proxy = _proxy([*jump, f"{user}@{head.address}"])
    return ["ssh", *options, *proxy, "-p", str(target.port), f"{user}@{target.address}"]


def host_pattern(record: HostRecord) -> str:
    """The host's name in a known_hosts file."""
    return record.address if record.port == 22 else f"[{record.address}]:{record.port}"


def _proxy(command: list[str]) -> list[str]:
    """The option that makes ssh run over a command. ssh expands percent signs, so they are escaped."""
    return ["-o", "ProxyCommand=" + shlex.join(command).replace("%", "%%")] if command else []


@contextlib.contextmanager
def _opened(access: Access, record: HostRecord, head: Connection | None = None) -> Iterator[StrictConnection]:
    """A connection to a node through the head, or to the head itself."""
    access.transport.admit(record)
    with _gateway(access, record) if head is None else contextlib.nullcontext(head) as gateway:
        yield from _open(access, record, gateway)


@contextlib.contextmanager
def _gateway(access: Access, head: HostRecord) -> Iterator[Tunnel | None]:
    command = access.transport.tunnel(head)
    if not command:
        yield None
        return
    try:
        tunnel = Tunnel(command)
    except OSError as error:
        raise Unreachable(f"{head.node}: the tunnel does not start: {error}") from None
    with contextlib.closing(tunnel):
        yield tunnel


def _open(access: Access, record: HostRecord, gateway: Connection | Tunnel | None) -> Iterator[StrictConnection]:
    where = f"{record.node} ({record.address}:{record.port})"
    connection = StrictConnection(access, record, gateway)
    try:
        connection.open()
    except paramiko.BadHostKeyException as error:
        raise Unreachable(
            f"{where}: refused: its host key has changed ({error.key.get_name()} {error.key.fingerprint}); the bucket"
            " has another. If the machine has just been replaced, try again. Otherwise, this may be an attack"
        ) from None
    except paramiko.AuthenticationException:
        raise Unreachable(f"{where}: refused user {access.transport.user} with key {access.transport.key}") from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        if "not found in known_hosts" in str(error):
            raise Unreachable(f"{where}: refused: its host key is unknown; the bucket has none for it") from None
        said = gateway.said() if isinstance(gateway, Tunnel) else ""
        raise Unreachable(f"{where}: no SSH connection: {said or error or type(error).__name__}") from None
    connection.transport.set_keepalive(ALIVE)
    try:
        yield connection
    finally:
        connection.close()


def _run(
    connection: StrictConnection, node: str, command: str, timeout: float, on_output: Callable[[str], None]
) -> Outcome:
    # `timeout` runs on the node: a time limit here alone would leave the command running there. If a signal ends the
    # command, `timeout` ends with the same signal. SSH has no exit status then, so a shell makes one of it.
    wrapped = f"timeout -k 5 {timeout:g} bash -c -- {shlex.quote(command)}; exit $?"
    deadline = time.monotonic() + timeout + GRACE
    kept, total = "", 0
    try:
        with connection.transport.open_session(timeout=TIMEOUT) as channel:
            channel.set_combine_stderr(True)
            channel.exec_command(wrapped)
            channel.shutdown_write()  # a command that reads its input finds its end, and does not wait
            for text in _lines(channel, deadline):
                on_output(text)
                kept, total = (kept + text)[-KEPT:], total + len(text)
            if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            code = channel.recv_exit_status()
    except TimeoutError:
        late = f"its output did not end {GRACE:g} s after TIMEOUT={timeout:g}; write a large output to a file\n"
        return Outcome(node, 255, late, reached=False)
    except (paramiko.SSHException, EOFError, OSError) as error:
        return Outcome(node, 255, f"{node}: connection lost: {error or type(error).__name__}\n", reached=False)
    if code < 0:
        return Outcome(node, 255, f"{node}: connection lost: no exit status came\n", reached=False)
    if code == EXIT_TIMEOUT:
        late = f"ended after {timeout:g} s; give it more time with TIMEOUT=\n"
        on_output(late)
        kept, total = (kept + late)[-KEPT:], total + len(late)
    return Outcome(node, code, kept, left_out=total - len(kept))


def _lines(channel: paramiko.Channel, deadline: float) -> Iterator[str]:
    """Whole lines of a command's output, several at once; also a part of a very long one. Raises `TimeoutError`."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    while True:
        channel.settimeout(max(0.01, deadline - time.monotonic()))
        block = channel.recv(LINE)
        rest += decoder.decode(block, final=not block)
        whole = len(rest) if not block or len(rest) > LINE else rest.rfind("\n") + 1
        if whole:
            yield rest[:whole]
        rest = rest[whole:]
        if not block:
            return
