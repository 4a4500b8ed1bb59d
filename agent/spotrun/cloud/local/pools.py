"""The pools and machines of a local cluster, and the loop that creates and ends machines."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from spotrun.cloud.base import Instance, Problem
from spotrun.cloud.local import metadata, procs, reconcile
from spotrun.cloud.local.cut import Cutter
from spotrun.cloud.local.layout import (
    HEAD_MACHINE,
    MARK,
    METADATA_PORT,
    SSH_PORT,
    Config,
    Layout,
    Pool,
    new_id,
    prepare,
    remove_tree,
)
from spotrun.cloud.local.machine import Machine
from spotrun.errors import CloudError
from spotrun.spec.names import BUCKET, CLUSTER, HEAD, NODE, POOL, ROLE
from spotrun.spec.notices import EC2_NOTICE, GCE_NOTICE

NOTICE = {"gce": GCE_NOTICE, "ec2": EC2_NOTICE}
PRICES = {"spot": 0.3, "on-demand": 1.0}  # dollars an hour, invented; the ratio is usual in clouds
_SWEEP = 0.01  # seconds between two looks for new sockets of a machine that is cut off
_FIRST_HOST, _LAST_HOST = 10, 254  # last byte of the machines' addresses; the daemon has 1, the head 2
log = logging.getLogger("cloud")


class LocalPools:
    """The pools and machines of one cluster."""

    def __init__(self, config: Config, layout: Layout, subnet: str, token: str) -> None:
        self.config, self.layout, self.subnet, self.token = config, layout, subnet, token
        self.endpoint = ""
        self.machines: dict[str, Machine] = {}
        self.dry: set[str] = set()
        self._wanted: dict[str, frozenset[int]] = {pool.name: frozenset() for pool in config.pools}
        self._wanted[HEAD] = frozenset({0})
        self._addresses: dict[str, str] = {HEAD_MACHINE: f"{subnet}.2"}
        self._short: dict[str, Problem] = {}
        self._broken: dict[str, Problem] = {}
        self._wake = asyncio.Event()
        self._cutter, self._cutting = Cutter(layout), asyncio.Lock()
        self._spawning = asyncio.Lock()
        app = metadata.build(config.metadata, self._subject_at)
        self._metadata = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    # What the interface asks for.

    def instances(self) -> list[Instance]:
        return [machine.instance() for _, machine in sorted(self.machines.items())]

    def sizes(self) -> dict[str, int]:
        return {pool.name: len(self._wanted[pool.name]) for pool in self.config.pools}

    def prices(self) -> dict[str, float]:
        return {pool.name: PRICES[pool.market] for pool in self.config.pools}

    def problems(self) -> list[Problem]:
        return [*self._short.values(), *self._broken.values()]

    def resize(self, name: str, size: int) -> None:
        pool = next((pool for pool in self.config.pools if pool.name == name), None)
        if pool is None:
            names = ", ".join(sorted(self._wanted.keys() - {HEAD}))
            raise CloudError(f"there is no pool {name!r} to resize; pools: {names}")
        if not 0 <= size <= pool.max:
            raise CloudError(f"pool {name}: size {size} is not allowed; its cluster file says 0 to {pool.max}")
        self._wanted[name] = reconcile.resized(self._wanted[name], size)
        self._wake.set()

    def remove(self, names: list[str]) -> None:
        machines = [self.find(name) for name in names]
        if any(machine.pool.name == HEAD for machine in machines):
            raise CloudError("the head cannot be removed; `make down` ends the cluster")
        for machine in machines:
            self._wanted[machine.pool.name] -= {machine.index}
        self._wake.set()

    def recreate(self, names: list[str]) -> None:
        for machine in [self.find(name) for name in names]:
            self._end(machine)

    def find(self, name: str, alive: bool = False) -> Machine:
        """A machine by name or id; `head` is the head's. Raises `CloudError`."""
        found = self.machines.get(HEAD_MACHINE if name == HEAD else name)
        found = found or next((machine for machine in self.machines.values() if machine.id == name), None)
        if found is None:
            raise CloudError(f"there is no machine {name!r}; machines: {', '.join(sorted(self.machines)) or 'none'}")
        if alive and found.state not in ("running", "stopping"):
            raise CloudError(f"machine {found.name} is {found.state}; wait until it is running")
        return found

    async def preempt(self, name: str, notice: float | None) -> None:
        if notice is not None and notice <= 0:
            return await self.kill(name)
        machine = self.find(name, alive=True)
        if machine.pool.market != "spot":
            raise CloudError(
                f"machine {machine.name} is on-demand, and the cloud preempts only spot machines; kill it instead"
            )
        if machine.state != "stopping":
            now = time.time()
            machine.due = now + (NOTICE[self.config.metadata] if notice is None else notice)
            machine.state = "stopping"
            machine.subject.change(terminate_at=machine.due, rebalance_at=now)
            self._wake.set()

    async def kill(self, name: str) -> None:
        machine = self.find(name)
        if machine.state == "terminated":
            raise CloudError(f"machine {machine.name} is terminated already")
        self._end(machine)
        await machine.gone.wait()

    async def freeze(self, name: str) -> None:
        machine = self.find(name, alive=True)
        await asyncio.to_thread(procs.stop, self._search(machine))

    async def thaw(self, name: str) -> None:
        machine = self.find(name, alive=True)
        await asyncio.to_thread(procs.resume, self._search(machine))

    async def cut(self, name: str) -> None:
        """Take a machine off the network. A repeated call silences its new sockets at once."""
        machine = self.find(name, alive=True)
        async with self._cutting:
            await asyncio.to_thread(self._cutter.sweep if machine.cut else self._cutter.cut, machine.name)
        if machine.cut is None and not machine.dying:
            machine.cut = asyncio.create_task(self._keep_cut(machine))

    async def join(self, name: str) -> None:
        machine = self.find(name, alive=True)
        if machine.cut is not None:
            await self._stop_cutting(machine)
            async with self._cutting:
                await asyncio.to_thread(self._cutter.join, machine.name)

    def stockout(self, zone: str, on: bool) -> None:
        zones = {pool.zone for pool in self.config.pools}
        if zone not in zones:
            raise CloudError(f"no pool is in zone {zone!r}; zones: {', '.join(sorted(zones))}")
        (self.dry.add if on else self.dry.discard)(zone)
        self._wake.set()

    def configure(self, config: Config) -> None:
        """Apply a changed cluster file, as `terraform apply` would. Existing machines do not change."""
        if config.fixed != self.config.fixed:
            what = "name, region, bucket and metadata flavour"
            raise CloudError(f"{what} of a running cluster cannot change: `make down` first")
        sizes = {pool.name: self._wanted.get(pool.name, frozenset()) for pool in config.pools}
        self._wanted = {
            pool.name: reconcile.resized(sizes[pool.name], min(len(sizes[pool.name]), pool.max))
            for pool in config.pools
        } | {HEAD: frozenset({0})}
        self.config = config
        self._wake.set()

    # The loop.

    async def run(self) -> None:
        """Create and end machines whenever what exists or what is wanted changes. Never returns."""
        await self._metadata.setup()
        while True:
            self._wake.clear()
            wake = self._reconcile()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wake == math.inf else max(0.0, wake - time.time())):
                    await self._wake.wait()

    async def close(self) -> None:
        """End every machine."""
        for machine in self.machines.values():
            self._end(machine)
        await asyncio.gather(*(machine.gone.wait() for machine in self.machines.values() if machine.life))
        await self._metadata.cleanup()

    def _reconcile(self) -> float:
        pools = {pool.name: pool for pool in (self.config.head, *self.config.pools)}
        members = {
            n.name: reconcile.Member(n.pool.name, n.index, n.state, n.due, n.ends or math.inf)
            for n in self.machines.values()
        }
        view = reconcile.View(time.time(), pools, self._wanted, members, self.config.capacity, frozenset(self.dry))
        plan = reconcile.plan(view)
        for name in plan.forget:
            del self.machines[name]
            self._broken.pop(name, None)
        for name in plan.destroy:
            self._end(self.machines[name])
        before = self._short
        self._short = {name: self._shortage(pools[name], missing) for name, missing in plan.short.items()}
        for pool, index in plan.create:
            try:
                self._begin(pools[pool], index)
            except CloudError as error:  # no address is free; the existing machines stay
                self._short[pool] = before.get(pool) or Problem(pool, "quota", str(error), time.time())
        return plan.wake

    def _shortage(self, pool: Pool, missing: int) -> Problem:
        before = self._short.get(pool.name)
        message = f"zone {pool.zone} has no more {pool.market} {pool.machine} at present: {missing} missing"
        return Problem(pool.name, "stockout", message, before.at if before else time.time())

    # A machine's life.

    def _begin(self, pool: Pool, index: int) -> None:
        name, now = reconcile.machine_name(pool.name, index), time.time()
        address, identity = self._address(name), new_id(self.config.metadata)
        tags = {
            CLUSTER: self.config.cluster,
            BUCKET: self.config.bucket,
            ROLE: HEAD if pool.name == HEAD else NODE,
            POOL: pool.name,
        }
        facts = metadata.Facts(name, identity, pool.zone, self.config.region, pool.machine, address, pool.market, tags)
        self._start(Machine(name, index, pool, address, identity, now, metadata.Subject(facts)))

    def _start(self, machine: Machine) -> None:
        """Begin a machine's life."""
        self.machines[machine.name] = machine
        machine.life = asyncio.create_task(self._live(machine))
        machine.life.add_done_callback(lambda _: self._ended(machine))  # even if it never ran
        self._wake.set()  # the loop must also wait for this machine's end

    def _end(self, machine: Machine) -> None:
        """Take a machine at once. Returns before it is gone."""
        if not machine.dying and machine.life is not None:
            machine.dying, machine.state, machine.due = True, "stopping", math.inf
            machine.life.cancel()

    async def _live(self, machine: Machine) -> None:
        """Run a machine from its creation to its end."""
        site: web.BaseSite | None = None
        try:
            await asyncio.sleep(self.config.boot_delay)
            site = await self._listen(machine)
            process = await self._boot(machine)
            if process.stdout is not None and await process.stdout.readline() and machine.state == "provisioning":
                log.info("%s runs at %s", machine.name, machine.address)
                machine.state = "running"
                self._broken.pop(machine.name, None)
            code = await process.wait()
            where = self.layout.folder(machine.name) / "init.log"
            self._blame(machine, f"its first process ended with {code}; see {where}")
        except asyncio.CancelledError:
            log.info("%s is taken", machine.name)
        except Exception as error:  # a machine that cannot start must not end the others
            log.exception("%s", machine.name)
            self._blame(machine, f"it could not be started: {error}")
        machine.dying, machine.state, machine.due = True, "stopping", math.inf
        await self._clear(machine, site)

    def _ended(self, machine: Machine) -> None:
        machine.state, machine.due = "terminated", time.time() + self.config.recreate_delay
        machine.gone.set()
        self._wake.set()

    def _blame(self, machine: Machine, message: str) -> None:
        log.warning("%s: %s", machine.name, message)
        text = f"machine {machine.name}: {message}"
        self._broken[machine.name] = Problem(machine.pool.name, "other", text, time.time())

    async def _listen(self, machine: Machine) -> web.BaseSite:
        """Serve a machine's metadata. The test of the images replaces this."""
        site = web.TCPSite(self._metadata, machine.address, METADATA_PORT, reuse_address=True)
        await site.start()
        return site

    async def _boot(self, machine: Machine) -> asyncio.subprocess.Process:
        folder, memory = self.layout.folder(machine.name), self.layout.tmpfs / machine.name
        keys, scratch = folder / "ssh", folder / "scratch"
        await asyncio.to_thread(prepare, folder, memory, keep_keys=machine.pool.name == HEAD)
        role = "head" if machine.pool.name == HEAD else "agent"
        command = ["--", *(part.replace("{role}", role) for part in self.config.role)]
        init = [sys.executable, "-m", "spotrun.cloud.local.init", machine.address, str(keys), f"{self.layout.key}.pub"]
        environment = self._environment(machine, memory, scratch, keys)
        async with self._spawning:
            with (folder / "init.log").open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *init,
                    *command,
                    env=environment,
                    cwd=scratch,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
            machine.pid = process.pid
        return process

    def _environment(self, machine: Machine, memory: Path, scratch: Path, keys: Path) -> dict[str, str]:
        server = f"{machine.address}:{METADATA_PORT}"
        values = {
            **os.environ,
            MARK: self.layout.mark(machine.name),
            "SPOTRUN_NODE": machine.name,
            "SPOTRUN_TMPFS": str(memory),
            "TMPDIR": str(memory / "tmp"),  # what a killed process leaves there goes with the machine
            "SPOTRUN_SCRATCH": str(scratch),
            "SPOTRUN_SSH_KEYS": str(keys),
            "SPOTRUN_SSH_PORT": str(SSH_PORT),
            "GCE_METADATA_HOST": server,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{server}/",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if machine.pool.name == HEAD:  # only the head may resize pools
            values |= {"SPOTRUN_LOCAL_CLOUD": self.endpoint, "SPOTRUN_LOCAL_CLOUD_TOKEN": self.token}
        return values

    async def _clear(self, machine: Machine, site: web.BaseSite | None) -> None:
        """Remove everything of a machine: processes, ports, memory."""
        machine.subject.end()
        await self._stop_cutting(machine)
        async with self._cutting:
            self._cutter.forget(machine.name)
        killed = await asyncio.to_thread(procs.kill, self._search(machine))
        async with self._spawning:
            known = {other.pid for other in self.machines.values()}
            killed |= await asyncio.to_thread(procs.kill, lambda: procs.strays(known))
        procs.reap(killed - {machine.pid})  # asyncio reaps that one
        if site is not None:
            with suppress(RuntimeError):  # it never started
                await site.stop()
        await asyncio.to_thread(remove_tree, self.layout.tmpfs / machine.name)

    async def _keep_cut(self, machine: Machine) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            async with self._cutting:
                try:
                    await asyncio.to_thread(self._cutter.sweep, machine.name)
                except OSError as error:
                    log.warning("%s: the cut has a hole: %s", machine.name, error)

    async def _stop_cutting(self, machine: Machine) -> None:
        if machine.cut is not None:
            async with self._cutting:  # a sweep that runs in a thread ends first
                machine.cut.cancel()
            machine.cut = None

    def _search(self, machine: Machine) -> Callable[[], set[int]]:
        mark = self.layout.mark(machine.name)
        return lambda: procs.of_machine(mark)

    def _subject_at(self, address: str) -> metadata.Subject | None:
        return next((n.subject for n in self.machines.values() if n.address == address and not n.gone.is_set()), None)

    def _address(self, name: str) -> str:
        """The same address each time for a name. If none is free, the address of a name without a machine."""
        if name not in self._addresses:
            free = [f"{self.subnet}.{host}" for host in range(_FIRST_HOST, _LAST_HOST + 1)]
            held = {address for owner, address in self._addresses.items()}
            used = {self._addresses[owner] for owner in self.machines if owner in self._addresses}
            choice = next((a for a in free if a not in held), None) or next((a for a in free if a not in used), None)
            if choice is None:
                raise CloudError(f"the local cloud has {len(free)} addresses, and all are in use")
            self._addresses = {owner: a for owner, a in self._addresses.items() if a != choice} | {name: choice}
        return self._addresses[name]
