"""This node's part in the generations of one job: which workers run, wait, warm up, or end."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from spotrun.backoff import Backoff
from spotrun.errors import SpotrunError
from spotrun.node import memory
from spotrun.node.job import Job, Node
from spotrun.node.log_uploader import LogUploader
from spotrun.node.workers import WorkerGroup
from spotrun.state.control import worker_fifo
from spotrun.state.wakeup import wake
from spotrun.store import log_key
from spotrun.wire import Failure, Generation, JobOrder

log = logging.getLogger(__name__)


CALL_BACK = 3.0  # seconds for workers to leave a generation that does not begin, or that has ended without them
LAUNCHERS = 3  # that may end while workers warm up; after that, the script may be at fault
AGAIN = (30.0, 1800.0)  # seconds until a failed warm-up is tried again: the first pause, the longest


class Generations:
    """The part of `node` in the generations of job `id`. folder: the job's in memory.

    newest: the newest generation that this agent took part in. not_started: why this node does not take part in the
    ordered generation. waiting: what the workers' start waits for, and since when, in epoch seconds. warm_up_failed:
    why the last warm-up failed, if it was after the newest generation; empty: it did not, or another one has begun.
    """

    def __init__(self, id: str, node: Node, folder: Path, logs: LogUploader) -> None:
        self.newest = 0
        self.not_started: Failure | None = None
        self._refused = 0  # the generation that `not_started` is about, if it has been refused
        self.waiting = ("", 0.0)
        self.warm_up_failed = ""
        self._again, self._again_at = Backoff(*AGAIN), 0.0  # when a failed warm-up is tried again, in monotonic seconds
        self._launchers_lost, self._lost_with = 0, 0  # since the newest generation; the origin of the last group
        self._id, self._node, self._folder, self._logs = id, node, folder, logs

    @property
    def pause(self) -> float | None:
        """Seconds until a failed warm-up is tried again; None: nothing waits for that."""
        left = self._again_at - time.monotonic()
        return left if left > 0 else None

    async def apply(self, job: Job, order: JobOrder) -> None:
        """Run the workers of the ordered generation, or of the generation after its drain.

        Of all others, only those stay that wait for a generation, or still have time to leave one. The rest end before
        new workers start.
        """
        wanted = order.next if _goes_on(job.group, order) else order.generation
        rank = self._rank(wanted)
        self.waiting, waiting = ("", 0.0), self.waiting
        if rank < 0:
            wanted = None
        group = job.group
        if group is not None and (wanted is None or wanted.number != group.number):
            able = group.regroup == "able"  # look here first: workers that leave a moment later must not be ended
            if self._stays(job, group, wanted, order.stand_by) and (wanted is None or self._regroup(job, wanted, rank)):
                return
            may_regroup = order.stand_by if wanted is None else wanted.regroup
            if able and may_regroup and self._has_devices(job) and _call_back(group):
                return
            await self.end_group(job, group)
            if group.living:
                return  # until the launcher has been replaced
            drop_group(job)
        if wanted is None or job.group is not None:
            self.not_started = None
            if job.group is None and order.stand_by and job.store and self.pause is None:
                self._warm_up(job)
        elif wanted.number <= self.newest:
            self._refuse(wanted.number, rank, f"generation {wanted.number} has ended on this node already")
        elif wanted.regroup:
            self.newest = wanted.number
            self._refuse(wanted.number, rank, f"no workers of this node wait for generation {wanted.number}")
        elif job.store:
            self._start(job, wanted, rank, waiting)

    def _rank(self, wanted: Generation | None) -> int:
        """This node's rank in the generation; -1: it is not a member."""
        me = (self._node.identity.name, self._node.boot)
        members = wanted.members if wanted is not None else ()
        return next((i for i, member in enumerate(members) if (member.node, member.boot) == me), -1)

    def _refuse(self, generation: int, rank: int, message: str) -> None:
        """Say why the generation does not start. Each turn comes here; the first reason stays."""
        before = self.not_started
        if before is None or (before.kind == "peer" and self._refused != generation):
            self.not_started = Failure(kind="peer", rank=rank, at=time.time(), message=message)
        self._refused = generation

    def _stays(self, job: Job, group: WorkerGroup, wanted: Generation | None, stand_by: bool) -> bool:
        """Whether the workers need not end: they wait for a generation to join without a restart, or warm up for it."""
        if group.number == 0 and not group.alive:
            if group.launcher_ended and group.origin != self._lost_with:
                self._launchers_lost, self._lost_with = self._launchers_lost + 1, group.origin
            if not group.launcher_ended or self._launchers_lost >= LAUNCHERS:
                self._fail_warm_up(group.failure.message if group.failure else "the script ended")
        if not self._has_devices(job):
            return False
        if wanted is None:
            return stand_by and (group.regroup == "waiting" or (group.number == 0 and group.alive))
        return wanted.regroup and wanted.number > self.newest and group.regroup == "waiting"

    def _has_devices(self, job: Job) -> bool:
        """Whether the job's workers have the devices that the job has now."""
        return self._node.claims.devices(self._id) == self._devices(job)

    def _devices(self, job: Job) -> tuple[int, ...]:
        return job.devices or tuple(range(self._node.devices))

    def _need(self, job: Job) -> memory.Need:
        return memory.Need(self._folder, job.bundle.state_bytes)

    def _warm_up(self, job: Job) -> None:
        """Start workers that wait for a generation, if there is room for them."""
        self.warm_up_failed = ""
        if self._node.claims.holder(self._devices(job)):
            return
        try:
            self._node.claims.check(self._devices(job), self._need(job), self._node.devices)
            group = job.warm_up()
        except (SpotrunError, OSError) as error:  # the node may still be able to begin a generation later
            log.warning("job %s: cannot warm up: %s", self._id, error)
            self._fail_warm_up(str(error))
            return
        self._follow(job, group)

    def _fail_warm_up(self, why: str) -> None:
        """A later try may succeed: what the set-up needs may be there then. Each turn may say this until then."""
        if not self.warm_up_failed:
            self.warm_up_failed, self._again_at = why, time.monotonic() + self._again.next()

    def _regroup(self, job: Job, wanted: Generation, rank: int) -> bool:
        """Have the waiting workers join the generation. False: the workers cannot join, and must end."""
        try:
            self._follow(job, job.regroup(wanted, rank))
        except OSError as error:  # memory or disk may be full
            log.error("job %s: no regroup for generation %s: %s", self._id, wanted.number, error)
            return False
        self._join(wanted.number)
        return True

    def _start(self, job: Job, wanted: Generation, rank: int, waiting: tuple[str, float]) -> None:
        if rank == 0 and not job.store_is_free:
            return  # until the launcher names another store: then a turn comes here again
        if rank == 0 and wanted.store != job.store:
            self.newest = wanted.number
            self._refuse(wanted.number, rank, f"generation {wanted.number} cannot start: its store is gone")
            return
        claims = self._node.claims
        if held := claims.holder(self._devices(job)):
            why = f"waiting for device {held[0]}, which workers of {held[1]} use"
            self.waiting = (why, waiting[1] or time.time())
            self.not_started = None
            return
        try:
            claims.check(self._devices(job), self._need(job), self._node.devices)
            group = job.start(wanted, rank)
        except (SpotrunError, OSError) as error:  # memory or disk may be full; each turn tries again
            message = f"generation {wanted.number} cannot start on this node: {error}"
            if self.not_started is None or self.not_started.message != message:
                log.error("job %s: %s", self._id, message)
                self.not_started = Failure(kind="setup", rank=rank, at=time.time(), message=message)
            return
        self._follow(job, group)
        self._join(wanted.number)

    def _join(self, generation: int) -> None:
        """The node takes part in the generation."""
        self.newest, self.not_started, self.warm_up_failed = generation, None, ""
        self._launchers_lost, self._again_at = 0, 0.0
        self._again.reset()

    def _follow(self, job: Job, group: WorkerGroup) -> None:
        """The group's workers have the job's devices, and their output goes into the bucket."""
        self._node.claims.make(self._id, self._devices(job), self._need(job), lambda: group.living)
        self._logs.turn_page()
        for each in group.workers:
            key = log_key(self._id, group.number, self._node.identity.name, each.rank)
            self._logs.follow(each.log, key, lasts=group.number == 0)  # of all workers that warm up

    async def end_group(self, job: Job, group: WorkerGroup) -> None:
        await group.end()
        if group.alive:
            log.error("workers of generation %s did not end; the launcher is ended with them", group.number)
            await job.restart_launcher()

    async def end_unreported(self, job: Job, group: WorkerGroup) -> None:
        """End workers whose launcher does not answer. `end_group` then ends the launcher, too."""
        if group.failure is None:
            message = "a worker has ended, and the launcher of the workers does not report how"
            group.group_failure = Failure(kind="signal", rank=group.workers[0].rank, at=time.time(), message=message)
        await self.end_group(job, group)


