"""The local cloud's daemon: it runs the pools, the HTTP interface and the metadata servers.

    python -m spotrun.cloud.local.daemon <state folder>

It goes into the background when its interface answers. Its state is only in memory: if it is killed, the next `up`
first removes what it left. SIGTERM ends it with all its machines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from spotrun.cloud.local import server
from spotrun.cloud.local.init import collect_orphans
from spotrun.cloud.local.layout import METADATA_PORT, SSH_PORT, ZYGOTE_MARK, Config, Layout, write_json
from spotrun.cloud.local.machine import ALL
from spotrun.cloud.local.pools import LocalPools
from spotrun.errors import CloudError
from spotrun.machine import private_paths
from spotrun.machine.processes import MARK, ZYGOTE, adopt_orphans

_SUBNETS = 250 * 250
_ZYGOTE = (sys.executable, "-P", "-c", "from spotrun.node.launch.zygote import main; main()")
log = logging.getLogger("cloud")


def claim_subnet(unique: str) -> tuple[str, socket.socket]:
    """The first three bytes of an unused loopback network, and a socket that claims it while it is open."""
    start = int(unique, 16)
    for attempt in range(_SUBNETS):
        number = (start + attempt * 7919) % _SUBNETS
        subnet = f"127.{number // 250 + 3}.{number % 250 + 3}"
        claim = socket.socket()
        try:
            claim.bind((f"{subnet}.1", SSH_PORT))
            for port in (SSH_PORT, METADATA_PORT):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((f"{subnet}.2", port))
        except OSError:
            claim.close()
            continue
        return subnet, claim
    raise CloudError("no loopback network (127.x.y.0/24) is free; is this Linux?")


def start_zygote(layout: Layout) -> None:
    """Start the process from which the machines of this cluster have torch. It ends with this process.

    Without it, each machine imports torch, which costs the time and the memory of one more copy.
    """
    folder = layout.tmpfs / ZYGOTE_MARK
    # torch makes folders for temporary files while it is imported.
    environment = os.environ | ALL | {MARK: layout.mark(ZYGOTE_MARK), "TMPDIR": str(folder)}
    try:
        private_paths.make_folder(folder)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(256)
            arguments = [str(os.getpid()), str(listener.fileno())]
            subprocess.Popen(
                [*_ZYGOTE, *arguments], env=environment, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()]
            )
    except OSError as error:
        log.warning("each machine imports torch for itself: %s", error)
    else:
        os.environ[ZYGOTE] = str(folder / "socket")


async def serve(layout: Layout, ready: Callable[[], None]) -> None:
    """Run the cloud until SIGTERM."""
    config = Config.from_json(json.loads(layout.config.read_text()))
    subnet, claim = claim_subnet(layout.unique)
    token = secrets.token_urlsafe(32)
    cloud = LocalPools(config, layout, subnet, token)
    runner = web.AppRunner(server.build(cloud, layout.unique, token), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, f"{subnet}.1", 0).start()
    port = runner.addresses[0][1]
    cloud.endpoint = f"http://{subnet}.1:{port}"
    private_paths.make_folder(layout.tmpfs)
    if config.share_torch:
        start_zygote(layout)
    write_json(
        layout.record,
        {"cluster": config.cluster, "endpoint": cloud.endpoint, "token": token, "pid": os.getpid(), "subnet": subnet},
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    loop, end = asyncio.create_task(cloud.run()), asyncio.create_task(ended.wait())
    collect_orphans(asyncio.get_running_loop())
    ready()
    await asyncio.wait({loop, end}, return_when=asyncio.FIRST_COMPLETED)
    if loop.done():
        log.error("the loop ended", exc_info=loop.exception())
    loop.cancel()
    await cloud.close()
    await runner.cleanup()
    claim.close()


def _detach(log_file: Path) -> Callable[[], None]:
    """Continue in a child process with its own session. The parent ends when the child is ready, or fails."""
    from_child, to_parent = os.pipe()
    if os.fork():
        os.close(to_parent)
        os._exit(0 if os.read(from_child, 1) else 1)
    os.close(from_child)
    os.setsid()
    output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)

    def ready() -> None:
        os.write(to_parent, b"1")
        os.close(to_parent)

    return ready


def main(argv: list[str]) -> None:
    layout = Layout(Path(argv[0]))
    # nohup and `&` ignore these signals, also in children. A machine's processes must not inherit that.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # The machines' files are private to the operator. Files that a worker writes get the umask of the user's shell.
    os.environ[private_paths.UMASK] = f"{os.umask(0o077):o}"
    ready = _detach(layout.log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    adopt_orphans()
    asyncio.run(serve(layout, ready))


if __name__ == "__main__":
    main(sys.argv[1:])
