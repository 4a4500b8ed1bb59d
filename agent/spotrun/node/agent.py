"""The agent: one small process on each node that does what the head has ordered, and reports the node's state.

One task (`Agent.run`) owns the state of the node: the order, the machine's condition, the notices. Each ordered job has
a task of its own (`Runner`). Every change wakes these tasks: an order, a worker's end, a notice. This process does not
import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spotrun.machine import source
from spotrun.machine.gpus import device_count
from spotrun.machine.metadata import Identity
from spotrun.machine.systemd import Systemd
from spotrun.node import cleanup, network
from spotrun.node.claims import Claims
from spotrun.node.connection import Connection
from spotrun.node.job import Node
from spotrun.node.part_uploader import left_in_memory
from spotrun.node.runner import Runner
from spotrun.readings import NAMES, NONE, OF_GPU, Readings
from spotrun.spec import names
from spotrun.store import Store
from spotrun.wire import Bundle, JobOrder, Notice, Order, Report

log = logging.getLogger(__name__)

STUCK = "a worker of job {} cannot be ended: a GPU or a disk may not answer"
JOB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


@dataclass(frozen=True)
class Settings:
    """Where things are on this machine."""

    tmpfs: Path  # folder in memory, for snapshots and control blocks
    scratch: Path  # folder on disk, for code, packages, logs and copies of checkpoint parts
    ssh_port: int
    name: str  # of this node; empty: the machine's metadata have it

    @classmethod
    def from_env(cls) -> Settings:
        get = os.environ.get
        return cls(
            tmpfs=Path(get("SPOTRUN_TMPFS", "/dev/shm/spotrun")),
            scratch=Path(get("SPOTRUN_SCRATCH", "/var/lib/spotrun")),
            ssh_port=int(get("SPOTRUN_SSH_PORT", "22")),
            name=get("SPOTRUN_NODE", ""),
        )


class Agent:
    """The state of this node, and what changes it."""

    def __init__(
        self, settings: Settings, identity: Identity, attributes: dict[str, str], store: Store, systemd: Systemd
    ) -> None:
        self.identity = identity
        self.cluster, self.pool = attributes[names.CLUSTER], attributes[names.POOL]
        self.store = store
        self.boot = uuid.uuid4().hex  # another value for each process: a restarted agent is another member
        self.connection = Connection(store, self.cluster, identity, self.obey, self._tell_systemd)
        self.unfit: tuple[str, ...] | None = None  # what is wrong with this machine; None: not checked yet
        self._settings, self._systemd = settings, systemd
        self._began = time.time()
        self._told = ""  # what systemd was last told about the jobs
        claims = Claims(settings.tmpfs)
        self._node = Node(identity, self.boot, store, settings.tmpfs, settings.scratch, claims)
        self._order: Order | None = None
        self._notice: Notice | None = None
        self._coming_notice: Notice | None = None
        self._wake = asyncio.Event()
        # By job id. At first: the jobs whose snapshots an earlier agent has left. The first order decides about them.
        self._runners = {job: self._runner(job) for job in left_in_memory(settings.tmpfs)}
        self._measured = NONE
        self._cleaned = False  # whether the files of jobs that are not ordered have been removed
        self._removal: asyncio.Task[None] | None = None

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The jobs that have begun on this node."""
        return tuple(runner.bundle for runner in self._runners.values() if runner.bundle is not None)

    @property
    def under_notice(self) -> bool:
        """Whether the machine will be taken. A rebalance recommendation alone does not say so."""
        return self._notice is not None and self._notice.kind != "rebalance"

    def ranks(self) -> dict[str, dict[int, tuple[int, float, float]]]:
        """By job that has begun here: what each living worker has done in its generation, see `WorkerGroup.ranks`."""
        return {job: runner.ranks for job, runner in self._runners.items() if runner.bundle is not None}

    def measured(self, values: Mapping[str, Any]) -> None:
        """Have the next reports tell what was measured. values: see `telemetry.sensors`; empty: nothing."""
        gpus = (tuple(float(gpu.get(name, math.nan)) for name in OF_GPU) for gpu in values.get("gpus", ()))
        found = tuple(float(values.get(name, math.nan)) for name in NAMES) if values else ()
        self._measured = Readings(machine=found, gpus=tuple(gpus))

    def obey(self, order: Order) -> None:
        """Take the head's newest order."""
        ids = [each.bundle.id for each in order.jobs]
        for bundle in (each.bundle for each in order.jobs):
            # Both strings become names of folders and objects.
            if not (re.fullmatch(JOB_ID, bundle.id) and re.fullmatch("[0-9a-f]{64}", bundle.code)):
                log.warning("an order for job %r with code %r: refused, malformed", bundle.id, bundle.code)
                return
        if len(set(ids)) < len(ids):
            log.warning("an order names a job twice (%s): refused", ", ".join(ids))
            return
        self._order = order.replace(jobs=tuple(self._accepted(each) for each in order.jobs))
        self._wake.set()

    def set_problems(self, problems: tuple[str, ...]) -> None:
        """Take the result of the health gate. Without problems, the agent takes jobs and begins the ordered ones."""
        self.unfit = problems
        if not problems:
            # Not earlier: a driver may load later than the agent starts.
            self._node.devices = device_count()
            self._node.environment = found = network.environment(network.gather(self.identity.address))
            log.info("workers' environment: %s", " ".join(f"{k}={v}" for k, v in found.items()) or "as it is")
            self._node.fit = True
        self._wake.set()

    def make_room(self) -> None:
        """Remove everything from the scratch disk that is not an ordered job's. No job may have begun here.

        Before the first order it removes nothing: a job may go on, and its last logs may not be in the bucket yet.
        Files in memory stay: removing them frees no disk space, and they may be the only copy of a job's state.
        """
        assert not self.bundles
        if self._order is None:
            return
        for folder, keep in self._kept_folders().items():
            cleanup.empty(folder, keep)
        cleanup.empty(self._settings.scratch / "packages")

    def notify(self, notice: Notice | None) -> None:
        """Take a notice that counts from now on; None: it no longer holds."""
        log.warning("notice: %s", notice)
        self._notice = notice
        for runner in self._runners.values() if self.under_notice else ():
            runner.hurry()
        self._wake.set()

    def expect(self, notice: Notice | None) -> None:
        """Take a notice that does not count yet."""
        log.warning("a notice that counts later: %s", notice)
        self._coming_notice = notice
        self._wake.set()

    async def run(self) -> None:
        """Pass on each order, and report whenever something has changed, and at intervals while workers live."""
        self._publish()
        while True:
            intervals = [each for runner in self._runners.values() if (each := runner.interval) is not None]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(intervals, default=None)):
                    await self._wake.wait()
            self._wake.clear()
            if self._order is not None:
                await self._apply(self._order)
            self._publish()

    async def end(self) -> None:
        """End all processes that this agent has started."""
        found = await asyncio.gather(*(runner.end() for runner in self._runners.values()), return_exceptions=True)
        for error in found:
            if error is not None:
                log.error("a job did not end well: %r", error)
        await self._node.templates.end()

    def _runner(self, job: str) -> Runner:
        runner = Runner(job, self._node, self._wake.set)
        if self.under_notice:
            runner.hurry()
        return runner

    def _accepted(self, order: JobOrder) -> JobOrder:
        """The job's order, or the one before if this one is older."""
        job, generation = order.bundle.id, order.generation
        newest = self._runners[job].newest if job in self._runners else 0
        before = self._order.job(job) if self._order else None
        if before is None or generation is None or generation.number >= newest:
            return order
        log.warning("job %s: generation %s was ordered after %s: refused", job, generation.number, newest)
        return before

    async def _apply(self, order: Order) -> None:
        """Run the ordered jobs and no others. If a job is ordered again while it leaves, it begins once it has left."""
        wanted = {each.bundle.id: each for each in order.jobs}
        if self._node.fit:
            for job in self._runners.keys() - wanted.keys() - set(order.parked):
                self._runners[job].leave()
            self._runners = {job: runner for job, runner in self._runners.items() if not runner.ended}
            new = [job for job in wanted if job not in self._runners]
            if new or not self._cleaned:
                await self._clean(order)
            self._runners |= {job: self._runner(job) for job in new}
        for job, runner in self._runners.items():
            if job in wanted:
                runner.obey(wanted[job])

    async def _clean(self, order: Order) -> None:
        """Remove the files of jobs that have left, and at the first order with a job also what a killed agent left."""
        if not order.jobs:
            return
        if not self._cleaned:
            self._cleaned = True
            kept = {*order.parked, *(each.bundle.id for each in order.jobs)}
            temporary = Path(tempfile.gettempdir())  # on a local machine it is in this folder
            kept |= {temporary.name} if temporary.parent == self._settings.tmpfs else set()
            await asyncio.to_thread(cleanup.empty, self._settings.tmpfs, kept)
            for folder, keep in self._kept_folders().items():
                await asyncio.to_thread(cleanup.empty, folder, keep)
        # No order should wait for the removal, which may take long. So the files are only moved here.
        moved = [path for folder, keep in self._kept_folders().items() for path in cleanup.set_aside(folder, keep)]
        if moved:
            self._removal = asyncio.create_task(asyncio.to_thread(cleanup.remove, moved))

    def _kept_folders(self) -> dict[Path, set[str]]:
        """Folders with an entry for each job, and the entries that jobs need."""
        ordered = [each.bundle for each in self._order.jobs] if self._order else []
        parked = self._order.parked if self._order else ()
        jobs = {bundle.id for bundle in ordered} | self._runners.keys() | set(parked)
        code = {bundle.code for bundle in (*ordered, *self.bundles)}
        scratch = self._settings.scratch
        return {scratch / "code": code, **{scratch / each: jobs for each in ("work", "logs", "metrics")}}

    def _publish(self) -> None:
        phase: Literal["checking", "unfit", "ready"] = "checking"
        unfit = (*(self.unfit or ()), *(STUCK.format(job) for job, each in self._runners.items() if each.stuck))
        if unfit or self.unfit is not None:
            phase = "unfit" if unfit else "ready"
        jobs = tuple(runner.report for runner in self._runners.values() if runner.report is not None)
        report = Report(
            code=source.DIGEST,
            node=self.identity.name,
            boot=self.boot,
            pool=self.pool,
            zone=self.identity.zone,
            address=self.identity.address,
            ssh_port=self._settings.ssh_port,
            devices=self._node.devices,
            phase=phase,
            since=self._began if phase == "checking" else 0.0,
            unfit=unfit,
            notice=self._notice,
            coming=self._coming_notice,
            jobs=jobs,
            readings=self._measured,
        )
        self.connection.publish(report)
        told = ", ".join(f"{work.job} {work.phase}" for work in jobs) or "idle"
        told = told if phase == "ready" else phase
        if told != self._told:
            self._told = told
            self._tell_systemd()

    def _tell_systemd(self) -> None:
        """Tell systemd what the jobs do, once a head has received a report. `systemctl status` shows it."""
        where = self.connection.joined
        if where:
            self._systemd.ready(f"joined the head of {self.cluster} at {where}: {self._told}")
