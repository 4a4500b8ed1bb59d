"""When the next generation begins without a restart, and which nodes it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotrun.head import events, status
from spotrun.head.allocation.assignment import as_it_is
from spotrun.head.costs import job_totals
from spotrun.head.events import Event
from spotrun.head.job_state import Action, Cause, Drain, EndGeneration, Progress, Release, Start, apply
from spotrun.head.orders import JobOrders
from spotrun.head.planner import failures, regroup
from spotrun.head.planner.plan import plan
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import FleetView, Node, View, bound
from spotrun.wire import Bundle, Generation, StateRef, Worker
from tests.head.views import NOW, A, B, C, D, failed, failure, job, member, node, notice, spare, spec, start, view

KILL, SILENT = (Cause(kind=kind, node=B) for kind in ("kill", "silent"))
SLOW = Progress(base=0, step=50, stepped_at=NOW - 3, restored_at=NOW - 200, pace=3.0)
FIXED = spec(nodes={"min": 3, "max": 3})


def trains(name: str, **changes: Any) -> Node:
    """A member whose workers could join another generation."""
    return node(name, **{"regroup": "able", **changes})


def taken(name: str) -> Node:
    """A member whose devices another job gets."""
    return replace(trains(name), assigned=False)


def waits(name: str, **changes: Any) -> Node:
    """A member whose workers have noticed the end of a peer, and wait."""
    return failed(name, "peer", **{"regroup": "waiting", **changes})


def warm(name: str, **changes: Any) -> Node:
    """A node whose workers have warmed up."""
    return spare(name, **{"regroup": "waiting", **changes})


def warming(name: str, **changes: Any) -> Node:
    """A node that may soon begin its warm-up."""
    return spare(name, **{"regroup": "no", **changes})


def sets_up(name: str, **changes: Any) -> Node:
    """A node whose workers warm up now."""
    found = warming(name, **{"since": NOW - 10, **changes})
    return replace(found, work=found.work.replace(devices=(0,)))


def lost(name: str, **changes: Any) -> Node:
    return node(name, **{"connected": False, "reported_at": NOW - 0.2, **changes})


def stuck(name: str, **changes: Any) -> Node:
    """A member whose workers wait for a silent one."""
    return trains(name, **{"stepped_at": NOW - 4, **changes})


def frozen(name: str, **changes: Any) -> Node:
    return node(name, **{"reported_at": NOW - 4, "stepped_at": NOW - 4, **changes})


def released(*members: str, at: float = NOW - 0.1) -> Any:
    """A job whose workers were told to leave, because B is silent."""
    return apply(able(*members), Release(B), at)


def ended_by_silence() -> Any:
    """A job whose generation has ended because B was silent. It has too few nodes, and its state is in the bucket."""
    saved = able(A, B, checkpoints=(StateRef(generation=1, step=48),))
    return apply(saved, EndGeneration(SILENT), NOW - 60)


def able(*members: str, **changes: Any) -> Any:
    return job(*members, regroups=True, **changes)


def again(*names: str, cause: Cause | None = None) -> Start:
    return replace(start(*names, cause=cause), regroup=True)


def test_a_failure_soon_after_a_regroup_does_not_count() -> None:
    """The lost node may be the reason: the next rank 0 may lack what the first rank 0 has made at its start."""
    first = job(A, B, C, restarts=3)
    assert first.current is not None
    regrouped = first.replace(current=first.current.replace(regroup=True))
    crash = Cause(kind="crash", node=B)
    members = (node(A), failed(B, "user"), node(C))
    ended, _ = plan(view(first, *members)).actions[:2]
    assert apply(first, ended, NOW).restarts == 4
    counted, begins = plan(view(regrouped, *members)).actions
    assert begins == start(A, B, C, cause=crash)
    after = apply(regrouped, counted, NOW)
    assert (after.restarts, after.failure) == (3, failure("user"))
    late = regrouped.replace(ordered_at=NOW - TIMEOUTS.regrouped - 1)
    ended, _ = plan(view(late, *members)).actions[:2]
    assert apply(late, ended, NOW).restarts == 4


def test_a_failure_soon_after_a_regroup_does_not_end_the_job_even_if_it_repeats() -> None:
    """It may be that of a newcomer, whose surroundings are others. If new workers have it too, the job ends."""
    first = job(A, B)
    assert first.current is not None
    regrouped = first.replace(current=first.current.replace(regroup=True))
    members = (node(A), failed(B, "user", repeats=True))
    counted, begins = plan(view(regrouped, *members)).actions
    assert begins == start(A, B, cause=Cause(kind="crash", node=B))
    after = apply(regrouped, counted, NOW)
    assert (after.restarts, after.failure) == (0, failure("user"))
    assert not failures.final(after), "nor if that generation cannot begin at once"
    again_failed, ended = plan(view(after.replace(current=first.current), *members)).actions
    assert failures.final(apply(after, again_failed, NOW))
    assert isinstance(ended, EndGeneration)
    assert ended.ending is not None
    assert ended.ending.phase == "failed"


def test_a_failure_in_a_warm_up_ends_no_job() -> None:
    newcomer = warming(C, regroup="failed", failure=failure("user").replace(repeats=True))
    assert plan(view(able(A, B), trains(A), trains(B), newcomer)).actions == ()


def with_another(begin: Start) -> Start:
    """The same generation, with B's new machine as its last node."""
    (found,) = (each for each in begin.members if each.node == B)
    members = *(each for each in begin.members if each.node != B), found.replace(boot="b2")
    return replace(begin, members=members)


def with_devices(begin: Start, devices: tuple[int, ...]) -> Start:
    """The same generation, with these devices of its last node."""
    *others, last = begin.members
    return replace(begin, members=(*others, last.replace(devices=devices)))


