"""The agent: one small process on each node that does what the head has ordered, and reports the node's state.

One task (`Agent.run`) owns all state. Every change wakes it: an order, a worker's end, a notice. Orders are whole
documents, so a turn reads only the newest one. This process does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spotrun.errors import SpotrunError
from spotrun.machine.gpus import gpu_count
from spotrun.machine.metadata import Identity
from spotrun.machine.systemd import Systemd
from spotrun.node import cleanup, network
from spotrun.node.connection import Connection
from spotrun.node.job import Job
from spotrun.node.log_uploader import LogUploader
from spotrun.node.part_uploader import PartUploader, WantedPart, left_in_memory, newest_snapshot
from spotrun.node.workers import Phase, WorkerGroup
from spotrun.spec import names
from spotrun.store import Store, log_key
from spotrun.wire import Bundle, Failure, Generation, Notice, Order, Report, StateRef

log = logging.getLogger(__name__)

JOB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
POLL = 0.05  # seconds between looks at the control blocks while workers live
LAST_UPLOAD = 5.0  # seconds that the agent waits for an upload of logs before it goes on


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
        self.logs = LogUploader(store)
        self.unfit: tuple[str, ...] | None = None  # what is wrong with this machine; None: not checked yet
        self._settings, self._systemd = settings, systemd
        self._began = time.time()
        self._told_phase = ""  # the phase that systemd was last told
        self._devices = 1
        self._environment: dict[str, str] = {}  # network variables for workers
        self._order: Order | None = None
        self._notice: Notice | None = None
        self._coming_notice: Notice | None = None
        self._wake = asyncio.Event()
        self._job: Job | None = None
        self._not_started: Failure | None = None  # why this node does not take part in the ordered generation
        self._snapshot: StateRef | None = None
        self._left = left_in_memory(settings.tmpfs)  # may be the only copy of a state
        self._read_slots = (-1, 0.0)  # newest committed step, and monotonic seconds, when the slots were last read
        self._part_uploader = PartUploader(store, settings.scratch / "parts", self._wake.set)
        self._flushed = 0  # the newest generation whose last logs have been sent to the bucket
        self._flush: asyncio.Task[None] | None = None

    @property
    def bundle(self) -> Bundle | None:
        """The ordered job; None if this node has no job."""
        return self._job.bundle if self._job else None

    def obey(self, order: Order) -> None:
        """Take the head's newest order."""
        job = self._job
        bundle, generation = order.bundle, order.generation
        # Both strings become names of folders and objects.
        if bundle and not (re.fullmatch(JOB_ID, bundle.id) and re.fullmatch("[0-9a-f]{64}", bundle.code)):
            log.warning("an order for job %r with code %r: refused, malformed", bundle.id, bundle.code)
            return
        if generation and bundle and job and bundle.id == job.bundle.id and generation.number < job.newest:
            log.warning("generation %s was ordered after %s: refused", generation.number, job.newest)
            return
        self._order = order
        self._wake.set()

    def set_problems(self, problems: tuple[str, ...]) -> None:
        """Take the result of the health gate. Without problems, the agent takes jobs and begins the ordered one."""
        self.unfit = problems
        if not problems:
            # Not earlier: a driver may load later than the agent starts.
            self._devices = max(1, gpu_count())
            self._environment = found = network.environment(network.gather(self.identity.address))
            log.info("workers' environment: %s", " ".join(f"{k}={v}" for k, v in found.items()) or "as it is")
        self._wake.set()

    def make_room(self) -> None:
        """Remove everything from the scratch disk that is not the ordered job's. No job may be held here.

        Before the first order it removes nothing: a job may go on, and its last logs may not be in the bucket yet.
        Files in memory stay: removing them frees no disk space, and they may be the only copy of a job's state.
        """
        assert self._job is None
        if self._order is None:
            return
        self._remove_other_jobs(self._order.bundle)
        cleanup.empty(self._settings.scratch / "packages")

    def notify(self, notice: Notice | None) -> None:
        """Take a notice that counts from now on; None: it no longer holds."""
        log.warning("notice: %s", notice)
        self._notice = notice
        self._wake.set()

    def expect(self, notice: Notice | None) -> None:
        """Take a notice that does not count yet."""
        log.warning("a notice that counts later: %s", notice)
        self._coming_notice = notice
        self._wake.set()

    async def run(self) -> None:
        """Take a turn whenever something has changed, and at intervals while workers live."""
        self._publish()
        while True:
            busy = self._job is not None and self._job.group is not None and self._job.group.alive
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL if busy else None):
                    await self._wake.wait()
            self._wake.clear()
            if self._order is not None and self.unfit == ():
                await self._turn(self._order)
            elif self._order is not None:
                self._upload_left_snapshot(self._order)
            self._publish()

    async def end(self) -> None:
        """End all processes that this agent has started."""
        if self._job is not None:
            await self._job.end()
            await self._upload_logs()

    async def _turn(self, order: Order) -> None:
        await self._apply_bundle(order)
        job = self._job
        if job is None:
            return
        await self._apply_generation(job, order)
        group = job.group
        if group is not None:
            part = self._part_uploader.part
            group.set_steps(order.stop_at, order.save.step if order.save and not part else None)
            if order.dump and group.alive and not group.stacks:
                await self._end_hung(job, group)
            elif group.broken:
                self._publish()
                await self._end_group(job, group)
            if not group.alive and self._flushed != group.number:
                self._flushed = group.number
                self._flush = asyncio.create_task(self._upload_logs())
        self._find_snapshot(job)
        self._apply_save(job.bundle.id, job.slots, group, order)

    def _upload_left_snapshot(self, order: Order) -> None:
        """Upload an ordered snapshot that an earlier agent left in memory, although this machine takes no job."""
        job = order.bundle.id if order.bundle else ""
        if self._left is not None and self._left[0] == job:
            self._apply_save(job, self._settings.tmpfs / job / "slots", None, order)

    async def _apply_bundle(self, order: Order) -> None:
        """Have the ordered job and no other."""
        job, bundle = self._job, order.bundle
        if job is not None and job.bundle != bundle:
            await job.end()
            self._drop_group(job)
            await self._upload_logs()
            self.logs.forget()
            if bundle is None or bundle.id != job.bundle.id:
                await asyncio.to_thread(job.remove)
            self._job, self._not_started, self._snapshot, self._flushed = None, None, None, 0
            self._read_slots = (-1, 0.0)
            self._part_uploader.forget()
        if bundle is not None and self._job is None:
            # Before the job begins: while it runs, nothing may be removed.
            await asyncio.to_thread(cleanup.empty, self._settings.tmpfs, keep=bundle.id)
            await asyncio.to_thread(self._remove_other_jobs, bundle)
            self._job = Job(
                bundle, self.store, self.identity.address, self._devices, self._settings.tmpfs, self._settings.scratch,
                self._wake.set, self._environment,
            )  # fmt: skip
            self._job.prepare()

    def _remove_other_jobs(self, bundle: Bundle | None) -> None:
        cleanup.empty(self._settings.scratch / "code", keep=bundle.code if bundle else None)
        cleanup.empty(self._settings.scratch / "logs", keep=bundle.id if bundle else None)

    async def _apply_generation(self, job: Job, order: Order) -> None:
        """Have the workers of the ordered generation and no others. Older workers are dead before new ones start."""
        wanted, rank = order.generation, -1
        if wanted is not None:
            me = (self.identity.name, self.boot)
            rank = next((i for i, member in enumerate(wanted.members) if (member.node, member.boot) == me), -1)
        if rank < 0:
            wanted = None
        if job.group is not None and (wanted is None or wanted.number != job.group.number):
            await self._end_group(job, job.group)
            if job.group.alive:
                return  # until the launcher has been replaced
            self._drop_group(job)
        if wanted is None or job.group is not None:
            self._not_started = None
        elif wanted.number <= job.newest:
            message = f"generation {wanted.number} has ended on this node already"
            self._not_started = self._not_started or Failure(kind="peer", rank=rank, at=time.time(), message=message)
        elif job.store:
            self._start(job, wanted, rank)

    def _start(self, job: Job, wanted: Generation, rank: int) -> None:
        try:
            group = job.start(wanted, rank, self.identity.name)
        except OSError as error:  # memory or disk may be full; each turn tries again
            message = f"generation {wanted.number} cannot start on this node: {error}"
            if self._not_started is None or self._not_started.message != message:
                log.error("%s", message)
                self._not_started = Failure(kind="setup", rank=rank, at=time.time(), message=message)
            return
        for each in group.workers:
            self.logs.follow(each.log, log_key(job.bundle.id, group.number, self.identity.name, each.rank))

    async def _end_group(self, job: Job, group: WorkerGroup) -> None:
        await group.end()
        if group.alive:
            log.error("workers of generation %s did not end; the launcher is ended with them", group.number)
            await job.restart_launcher()

    def _drop_group(self, job: Job) -> None:
        if job.group is not None:
            job.group.close()
            job.group = None

    async def _end_hung(self, job: Job, group: WorkerGroup) -> None:
        """Put the stacks of workers that hang into the bucket, then end the workers."""
        text = await group.dump_stacks()
        key = log_key(job.bundle.id, group.number, self.identity.name, "stacks")
        with contextlib.suppress(TimeoutError, SpotrunError):
            async with asyncio.timeout(LAST_UPLOAD):
                await asyncio.to_thread(self.store.put, key, text)
        group.stacks = key
        message = f"no step was completed for too long; stacks of this node's workers: {key}"
        trace, rank = text.decode(errors="replace")[-20000:], group.workers[0].rank
        group.group_failure = Failure(kind="hang", rank=rank, at=time.time(), message=message, traceback=trace)
        await self._end_group(job, group)
        await self._upload_logs()

    def _find_snapshot(self, job: Job) -> None:
        """Read the newest snapshot's record if there may be a new one, but not too often."""
        committed = job.group.committed if job.group else -2
        ended = job.group is not None and not job.group.alive
        seen, at = self._read_slots
        if committed != seen and (ended or committed < 0 or time.monotonic() - at > 10 * POLL):
            self._snapshot = newest_snapshot(job.slots, job.bundle.id)
            self._read_slots = (committed, time.monotonic())

    def _apply_save(self, job: str, slots: Path, group: WorkerGroup | None, order: Order) -> None:
        """Upload the ordered part of the ordered snapshot, once workers have committed the snapshot."""
        save, ref = order.save, order.upload
        if save is not None and order.generation is not None:
            ref = StateRef(generation=order.generation.number, step=save.step)
        if save is None or ref is None:
            self._part_uploader.want(None)
            return
        saving = group is not None and group.alive and group.number == ref.generation
        awaited = group is not None and saving and group.committed < ref.step
        self._part_uploader.want(WantedPart(job, slots, ref, save.index, save.parts), awaited)

    async def _upload_logs(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_UPLOAD):
                await self.logs.upload(all=True)

    def _publish(self) -> None:
        job = self._job
        group = job.group if job else None
        part = self._part_uploader.part
        # Until an order says what happens to that snapshot, or for as long as this machine may not begin a job.
        left = self._left if job is None and (self._order is None or self.unfit != ()) else None
        phase = _phase(self.unfit, job, self._not_started)
        doing, since = self._doing(phase, job)
        report = Report(
            node=self.identity.name,
            boot=self.boot,
            pool=self.pool,
            zone=self.identity.zone,
            address=self.identity.address,
            ssh_port=self._settings.ssh_port,
            devices=self._devices,
            job=job.bundle.id if job else left[0] if left else None,
            phase=phase,
            doing=doing,
            doing_since=since,
            unfit=self.unfit or (),
            generation=job.newest if job else 0,
            store=job.store if job else "",
            workers=group.report() if group else (),
            failure=(job.failure or (group.failure if group else self._not_started)) if job else None,
            snapshot=left[1] if left else self._snapshot,
            parts=(part,) if part else (),
            late=group.late if group and group.late is not None else self._part_uploader.late,
            trouble=self._part_uploader.trouble,
            notice=self._notice,
            coming=self._coming_notice,
            stacks=group.stacks if group else "",
        )
        self.connection.publish(report)
        if phase != self._told_phase:
            self._told_phase = phase
            self._tell_systemd()

    def _doing(self, phase: str, job: Job | None) -> tuple[str, float]:
        """The present step of a node that does not train yet, and since when, in epoch seconds."""
        if phase == "checking":
            return "checking the machine", self._began
        if job is not None and phase == "preparing":
            return job.doing, job.doing_since
        if job is not None and job.group is not None and phase == "starting":
            return job.group.doing
        return "", 0.0

    def _tell_systemd(self) -> None:
        """Tell systemd the phase, once a head has received a report. `systemctl status` shows it."""
        where = self.connection.joined
        if where:
            self._systemd.ready(f"joined the head of {self.cluster} at {where}: {self._told_phase}")


def _phase(
    unfit: tuple[str, ...] | None, job: Job | None, not_started: Failure | None
) -> Phase | Literal["checking", "unfit", "idle", "preparing", "ready"]:
    if unfit != ():
        return "checking" if unfit is None else "unfit"
    if job is None:
        return "idle"
    if job.group is not None:
        return job.group.phase
    if job.failure is not None or not_started is not None:
        return "failed"
    return "ready" if job.store else "preparing"
