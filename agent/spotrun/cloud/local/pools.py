"""The pools and machines of a local cluster, and the loop that creates and ends machines."""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from aiohttp import web

from spotrun.cloud.base import Advice, Instance, Problem
from spotrun.cloud.local import market, metadata, procs, reconcile
from spotrun.cloud.local.cut import Cutter
from spotrun.cloud.local.layout import (
    HEAD_MACHINE,
    METADATA_PORT,
    Change,
    Config,
    Layout,
    Pool,
    new_id,
    prepare,
    remove_tree,
)
from spotrun.cloud.local.ledger import Ledger
from spotrun.cloud.local.machine import Machine
from spotrun.errors import CloudError
from spotrun.spec.names import BUCKET, CLUSTER, HEAD, NODE, POOL, ROLE
from spotrun.spec.notices import EC2_NOTICE, GCE_NOTICE

NOTICE = {"gce": GCE_NOTICE, "ec2": EC2_NOTICE}
_SWEEP = 0.01  # seconds between two looks for new sockets of a machine that is cut off
_FIRST_HOST, _LAST_HOST = 10, 254  # last byte of the machines' addresses; the daemon has 1, the head 2
log = logging.getLogger("cloud")


class LocalPools:
    """The pools and machines of one cluster."""

    def __init__(self, config: Config, layout: Layout, subnet: str, token: str) -> None:
        self.config, self.layout, self.subnet, self.token = config, layout, subnet, token
        self.endpoint = ""
        self.machines: dict[str, Machine] = {}
        self._wanted: dict[str, frozenset[int]] = {pool.name: frozenset() for pool in config.pools}
        self._wanted[HEAD] = frozenset({0})
        self._addresses: dict[str, str] = {HEAD_MACHINE: f"{subnet}.2"}
        self._began = time.time()
        self._changes: list[Change] = []  # of the market, made by hand
        self._queued: dict[str, float] = {}  # by flex pool: when its request has its turn
        self.ledger = Ledger(layout.ledger)
        self._short: dict[str, Problem] = {}
        self._broken: dict[str, Problem] = {}
        self._cutter, self._cutting = Cutter(layout), asyncio.Lock()
        self._wake, self._spawning = asyncio.Event(), asyncio.Lock()
        app = metadata.build(config.metadata, self._subject_at)
        self._metadata = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    # Requests from outside.

    def instances(self) -> list[Instance]:
        return [machine.instance() for _, machine in sorted(self.machines.items())]

    def sizes(self) -> dict[str, int]:
        return {pool.name: len(self._wanted[pool.name]) for pool in self.config.pools}

    def prices(self) -> dict[str, float]:
        return dict(self._market().prices)

    def advice(self) -> dict[str, Advice]:
        return dict(self._market().advice)

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
            what = f"machine {machine.name} is {machine.pool.market}"
            raise CloudError(f"{what}, and the cloud preempts only spot machines; kill it instead")
        self._preempt(machine, notice)

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
        """Cut a machine off the network, until `join`. A repeated call cuts off its new sockets at once."""
        machine = self.find(name, alive=True)
        async with self._cutting:
            await asyncio.to_thread(self._cutter.sweep if machine.cut else self._cutter.cut, machine.name)
        if machine.cut is None and not machine.dying:
            machine.cut = asyncio.create_task(self._keep_cut(machine))

    async def join(self, name: str) -> None:
        """End a machine's cut."""
        machine = self.find(name, alive=True)
        if machine.cut is not None:
            await self._stop_cutting(machine)
            async with self._cutting:
                await asyncio.to_thread(self._cutter.join, machine.name)

    def change(self, change: Change) -> None:
        """Change the market now, whatever `after` says."""
        places = {place for pool in self.config.pools for place in (pool.name, pool.zone)}
        if change.where not in places:
            raise CloudError(f"there is no zone or pool {change.where!r}; allowed: {', '.join(sorted(places))}")
        self._changes.append(replace(change, after=time.time() - self._began))
        self.ledger.set_prices(self._market().prices)
        self._wake.set()

    def configure(self, config: Config) -> None:
        """Apply a changed cluster file, as `terraform apply` would. Existing machines do not change."""
        if config.fixed != self.config.fixed:
            what = "name, region, bucket, metadata flavour and share_torch"
            raise CloudError(f"{what} cannot change while the cluster is up; run `make down` first")
        sizes = {pool.name: self._wanted.get(pool.name, frozenset()) for pool in config.pools}
        self._wanted = {
            pool.name: reconcile.resized(sizes[pool.name], min(len(sizes[pool.name]), pool.max))
            for pool in config.pools
        } | {HEAD: frozenset({0})}
        self.config = config
        self._wake.set()

    # The loop.

    async def run(self) -> None:
        """Whenever the machines or the wanted sizes change, create and end machines. Never returns."""
        await self._metadata.setup()
        self.ledger.begin()
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
        now, now_market = time.time(), self._market()
        self.ledger.set_prices(now_market.prices)
        limits = (now_market.capacity, now_market.dry, self._queued, self.config.queue_delay)
        plan = reconcile.plan(reconcile.View(now, pools, self._wanted, members, *limits))
        self._queued, self._wanted = dict(plan.queued), dict(plan.wanted)
        for name in plan.forget:
            del self.machines[name]
            self._broken.pop(name, None)
        for name in plan.destroy:
            self._end(self.machines[name])
        for name in plan.take:
            self._take(self.machines[name], now_market.notice)
        before = self._short
        self._short = {name: self._shortage(pools[name], missing) for name, missing in plan.short.items()}
        for pool, index in plan.create:
            try:
                self._begin(pools[pool], index)
            except CloudError as error:  # no address is free; the existing machines stay
                self._short[pool] = before.get(pool) or Problem(pool, "quota", str(error), time.time())
        return min(plan.wake, self._began + now_market.next)

    def _market(self) -> market.Conditions:
        return market.at(time.time() - self._began, self.config, self._changes, self._began)

    def _shortage(self, pool: Pool, missing: int) -> Problem:
        what = f"{pool.market} {pool.machine}"
        kind: Literal["queue", "stockout"] = "queue" if pool.name in self._queued else "stockout"
        message = (
            f"the request for {missing} {what} waits for its turn in zone {pool.zone}"
            if kind == "queue"
            else f"zone {pool.zone} has no more {what} at present: {missing} missing"
        )
        before = self._short.get(pool.name)
        return Problem(pool.name, kind, message, before.at if before else time.time())

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
        self.ledger.note("created", machine)
        machine.life = asyncio.create_task(self._live(machine))
        machine.life.add_done_callback(lambda _: self._ended(machine))  # even if the task never ran
        self._wake.set()  # the loop must also wait for this machine's end

    def _preempt(self, machine: Machine, notice: float | None) -> None:
        if machine.state != "stopping":
            now = time.time()
            machine.due = now + (NOTICE[self.config.metadata] if notice is None else notice)
            machine.state = "stopping"
            machine.subject.change(terminate_at=machine.due, rebalance_at=now)
            self.ledger.note("notice", machine)
            self._wake.set()

    def _take(self, machine: Machine, notices: Mapping[str, float]) -> None:
        """Preempt a machine, because its zone or pool has too many. A machine that does not run yet ends at once."""
        notice = notices.get(machine.pool.name, notices.get(machine.pool.zone))
        if machine.state != "running" or notice == 0.0:
            self._end(machine)
        else:
            self._preempt(machine, notice)

    def _end(self, machine: Machine) -> None:
        """Begin to end a machine, without notice. Returns before the machine is gone."""
        if not machine.dying and machine.life is not None:
            self._doom(machine)
            machine.life.cancel()

    def _doom(self, machine: Machine) -> None:
        machine.dying, machine.state, machine.due = True, "stopping", math.inf

    async def _live(self, machine: Machine) -> None:
        """Run a machine from its creation to its end."""
        site: web.BaseSite | None = None
        try:
            await asyncio.sleep(self.config.boot_delay)
            site = await self._listen(machine)
            process = await self._boot(machine)
            if process.stdout is not None and await process.stdout.readline() and machine.state == "provisioning":
                log.info("%s runs at %s", machine.name, machine.address)
                machine.state, machine.started = "running", time.time()
                self.ledger.note("running", machine, machine.started)
                self._broken.pop(machine.name, None)
            code = await process.wait()
            where = self.layout.folder(machine.name) / "init.log"
            self._blame(machine, f"its first process ended with {code}; see {where}")
        except asyncio.CancelledError:
            log.info("%s is being ended", machine.name)
        except Exception as error:  # a machine that cannot start must not end the others
            log.exception("%s", machine.name)
            self._blame(machine, f"it could not be started: {error}")
        self._doom(machine)
        await self._clear(machine, site)

    def _ended(self, machine: Machine) -> None:
        machine.state, machine.due = "terminated", time.time() + self.config.recreate_delay
        machine.gone.set()
        self.ledger.note("ended", machine)
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
        keys, scratch, role = folder / "ssh", folder / "scratch", "head" if machine.pool.name == HEAD else "agent"
        await asyncio.to_thread(prepare, folder, memory, keep_keys=machine.pool.name == HEAD)
        init = [sys.executable, "-m", "spotrun.cloud.local.init", machine.address, str(keys), f"{self.layout.key}.pub"]
        init += ["--", *(part.replace("{role}", role) for part in self.config.role)]
        async with self._spawning:
            with (folder / "init.log").open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *init,
                    env=self._env(machine, machine.environment(self.layout.mark(machine.name), memory, scratch, keys)),
                    cwd=scratch,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
            machine.pid = process.pid
        return process

    def _env(self, machine: Machine, values: dict[str, str]) -> dict[str, str]:
        """The environment of a machine. Only the head may resize pools. Tests of other clouds replace this."""
        access = {"SPOTRUN_LOCAL_CLOUD": self.endpoint, "SPOTRUN_LOCAL_CLOUD_TOKEN": self.token}
        return values | access if machine.pool.name == HEAD else values

    async def _clear(self, machine: Machine, site: web.BaseSite | None) -> None:
        """Remove all that a machine used: processes, ports, memory."""
        machine.subject.end()
        await self._stop_cutting(machine)
        async with self._cutting:
            self._cutter.forget(machine.name)
        killed = await asyncio.to_thread(procs.kill, self._search(machine))
        self.ledger.end(machine)
        async with self._spawning:
            known = {other.pid for other in self.machines.values()}
            killed |= await asyncio.to_thread(procs.kill, lambda: procs.strays(known))
        procs.reap(killed - {machine.pid})  # asyncio reaps the machine's first process
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
                    log.warning("%s: new sockets may not be cut off: %s", machine.name, error)

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
        """The address for a machine of this name. The name keeps it as long as other names find free ones."""
        if name not in self._addresses:
            free = [f"{self.subnet}.{host}" for host in range(_FIRST_HOST, _LAST_HOST + 1)]
            held = {address for owner, address in self._addresses.items()}
            used = {self._addresses[owner] for owner in self.machines if owner in self._addresses}
            choice = next((a for a in free if a not in held), None) or next((a for a in free if a not in used), None)
            if choice is None:
                raise CloudError(f"the local cloud has {len(free)} addresses, and all are in use")
            self._addresses = {owner: a for owner, a in self._addresses.items() if a != choice} | {name: choice}
        return self._addresses[name]
