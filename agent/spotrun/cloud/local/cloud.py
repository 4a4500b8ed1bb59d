"""The local cloud for its callers: the cloud protocol over HTTP, faults on demand, start and end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotrun.cloud.base import Advice, Ended, Instance, Problem, Said, Shortfall
from spotrun.cloud.local import procs
from spotrun.cloud.local.layout import (
    DAEMON,
    Change,
    Config,
    Layout,
    Pool,
    base_environment,
    ensure_key,
    remove_tree,
    write_json,
)
from spotrun.errors import CloudError
from spotrun.locks import try_lock
from spotrun.machine import private_paths
from spotrun.spec.names import HEAD

if TYPE_CHECKING:
    import aiohttp

    from spotrun.spec import ClusterSpec

_TIMEOUT = 60.0  # seconds for one request; the end of a machine with many processes takes longest
_START = 60.0  # seconds for the daemon to start
_END = 20.0  # seconds for the daemon to end its machines and itself
_LOCKED = 180.0  # seconds to wait for another `up` or `down`, longer than one usually takes
_ANSWER = 10.0  # seconds for requests that a healthy daemon answers at once


class LocalCloud:
    """The `Cloud` protocol, and faults on demand. One event loop at a time.

    endpoint, token: the daemon's. Default: SPOTRUN_LOCAL_CLOUD and SPOTRUN_LOCAL_CLOUD_TOKEN, which only the head's
    machine has. Methods take a machine's name or id; `head` is the head's machine.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.endpoint = endpoint or os.environ.get("SPOTRUN_LOCAL_CLOUD", "")
        self.token = token or os.environ.get("SPOTRUN_LOCAL_CLOUD_TOKEN", "")
        if not (self.endpoint and self.token):
            raise CloudError(
                "the local cloud's address is unknown: SPOTRUN_LOCAL_CLOUD and SPOTRUN_LOCAL_CLOUD_TOKEN "
                "are not both set; only the head's machine has them"
            )
        self._session: aiohttp.ClientSession | None = None

    async def nodes(self) -> list[Instance]:
        return [Instance(**values) for values in await self._ask("GET", "nodes")]

    async def ended(self) -> list[Ended]:
        return [Ended(**values) for values in await self._ask("GET", "ended")]

    async def sizes(self) -> dict[str, int]:
        return dict(await self._ask("GET", "sizes"))

    async def resize(self, pool: str, size: int) -> None:
        await self._ask("POST", "resize", pool=pool, size=size)

    async def remove(self, names: Sequence[str]) -> None:
        await self._ask("POST", "remove", names=list(names))

    async def recreate(self, names: Sequence[str]) -> None:
        await self._ask("POST", "recreate", names=list(names))

    async def preempt(self, name: str, notice: float | None = None) -> None:
        """As in `Cloud`. `notice` 0 kills any machine."""
        await self._ask("POST", "preempt", name=name, notice=notice)

    async def prices(self) -> dict[str, float]:
        return dict(await self._ask("GET", "prices"))

    async def advice(self) -> dict[str, Advice]:
        return {pool: _advice(values) for pool, values in (await self._ask("GET", "advice")).items()}

    async def problems(self) -> list[Problem]:
        return [Problem(**values) for values in await self._ask("GET", "problems")]

    async def shortfalls(self) -> list[Shortfall]:
        return []

    async def kill(self, name: str) -> None:
        """Take a machine without notice. It is gone when this returns, and is recreated later."""
        await self._ask("POST", "kill", name=name)

    async def freeze(self, name: str) -> None:
        """Stop every process of a machine."""
        await self._ask("POST", "freeze", name=name)

    async def thaw(self, name: str) -> None:
        """Let a frozen machine continue."""
        await self._ask("POST", "thaw", name=name)

    async def cut(self, name: str) -> None:
        """Take a machine off the network. `spotrun.cloud.local.cut` says what it can still reach."""
        await self._ask("POST", "cut", name=name)

    async def join(self, name: str) -> None:
        """Undo a cut."""
        await self._ask("POST", "join", name=name)

    async def stockout(self, zone: str, on: bool) -> None:
        """Have a zone give no more machines, or give them again. Its present machines stay."""
        await self.market(zone, dry=on)

    async def market(self, where: str, **change: float | bool | None) -> None:
        """Change the market of a pool or zone now. change: the keys of `Change`, without `after`."""
        await self._ask("POST", "market", where=where, **change)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, what: str, **body: object) -> Any:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT),
                trust_env=False,
            )
        try:
            async with self._session.request(
                method, f"{self.endpoint}/v1/{what}", json=body if method == "POST" else None
            ) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise CloudError(
                f"the local cloud does not answer at {self.endpoint} ({error or type(error).__name__}); "
                "`make up` brings it up again"
            ) from error
        if response.status >= 400:
            raise CloudError(str(answer.get("error", answer)) if isinstance(answer, dict) else str(answer))
        return answer


