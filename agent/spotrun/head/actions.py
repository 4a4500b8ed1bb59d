"""The actions that `planner.plan` chooses from, for one job. `job_state.apply` says what each does to its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spotrun.folders import FoldersRef
from spotrun.head.job_parts import Cause, Ending, Idle, KeptNode
from spotrun.wire import Failure, Member, StateRef


@dataclass(frozen=True)
class Start:
    """Begin a new generation."""

    members: tuple[Member, ...]
    store: str
    cause: Cause | None = None
    regroup: bool = False  # as in `Generation`
    planned: bool = False  # whether the drain has named this generation as the next one
    others: tuple[str, ...] = ()  # nodes whose code of spotrun is not that of the first one


@dataclass(frozen=True)
class EndGeneration:
    """End the generation. The next one cannot begin yet."""

    cause: Cause | None = None
    ending: Ending | None = None


@dataclass(frozen=True)
class Drain:
    """Stop all workers after `step`."""

    step: int
    cause: Cause
    deadline: float
    next: Start | None = None  # the generation after the drain; None: not known yet
    reason: str = field(default="", compare=False)  # for operators: why now


@dataclass(frozen=True)
class Save:
    """Take a checkpoint."""

    ref: StateRef
    holders: tuple[str, ...]


@dataclass(frozen=True)
class AbortSave:
    """Give up the checkpoint that is being taken."""

    reason: str


@dataclass(frozen=True)
class CountFailure:
    """The user's code has failed. counts: whether this is one of the job's `max_restarts`."""

    failure: Failure
    node: str
    stacks: str = ""
    counts: bool = True


@dataclass(frozen=True)
class DumpStacks:
    """The workers hang: keep their stacks, then end them."""


@dataclass(frozen=True)
class Release:
    """Tell the workers of this generation to leave it. Some members are gone, silent or stopped, or leave soon.

    Without this, the workers would wait for a long time. node, kind: as in the `Cause` for which the generation ends.
    """

    node: str
    kind: str = "silent"
    reason: str = field(default="", compare=False)  # for operators; empty: `node` is gone or silent


@dataclass(frozen=True)
class Stop:
    """End the job early; its state goes into the bucket."""

    reason: str


@dataclass(frozen=True)
class SetEnding:
    """Say what the job will become once its state is in the bucket."""

    ending: Ending


@dataclass(frozen=True)
class Resume:
    """Continue from the checkpoint although the script had finished, because no node has the last state any more."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """End the job."""

    phase: Literal["succeeded", "failed", "stopped"]
    reason: str


@dataclass(frozen=True)
class KeepFolders:
    """The job's folders are in the bucket."""

    ref: FoldersRef


@dataclass(frozen=True)
class KeepNode:
    """Keep a node of the failed job for a person."""

    node: KeptNode


@dataclass(frozen=True)
class LetGo:
    """Give the kept node back."""

    reason: str


@dataclass(frozen=True)
class SetIdle:
    """Give the machines back, or ask for them again."""

    idle: Idle
    why: str


Action = (
    Start
    | EndGeneration
    | Drain
    | Save
    | AbortSave
    | CountFailure
    | DumpStacks
    | Release
    | Stop
    | SetEnding
    | Resume
    | Finish
    | KeepFolders
    | KeepNode
    | LetGo
    | SetIdle
)
