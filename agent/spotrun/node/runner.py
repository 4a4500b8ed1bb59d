"""One job of this node: it carries out the job's newest order and reports on the job.

Each job has a task of its own (`Runner.run`). So a job that hangs, fails or ends slowly delays no other. Orders are
whole documents, so a turn reads only the newest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from spotrun.backoff import Backoff
from spotrun.errors import SpotrunError
from spotrun.node import about, cleanup, event_files, memory
from spotrun.node.generations import Generations, drop_group, release
from spotrun.node.job import Job, Node
from spotrun.node.kept_folders import Keeper
from spotrun.node.log_uploader import GrowingFiles, LogUploader
from spotrun.node.metrics_uploader import MetricsUploader
from spotrun.node.part_uploader import PartUploader, WantedPart, newest_snapshot
from spotrun.node.phase import Phase
from spotrun.node.workers import WorkerGroup
from spotrun.spec import JobSpec
from spotrun.state.control import NONE
from spotrun.store import event_file_key, log_key
from spotrun.wire import Bundle, Failure, JobOrder, JobReport, StateRef

log = logging.getLogger(__name__)

POLL = 0.05  # seconds between looks at the control blocks while workers live
STANDING_BY = 1.0  # the same while all of them have warmed up and wait: an order or a worker's end wakes the runner
LAST_UPLOAD = 5.0  # seconds that a job waits for an upload of logs before it goes on
AGAIN = (1.0, 30.0)  # seconds until a job begins again after an unexpected error: the first pause, the longest


class Runner:
    """The job `id` on this node. changed: called when `report` has changed in more than progress."""

    def __init__(self, id: str, node: Node, changed: Callable[[], None]) -> None:
        self.id = id
        self.ended = False  # whether the job was told to leave and has left
        self._node, self._changed = node, changed
        self._order: JobOrder | None = None
        self._job: Job | None = None
        self._leaving = asyncio.Event()
        self._slots = node.tmpfs / id / "slots"
        self._snapshot = newest_snapshot(self._slots, id)  # an earlier agent may have left the only copy of a state
        self._read_slots = (-1, 0.0)  # newest committed step, and monotonic seconds, when the slots were last read
        self._logs = LogUploader(node.store)
        self._events = GrowingFiles(node.store, self._event_files)
        self._metrics = MetricsUploader(node.store, id, node.scratch / "metrics" / id)
        self._generations = Generations(id, node, self._slots.parent, self._logs)
        self._part_uploader = PartUploader(node.store, node.scratch / "parts", self.wake)
        self._keeper = Keeper(node.store, self.wake)
        self._saved: StateRef | None = None  # the newest state of which this node has uploaded its part
        self._flushed = 0  # the newest generation whose last logs have been sent to the bucket
        self._flush: asyncio.Task[None] | None = None
        self._again = Backoff(*AGAIN)
        self._about: asyncio.Task[None] | None = None
        self._seed = NONE  # of the script, as far as a turn has seen it
        self._event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._report = self._make_report()

    @property
    def newest(self) -> int:
        """The newest generation that this agent took part in."""
        return self._generations.newest

    @property
    def bundle(self) -> Bundle | None:
        """The job as it is carried out; None if it has not begun here."""
        return self._job.bundle if self._job else None

    @property
    def ranks(self) -> dict[int, tuple[int, float, float]]:
        """What each living worker has done in its generation, see `WorkerGroup.ranks`."""
        group = self._job.group if self._job else None
        return group.ranks() if group is not None and group.living else {}

    @property
    def stuck(self) -> bool:
        """Whether a worker has not ended, although it was killed."""
        group = self._job.group if self._job else None
        return group is not None and group.stuck

    @property
    def interval(self) -> float | None:
        """Seconds until the next look at the workers, or at what their start waits for; None: no look is needed."""
        group = self._job.group if self._job else None
        return POLL if self._generations.waiting[0] else interval(group) or self._generations.pause

    @property
    def report(self) -> JobReport | None:
        """What the last turn found; None: nothing. `devices` is as of now, because another job may have got them."""
        # While the job leaves, which can take seconds, no generation may count on its workers or its state.
        found = JobReport(job=self.id) if self._leaving.is_set() else self._report
        return found and found.replace(devices=self._node.claims.devices(self.id))

    def obey(self, order: JobOrder) -> None:
        """Take the newest order about this job."""
        self._order = order
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self.wake()

    def wake(self) -> None:
        """Take a turn soon."""
        self._event.set()

    def leave(self) -> None:
        """End the job and remove its files in memory. `ended` says when that is done."""
        self._leaving.set()
        self.ended = self.ended or self._task is None
        self.wake()

    def hurry(self) -> None:
        """The machine will be taken: upload as soon as possible."""
        self._metrics.hurry()
        self._part_uploader.hurry()

    async def end(self) -> None:
        """End all processes of the job, because the agent ends. Files stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._job is not None:
            await self._job.end()
            await self._upload_logs()

    async def _run(self) -> None:
        """Take a turn whenever something has changed, and at intervals while workers live, until the job has left."""
        uploads = [asyncio.create_task(each.run()) for each in (self._logs, self._events, self._metrics)]
        try:
            while not self._leaving.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.interval):
                        await self._event.wait()
                self._event.clear()
                await self._take_turn()
            await self._end_job()
            if self._about is not None:  # the workers have ended, so the task waits only for the bucket
                await asyncio.wait({self._about}, timeout=LAST_UPLOAD)
            await asyncio.to_thread(cleanup.remove, [self._slots.parent])
        finally:
            for each in (*uploads, *filter(None, [self._about])):
                each.cancel()
            self.ended = True
            self._changed()

    async def _take_turn(self) -> None:
        """Take a turn. An unexpected error ends the processes of this job, but those of no other job."""
        try:
            if self._order is not None and not self._leaving.is_set():
                await self._turn(self._order)
            self._publish()
        except Exception as error:
            log.exception("job %s: unexpected error; the job begins again", self.id)
            message, snapshot = f"unexpected error on this node: {error!r}"[:1000], self._snapshot  # its files stay
            self._generations.not_started = Failure(kind="setup", rank=0, at=time.time(), message=message)
            with contextlib.suppress(Exception):
                await self._end_job()
            self._job, self._snapshot = None, snapshot  # a worker that still lives keeps its devices: see `Claims`
            self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._again.next()):
                    await self._leaving.wait()
            self.wake()

    async def _turn(self, order: JobOrder) -> None:
        group = None
        if self._node.fit:
            job = await self._apply_bundle(order)
            newest = self.newest
            await self._generations.apply(job, order)
            if self.newest > newest:
                self._again.reset()
            if job.group is not None and job.group.number > 0 and self._about is None:
                self._about = asyncio.create_task(self._write_about(job))
            group = job.group
            if group is not None:
                self._seed = group.workers[0].control.seed
                await self._apply_steps(job, group, order)
            self._find_snapshot(group)
        self._apply_save(group, order)
        self._apply_keep(order)

    async def _apply_bundle(self, order: JobOrder) -> Job:
        """Begin the job as it is ordered. If it has begun in another way, end it first."""
        job, bundle = self._job, order.bundle
        if job is not None and (job.bundle.code, job.bundle.job) != (bundle.code, bundle.job):
            await self._end_job()
        if self._job is None:
            self._job = Job(bundle, self._node, order.devices, self.wake)
            self._job.prepare()
        self._job.bundle, self._job.devices = bundle, order.devices
        return self._job

    async def _apply_steps(self, job: Job, group: WorkerGroup, order: JobOrder) -> None:
        part = self._part_uploader.part
        if not _is_about(order, group):
            order = order.replace(stop_at=None, save=None, release=False, dump=False)
        group.set_steps(order.stop_at, order.save.step if order.save and not part else None)
        if order.release:
            release(group)
        if order.dump and group.alive and not group.stacks:
            await self._end_hung(job, group)
        elif group.unreported():
            await self._generations.end_unreported(job, group)
        elif group.broken:
            self._publish()
            await self._generations.end_group(job, group)
        elif group.alive and (size := memory.excess(self._slots.parent)):
            await self._end_greedy(job, group, size)
        ended = group.number if not group.alive or group.regroup == "waiting" else group.previous
        if ended > self._flushed and not group.joining:
            self._flushed = ended
            self._flush = asyncio.create_task(self._upload_logs())

    async def _end_job(self) -> None:
        """End all processes of the job and forget it. Files stay."""
        job = self._job
        if job is not None:
            await job.end()
            while job.group is not None and job.group.living:  # the kernel kills workers whose launcher is gone
                await asyncio.sleep(POLL)
            drop_group(job)
            await self._upload_logs()
        self._logs.forget()
        self._part_uploader.forget()
        self._keeper.stop()
        self._job, self._generations.waiting, self._snapshot = None, ("", 0.0), None
        self._read_slots, self._flushed = (-1, 0.0), 0

    async def _end_hung(self, job: Job, group: WorkerGroup) -> None:
        """Put the stacks of workers that hang into the bucket, then end the workers."""
        text = await group.dump_stacks()
        key = log_key(self.id, group.number, self._node.identity.name, "stacks")
        with contextlib.suppress(TimeoutError, SpotrunError):
            async with asyncio.timeout(LAST_UPLOAD):
                await asyncio.to_thread(self._node.store.put, key, text)
        group.stacks = key
        message = f"{job.why_hung(group)}; stacks of this node's workers: {key}"
        trace, rank = text.decode(errors="replace")[-20000:], group.workers[0].rank
        group.group_failure = Failure(kind="hang", rank=rank, at=time.time(), message=message, traceback=trace)
        await self._generations.end_group(job, group)
        await self._upload_logs()

    async def _end_greedy(self, job: Job, group: WorkerGroup, size: int) -> None:
        """End workers whose files leave no memory for the snapshots of other jobs, and remove these files."""
        message = (
            f"the script has written {size / 1e6:.0f} MB beside its snapshots into {self._slots.parent}, and no memory "
            "is left for snapshots. Write files to the disk"
        )
        group.group_failure = Failure(kind="user", rank=group.workers[0].rank, at=time.time(), message=message)
        self._publish()
        await self._generations.end_group(job, group)
        for path in await asyncio.to_thread(lambda: list(memory.strays(self._slots.parent))):
            path.unlink(missing_ok=True)

    def _find_snapshot(self, group: WorkerGroup | None) -> None:
        """Read the newest snapshot's record if there may be a new one, but not too often."""
        committed = group.committed if group else -2
        ended = group is not None and (group.regroup == "waiting" or group.phase in ("drained", "failed", "succeeded"))
        seen, at = self._read_slots
        if committed != seen and (ended or committed < 0 or time.monotonic() - at > 10 * POLL):
            self._snapshot = newest_snapshot(self._slots, self.id)
            self._read_slots = (committed, time.monotonic())

    def _apply_save(self, group: WorkerGroup | None, order: JobOrder) -> None:
        """Upload the ordered part of the ordered snapshot, once workers have committed the snapshot."""
        save, ref = order.save, order.upload
        if save is not None and order.generation is not None:
            ref = StateRef(generation=order.generation.number, step=save.step)
        if save is None or ref is None:
            self._part_uploader.want(None)
            return
        saving = False
        if group is not None and group.alive:
            # The snapshot may be committed after its workers have joined the next generation.
            in_time = group.number == ref.generation and group.committed < ref.step
            saving = in_time or (group.previous == ref.generation and group.writes_snapshot)
        if self._part_uploader.part is not None and self._saved != ref:
            self._saved = ref
            self._metrics.soon()  # what was logged up to a state should be in the bucket with the state
        self._part_uploader.want(WantedPart(self.id, self._slots, ref, save.index, save.parts), saving)

    def _apply_keep(self, order: JobOrder) -> None:
        """Upload the folders that the ordered generation has left here."""
        if self._job is None or not order.keep or self.newest != order.keep:
            self._keeper.stop()
            return
        folders = JobSpec.kept(order.bundle.job).keep
        self._keeper.want(self.id, self._job.root, folders, order.keep)

    def _event_files(self) -> dict[Path, str]:
        """The script's event files, with their keys. Called in another thread."""
        job, node = self._job, self._node.identity.name
        found = event_files.find(job.root, job.keep) if job is not None else {}
        return {path: event_file_key(self.id, node, name) for path, name in found.items()}

    async def _write_about(self, job: Job) -> None:
        """Write down what this node has, once its workers have started."""
        while job.group is not None and job.group.phase == "starting":
            await asyncio.sleep(4 * POLL)
        # The workers of a short job may be gone already.
        node, seed = self._node, job.group.workers[0].control.seed if job.group is not None else self._seed
        await asyncio.to_thread(
            about.write, node.store, self.id, node.identity, node.boot, node.devices, job.python_path, seed
        )

    async def _upload_logs(self) -> None:
        """Upload what the workers have printed and logged, when they have ended or wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_UPLOAD):
                uploaders = (self._metrics, self._logs, self._events)
                await asyncio.gather(*(each.upload(all=True) for each in uploaders))

    def _publish(self) -> None:
        before, self._report = self._report, self._make_report()
        if (before and before.essence) != (self._report and self._report.essence):
            self._changed()

    def _make_report(self) -> JobReport | None:
        job, part = self._job, self._part_uploader.part
        uploads: dict[str, Any] = {"parts": (part,) if part else (), "trouble": self._part_uploader.trouble}
        if job is None:
            if self._snapshot is None and self._generations.not_started is None:
                return None  # the job has not begun: the machine is not fit, or the next turn begins the job
            phase: Literal["failed", "idle"] = "failed" if self._generations.not_started else "idle"
            return JobReport(
                job=self.id,
                phase=phase,
                generation=self.newest,
                failure=self._generations.not_started,
                snapshot=self._snapshot,
                late=self._part_uploader.late,
                **uploads,
            )
        group, now = job.group, _phase(job, self._generations.not_started)
        self._find_snapshot(group)  # after the phase: a drain is over when its snapshot is committed
        trains = group is not None and group.number > 0  # workers that warm up do not
        doing, since = self._generations.waiting
        if now == "preparing":
            doing, since = job.doing, job.doing_since
        elif group is not None and now == "starting":
            doing, since = group.doing
        elif self._generations.warm_up_failed:
            doing = f"its workers ended while they warmed up: {self._generations.warm_up_failed}"
        elif group is not None and not trains and group.regroup != "waiting":
            doing, since = f"warming up: {group.doing[0]}", group.doing[1]
        return JobReport(
            job=self.id,
            phase=now,
            devices=self._node.claims.devices(self.id),
            doing=doing,
            doing_since=since,
            generation=self.newest,
            store=job.store,
            workers=group.report() if group and trains else (),
            before=group.before if group and self._order and not _is_about(self._order, group) else (),
            regroup="failed" if self._generations.warm_up_failed else group.regroup if group else "no",
            needs_release=group is not None and group.needs_release,
            failure=job.failure or (group.failure if group and trains else self._generations.not_started),
            snapshot=self._snapshot,
            late=group.late if group and group.late is not None else self._part_uploader.late,
            stops=group.stops if group else None,
            stacks=group.stacks if group else "",
            keeping=self._keeper.keeping,
            place=job.place,
            **uploads,
        )


def _is_about(order: JobOrder, group: WorkerGroup) -> bool:
    """Whether the order is about the generation of these workers.

    It is not while the workers warm up, wait, leave a generation that does not begin, or are in the one after a drain.
    """
    return order.generation is not None and order.generation.number == group.number


def interval(group: WorkerGroup | None) -> float | None:
    """Seconds between looks at these workers; None: they are gone."""
    if group is None or not group.living:
        return None
    return STANDING_BY if group.number == 0 and group.regroup == "waiting" else POLL


def _phase(job: Job, not_started: Failure | None) -> Phase | Literal["preparing", "ready"]:
    if job.group is not None and job.group.number > 0:
        return job.group.phase
    if job.failure is not None or not_started is not None:
        return "failed"
    return "ready" if job.store else "preparing"