def _goes_on(group: WorkerGroup | None, order: JobOrder) -> bool:
    """Whether these workers take part in the generation after a drain, or can join it now."""
    if group is None or order.next is None:
        return False
    if group.number == order.next.number:
        return True
    # Workers that have lost a peer wait for an order: the generation after the drain may not begin.
    stopped = order.generation is None or group.stopped_in(order.generation.number)
    return stopped and group.regroup == "waiting"


def _call_back(group: WorkerGroup) -> bool:
    """Have workers leave a generation that does not begin, or that went on without them while this node was silent.

    Call it if a look a moment ago has found that they can regroup, and do not wait yet. True: they still have time to
    leave. After that, they can join another generation.
    """
    # Workers without peers complete their steps, and nothing would stop them.
    peers = len(group.generation.members) > 1
    if not group.forms and not (peers and group.number > 0):
        return False
    release(group)  # they may leave at any moment, or have left by now: then the next turn finds that they wait
    return time.time() - group.released_at < CALL_BACK


def release(group: WorkerGroup) -> None:
    """Tell workers that can regroup to leave their generation. Later calls change nothing.

    Call it if a peer is gone or silent, or if the generation does not begin.
    """
    group.released_at = group.released_at or time.time()
    for each in group.workers:
        able = group.joining or each.control.able > 0
        if each.code is None and able and each.control.released != group.number:
            each.control.released = group.number
            wake(str(worker_fifo(each.path)))


def drop_group(job: Job) -> None:
    """Forget the job's workers, which have ended."""
    if job.group is not None:
        job.group.close()
        job.group = None
