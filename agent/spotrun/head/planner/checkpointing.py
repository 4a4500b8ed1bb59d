"""When a checkpoint is taken, by which nodes, and when it is given up. Pure.

A node that cannot put its part into the bucket tries again by itself, and reports what is wrong (`wire.Trouble`). This
module decides only when other nodes take over the part, and when a newer state is saved instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from spotrun.head.job_state import AbortSave, Action, Finish, Resume, Save
from spotrun.head.planner import patience
from spotrun.head.planner.liveness import reports, silent
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View
from spotrun.wire import Part, StateRef, Trouble

AGAIN = 2.0  # seconds from a checkpoint that is given up until the next one: its cause may still be there
NAMED, NAME = 4, 40  # objects that an event names at most, and characters of a name: a job's code can choose them
DRAIN_AHEAD = 0.3  # seconds between choosing a step and reaching it: several times as long as an order takes to arrive


def secure(view: View) -> tuple[Action, ...] | None:
    """Put the newest snapshot of a reachable node into the bucket; None: the bucket already has the newest state."""
    job = view.job
    newer = patience.unsaved(view)
    holders = [n for n in newer if n.connected]
    if not holders:
        # Do not give up only because the head sees no node: a node with the state may be back in a moment.
        if newer or view.blind():
            return ()
        return (AbortSave("no node holds a state that is not in the bucket"),) if job.saving else None
    holders = [n for n in holders if not silent(view, n)] or holders
    best = max(patience.state(node) for node in holders)
    names = _able(node for node in holders if patience.state(node) == best)
    ref = StateRef(generation=best[0], step=best[1])
    if torn(view, ref):
        names = names[:1]  # the snapshot of a single node is consistent in itself
    if not job.saving or job.saving.ref != ref or not set(job.saving.holders) <= set(names):
        return (Save(ref, names),)
    gone = any(n.work.late == ref.step for n in holders if n.name in job.saving.holders)
    again = gone and view.now - job.saving.since > TIMEOUTS.save_again
    return (AbortSave("a node does not have that snapshot any more"),) if again else ()


def checkpoint(view: View, here: list[Node], now: bool = False) -> tuple[Action, ...]:
    """Begin a checkpoint when the interval has passed; give up one that does not succeed. now: without the interval."""
    job = view.job
    if job.saving:
        return _go_on(view, here)
    since = max(job.saved_at, job.started or view.now)
    due = now or view.now - since >= job.spec.checkpoint_interval
    seen = any(node.work.workers for node in here)  # otherwise the head knows only an old step
    if not due or not seen or not job.has_stepped or view.now - job.given_up_at < AGAIN:
        return ()
    step = ahead(view, here, DRAIN_AHEAD)
    if job.progress.total_steps and step >= job.progress.total_steps:
        return ()  # the end of the job saves the last state anyway
    return (Save(StateRef(generation=job.generation, step=step), _members(view, here)),)


def closing(view: View) -> Finish | Resume:
    """The end of a job whose last state is in the bucket, or for which the head no longer waits.

    If the script had finished and its last state vanished with its nodes, the work is done again. If nodes hold the
    last state and the bucket does not accept it, the job fails. The reason says what is lost.
    """
    job, holders = view.job, patience.unsaved(view)
    assert job.ending is not None
    ending = job.ending
    last = max([(-1, -1), *map(patience.state, holders), *([(s.generation, s.step)] if (s := ending.state) else [])])
    if last <= job.newest:
        missing = patience.unreported(view) if ending.phase != "succeeded" else ""
        return Finish(ending.phase, "; ".join(filter(None, [ending.reason, missing])))
    reachable = [node for node in holders if reports(view, node)]
    kept = f"the newest checkpoint is of step {job.newest[1]}" if job.checkpoints else "there is no checkpoint"
    names = ", ".join(sorted(node.name for node in holders)) or "the nodes that held it"
    lost = f"the state after step {last[1]} is lost, it was not saved by {names}"
    if ending.phase == "succeeded" and not reachable:
        return Resume(f"{lost}; {kept}")
    why = next((f" ({_message(node.work.trouble)})" for node in reachable if node.work.trouble), "")
    phase = "failed" if ending.phase == "succeeded" else ending.phase
    return Finish(phase, "; ".join(filter(None, [ending.reason, lost + why, kept])))


def _go_on(view: View, here: list[Node]) -> tuple[Action, ...]:
    """Give up the checkpoint under way, if it must be given up."""
    job = view.job
    assert job.saving is not None
    saving, waited = job.saving, view.now - job.saving.since
    if (saving.ref.generation, saving.ref.step) <= job.newest:
        return (AbortSave("the bucket has this checkpoint, or a newer one"),)
    if torn(view, saving.ref):
        step = ahead(view, here, DRAIN_AHEAD)
        why = f"{_differing(view, saving.ref)} differs between nodes; one node saves all of it"
        return (AbortSave(why), Save(StateRef(generation=job.generation, step=step), _members(view, here)[:1]))
    if any(node.work.late == saving.ref.step for node in here):
        return (AbortSave("a worker was past the step already"),)
    failing = [n for n in here if n.name in saving.holders and (t := n.work.trouble) and t.step == saving.ref.step]
    others = set(saving.holders) - {node.name for node in failing}
    long = waited > max(TIMEOUTS.save_newer, job.spec.checkpoint_interval)
    if failing and (long or (others and any(map(_steady, failing)))):
        return (AbortSave(f"{failing[0].name} could not save its part: {_message(failing[0].work.trouble)}"),)
    return (AbortSave(f"not complete after {TIMEOUTS.save:.0f} s"),) if waited > TIMEOUTS.save else ()


def _members(view: View, here: list[Node]) -> tuple[str, ...]:
    """Names of the members that each save a part, in the order of their ranks."""
    unable = {node.name for node in here} - set(_able(here))
    return tuple(member.node for member in view.job.members if member.node not in unable)


def _able(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Names of the nodes that have not failed for long; if there are none, the names of all."""
    found = sorted(nodes, key=lambda node: node.name)
    return tuple(node.name for node in [n for n in found if not _steady(n)] or found)