def begun(*members: str, step: int = 0, **changes: Any) -> Any:
    """A job whose generation has begun without a restart, at step 0."""
    found = apply(able(*members, current=None, **changes), again(*members), NOW - 1)
    return found.replace(progress=Progress(base=0, step=step))


GROW, MOVE = Cause(kind="grow"), Cause(kind="move", node=B)


GROUPED = (Worker(rank=0, pid=1, step=-1, stepped_at=0.0, phases=(NOW - 0.3, NOW - 0.2, NOW - 0.1, 0.0, 0.0)),)


def growing(*members: str, at: float = NOW - 0.2, **changes: Any) -> Any:
    """A job that stops after step 56, to go on with C in generation 2."""
    return apply(able(*members, **changes), Drain(56, GROW, at + 60, next=again(*members, C, cause=GROW)), at)


def leaves(name: str, **changes: Any) -> Node:
    """A member whose machine will be taken in 100 s."""
    return trains(name, **{"notice": notice(100), **changes})


def ahead(name: str, **changes: Any) -> Node:
    """A node whose workers have gone on to generation 2 by themselves."""
    return node(name, **{"generation": 2, "phase": "starting", "regroup": "able", "workers": (), **changes})


def trainers(*names: str) -> tuple[Node, ...]:
    """Members of generation 2."""
    return tuple(trains(name, generation=2) for name in names)


GPU = {"needs_release": True}

