"""The agent: on each node one small process that brings about what the head has ordered, and reports what is.

One task (`Agent.run`) owns all state and is woken by whatever changes: an order, a worker's end, a notice. Orders are
whole documents, so a turn looks only at the newest one. No torch here.
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
from spotrun.node import workers as groups
from spotrun.node.connection import Link
from spotrun.node.job import Job
from spotrun.node.log_uploader import Logs, kept, newest
from spotrun.node.part_uploader import Saver, Wanted
from spotrun.spec import names
from spotrun.store import Store, log_key
from spotrun.wire import Bundle, Failure, Generation, Notice, Order, Report, StateRef

log = logging.getLogger(__name__)

JOB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
POLL = 0.05  # seconds between looks at the control blocks while workers live
LAST_UPLOAD = 5.0  # seconds that the bucket gets for logs before something waits no longer for it


@dataclass(frozen=True)
class Settings:
    """Where things are on this machine."""

    tmpfs: Path
    scratch: Path
    ssh_port: int
    name: str  # of this node, if its metadata do not tell

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
    """All that this node holds and does."""

    def __init__(
        self, settings: Settings, identity: Identity, attributes: dict[str, str], store: Store, systemd: Systemd
    ) -> None:
        self.identity = identity
        self.cluster = attributes[names.CLUSTER]
        self.store = store
        self.link = Link(store, self.cluster, identity, self.obey, self._tell_systemd)
        self.logs = Logs(store)
        self.unfit: tuple[str, ...] | None = None  # what is wrong with this machine; None: not known yet
        self._settings, self._systemd = settings, systemd
        self._phase = ""  # that systemd was told last
        self.boot = uuid.uuid4().hex
        self.pool = attributes[names.POOL]
        self._devices = 1
        self._environment: dict[str, str] = {}
        self._order: Order | None = None
        self._notice: Notice | None = None
        self._coming: Notice | None = None
        self._wake = asyncio.Event()
        self._job: Job | None = None
        self._missed: Failure | None = None  # a generation ordered that cannot be taken part in any more
        self._snapshot: StateRef | None = None
        self._kept = kept(settings.tmpfs)  # it may be the only copy of a state
        self._looked = (-1, 0.0)  # newest commit seen, when the slots were last read
        self._saver = Saver(store, settings.scratch / "parts", self._wake.set)
        self._flushed = 0  # generation whose logs have been sent to the bucket after its end
        self._flush: asyncio.Task[None] | None = None

    @property
    def bundle(self) -> Bundle | None:
        """The job of this node, as ordered; None if it has no job."""
        return self._job.bundle if self._job else None

    def obey(self, order: Order) -> None:
        """Take the head's newest order."""
        job = self._job
        bundle, generation = order.bundle, order.generation
        # Both become names of folders and objects.
        if bundle and not (re.fullmatch(JOB_ID, bundle.id) and re.fullmatch("[0-9a-f]{64}", bundle.code)):
            log.warning("an order for job %r with code %r: refused, malformed", bundle.id, bundle.code)
            return
        if generation and bundle and job and bundle.id == job.bundle.id and generation.number < job.newest:
            log.warning("generation %s was ordered after %s: refused", generation.number, job.newest)
            return
        self._order = order
        self._wake.set()

    def examined(self, problems: tuple[str, ...]) -> None:
        """Take jobs from now on, if there are no problems; what has been ordered meanwhile is begun."""
        self.unfit = problems
        if not problems:
            self._take_stock()
        self._wake.set()

    def make_room(self) -> None:
        """Remove from the scratch disk what is not the ordered job's. Only while no job is held here.

        Nothing before an order says which job that is: the last logs of one that goes on may not be in the bucket yet.
        What is in memory stays: no disk is the fuller for it, and it may be the only copy of a job's state.
        """
        assert self._job is None
        if self._order is None:
            return
        self._remove_others(self._order.bundle)
        cleanup.empty(self._settings.scratch / "packages")

    def notify(self, notice: Notice | None) -> None:
        """Take the cloud's word."""
        log.warning("notice: %s", notice)
        self._notice = notice
        self._wake.set()

    def expect(self, notice: Notice | None) -> None:
        """Take a word of the cloud that does not count yet."""
        log.warning("a notice that counts later: %s", notice)
        self._coming = notice
        self._wake.set()

    async def run(self) -> None:
        """Turn after turn, whenever something has changed; at intervals only while workers live."""
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
                self._rescue(self._order)
            self._publish()

    async def end(self) -> None:
        """End all that was started here."""
        if self._job is not None:
            await self._job.end()
            await self._upload_logs()

    def _take_stock(self) -> None:
        """What workers are told of this machine. Not before it is fit: drivers may come later than the agent."""
        self._devices = max(1, gpu_count())
        self._environment = network.environment(network.gather(self.identity.address))
        log.info("workers' environment: %s", " ".join(f"{k}={v}" for k, v in self._environment.items()) or "as it is")

    async def _turn(self, order: Order) -> None:
        await self._hold_job(order)
        job = self._job
        if job is None:
            return
        await self._hold_generation(job, order)
        group = job.group
        if group is not None:
            group.arm(order.stop_at, order.save.step if order.save and not self._saver.part else None)
            if order.dump and group.alive and not group.stacks:
                await self._dump(job, group)
            elif group.broken:
                self._publish()
                await self._free(job, group)
            if not group.alive and self._flushed != group.number:
                self._flushed = group.number
                self._flush = asyncio.create_task(self._upload_logs())
        self._look_at_slots(job)
        self._hold_save(job.bundle.id, job.slots, group, order)

    def _rescue(self, order: Order) -> None:
        """No job begins here, or not yet; what was left of one in memory is put into the bucket all the same."""
        job = order.bundle.id if order.bundle else ""
        if self._kept is not None and self._kept[0] == job:
            self._hold_save(job, self._settings.tmpfs / job / "slots", None, order)

    async def _hold_job(self, order: Order) -> None:
        """Have the ordered bundle and no other."""
        job, bundle = self._job, order.bundle
        if job is not None and job.bundle != bundle:
            await job.end()
            self._drop_group(job)
            await self._upload_logs()
            self.logs.forget()
            if bundle is None or bundle.id != job.bundle.id:
                await asyncio.to_thread(job.remove)
            self._job, self._missed, self._snapshot, self._looked, self._flushed = None, None, None, (-1, 0.0), 0
            self._saver.forget()
        if bundle is not None and self._job is None:
            await asyncio.to_thread(self._remove_old, bundle)
            self._job = Job(
                bundle, self.store, self.identity.address, self._devices, self._settings.tmpfs, self._settings.scratch,
                self._wake.set, self._environment,
            )  # fmt: skip
            self._job.begin()

    def _remove_old(self, bundle: Bundle) -> None:
        """Remove what other jobs have left. Before the job begins: nothing of it may be under way meanwhile."""
        cleanup.empty(self._settings.tmpfs, keep=bundle.id)
        self._remove_others(bundle)

    def _remove_others(self, bundle: Bundle | None) -> None:
        cleanup.empty(self._settings.scratch / "code", keep=bundle.code if bundle else None)
        cleanup.empty(self._settings.scratch / "logs", keep=bundle.id if bundle else None)

    async def _hold_generation(self, job: Job, order: Order) -> None:
        """Have the workers of the ordered generation and no other; those of an older one are dead before it begins."""
        wanted, rank = order.generation, -1
        if wanted is not None:
            me = (self.identity.name, self.boot)
            rank = next((i for i, member in enumerate(wanted.members) if (member.node, member.boot) == me), -1)
        if rank < 0:
            wanted = None
        if job.group is not None and (wanted is None or wanted.number != job.group.number):
            await self._free(job, job.group)
            if job.group.alive:
                return  # until the launcher has been replaced
            self._drop_group(job)
        if wanted is None or job.group is not None:
            self._missed = None
        elif wanted.number <= job.newest:
            message = f"generation {wanted.number} has ended on this node already"
            self._missed = self._missed or Failure(kind="peer", rank=rank, at=time.time(), message=message)
        elif job.store:
            self._start(job, wanted, rank)

    def _start(self, job: Job, wanted: Generation, rank: int) -> None:
        try:
            group = job.start(wanted, rank, self.identity.name)
        except OSError as error:  # no room in memory or on the disk, say; tried again at each turn
            message = f"generation {wanted.number} cannot start on this node: {error}"
            if self._missed is None or self._missed.message != message:
                log.error("%s", message)
                self._missed = Failure(kind="setup", rank=rank, at=time.time(), message=message)
            return
        for each in group.locals:
            self.logs.follow(each.log, log_key(job.bundle.id, group.number, self.identity.name, each.rank))

    async def _free(self, job: Job, group: groups.Group) -> None:
        await group.free()
        if group.alive:
            log.error("workers of generation %s did not end; the launcher is ended with them", group.number)
            await job.restart_launcher()

    def _drop_group(self, job: Job) -> None:
        if job.group is not None:
            job.group.close()
            job.group = None

    async def _dump(self, job: Job, group: groups.Group) -> None:
        """The workers hang: keep their stacks, end them."""
        text = await group.dump()
        key = log_key(job.bundle.id, group.number, self.identity.name, "stacks")
        with contextlib.suppress(TimeoutError, SpotrunError):
            async with asyncio.timeout(LAST_UPLOAD):
                await asyncio.to_thread(self.store.put, key, text)
        group.stacks = key
        message = f"no step was completed for too long; stacks of this node's workers: {key}"
        trace = text.decode(errors="replace")[-20000:]
        group.lost = Failure(kind="hang", rank=group.locals[0].rank, at=time.time(), message=message, traceback=trace)
        await self._free(job, group)
        await self._upload_logs()

    def _look_at_slots(self, job: Job) -> None:
        """Read the newest snapshot's record, when there may be another and not too often."""
        commit = max((each.control.committed for each in job.group.locals), default=-1) if job.group else -2
        ended = job.group is not None and not job.group.alive
        seen, at = self._looked
        if commit != seen and (ended or commit < 0 or time.monotonic() - at > 10 * POLL):
            self._snapshot = newest(job.slots, job.bundle.id)
            self._looked = (commit, time.monotonic())

    def _hold_save(self, job: str, slots: Path, group: groups.Group | None, order: Order) -> None:
        """Upload the ordered part of the ordered snapshot, once it is there."""
        save, ref = order.save, order.upload
        if save is not None and order.generation is not None:
            ref = StateRef(generation=order.generation.number, step=save.step)
        wanted = Wanted(job, slots, ref, save.index, save.parts) if save is not None and ref is not None else None
        self._saver.hold(wanted, awaited=wanted is not None and _awaited(group, wanted.ref))

    async def _upload_logs(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_UPLOAD):
                await self.logs.upload(all=True)

    def _publish(self) -> None:
        job = self._job
        group = job.group if job else None
        late = group.late if group and group.late is not None else self._saver.late
        part = self._saver.part
        # Until an order says what becomes of it, or for as long as this machine may not begin a job.
        old = self._kept if job is None and (self._order is None or self.unfit != ()) else None
        report = Report(
            node=self.identity.name,
            boot=self.boot,
            pool=self.pool,
            zone=self.identity.zone,
            address=self.identity.address,
            ssh_port=self._settings.ssh_port,
            devices=self._devices,
            job=job.bundle.id if job else old[0] if old else None,
            phase=_phase(self.unfit, job, self._missed),
            unfit=self.unfit or (),
            generation=job.newest if job else 0,
            store=job.store if job else "",
            workers=group.view() if group else (),
            failure=(job.failure or (group.failure if group else self._missed)) if job else None,
            snapshot=old[1] if old else self._snapshot,
            parts=(part,) if part else (),
            late=late,
            trouble=self._saver.trouble,
            notice=self._notice,
            coming=self._coming,
            stacks=group.stacks if group else "",
        )
        self.link.publish(report)
        if report.phase != self._phase:
            self._phase = report.phase
            self._tell_systemd()

    def _tell_systemd(self) -> None:
        """What `systemctl status` shows. Joined is who has been heard by a head; it stays so while the head is away."""
        where = self.link.joined
        if where:
            self._systemd.ready(f"joined the head of {self.cluster} at {where}: {self._phase}")


def _awaited(group: groups.Group | None, ref: StateRef) -> bool:
    """Whether workers have yet to commit this snapshot."""
    running = group is not None and group.alive and group.number == ref.generation
    return group is not None and running and max(each.control.committed for each in group.locals) < ref.step


def _phase(
    unfit: tuple[str, ...] | None, job: Job | None, missed: Failure | None
) -> groups.Phase | Literal["checking", "unfit", "idle", "preparing", "ready"]:
    if unfit != ():
        return "checking" if unfit is None else "unfit"
    if job is None:
        return "idle"
    if job.group is not None:
        return job.group.phase
    if job.failure is not None or missed is not None:
        return "failed"
    return "ready" if job.store else "preparing"