def _steady(node: Node) -> bool:
    """Whether a node has failed so long that other nodes take over. Both times are by the node's clock."""
    trouble = node.work.trouble
    return trouble is not None and trouble.at - trouble.since >= TIMEOUTS.save_elsewhere


def _message(trouble: Trouble | None) -> str:
    return trouble.message if trouble else ""


def ahead(view: View, here: list[Node], seconds: float, pace: float = 0.0) -> int:
    """A step that no worker has reached when the order arrives: `seconds` ahead at the present pace, plus a margin.

    pace: seconds that the next steps take; 0: as many as those before. The margin is two steps, but at most the steps
    of one second: with slow steps, two more could outlast a notice. If a worker has passed the step anyway, its agent
    reports that the order was late.
    """
    pace = max(pace or view.job.progress.pace or 1.0, 1e-4)
    newest = max((w.step for n in here for w in n.work.workers), default=view.job.progress.step)
    stepped_at = max((w.stepped_at for n in here for w in n.work.workers), default=view.now)
    # Only steps since the last report are unknown. A long step before the report must not count as many short steps.
    reported_at = max((n.reported_at for n in here), default=view.now)
    since = max(0.0, view.now - max(stepped_at, reported_at))
    return newest + max(1, math.ceil(round((since + seconds) / pace + min(2.0, 1.0 / pace), 6)))


def torn(view: View, ref: StateRef) -> bool:
    """Whether parts of this checkpoint come from different states: together they would not be a valid state."""
    return len({part.whole for part in _parts(view, ref)}) > 1


def _parts(view: View, ref: StateRef) -> list[Part]:
    """The parts of this checkpoint that are in the bucket."""
    parts = (part for node in view.nodes if node.work.job == view.job.id for part in node.work.parts)
    return [part for part in parts if (part.generation, part.step) == (ref.generation, ref.step)]


def _differing(view: View, ref: StateRef) -> str:
    """What of a torn checkpoint differs between nodes: the names of the objects, as far as they are known."""
    sketches = [part.sketch for part in _parts(view, ref) if part.sketch]
    names = dict.fromkeys(name for each in sketches for name in each)
    found = [name for name in names if len({each.get(name) for each in sketches}) > 1 and name.isidentifier()]
    if not found:
        return "something that run.track was given"
    return f"what run.track was given as {', '.join(name[:NAME] for name in found[:NAMED])}"