cases: dict[str, tuple[View, tuple[Action, ...]]] = {
    "survivors and a spare that has warmed up go on together": (
        view(able(A, B, C), waits(A), lost(B), waits(C), warm(D)),
        (again(A, C, D, cause=KILL),),
    ),
    "workers on GPUs do not notice that a peer is gone: they are told to leave": (
        view(able(A, B, C), stuck(A, **GPU), lost(B, cloud="gone"), stuck(C, **GPU), warm(D)),
        (Release(B, "kill"),),
    ),
    "the same with a silent peer": (
        view(
            able(A, B, C),
            stuck(A, **GPU),
            frozen(B),
            stuck(C, **GPU),
            warm(D, **GPU),
        ),
        (Release(B),),
    ),
    "an abort on a GPU takes time: wait for it": (
        view(released(A, B, C, at=NOW - 14), waits(A), frozen(B), stuck(C, **GPU), warm(D)),
        (),
    ),
    "an abort takes too long: all begin with new workers": (
        view(released(A, B, C, at=NOW - 30), waits(A), frozen(B), stuck(C, **GPU), warm(D)),
        (start(A, C, D, cause=SILENT),),
    ),
    "a worker on a GPU that could not leave has ended: all begin with new workers at once": (
        view(released(A, B, C), waits(A), frozen(B), trains(C, phase="failed", regroup="no", **GPU), warm(D)),
        (start(A, C, D, cause=SILENT),),
    ),
    "workers on GPUs go on after a stop": (
        view(able(A, B), trains(A, **GPU), trains(B, **GPU), warm(C, **GPU)),
        (Drain(56, GROW, NOW + 60, next=again(A, B, C, cause=GROW)),),
    ),
    "a member is silent, so its peers wait for it: they are told to leave": (
        view(able(A, B, C), stuck(A), frozen(B), stuck(C), warm(D)),
        (Release(B),),
    ),
    "they are about to leave: wait for them": (
        view(released(A, B, C), waits(A), frozen(B), stuck(C), warm(D)),
        (),
    ),
    "they have left a silent member": (
        view(released(A, B, C), waits(A), frozen(B), waits(C), warm(D)),
        (again(A, C, D, cause=SILENT),),
    ),
    "one of them does not leave a silent member: all begin with new workers": (
        view(released(A, B, C, at=NOW - 2), waits(A), frozen(B), stuck(C), warm(D)),
        (start(A, C, D, cause=SILENT),),
    ),
    "a member that was silent is back when the others have left, and goes on with them": (
        view(released(A, B, C), waits(A), waits(B), waits(C)),
        (again(A, B, C, cause=SILENT),),
    ),
    "a member that was lost is back when the others have left: the reason is still the loss": (
        view(apply(able(A, B, C), Release(B, "kill"), NOW - 0.1), waits(A), waits(B), waits(C)),
        (again(A, B, C, cause=KILL),),
    ),
    "a member that was silent is back, and has not left yet: wait for it, as for the others": (
        view(released(A, B, C), waits(A), trains(B), waits(C)),
        (),
    ),
    "another machine has a silent member's name, and its peers wait for the old one: they are told to leave": (
        view(able(A, B, C), stuck(A), spare(B, boot="b2"), stuck(C)),
        (Release(B, "kill"),),
    ),
    "they are about to leave the old machine: wait for them": (
        view(released(A, B, C), waits(A), warm(B, boot="b2"), stuck(C)),
        (),
    ),
    "they have left the old machine": (
        view(released(A, B, C), waits(A), warm(B, boot="b2"), waits(C)),
        (with_another(again(A, B, C, cause=KILL)),),
    ),
    "one of them does not leave the old machine: all begin with new workers": (
        view(released(A, B, C, at=NOW - 2), waits(A), spare(B, boot="b2"), stuck(C)),
        (with_another(start(A, B, C, cause=KILL)),),
    ),
    "peers have noticed that another machine has a member's name": (
        view(able(A, B, C), waits(A), warm(B, boot="b2"), waits(C)),
        (with_another(again(A, B, C, cause=KILL)),),
    ),
    "a new head finds no machine of a member, and its peers wait for the old one: they are told to leave": (
        view(able(A, B, C), stuck(A), stuck(C), vanished=frozenset({B})),
        (Release(B, "kill"),),
    ),
    "a survivor stands still when the others have left: they go on without it": (
        view(
            released(A, B, C, at=NOW - 2),
            waits(A),
            frozen(B),
            trains(C, reported_at=NOW - TIMEOUTS.failure - 0.1),
            warm(D),
        ),
        (again(A, D, cause=SILENT),),
    ),
    "the same, and they are too few: they wait for it": (
        view(released(A, B, C, at=NOW - 2), waits(A), frozen(B), trains(C, reported_at=NOW - TIMEOUTS.failure - 0.1)),
        (EndGeneration(SILENT),),
    ),
    "the same on GPUs, and only it has the newest state: they wait for it": (
        view(
            released(A, B, C, at=NOW - 30),
            waits(A, snapshot=None, **GPU),
            frozen(B),
            trains(C, reported_at=NOW - TIMEOUTS.failure - 0.1, **GPU),
            warm(D),
        ),
        (EndGeneration(SILENT),),
    ),
    "the same, but a worker that waits has the state in its memory: they go on without the one that stands still": (
        view(
            released(A, B, C, at=NOW - 2),
            waits(A, snapshot=None),
            frozen(B),
            trains(C, reported_at=NOW - TIMEOUTS.failure - 0.1),
            warm(D),
        ),
        (again(A, D, cause=SILENT),),
    ),
    "a survivor that stood still is back when the others have left: they go on without it": (
        view(released(A, B, C, at=NOW - 2), waits(A), frozen(B), trains(C, reports_since=NOW - 0.3), warm(D)),
        (again(A, D, cause=SILENT),),
    ),
    "a new head came before the workers were told to leave, and one of them does not: all begin with new workers": (
        view(
            released(A, B, C, at=NOW - 2),
            waits(A, reports_since=NOW - 4),
            frozen(B),
            trains(C, reports_since=NOW - 4),
            warm(D),
            awake_since=NOW - 5,
        ),
        (start(A, C, D, cause=SILENT),),
    ),
    "too few waited, and a member that was silent is back: they wait until its workers have left": (
        view(ended_by_silence(), waits(A), trains(B, reports_since=NOW - 0.3)),
        (),
    ),
    "its workers have left: they go on together": (
        view(ended_by_silence(), waits(A), waits(B, reports_since=NOW - 0.3)),
        (again(A, B),),
    ),
    "its workers do not leave, and its agent does not end them: all begin with new workers": (
        view(ended_by_silence(), waits(A), trains(B, reports_since=NOW - TIMEOUTS.regroup)),
        (start(A, B),),
    ),
    "all members were silent, and are back: they wait until all workers have left": (
        view(ended_by_silence(), *(trains(each, reports_since=NOW - 0.3) for each in (A, B))),
        (),
    ),
    "a member is silent, and nobody can regroup: all begin with new workers": (
        view(job(A, B, C), stuck(A, regroup="no"), frozen(B), stuck(C, regroup="no"), spare(D)),
        (start(A, C, D, cause=SILENT),),
    ),
    "a survivor is about to notice the end of its peer: wait for it": (
        view(able(A, B, C), waits(A), lost(B), trains(C), warm(D)),
        (),
    ),
    "a survivor does not notice the end of its peer: all begin with new workers": (
        view(able(A, B, C), waits(A, at=NOW - 2), lost(B, reported_at=NOW - 4), trains(C), warm(D)),
        (start(A, C, D, cause=KILL),),
    ),
    "a survivor in a slow step notices it later: wait for it": (
        view(
            able(A, B, C, progress=SLOW),
            waits(A, at=NOW - 2),
            lost(B, reported_at=NOW - 4),
            trains(C),
            warm(D),
        ),
        (),
    ),
    "but not for longer than new workers need": (
        view(
            able(A, B, C, progress=SLOW.replace(pace=60.0)),
            waits(A, at=NOW - 11),
            lost(B, reported_at=NOW - 13),
            trains(C),
            warm(D),
        ),
        (start(A, C, D, cause=KILL),),
    ),
    "a survivor's workers have ended, too: all begin with new workers": (
        view(able(A, B, C), waits(A), lost(B), failed(C, "peer", regroup="no"), warm(D)),
        (start(A, C, D, cause=KILL),),
    ),
    "enough survivors do not wait for a node that warms up": (
        view(able(A, B, C), waits(A), lost(B), waits(C), warming(D)),
        (again(A, C, cause=KILL),),
    ),
    "too few survivors wait for a node that warms up": (
        view(able(A, B, C, spec=FIXED), waits(A), lost(B), waits(C), warming(D)),
        (EndGeneration(KILL),),
    ),
    "and go on with it when it has warmed up": (
        view(apply(able(A, B, C, spec=FIXED), EndGeneration(KILL), NOW), waits(A), lost(B), waits(C), warm(D)),
        (again(A, C, D),),
    ),
    "but not for longer than a start may take": (
        view(
            apply(able(A, B, C, spec=FIXED), EndGeneration(KILL), NOW - 601),
            waits(A),
            lost(B),
            waits(C),
            warming(D, since=NOW - 601),
        ),
        (start(A, C, D),),
    ),
    "a member under notice is silent, so the others do not notice it: they are told to leave": (
        view(able(A, B, C), stuck(A), frozen(B, notice=notice(20)), stuck(C), warm(D)),
        (Release(B, "preempt"),),
    ),
    "the only member is lost, and a node warms up: no new workers begin": (
        view(able(A, spec=spec(nodes={"min": 1, "max": 2})), lost(A, cloud="gone"), sets_up(B)),
        (EndGeneration(KILL.replace(node=A)),),
    ),
    "too few nodes warm up: all begin with new workers": (
        view(able(A), lost(A, cloud="gone"), sets_up(B), warming(C)),
        (start(B, C, cause=KILL.replace(node=A)),),
    ),
    "a node has warmed up for too long: it begins with new workers": (
        view(
            able(A, spec=spec(nodes={"min": 1, "max": 2})),
            lost(A, cloud="gone"),
            sets_up(B, since=NOW - 601),
            awake_since=NOW - 700,
        ),
        (start(B, cause=KILL.replace(node=A)),),
    ),
    "a node warms up on other devices than the job has there now: it begins with new workers": (
        view(
            able(A, spec=spec(nodes={"min": 1, "max": 2})),
            lost(A, cloud="gone"),
            replace(sets_up(B), devices=(1,)),
        ),
        (with_devices(start(B, cause=KILL.replace(node=A)), (1,)),),
    ),
    "a node has warmed up on other devices than the job has there now: the others go on without it": (
        view(able(A, B, C), waits(A), lost(B), waits(C), replace(sets_up(D, regroup="waiting"), devices=(0, 1))),
        (again(A, C, cause=KILL),),
    ),
    "enough nodes warm up, but not for longer than a start may take": (
        view(
            apply(able(A), EndGeneration(KILL), NOW - 601),
            *(sets_up(each, since=NOW - 601) for each in (B, C)),
        ),
        (start(B, C),),
    ),
    "nobody waits for a node whose warm-up has failed": (
        view(able(A, B, C, spec=FIXED), waits(A), lost(B), waits(C), warming(D, regroup="failed")),
        (start(A, C, D, cause=KILL),),
    ),
    "nobody waits for a node whose agent knows no warm-up": (
        view(able(A, B, C, spec=FIXED), waits(A), lost(B), waits(C), spare(D)),
        (start(A, C, D, cause=KILL),),
    ),
    "a script that cannot go on begins again on all nodes": (
        view(job(A, B, C), failed(A, "peer"), lost(B), failed(C, "peer"), spare(D)),
        (start(A, C, D, cause=KILL),),
    ),
    "the script fails on a member: all begin with new workers": (
        view(able(A, B, C), waits(A), failed(B, "user", at=NOW - 0.2), waits(C)),
        (*plan(view(job(A, B, C), failed(A, "peer"), failed(B, "user", at=NOW - 0.2), failed(C, "peer"))).actions,),
    ),
    "a worker does not get into its next generation: a member may be lost": (
        view(begun(A, B), waits(A, generation=2), node(B, generation=2, phase="starting", regroup="able")),
        (),
    ),
    "the same, and a member has not reported since": (
        view(
            begun(A, B),
            waits(A, generation=2, at=NOW - 2),
            node(B, generation=2, phase="starting", regroup="able", reported_at=NOW - 1.5),
        ),
        (),
    ),
    "the same, and no member is lost: the generation after it has new workers": (
        view(begun(A, B), waits(A, generation=2, at=NOW - 2), node(B, generation=2, phase="starting", regroup="able")),
        (start(A, B, cause=Cause(kind="start", node=A)),),
    ),
    "workers take too long to get into their next generation: the same": (
        view(
            begun(A, B).replace(ordered_at=NOW - 11),
            node(A, generation=2, phase="starting", regroup="able"),
            node(B, generation=2, phase="starting", regroup="able"),
        ),
        (start(A, B, cause=Cause(kind="start", node=f"{A}, {B}")),),
    ),
    "no member has the state, and the bucket is slow: wait": (
        view(
            begun(A, B, checkpoints=(StateRef(generation=1, step=48),)).replace(ordered_at=NOW - 599),
            *(ahead(each, snapshot=None, workers=GROUPED) for each in (A, B)),
        ),
        (),
    ),
    "no member has the state, and the bucket does not answer: new workers": (
        view(
            begun(A, B, checkpoints=(StateRef(generation=1, step=48),)).replace(ordered_at=NOW - 601),
            *(ahead(each, snapshot=None, workers=GROUPED) for each in (A, B)),
        ),
        (start(A, B, cause=Cause(kind="start", node=f"{A}, {B}")),),
    ),
    "no member has the state, and they do not get into the process group: new workers": (
        view(
            begun(A, B, checkpoints=(StateRef(generation=1, step=48),)).replace(ordered_at=NOW - 11),
            *(ahead(each, snapshot=None) for each in (A, B)),
        ),
        (start(A, B, cause=Cause(kind="start", node=f"{A}, {B}")),),
    ),
    "they take long for a large state: wait": (
        view(
            begun(A, B).replace(ordered_at=NOW - 11, state_bytes=int(1e9)),
            node(A, generation=2, phase="starting", regroup="able"),
            node(B, generation=2, phase="starting", regroup="able"),
        ),
        (),
    ),
    "a member is lost again before the first step: the others go on": (
        view(begun(A, B, C), waits(A, generation=2), lost(B, generation=2), waits(C, generation=2)),
        (again(A, C, cause=KILL),),
    ),
    "a member is lost again before the first step, and another one may still join the group: it is told to leave": (
        view(begun(A, B, C), waits(A, generation=2), lost(B, generation=2), ahead(C)),
        (Release(B, "kill"),),
    ),
    "it is about to leave: wait for it": (
        view(
            apply(begun(A, B, C), Release(B, "kill"), NOW - 0.1),
            waits(A, generation=2),
            lost(B, generation=2),
            ahead(C),
        ),
        (),
    ),
    "a new head sees one member whose peer is gone: it waits for the reports of the others": (
        view(begun(A, B, C).replace(ordered_at=NOW - 9), waits(A, generation=2, at=NOW - 5), awake_since=NOW - 4),
        (),
    ),
    "a lost member has not reported to a new head when agents would have found it: the others go on": (
        view(
            begun(A, B, C).replace(ordered_at=NOW - 9),
            waits(A, generation=2, at=NOW - 8),
            waits(C, generation=2, at=NOW - 8),
            awake_since=NOW - 7,
        ),
        (again(A, C, cause=KILL),),
    ),
    "a new head sees only one of those that were told to leave: it waits for the other one": (
        view(apply(begun(A, B, C), Release(B, "kill"), NOW - 3), waits(A, generation=2), awake_since=NOW - 2),
        (),
    ),
    "a new head finds that a machine was replaced: it waits for the other members": (
        view(begun(A, B, C), waits(A, generation=2), spare(B, boot="b2"), awake_since=NOW - 2),
        (),
    ),
    "the other members have reported: they go on": (
        view(begun(A, B, C), waits(A, generation=2), spare(B, boot="b2"), waits(C, generation=2), awake_since=NOW - 2),
        (again(A, C, cause=KILL),),
    ),
    "a new head sees both that were told to leave: it does not wait for the lost one": (
        view(
            apply(begun(A, B, C), Release(B, "kill"), NOW - 3),
            waits(A, generation=2),
            waits(C, generation=2),
            awake_since=NOW - 2,
        ),
        (again(A, C, cause=KILL),),
    ),
    "a new head has waited long enough for the other one that was told to leave: it goes on without it": (
        view(
            apply(begun(A, B, C, spec=spec(nodes={"min": 1, "max": 3})), Release(B, "kill"), NOW - 13),
            waits(A, generation=2),
            awake_since=NOW - 12,
        ),
        (again(A, cause=Cause(kind="kill", node=f"{B}, {C}")),),
    ),
    "a member is silent before the first step after a regroup: its peers are told to leave": (
        view(
            begun(A, B, C).replace(ordered_at=NOW - 8),
            stuck(A, generation=2),
            frozen(B, generation=2),
            stuck(C, generation=2),
            warm(D),
        ),
        (Release(B),),
    ),
    "too few nodes are left after a loss before the first step: the others wait for another one": (
        view(begun(A, B, C, spec=FIXED), waits(A, generation=2), lost(B, generation=2), waits(C, generation=2)),
        (EndGeneration(KILL),),
    ),
    "and go on with it": (
        view(
            apply(begun(A, B, C, spec=FIXED), EndGeneration(KILL), NOW),
            waits(A, generation=2),
            lost(B, generation=2),
            waits(C, generation=2),
            warm(D),
        ),
        (again(A, C, D),),
    ),
    "a script fails before the first step after a regroup: new workers": (
        view(begun(A, B), waits(A, generation=2), failed(B, "user", generation=2)),
        (*plan(view(begun(A, B), failed(A, "peer", generation=2), failed(B, "user", generation=2))).actions,),
    ),
    "a node that has warmed up joins": (
        view(able(A, B), trains(A), trains(B), warm(C)),
        (Drain(56, GROW, NOW + 60, next=again(A, B, C, cause=GROW)),),
    ),
    "a node that has warmed up joins, and a member needs new workers: the next generation is not known yet": (
        view(able(A, B), trains(A), trains(B, regroup="no"), warm(C)),
        (Drain(56, GROW, NOW + 60),),
    ),
    "a member goes to another job, and a node that has warmed up takes its place": (
        view(able(A, B), trains(A), taken(B), warm(C)),
        (Drain(56, MOVE, NOW + 60, next=again(A, C, cause=MOVE)),),
    ),
    "a member goes to another job, and too few nodes stay: the next generation is not known yet": (
        view(able(A, B, spec=spec(nodes={"min": 2, "max": 2})), trains(A), taken(B)),
        (Drain(56, MOVE, NOW + 60),),
    ),
    "all members go to other jobs: the order names no next generation": (
        view(able(A, B), taken(A), taken(B), warm(C)),
        (Drain(56, Cause(kind="move", node=f"{A}, {B}"), NOW + 60),),
    ),
    "the job stops: the order names no next generation": (
        view(able(A, B, stopping="by the operator"), trains(A), trains(B), warm(C)),
        (Drain(56, Cause(kind="stop"), NOW + 60),),
    ),
    "the members have gone on after the drain: the next generation begins": (
        view(growing(A, B), ahead(A), ahead(B), ahead(C)),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "a member has gone on, and another one has stopped: the next generation begins": (
        view(growing(A, B), ahead(A), trains(B, phase="drained", regroup="waiting"), ahead(C)),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "all have stopped, and the newcomer has gone on: the next generation begins": (
        view(growing(A, B), *(trains(each, phase="drained", regroup="waiting") for each in (A, B)), ahead(C)),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "all have stopped, and their agents will have them go on in a moment: the next generation begins": (
        view(growing(A, B), *(trains(each, phase="drained", regroup="waiting") for each in (A, B)), warm(C)),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "all have stopped, and the newcomer warms up again: the others go on": (
        view(
            growing(A, B),
            *(trains(each, phase="drained", regroup="waiting") for each in (A, B)),
            warming(C, regroup="able"),
        ),
        (again(A, B, cause=GROW),),
    ),
    "all have stopped, and the job has other devices of the newcomer now: it joins with these": (
        view(
            growing(A, B),
            *(trains(each, phase="drained", regroup="waiting") for each in (A, B)),
            replace(warm(C), devices=(1,)),
        ),
        (with_devices(again(A, B, C, cause=GROW), (1,)),),
    ),
    "all have stopped, and the newcomer is lost: those who are left go on": (
        view(growing(A, B), *(trains(each, phase="drained", regroup="waiting") for each in (A, B)), lost(C)),
        (again(A, B, cause=GROW),),
    ),
    "a member has gone on, and another one is about to stop: wait for it": (
        view(growing(A, B), ahead(A), trains(B), ahead(C)),
        (),
    ),
    "a member has gone on, and another one's worker has failed at the stop: the first one is called back": (
        view(growing(A, B), ahead(A), waits(B, late=56), ahead(C)),
        (EndGeneration(GROW),),
    ),
    "the members have gone on, and the newcomer is lost: they are called back": (
        view(growing(A, B), ahead(A), ahead(B), lost(C, generation=2, phase="starting")),
        (EndGeneration(GROW),),
    ),
    "the members have gone on, and the newcomer's worker has ended: they are called back": (
        view(growing(A, B), ahead(A), ahead(B), ahead(C, phase="failed", regroup="no")),
        (EndGeneration(GROW),),
    ),
    "the members have gone on, and one of them goes to another job: they are called back": (
        view(growing(A, B), ahead(A), replace(ahead(B), assigned=False), ahead(C)),
        (EndGeneration(GROW),),
    ),
    "the members have gone on, and the job stops: they are called back": (
        view(growing(A, B, stopping="by the operator"), ahead(A), ahead(B), ahead(C)),
        (EndGeneration(GROW),),
    ),
    "a new head waits until it sees a member that may have gone on": (
        view(growing(A, B), ahead(A), ahead(C), began=NOW - 1, awake_since=NOW - 1),
        (),
    ),
    "the members train, and one of them cannot be seen: the generation has begun": (
        view(growing(A, B), ahead(A, workers=GROUPED), lost(B), ahead(C)),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "the members are in the process group, and the newcomer cannot be seen: the generation has begun": (
        view(growing(A, B), ahead(A, workers=GROUPED), ahead(B), lost(C, generation=2, phase="starting", workers=())),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "the members have ended their work, and the head learns it late: the generation has begun": (
        view(growing(A, B), *(ahead(each, phase="succeeded", regroup="no", workers=GROUPED) for each in (A, B, C))),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "the head sees no member when the drain should end: it waits": (
        view(growing(A, B, at=NOW - 61), *(lost(each, reported_at=NOW - 50) for each in (A, B)), lost(C)),
        (),
    ),
    "the head has ended the generation before it learned that the next one trains: that one has begun": (
        view(
            apply(growing(A, B), EndGeneration(GROW), NOW - 1),
            *(ahead(each, phase="running", workers=GROUPED) for each in (A, B, C)),
        ),
        (replace(again(A, B, C), planned=True),),
    ),
    "the same, but another job has got the newcomer, so that generation has ended: the others go on": (
        view(
            apply(growing(A, B), EndGeneration(GROW), NOW - 1),
            *(waits(each, generation=2, workers=GROUPED) for each in (A, B)),
        ),
        (again(A, B),),
    ),
    "the same, and the newcomer is back, but it still ends the workers that it had: the others go on": (
        view(
            apply(growing(A, B), EndGeneration(GROW), NOW - 1),
            *(waits(each, generation=2, workers=GROUPED) for each in (A, B)),
            spare(C, phase="idle", store=""),
        ),
        (again(A, B),),
    ),
    "the head sees only a member that leaves, and that has stopped: the others may train": (
        view(
            apply(able(A, B), Drain(56, MOVE, NOW + 60, next=again(A, cause=MOVE)), NOW - 5),
            lost(A, reported_at=NOW - 4),
            trains(B, phase="drained", regroup="waiting", stepped_at=NOW - 4),
        ),
        (),
    ),
    "a member gets a notice after the others have gone on with it: they wait for their first step": (
        view(begun(A, B), leaves(A, generation=2), trains(B, generation=2), warm(C)),
        (),
    ),
    "the first step after a regroup takes too long for a notice: they are told to leave": (
        view(begun(A, B, C).replace(ordered_at=NOW - 11), leaves(A, generation=2), *trainers(B, C), warm(D)),
        (Release(A, "preempt"),),
    ),
    "steps take long, so they wait longer for their first step": (
        view(begun(A, B, C).replace(ordered_at=NOW - 11, pace=2.0), leaves(A, generation=2), *trainers(B, C), warm(D)),
        (),
    ),
    "so does the transfer of a large state": (
        view(
            begun(A, B, C).replace(ordered_at=NOW - 11, state_bytes=10**9),
            leaves(A, generation=2),
            *trainers(B, C),
            warm(D),
        ),
        (),
    ),
    "but not longer than the notice": (
        view(begun(A, B, C).replace(pace=2.0), leaves(A, generation=2, notice=notice(2)), *trainers(B, C), warm(D)),
        (Release(A, "preempt"),),
    ),
    "all members leave before the first step: nobody waits for their workers, and the state is saved": (
        view(begun(A, B), *(leaves(name, generation=2, notice=notice(2), **GPU) for name in (A, B))),
        (EndGeneration(Cause(kind="preempt", node=f"{A}, {B}")),),
    ),
    "they have left the member with the notice, and go on without it": (
        view(
            apply(begun(A, B, C), Release(A, "preempt"), NOW - 0.1),
            waits(A, generation=2, notice=notice(2)),
            waits(B, generation=2),
            waits(C, generation=2),
            warm(D),
        ),
        (again(B, C, D, cause=Cause(kind="preempt", node=A)),),
    ),
    "the job stops before the first step after a regroup: it does not wait": (
        view(begun(A, B, stopping="by the operator").replace(ordered_at=NOW - 11), *trainers(A, B)),
        (EndGeneration(Cause(kind="stop")),),
    ),
    "the job pauses then, and a node lies about its pace: the wait ends": (
        view(
            begun(A, B, paused="by the operator", pace=1e30).replace(ordered_at=NOW - 611),
            *(replace(each, assigned=False) for each in trainers(A, B)),
        ),
        (EndGeneration(Cause(kind="pause", node="a, b")),),
    ),
    "the members are not in the process group yet, and one of them gets a notice: the next generation begins": (
        view(growing(A, B), leaves(A, generation=2, phase="starting", workers=()), ahead(B), ahead(C)),
        (replace(again(A, B, C, cause=GROW), planned=True),),
    ),
    "only the newcomer has gone on: training goes on": (view(growing(A, B), trains(A), trains(B), ahead(C)), ()),
    "a member dies before its stop: the newcomer that has gone on too early will soon wait again": (
        view(growing(A, B, spec=spec(nodes={"min": 2, "max": 3})), waits(A), lost(B), ahead(C)),
        (EndGeneration(KILL),),
    ),
    "a member dies after its last step, and the others have gone on: they are called back": (
        view(growing(A, B), ahead(A), lost(B, cloud="gone"), ahead(C)),
        (EndGeneration(KILL),),
    ),
    "after a kill, one node that was called back waits, and another one will soon: the head waits": (
        view(apply(growing(A, B), EndGeneration(KILL), NOW), waits(A, generation=2), lost(B), ahead(C)),
        (),
    ),
    "after a kill, both nodes that were called back wait: they go on together": (
        view(apply(growing(A, B), EndGeneration(KILL), NOW), waits(A, generation=2), lost(B), waits(C, generation=2)),
        (again(A, C),),
    ),
    "after a kill, a node that was called back cannot regroup: all begin with new workers": (
        view(apply(growing(A, B), EndGeneration(KILL), NOW), ahead(A, regroup="no"), lost(B), waits(C, generation=2)),
        (start(A, C),),
    ),
    "the stop step came too late for a member: the next generation stays the same": (
        view(growing(A, B), trains(A, late=56, step=57), trains(B), ahead(C)),
        (Drain(72, GROW, NOW - 0.2 + 60),),
    ),
    "a new head waits for a newcomer that may have gone on already": (
        view(growing(A, B), trains(A, phase="drained", regroup="waiting"), ahead(B), awake_since=NOW - 0.1),
        (),
    ),
    "the newcomer does not report in time: the others are called back": (
        view(growing(A, B), trains(A, phase="drained", regroup="waiting"), ahead(B), awake_since=NOW - 11),
        (EndGeneration(GROW),),
    ),
    "not all members of the first generation have said that they train, and whether they can regroup": (
        view(job(A, B), trains(A, since=NOW - 1), node(B, phase="starting", step=-1), warming(C)),
        (),
    ),
    "the same with a notice": (
        view(job(A, B), leaves(A, since=NOW - 1), node(B, phase="starting", step=-1), warm(C)),
        (),
    ),
    "the same, and the job stops": (
        view(job(A, B, stopping="so"), trains(A, since=NOW - 1), node(B, phase="starting", step=-1)),
        (Drain(56, Cause(kind="stop"), NOW + 60, None),),
    ),
    "the same, and the rest of the notice is just enough": (
        view(job(A, B), trains(A, notice=notice(5.5), since=NOW - 1), node(B, phase="starting", step=-1), warm(C)),
        (Drain(56, Cause(kind="preempt", node=A), NOW + 2.5, None),),
    ),
    "a member has not said for long that it trains: the others wait no longer": (
        view(job(A, B), trains(A, since=NOW - 11), node(B, phase="starting", step=-1), warming(C)),
        (Drain(56, GROW, NOW + 60, None),),
    ),
    "a node that warms up does not disturb the others": (view(able(A, B), trains(A), trains(B), warming(C)), ()),
}


@pytest.mark.parametrize("name", cases)
def test_plan(name: str) -> None:
    seen, wanted = cases[name]
    assert plan(seen).actions == wanted


def test_a_new_head_leaves_the_nodes_that_a_drain_has_named_to_the_job() -> None:
    """Otherwise a newcomer that has gone on counts as lost to the job until all nodes of all jobs have reported."""
    found = as_it_is(FleetView(NOW, (growing(A, B),), ()))
    assert found.assigned == {"j": {A: (), B: (), C: ()}}


def test_a_new_head_knows_the_devices_of_workers_that_wait() -> None:
    """With other devices of the same node, these workers would end."""
    waiting = apply(able(A, B), EndGeneration(KILL), NOW)
    survivor = waits(A)
    report = survivor.report.replace(jobs=(survivor.work.replace(devices=(1,)),))
    seen = replace(survivor, report=report), lost(B), warm(C)
    found = as_it_is(FleetView(NOW, (waiting,), seen))
    assert (found.held, found.assigned) == ({"j": {A: (1,), B: (0,)}}, {})
    assert as_it_is(FleetView(NOW, (waiting.replace(paused="by the operator"),), seen)).held == {}
    mine = member(A).model_copy(update={"devices": (0, 1)})
    other = job(A, id="k", current=Generation(number=1, members=(mine,), store="h:1"))
    found = as_it_is(FleetView(NOW, (waiting, other), seen))
    assert found.held == {"j": {B: (0,)}, "k": {A: (0, 1)}}, "nobody takes devices from a job that trains"


def test_a_number_that_a_drain_has_given_is_not_used_twice() -> None:
    drains = growing(A, B)
    assert (drains.generation, drains.following.number, drains.next_number) == (1, 2, 3)
    later = apply(drains, Drain(75, GROW, NOW + 60), NOW)
    assert later.following == drains.following, "the agents know it already"
    went_on = apply(drains, replace(again(A, B, C, cause=GROW), planned=True), NOW)
    assert (went_on.current, went_on.following) == (drains.following, None)
    assert apply(drains, start(A, C, cause=KILL), NOW).generation == 3, "workers may wait for generation 2"
    assert apply(apply(drains, EndGeneration(KILL), NOW), start(A, C), NOW).generation == 3


def test_a_named_newcomer_stays_until_the_time_of_the_drain_is_over() -> None:
    drains = growing(A, B)
    seen = view(drains, stuck(A), stuck(B), now=NOW + 59)
    assert [each.node for each in bound(seen, drains)] == [A, B, C, A, B]
    assert bound(replace(seen, now=NOW + 61), drains) == drains.bound


def test_the_nodes_of_the_next_generation_know_it_before_the_stop() -> None:
    drains, bundle = growing(A, B), Bundle(id="j", code="x", job={})
    orders = {name: JobOrders(drains, bundle).of(name, "b1", (0,)) for name in (A, B, C, D)}
    assert [(name, order.next and order.next.number) for name, order in orders.items()] == [
        (A, 2),
        (B, 2),
        (C, 2),
        (D, None),
    ]
    assert orders[A].stop_at == 56
    taken = JobOrders(drains, bundle).of(C, "b1", None)
    assert (taken.next, taken.devices, taken.stand_by) == (orders[C].next, (), False), "the others wait for it"
    assert JobOrders(drains, bundle).of(C, "b1", (1,)).devices == (), "it joins with those that the others know"
    assert JobOrders(drains, bundle).of(C, "b2", (0,)).next is None, "it is another machine"
    went_on = apply(drains, replace(again(A, B, C, cause=GROW), planned=True), NOW)
    assert JobOrders(went_on, bundle).of(A, "b1", (0,)).next is None


def test_the_last_steps_of_members_that_have_gone_on_count() -> None:
    drains = growing(A, B)
    last = Worker(rank=0, pid=1, step=56, base=10, stepped_at=NOW - 0.05)
    seen = view(drains, ahead(A, before=(last,)), ahead(B, before=(last.replace(rank=1),)))
    assert job_totals.observe(drains, seen).progress.step == 56


def test_a_job_says_that_it_waits_for_a_warm_up() -> None:
    waiting = apply(able(A, B, C, spec=FIXED), EndGeneration(KILL), NOW)
    seen = view(waiting, waits(A), lost(B), waits(C), warming(D))
    assert plan(seen).reason == f"waiting for {D} to warm up"


def test_a_job_says_that_it_waits_for_workers_that_were_called_back() -> None:
    seen = view(ended_by_silence(), waits(A), trains(B, reports_since=NOW - 0.3), warming(D))
    assert plan(seen).reason == f"waiting for {B} to leave the last generation; waiting for {D} to warm up"


def test_only_nodes_of_a_job_that_can_regroup_stand_by() -> None:
    bundle = Bundle(id="j", code="x", job={})
    waiting = apply(able(A, B), EndGeneration(KILL), NOW)
    assert JobOrders(waiting, bundle).of(A, "b1", (0,)).stand_by
    assert not JobOrders(waiting, bundle).of(A, "b1", None).stand_by, "it has no devices there any more"
    assert not JobOrders(waiting.replace(regroups=False), bundle).of(A, "b1", (0,)).stand_by
    assert not JobOrders(waiting.replace(paused="by the operator"), bundle).of(A, "b1", (0,)).stand_by
    training = able(A, B)
    assert not JobOrders(training, bundle).of(A, "b1", (0,)).stand_by, "a member trains"
    assert JobOrders(training, bundle).of(C, "b1", (0,)).stand_by, "a spare warms up"
    assert not JobOrders(training, bundle).of(C, "b1", (0,), fits=False).stand_by, "first, its old workers end"


TRAINS, BEGINS = Progress(base=50, step=51), Progress(base=50, step=50)


@pytest.mark.parametrize(
    ("changes", "seen", "wanted"),
    [
        pytest.param({"progress": TRAINS}, waits(C), True, id="the others train without it"),
        pytest.param({"progress": TRAINS}, trains(C), True, id="the same, and its workers have not noticed"),
        pytest.param({"progress": BEGINS}, waits(C), False, id="the others have made no step yet"),
        pytest.param({"progress": TRAINS}, trains(A), False, id="its agent will soon report that it has gone on"),
        pytest.param({"progress": TRAINS}, trains(A, boot="b0"), True, id="it was a member before it restarted"),
        pytest.param({"progress": TRAINS}, warm(C, generation=1), False, id="it has warmed up"),
        pytest.param({"progress": TRAINS}, trains(C, generation=2), False, id="it has been in the newest generation"),
        pytest.param({"current": None, "reached": 60}, waits(C), True, id="the others have trained without it"),
        pytest.param({"current": None, "reached": 51}, waits(C), False, id="the others have made one step at most"),
        pytest.param({"current": None, "reached": 40}, waits(C), True, id="the others have gone back"),
    ],
)
def test_workers_that_others_have_left_behind(changes: dict[str, Any], seen: Node, wanted: bool) -> None:
    """They may be in another epoch. They end, and new ones warm up."""
    found = apply(able(A, B, C), again(A, B, cause=KILL), NOW - 9).replace(**{"reached": 50, **changes})
    assert found.has_left_behind(seen.report) == wanted
    order = JobOrders(found, Bundle(id="j", code="x", job={})).of(C, "b1", (0,), fits=not wanted)
    assert order.stand_by != wanted


@pytest.mark.parametrize(
    ("cause", "step", "wanted"),
    [
        ("kill", 60, False),
        ("kill", 50, False),
        ("preempt+silent", 50, False),
        ("start", 50, True),
        ("crash", 60, True),
        ("hang", 60, True),
        ("move", 60, False),
        ("move", 50, True),
    ],
)
def test_workers_that_did_not_go_on_well_are_replaced(cause: str, step: int, wanted: bool) -> None:
    """A step of the generation shows that it went on well; 50 is where it began."""
    before = able(A, B, progress=Progress(base=50, step=step))
    assert before.current is not None
    before = before.replace(current=before.current.replace(regroup=True))
    after = apply(before, EndGeneration(Cause(kind=cause)), NOW)
    assert after.new_workers == wanted
    assert apply(after, again(A), NOW).new_workers == wanted


def test_machines_of_two_versions() -> None:
    """Workers of two versions may not understand each other: the event says so before the job fails."""
    nodes = [node(A, code="one"), node(B, code="one"), node(C, code="another"), node(D)]
    alike, mixed = (regroup.start(each, KILL, regroup=True) for each in (nodes[:2], nodes))
    assert (alike.others, mixed.others) == ((), (C,)), "the last one is of a version that does not tell its code"
    said = status.event(job(), mixed)
    assert said is not None
    assert said[1] == (
        "1: 4 nodes (a, b, c, d) (kill: b); other version of spotrun: c; the job may fail: update a cluster between "
        "two jobs"
    )
    assert events.members([Event(at=NOW, kind=said[0], text=said[1])]) == {1: [A, B, C, D]}