def up(
    cluster: ClusterSpec,
    home: Path,
    role_command: Sequence[str] | None = None,
    starting: Callable[[], None] = lambda: None,
) -> LocalCloud:
    """Start a cluster's local cloud, with its head. If it already runs, apply changes of the cluster file.

    First removes what a killed daemon left. home: the folder with the state of local clusters (in `local/<cluster>`).
    role_command: what machines run instead of `spotrun agent` and `spotrun head`; `{role}` in it becomes `agent` or
    `head`. starting: called before the local cloud starts, but not if it already runs.
    """
    if not sys.platform.startswith("linux"):
        raise CloudError(f"the local cloud needs Linux, and this is {sys.platform}: take another cloud's cluster file")
    layout = Layout.of(home, cluster.name)
    config = _config(cluster, layout, role_command)
    with _lock(layout):
        cloud = _running(layout)
        if cloud is not None:
            if json.loads(layout.config.read_text()) != json.loads(json.dumps(config.to_json())):
                _post(cloud, "configure", config.to_json())
                write_json(layout.config, config.to_json())
            return cloud
        if pid := _daemon(layout):  # busy, or stopped: its machines must not be removed
            raise CloudError(f"the local cloud (pid {pid}) runs but does not answer; `make down` ends it")
        _sweep(layout)
        if os.path.lexists(layout.tmpfs):  # not our own, which has just been removed
            private_paths.check_folder(layout.tmpfs)
        ensure_key(layout.key)
        write_json(layout.config, config.to_json())
        starting()
        _start(layout)
        cloud = _running(layout)
    if cloud is None:
        raise CloudError(f"the local cloud ended as soon as it had started; see {layout.log}")
    return cloud


def find(cluster: str, home: Path) -> LocalCloud | None:
    """The running local cloud of a cluster; None if it does not run."""
    return _running(Layout.of(home, cluster))


def daemon(cluster: str, home: Path) -> int | None:
    """The pid of the cluster's daemon, whether or not it answers; None if there is none."""
    return _daemon(Layout.of(home, cluster))


def alive(cluster: str, home: Path) -> bool:
    """Whether any process of the cluster runs, with or without the daemon."""
    return bool(procs.of_cluster(Layout.of(home, cluster).unique))


def down(cluster: str, home: Path) -> None:
    """End a cluster, even if its daemon hangs. No process, port or memory stays; the bucket stays."""
    layout = Layout.of(home, cluster)
    if not layout.state.is_dir():
        return
    with _lock(layout):
        _stop_daemon(layout)
        _sweep(layout)


def homes(cluster: str) -> list[Path]:
    """The homes on this computer with a running cluster of that name, as far as this user can see them."""
    found = set()
    for pid in procs.pids():
        if procs.mark_of(pid).endswith(f"/{DAEMON}"):
            layout = Layout(Path(procs.last_word(pid)))
            if layout.state.name == cluster and layout.state.parent.name == "local" and _daemon(layout) == pid:
                found.add(layout.state.parent.parent)
    return sorted(found)


