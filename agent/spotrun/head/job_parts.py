"""The parts of a job's state (`JobState`). No I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spotrun.wire import Document, Member, Place, StateRef


class Cause(Document):
    """Why a generation ended."""

    kind: str  # preempt (with notice), kill, silent (frozen or cut off), crash, hang, grow, end (a machine retired) …
    node: str = ""


class Interruption(Document):
    """What made a generation end early, and what that cost."""

    kind: str
    node: str
    at: float
    generation: int  # the one that ended
    step: int  # the newest one at that time
    step_cost: float = 0.0  # node-seconds of one step at that time
    nodes: float = 0.0  # how many nodes trained then; 0: not known, because an older head wrote it
    seconds: float | None = None  # from the last step before to the first step after; None while it lasts
    held: float = 0.0  # the part of `seconds` before an operator resumed or relaunched the job
    steps_lost: int | None = None
    phases: tuple[float, ...] = ()  # of the generation after it: ordered, then as in wire.Worker.phases

    @property
    def recovery(self) -> float | None:
        """Seconds to the next step, from when the job could go on; None while it lasts."""
        return None if self.seconds is None else self.seconds - self.held


class Draining(Document):
    """A generation on its way to a common stop."""

    step: int
    cause: Cause
    deadline: float  # when the head stops waiting for it


class Released(Document):
    """The workers of a generation were told to leave it. node, kind: as in the action `Release`. at: when."""

    node: str
    at: float
    kind: str = "silent"


class Saving(Document):
    """A checkpoint being taken: holder i uploads part i."""

    ref: StateRef
    holders: tuple[str, ...]
    since: float


class Ending(Document):
    """What the job will become once its last state is in the bucket."""

    phase: Literal["succeeded", "stopped", "failed"]
    reason: str = ""
    deadline: float = 0.0  # when the job finishes without the checkpoint; 0: not set yet
    state: StateRef | None = None  # the newest one that nodes held when the job ended


class Idle(Document):
    """A job that has had fewer machines than it needs for some time; see `planner.idle`."""

    since: float
    tries: int = 0  # how often the cloud was asked again
    next: float = 0.0  # when it is asked again; 0: the machines are still kept
    until: float = 0.0  # when the current try ends; 0: no try is under way


class Progress(Document):
    """What the current generation has done, from its members' reports."""

    base: int = -1  # the step that it began at
    step: int = -1  # newest completed
    stepped_at: float = 0.0
    restored_at: float = 0.0
    pace: float = 0.0  # seconds a step
    samples_per_second: float = 0.0
    total_steps: int = 0
    metrics: dict[str, float] = Field(default={})
    stall: float = 0.0  # seconds spent copying snapshots, of the worker that spent most
    seen_at: float = 0.0  # when the head first saw the newest step, by its own clock; 0: not known


class KeptNode(Document):
    """The node of a job that has failed, kept for a person."""

    member: Member
    until: float  # when it is let go at the latest, epoch seconds
    made: float = 0.0  # when the cloud made its machine; 0: not known
    place: Place | None = None  # where the job's things are on it; None: its agent is of an older version
