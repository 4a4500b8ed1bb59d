"""The state of a job as the head keeps it in the bucket (jobs/<id>/state.json), and the actions that change it. Pure.

`planner.plan` chooses actions, and `apply` returns the state after an action. The head does the I/O that follows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, PlainSerializer, SkipValidation

from spotrun.folders import FoldersRef, Input
from spotrun.head.actions import AbortSave as AbortSave
from spotrun.head.actions import Action as Action
from spotrun.head.actions import CountFailure as CountFailure
from spotrun.head.actions import Drain as Drain
from spotrun.head.actions import DumpStacks as DumpStacks
from spotrun.head.actions import EndGeneration as EndGeneration
from spotrun.head.actions import Finish as Finish
from spotrun.head.actions import KeepFolders as KeepFolders
from spotrun.head.actions import KeepNode as KeepNode
from spotrun.head.actions import LetGo as LetGo
from spotrun.head.actions import Release as Release
from spotrun.head.actions import Resume as Resume
from spotrun.head.actions import Save as Save
from spotrun.head.actions import SetEnding as SetEnding
from spotrun.head.actions import SetIdle as SetIdle
from spotrun.head.actions import Start as Start
from spotrun.head.actions import Stop as Stop
from spotrun.head.costs.bill import Line
from spotrun.head.job_parts import Cause as Cause
from spotrun.head.job_parts import Draining as Draining
from spotrun.head.job_parts import Ending as Ending
from spotrun.head.job_parts import Idle as Idle
from spotrun.head.job_parts import Interruption as Interruption
from spotrun.head.job_parts import KeptNode as KeptNode
from spotrun.head.job_parts import Progress as Progress
from spotrun.head.job_parts import Released as Released
from spotrun.head.job_parts import Saving as Saving
from spotrun.head.speeds import Slow, Speed
from spotrun.head.timeline import Timeline
from spotrun.spec import JobSpec
from spotrun.wire import Failure, Generation, Kept, Manifest, Member, Report, StateRef

Phase = Literal["queued", "starting", "running", "draining", "waiting", "finishing", "succeeded", "failed", "stopped"]
ENDED = ("succeeded", "failed", "stopped")
# Kinds of `Cause`: a machine was lost or will be, or something is wrong with the script or its workers.
LOSSES, FAILURES = frozenset({"kill", "preempt", "silent"}), frozenset({"crash", "hang", "start"})
_INTERRUPTIONS = AliasChoices("interruptions", "losses")  # until version 0.1, the key was `losses`


def _read_spec(values: object) -> JobSpec:
    """Keep keys that a newer head has written: that head may take up the job again."""
    return JobSpec.model_validate(values, extra="allow")


def as_accepted(spec: JobSpec) -> dict[str, Any]:
    """The job file with the keys that it had when a head accepted the job, without defaults of keys that came later.

    Agents end a job's workers if its file changes, so a head of a later version must not add its own defaults.
    """
    return spec.model_dump(mode="json", exclude_unset=True)


class JobState(Kept):
    """Everything that a new head must know of a job."""

    id: str
    name: str
    cluster: str
    epoch: int = 0  # of the head that last took up the job
    code: str
    spec: Annotated[JobSpec, BeforeValidator(_read_spec), PlainSerializer(as_accepted)]
    phase: Phase = "queued"
    reason: str = ""
    submitted: float
    started: float | None = None
    ended: float | None = None
    generation: int = 0  # number of the newest generation that has begun
    following: Generation | None = None  # as the last drain has named it; None: another one has begun since then
    current: Generation | None = None
    ordered_at: float = 0.0  # when `current` was given out, or when the last one ended
    last: tuple[Member, ...] = ()  # members of the newest generation, in rank order
    trained: tuple[str, ...] = ()  # nodes of its generations since the newest checkpoint, with those that took it
    draining: Draining | None = None
    saving: Saving | None = None
    checkpoints: tuple[StateRef, ...] = ()  # complete ones, newest first
    saved_at: float = 0.0
    given_up_at: float = 0.0  # when a checkpoint was last given up
    state_bytes: int = 0  # size of the newest complete checkpoint
    upload: float = 0.0  # seconds that its slowest part took into the bucket; 0: not known
    dumping: bool = False
    released: Released | None = None  # set if the workers of `current` were told to leave it
    regroups: bool = False  # whether its workers can join another generation without a restart; nodes warm up for it
    new_workers: bool = False  # whether the next generation needs new workers, because the old ones may be broken
    stopping: str = ""  # why the job should stop; empty: it should not
    ending: Ending | None = None
    idle: Idle | None = None
    paused: str = ""  # why the job should not train until an operator resumes it; empty: it should
    resumed_at: float = 0.0  # when an operator last resumed or relaunched it
    after: tuple[str, ...] = ()  # ids of the jobs that it still waits for, see `JobSpec.after`
    blocked: str = ""  # the same, as a text for operators; empty: it waits for none
    inputs: tuple[Input, ...] = ()  # folders of the jobs that it waited for
    folders: FoldersRef | None = None  # the folders that it has left in the bucket
    priority: int | None = None  # as an operator has set it; None: as in the job file
    budget: float | None = None  # USD, as an operator has set it; None: as in the job file
    restarts: int = 0
    failure: Failure | None = None
    failed_node: str = ""
    stacks: str = ""
    kept_node: KeptNode | None = None  # see `JobSpec.keep_on_failure`
    progress: Progress = Progress()
    reached: int = 0  # the newest step of the newest generation that has restored a state
    pace: float = 0.0  # seconds a step, of the newest generation that completed steps
    paced: int = 0  # nodes of that generation; 0: not known
    speeds: tuple[Speed, ...] = ()  # how fast it was on which machines
    slow: tuple[Slow, ...] = ()  # workers that are slower than the others
    interruptions: tuple[Interruption, ...] = Field(default=(), validation_alias=_INTERRUPTIONS)
    good_seconds: float = 0.0  # node-seconds in steps that counted, of ended generations
    node_seconds: float = 0.0
    spent: dict[str, float] = Field(default={})  # node_seconds by what the machines did, see `head.node_time`
    timeline: SkipValidation[Timeline] = Field(default=Timeline(), exclude=True)
    """`spent` by machine and time. The timeline is too large for the state, and no decision needs it."""
    stalled: float = 0.0  # node-seconds that ended generations spent copying snapshots
    cost: float = 0.0  # USD, as far as prices are known
    account: tuple[Line, ...] = ()  # time and cost by month, pool and market; older heads did not write it
    unpriced: dict[str, float] = Field(default={})  # machine-seconds by pool that an older head counted without a price
    hourly: float = 0.0  # USD an hour, at present
    counted_at: float = 0.0  # node_seconds are counted up to here

    @property
    def next_number(self) -> int:
        """A number that no generation has, and that no drain has named."""
        return max(self.generation, self.following.number if self.following else 0) + 1

    @property
    def ended_already(self) -> bool:
        return self.phase in ENDED

    @property
    def over(self) -> bool:
        """Whether it has ended and keeps no node: the head can forget it."""
        return self.ended_already and self.kept_node is None

    @property
    def keeper(self) -> Member | None:
        """Which node should upload the job's folders now; None: there is nothing to upload."""
        due = self.ending is not None and self.ending.phase == "succeeded" and self.spec.keep and self.last
        return self.last[0] if due and (self.folders is None or self.folders.generation < self.generation) else None

    @property
    def resting(self) -> bool:
        """Whether its machines have been given back, and the head asks for none at the moment; see `planner.idle`."""
        return self.current is None and self.idle is not None and self.idle.next > 0 and not self.idle.until

    @property
    def wants_nodes(self) -> bool:
        """Whether it should train as soon as it has nodes."""
        ends = self.ended_already or self.ending is not None or bool(self.stopping)
        return not (ends or self.paused or self.blocked or self.resting)

    @property
    def rank(self) -> int:
        """Its priority now."""
        return self.spec.priority if self.priority is None else self.priority

    @property
    def cost_limit(self) -> float | None:
        """USD that it may cost now; None: any sum."""
        return self.spec.budget if self.budget is None else self.budget

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the current generation in rank order; none if no generation is under way."""
        return self.current.members if self.current else ()

    @property
    def no_step_since_regroup(self) -> bool:
        """Whether the current generation began without a restart, and has completed no step yet."""
        begun = self.current is not None and self.current.regroup
        return begun and not self.has_stepped

    @property
    def has_stepped(self) -> bool:
        """Whether the current generation has completed a step."""
        return self.progress.step > max(self.progress.base, -1)

    @property
    def involved(self) -> frozenset[str]:
        """The nodes that may hold a state of it. What others say about it does not count: the code of a job may lie."""
        members = (*self.last, *(self.following.members if self.following else ()))
        return frozenset([*self.trained, *(member.node for member in members)])

    def has_left_behind(self, report: Report) -> bool:
        """Whether others have made steps since a node's workers were in a generation.

        Then these workers cannot join the next one: the script may be in another epoch there. That is so if the node
        was silent, and the others went on without it.
        """
        work = report.of(self.id)
        if work is None or work.generation >= self.generation:
            return False
        steps = [each.step for each in (*work.workers, *work.before) if each.step >= 0]
        if not steps or not (self.has_stepped or abs(self.reached - max(steps)) > 1):
            return False
        return all((each.node, each.boot) != (report.node, report.boot) for each in self.members)

    @property
    def kept(self) -> Member | None:
        """The node that is kept for a person, or will be when the job's last state is in the bucket."""
        if self.kept_node:
            return self.kept_node.member
        due = self.ending is not None and self.ending.phase == "failed" and self.spec.keep_on_failure is not None
        return next((member for member in self.last if member.node == self.failed_node), None) if due else None

    @property
    def bound(self) -> tuple[Member, ...]:
        """The nodes that must stay the job's: its members, the one with its folders, the one kept for a person."""
        return (*self.members, *filter(None, [self.keeper, self.kept]))

    @property
    def size(self) -> float:
        """How many nodes the current generation has. A part of a node's devices counts as that part of a node."""
        return sum(member.share for member in self.members)

    @property
    def newest(self) -> tuple[int, int]:
        """Generation and step of the newest complete checkpoint."""
        return max(((ref.generation, ref.step) for ref in self.checkpoints), default=(-1, -1))


def apply(job: JobState, action: Action, now: float) -> JobState:
    """The job after the action."""
    match action:
        case Start():
            planned = job.following if action.planned else None
            return _begin(_end_generation(job, action.cause, now), planned or _generation(job, action), now)
        case EndGeneration():
            job = _end_generation(job, action.cause, now)
            phase = "finishing" if action.ending or job.ending else "waiting"
            return job.replace(phase=phase, ordered_at=now, ending=action.ending or job.ending)
        case Drain():
            return _drain(job, action)
        case Save():
            return job.replace(saving=Saving(ref=action.ref, holders=action.holders, since=now))
        case AbortSave():
            return job.replace(saving=None, given_up_at=now)
        case CountFailure():
            job = job.replace(restarts=job.restarts + action.counts, stacks=action.stacks or job.stacks)
            return job.replace(failure=action.failure, failed_node=action.node)
        case DumpStacks():
            return job.replace(dumping=True)
        case Release():
            return job.replace(released=Released(node=action.node, at=now, kind=action.kind))
        case Stop():
            return job.replace(stopping=action.reason)
        case SetEnding():
            return job.replace(ending=action.ending)
        case Resume():
            return job.replace(ending=None, phase="waiting", saving=None)
        case Finish():
            job = _end_generation(job, None, now)
            job = job.replace(phase=action.phase, reason=action.reason, ended=now)
            return job.replace(saving=None, ending=None, idle=None)
        case KeepFolders():
            return job.replace(folders=action.ref)
        case KeepNode():
            return job.replace(kept_node=action.node, last=(action.node.member,))
        case LetGo():
            return job.replace(kept_node=None)
        case SetIdle():
            return job.replace(idle=action.idle)


def saved(job: JobState, complete: tuple[StateRef, ...], manifest: Manifest, now: float, took: float = 0.0) -> JobState:
    """The job after `manifest` was written. complete: the complete ones, newest first. took: s of its slowest part."""
    ref = StateRef(generation=manifest.generation, step=manifest.step)
    saving = None if job.saving and job.saving.ref == ref else job.saving
    # A later version may have written a manifest for the same step: it is not replaced, and counts as this one.
    known = complete if ref in complete else (ref, *complete)
    if not took and job.saving and not saving:
        took = now - job.saving.since  # an upper limit: an agent of an older version does not report `took`
    job = job.replace(state_bytes=sum(file.size for file in manifest.files), upload=took or job.upload)
    if ref.generation == job.generation:
        job = job.replace(trained=tuple(member.node for member in job.last))
    return job.replace(checkpoints=known, saved_at=now, saving=saving)


def by_clock(job: JobState, now: float) -> JobState:
    """The job for a head whose clock may be behind that of the last head.

    No past time is after `now`, and no time-out gets longer. A kept node has a limit of its own.
    """
    saving, released, idle = job.saving, job.released, job.idle
    names = ("submitted", "started", "counted_at", "ordered_at", "saved_at", "given_up_at", "resumed_at")
    times = {name: at for name in names if (at := getattr(job, name)) is not None}
    past = [*times.values(), saving.since if saving else 0.0, released.at if released else 0.0]
    ahead = max([*past, idle.since if idle else 0.0]) - now
    if ahead <= 0:
        return job

    def earlier(at: float) -> float:
        return at - ahead if at else at  # 0: not set

    job = job.replace(**{name: min(at, now) for name, at in times.items()})
    return job.replace(
        saving=saving and saving.replace(since=min(saving.since, now)),
        released=released and released.replace(at=min(released.at, now)),
        idle=idle and idle.replace(since=min(idle.since, now), next=earlier(idle.next), until=earlier(idle.until)),
        draining=job.draining and job.draining.replace(deadline=earlier(job.draining.deadline)),
        ending=job.ending and job.ending.replace(deadline=earlier(job.ending.deadline)),
    )


def good_seconds(progress: Progress, members: float) -> float:
    """Node-seconds that a generation spent in completed steps."""
    return max(0.0, progress.stepped_at - progress.restored_at) * members if progress.step > progress.base else 0.0


def in_doubt(job: JobState, cause: Cause | None) -> bool:
    """Whether the next generation needs new workers. cause: why the current one ends.

    After a failure of the script or its workers, nobody knows whether the workers still work. The same is true after a
    regroup without a step, unless a member that is lost, or will be, explains it.
    """
    if job.current is None:
        return job.new_workers
    kinds = set(cause.kind.split("+")) if cause is not None else set()
    if job.no_step_since_regroup:
        return not kinds or not kinds <= LOSSES
    return bool(kinds & FAILURES)


def _begin(job: JobState, current: Generation, now: float) -> JobState:
    """The job, which has no generation, at the beginning of the next one."""
    involved = job.involved | {each.node for each in current.members}
    job = job.replace(generation=current.number, current=current, last=current.members, trained=tuple(sorted(involved)))
    job = job.replace(ordered_at=now, saving=None)
    return job.replace(phase="starting", started=job.started or now, following=None)


def _generation(job: JobState, action: Start) -> Generation:
    return Generation(
        number=job.next_number,
        members=action.members,
        store=action.store,
        checkpoints=job.checkpoints[:8],
        regroup=action.regroup,
    )


def _drain(job: JobState, action: Drain) -> JobState:
    """The job in a drain. Another stop step does not change the generation after the drain."""
    following = job.following
    if job.draining is None:
        following = _generation(job, action.next) if action.next is not None else None
    draining = Draining(step=action.step, cause=action.cause, deadline=action.deadline)
    return job.replace(draining=draining, phase="draining", saving=None, following=following)


def _end_generation(job: JobState, cause: Cause | None, now: float) -> JobState:
    """Add up what the current generation did. The good seconds are corrected when the lost steps are known."""
    if job.current is None:
        return job
    progress, members = job.progress, job.size
    good = good_seconds(progress, members)
    interruptions = job.interruptions if cause is None else _interrupt(job, cause, good, now)
    return job.replace(
        current=None,
        draining=None,
        dumping=False,
        released=None,
        new_workers=in_doubt(job, cause),
        interruptions=interruptions,
        good_seconds=job.good_seconds + good,
        stalled=job.stalled + progress.stall * members,
        progress=Progress(total_steps=progress.total_steps, metrics=progress.metrics),
    )


def _interrupt(job: JobState, cause: Cause, good: float, now: float) -> tuple[Interruption, ...]:
    """The interruptions with one more. If no step was completed since the last one, both are counted as one."""
    progress = job.progress
    steps = progress.step - progress.base
    if job.interruptions and job.interruptions[-1].seconds is None and steps <= 0:
        last = job.interruptions[-1]
        kinds = last.kind if cause.kind in last.kind.split("+") else f"{last.kind}+{cause.kind}"
        nodes = dict.fromkeys(name for name in (last.node, cause.node) if name)
        return (*job.interruptions[:-1], last.replace(kind=kinds, node=", ".join(nodes)))
    found = Interruption(
        kind=cause.kind,
        node=cause.node,
        at=progress.stepped_at or now,
        generation=job.current.number if job.current else job.generation,
        step=max(progress.step, progress.base, 0),
        step_cost=good / steps if steps > 0 else 0.0,
        nodes=job.size,
    )
    return (*job.interruptions, found)