def _config(cluster: ClusterSpec, layout: Layout, role_command: Sequence[str] | None) -> Config:
    head = Pool(HEAD, cluster.head.zone, cluster.head.machine, "on-demand", 1)
    return Config(
        cluster=cluster.name,
        region=cluster.region,
        bucket=cluster.bucket or layout.bucket.as_uri(),
        head=head,
        pools=tuple(
            Pool(p.name, p.zone, p.machine, p.market, p.max, p.max_run_duration or 0.0, p.devices or 0)
            for p in cluster.pools
        ),
        metadata=cluster.local.metadata,
        boot_delay=cluster.local.boot_delay,
        recreate_delay=cluster.local.recreate_delay,
        queue_delay=cluster.local.queue_delay,
        capacity=dict(cluster.local.capacity),
        market=tuple(Change(**each.model_dump()) for each in cluster.local.market),
        share_torch=cluster.local.share_torch,
        **({"role": tuple(role_command)} if role_command is not None else {}),
    )


def _advice(values: dict[str, Any]) -> Advice:
    said = {key: Said(**value) for key, value in values.items() if key != "prices" and value is not None}
    return Advice(**said, prices=tuple(Said(**each) for each in values["prices"]))


def _running(layout: Layout) -> LocalCloud | None:
    try:
        private_paths.check_folder(layout.state)
        record = json.loads(layout.record.read_text())
        cloud = LocalCloud(record["endpoint"], record["token"])
        answer = _request(cloud, "ping", None)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None
    return cloud if answer.get("unique") == layout.unique else None


def _post(cloud: LocalCloud, what: str, body: dict[str, Any]) -> None:
    try:
        _request(cloud, what, body)
    except urllib.error.HTTPError as error:
        raise CloudError(str(json.loads(error.read()).get("error", error))) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CloudError(f"the local cloud does not answer at {cloud.endpoint}: {error}") from error


def _request(cloud: LocalCloud, what: str, body: dict[str, Any] | None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{cloud.endpoint}/v1/{what}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {cloud.token}"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy
    with direct.open(request, timeout=_ANSWER) as response:
        found = json.loads(response.read())
    return found if isinstance(found, dict) else {}


def _start(layout: Layout) -> None:
    command = [sys.executable, "-m", "spotrun.cloud.local.daemon", str(layout.state)]
    environment = base_environment(layout.mark(DAEMON))
    began = layout.log.stat().st_size if layout.log.exists() else 0
    try:
        result = subprocess.run(
            command,
            env=environment,
            cwd=layout.state,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START,
            check=False,
        )
    except subprocess.TimeoutExpired:
        _sweep(layout)
        raise CloudError(f"the local cloud did not start within {_START:g} s; see {layout.log}") from None
    if result.returncode:
        written = layout.log.read_text(errors="replace")[began:] if layout.log.exists() else ""
        last = (written.strip() or result.stderr.strip() or "it gave no reason").splitlines()[-1]
        raise CloudError(f"the local cloud did not start: {last}; see {layout.log}")


def _daemon(layout: Layout) -> int | None:
    """The pid of the cluster's daemon, if it lives."""
    try:
        pid = int(json.loads(layout.record.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if procs.mark_of(pid) == layout.mark(DAEMON) else None


def _stop_daemon(layout: Layout) -> None:
    """Have the daemon end its machines, if it can: only the daemon can reap its dead children."""
    if pid := _daemon(layout):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
            procs.await_exit(pid, _END)


def _sweep(layout: Layout) -> None:
    """Remove a cluster's processes, memory and sockets."""
    procs.kill(lambda: procs.of_cluster(layout.unique))
    remove_tree(layout.tmpfs)
    layout.record.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(layout: Layout) -> Iterator[None]:
    """One `up` or `down` of a cluster at a time. Raises `CloudError` if another one does not end."""
    layout.make()
    deadline = time.monotonic() + _LOCKED
    with open(os.open(layout.state / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise CloudError(
                    f"another `make up` or `make down` of this cluster is under way (pid {file.read(20).strip()}), and"
                    f" has not ended within {_LOCKED:g} s; end it first"
                )
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # if the disk is full, `down` must go on: the pid is for a message only
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield
