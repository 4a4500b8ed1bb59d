"""The planner's decisions as data: a view in, the actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotrun.head.fleet.record import Recreate
from spotrun.head.job_state import (
    AbortSave,
    Cause,
    CountFailure,
    Drain,
    Draining,
    DumpStacks,
    EndGeneration,
    Ending,
    Finish,
    Interruption,
    JobState,
    Progress,
    Save,
    Saving,
    SetEnding,
    Start,
    Stop,
    apply,
)
from spotrun.head.planner.liveness import interrupted
from spotrun.head.view import Node, View
from spotrun.wire import Member, Notice, StateRef
from tests.head.views import (
    NOW,
    A,
    B,
    C,
    D,
    failed,
    failure,
    frozen,
    job,
    listed,
    member,
    node,
    notice,
    part,
    planned,
    spare,
    spec,
    start,
    view,
)

KILL, SILENT, PREEMPT = (Cause(kind=k, node=B) for k in ("kill", "silent", "preempt"))
REPEATS = failure("user").replace(repeats=True)
STUCK = {"stepped_at": NOW - 4.0}
REGROUP_SLOW = start(A, C, cause=SILENT)


def slow(silent: float, stepped: float) -> View:
    """One member is silent, and nobody has completed a step, of 20 s each, for so many seconds."""
    progress = Progress(base=0, step=50, stepped_at=NOW - stepped, pace=20.0)
    others = (node(name, stepped_at=NOW - stepped) for name in (A, C))
    return view(job(A, B, C, progress=progress), frozen(B, silent), *others)


def cannot_join(*names: str) -> tuple[Node, ...]:
    """Members of generation 2 that could not connect to the others, 2 s ago."""
    return tuple(failed(n, "peer", at=NOW - 2, generation=2, reported_at=NOW) for n in names)


def begun_a_moment_ago(*members: str, **changes: Any) -> JobState:
    """A job whose generation uses the store that the first member reports."""
    found = job(*members, phase="starting", progress=Progress(), ordered_at=NOW - 0.1, **changes)
    assert found.current is not None
    return found.replace(current=found.current.replace(store=f"{members[0]}:1"))


CASES: dict[str, tuple[View, tuple[Any, ...]]] = {
    "all members train: nothing is done": (view(job(A, B, C), node(A), node(B), node(C)), ()),
    "all nodes of a new job are ready: it begins with all": (
        view(job(), spare(A), spare(B), spare(C)),
        (start(A, B, C),),
    ),
    "two of three nodes are ready and a third is expected: the job waits": (view(job(), spare(A), spare(B)), ()),
    "two of three nodes are ready and no third is expected: the job begins": (
        view(job(), spare(A), spare(B), expected=2),
        (start(A, B),),
    ),
    "the third node has not come for 11 s: the job begins with two": (
        view(job(), spare(A), spare(B), waiting_since=NOW - 11),
        (start(A, B),),
    ),
    "fewer nodes than the least are ready: the job waits": (view(job(), spare(A), expected=1), ()),
    "a node still prepares: the job waits for it": (view(job(), spare(A), spare(B), spare(C, phase="preparing")), ()),
    "one of four ready nodes is under notice: the job begins without it": (
        view(job(), spare(A), spare(B), spare(C), spare(D, notice=notice())),
        (start(A, B, C),),
    ),
    "more nodes than the most are ready: the job begins with the most": (
        view(job(), spare(D), spare(C), spare(B), spare(A)),
        (start(A, B, C),),
    ),
    "a member is under notice: all drain": (
        view(job(A, B, C), node(A), node(B, notice=notice()), node(C)),
        (Drain(56, PREEMPT, NOW + 27),),
    ),
    "a rebalance recommendation is no notice": (
        view(job(A, B, C), node(A), node(B, notice=Notice(kind="rebalance", deadline=NOW)), node(C)),
        (),
    ),
    "notice before the first step: nothing to lose": (
        view(
            job(A, B, C, phase="starting", progress=Progress(base=40, step=40)),
            node(A),
            node(B, notice=notice()),
            node(C),
        ),
        (start(A, C, cause=PREEMPT),),
    ),
    "one of three members has drained: the others are awaited": (
        view(
            job(A, B, C, draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 27)),
            node(A, phase="drained"),
            node(B, notice=notice()),
            node(C),
        ),
        (),
    ),
    "all members have drained: the next generation begins without the leaving one": (
        view(
            job(A, B, C, draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 27)),
            *(node(A, phase="drained"), node(B, phase="drained", notice=notice()), node(C, phase="drained")),
        ),
        (start(A, C, cause=PREEMPT),),
    ),
    "all members have drained and too few stay: the generation ends": (
        view(
            job(A, B, spec=spec(), draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 27)),
            *(node(A, phase="drained"), node(B, phase="drained", notice=notice(12))),
        ),
        (EndGeneration(PREEMPT),),
    ),
    "a worker had passed the stop step already: a later one is chosen": (
        view(
            job(A, B, C, draining=Draining(step=50, cause=PREEMPT, deadline=NOW + 27)),
            *(node(A, late=50, step=52), node(B, notice=notice()), node(C)),
        ),
        (Drain(67, PREEMPT, NOW + 27),),
    ),
    "a drain has not ended at its deadline: the next generation begins": (
        view(
            job(A, B, C, draining=Draining(step=56, cause=PREEMPT, deadline=NOW - 1)),
            *(node(A), node(B, notice=notice(2)), node(C)),
        ),
        (start(A, C, cause=PREEMPT),),
    ),
    "a member disconnected and its peers failed: it was killed": (
        view(job(A, B, C), failed(A, "peer"), node(B, connected=False), node(C)),
        (start(A, C, cause=KILL),),
    ),
    "a spare takes the place of a killed member, behind the survivors": (
        view(job(C, B, A), node(A), failed(C, "peer"), node(B, connected=False), spare(D)),
        (start(C, A, D, cause=KILL),),
    ),
    "a member only disconnected: nothing is done": (view(job(A, B, C), node(A), node(B, connected=False), node(C)), ()),
    "a member is silent and its peers complete steps: nothing is done": (
        view(job(A, B, C), node(A), node(B, reported_at=NOW - 60), node(C)),
        (),
    ),
    "a member disconnected and the cloud says that it is gone: it was killed": (
        view(job(A, B, C), node(A), node(B, connected=False, cloud="gone"), node(C)),
        (start(A, C, cause=KILL),),
    ),
    "the cloud says that a member is gone, but it reports: nothing is done": (
        view(job(A, B, C), node(A), node(B, cloud="gone"), node(C)),
        (),
    ),
    "a member is silent and nobody completes a step: it is interrupted": (
        view(job(A, B, C), node(A, **STUCK), frozen(B, 4), node(C, **STUCK)),
        (start(A, C, cause=SILENT),),
    ),
    "a member is silent and nobody completes a step, but not for long: nothing is done": (
        view(job(A, B, C), node(A, **STUCK), frozen(B, 2), node(C, **STUCK)),
        (),
    ),
    "all members are silent: the head may be cut off, so nothing is done": (
        view(job(A, B, C), frozen(A, 9), frozen(B, 9), frozen(C, 9)),
        (),
    ),
    "a member is silent, but the head has just woken up: nothing is done": (
        view(job(A, B, C), node(A, **STUCK), frozen(B, 4), node(C, **STUCK), awake_since=NOW - 1),
        (),
    ),
    "another incarnation reports": (
        view(job(A, B, C), node(A), spare(B, boot="b2"), node(C)),
        (Start((*start(A, C).members, Member(node=B, boot="b2", address="127.0.0.1")), "a:1", KILL),),
    ),
    "a member was killed and too few are left: the generation ends": (
        view(job(A, B), failed(A, "peer"), node(B, connected=False)),
        (EndGeneration(KILL),),
    ),
    "the script fails on a member: count it and begin again": (
        view(job(A, B, C), failed(A, "peer"), failed(B, "user", at=NOW - 0.2), node(C)),
        (CountFailure(failure("user", at=NOW - 0.2), B), start(A, B, C, cause=Cause(kind="crash", node=B))),
    ),
    "the script fails more often than max_restarts: the job will fail when its last state is saved": (
        view(job(A, B, C, restarts=3), node(A), failed(B, "user"), node(C)),
        (
            CountFailure(failure("user"), B),
            EndGeneration(ending=Ending(phase="failed", reason="boom", state=StateRef(generation=1, step=48))),
        ),
    ),
    "the script fails in a way that repeats: the job will fail when its last state is saved": (
        view(job(A, B, C), node(A), failed(B, "user", repeats=True), node(C)),
        (
            CountFailure(REPEATS, B),
            EndGeneration(ending=Ending(phase="failed", reason="boom", state=StateRef(generation=1, step=48))),
        ),
    ),
    "the same without a state: the job fails at once": (
        view(job(A, B), node(A, snapshot=None), failed(B, "user", repeats=True, snapshot=None)),
        (CountFailure(REPEATS, B), EndGeneration(), Finish("failed", "boom")),
    ),
    "a job without a generation has such a failure: its end is set": (
        view(job(failure=REPEATS, restarts=1), spare(A), spare(B)),
        (SetEnding(Ending(phase="failed", reason="boom")),),
    ),
    "a set-up that repeats its failure in a generation: the others begin again": (
        view(job(A, B, C), node(A), failed(B, "setup", repeats=True), node(C)),
        (
            CountFailure(failure("setup").replace(repeats=True), B),
            start(A, C, cause=Cause(kind="crash", node=B)),
        ),
    ),
    "the script fails on two members: the earlier failure counts": (
        view(job(A, B, C), failed(A, "user", at=NOW - 0.5), failed(B, "user"), node(C)),
        (CountFailure(failure("user", at=NOW - 0.5), A), start(A, B, C, cause=Cause(kind="crash", node=A))),
    ),
    "a worker dies on a node under notice: that is no failure of the script": (
        view(job(A, B, C), node(A), failed(B, "signal", notice=notice()), node(C)),
        (Drain(56, PREEMPT, NOW + 27),),
    ),
    "a peer is gone, and a new head does not see all members yet: wait for them": (
        view(job(A, B), failed(A, "peer", at=NOW - 5), awake_since=NOW - 1),
        (),
    ),
    "a member refuses its start, and a new head does not see all members yet: wait for them": (
        view(
            job(A, B, generation=2, progress=Progress()),
            spare(A, generation=2, phase="failed", failure=failure("peer"), store="a:2"),
            awake_since=NOW - 1,
        ),
        (),
    ),
    "a worker was killed by a signal: first see whether a peer is gone": (
        view(job(A, B, C), failed(A, "signal"), node(B), node(C)),
        (),
    ),
    "a worker was killed by a signal and no peer is gone: count a failure": (
        view(
            job(A, B, C),
            failed(A, "signal", at=NOW - 2, reported_at=NOW),
            *(failed(n, "peer", at=NOW - 2.1, reported_at=NOW) for n in (B, C)),
        ),
        (CountFailure(failure("signal", at=NOW - 2), A), start(A, B, C, cause=Cause(kind="crash", node=A))),
    ),
    "a worker was killed by a signal because a peer is gone: count no failure": (
        view(job(A, B, C), failed(A, "signal"), node(B, connected=False, cloud="gone"), node(C)),
        (start(A, C, cause=KILL),),
    ),
    "nodes hold different states: one of them saves a later one": (
        view(
            job(A, B, saving=Saving(ref=StateRef(generation=1, step=48), holders=(A, B), since=NOW)),
            *(node(A, parts=(part(0, "x"),)), node(B, parts=(part(1, "y"),))),
        ),
        (
            AbortSave("something that run.track was given differs between nodes; one node saves all of it"),
            Save(StateRef(generation=1, step=56), (A,)),
        ),
    ),
    "nodes hold different states and the job stops: the end of the job is set": (
        view(
            job(saving=Saving(ref=StateRef(generation=1, step=48), holders=(A, B), since=NOW), stopping="so"),
            *(node(A, phase="drained", parts=(part(0, "x"),)), node(B, phase="drained", parts=(part(1, "y"),))),
        ),
        (SetEnding(Ending(phase="stopped", reason="so", state=StateRef(generation=1, step=48))),),
    ),
    "collectives failed: first see who is gone": (
        view(job(A, B, C), failed(A, "peer"), failed(B, "peer"), node(C)),
        (),
    ),
    "collectives failed and no member is gone: count a failure": (
        view(
            job(A, B, C),
            *(failed(n, "peer", at=NOW - 2, reported_at=NOW) for n in (A, B, C)),
        ),
        (CountFailure(failure("peer", at=NOW - 2), A), start(A, B, C, cause=Cause(kind="crash", node=A))),
    ),
    "a member that has not begun the generation does not report: it may be gone": (
        view(job(A, B, C, generation=2, progress=Progress()), *cannot_join(A, C), spare(B, reported_at=NOW - 2.5)),
        (),
    ),
    "it is silent: count no failure": (
        view(job(A, B, C, generation=2, progress=Progress()), *cannot_join(A, C), spare(B, reported_at=NOW - 4)),
        (start(A, C, cause=Cause(kind="silent", node=B)),),
    ),
    "it reports, and is not gone: count a failure": (
        view(job(A, B, C, generation=2, progress=Progress()), *cannot_join(A, C), spare(B, reported_at=NOW)),
        (CountFailure(failure("peer", at=NOW - 2), A), start(A, B, C, cause=Cause(kind="crash", node=A))),
    ),
    "a new head has not seen a member, and its agents may take longer to find the head: it may be gone": (
        view(
            job(A, B, C, generation=2, progress=Progress(), spec=spec(heartbeat_timeout=8)),
            *cannot_join(A, C),
            awake_since=NOW - 12,
        ),
        (),
    ),
    "the script has ended on a node while other nodes trained: the failure says so": (
        view(
            job(A, B, C),
            node(A, phase="succeeded"),
            *(failed(n, "peer", at=NOW - 2, reported_at=NOW) for n in (B, C)),
        ),
        (
            CountFailure(failure("peer", at=NOW - 2, message="the script ended on a, while others trained: boom"), B),
            start(A, B, C, cause=Cause(kind="crash", node=B)),
        ),
    ),
    "another node is ready: all drain to grow": (
        view(job(A, B), node(A), node(B), spare(C)),
        (Drain(56, Cause(kind="grow"), NOW + 60),),
    ),
    "another node is ready, but the generation is young: it does not grow yet": (
        view(job(A, B, ordered_at=NOW - 5), node(A), node(B), spare(C)),
        (),
    ),
    "another node is ready, but few steps are left: it does not grow": (
        view(
            job(A, B, progress=Progress(base=0, step=990, stepped_at=NOW, pace=0.1, total_steps=1000)),
            *(node(A), node(B), spare(C)),
        ),
        (),
    ),
    "the operator stops the job: all drain": (
        view(job(A, B, C, stopping="stopped by the operator"), node(A), node(B), node(C)),
        (Drain(56, Cause(kind="stop"), NOW + 60),),
    ),
    "all members of a stopping job have drained: the generation ends": (
        view(
            job(
                A,
                B,
                stopping="stopped by the operator",
                draining=Draining(step=56, cause=Cause(kind="stop"), deadline=NOW + 9),
            ),
            *(node(A, phase="drained"), node(B, phase="drained")),
        ),
        (EndGeneration(Cause(kind="stop")),),
    ),
    "the operator stops a waiting job: its end is set": (
        view(job(stopping="stopped by the operator"), spare(A)),
        (SetEnding(Ending(phase="stopped", reason="stopped by the operator")),),
    ),
    "the budget is spent: the job stops": (
        view(job(A, B, cost=2.5, spec=spec(budget=2.5)), node(A), node(B)),
        (Stop("the budget of $2.5 is spent"),),
    ),
    "no step is completed for hang_timeout: the stacks are kept": (
        view(
            job(A, B, progress=Progress(base=0, step=50, stepped_at=NOW - 301, pace=0.1)),
            *(node(A, stepped_at=NOW - 301), node(B, stepped_at=NOW - 301)),
        ),
        (DumpStacks(),),
    ),
    "the first step takes longer than hang_timeout: that is no hang": (
        view(
            job(A, B, ordered_at=NOW - 301, progress=Progress()),
            *(node(A, phase="starting", stepped_at=0.0), node(B, phase="starting", stepped_at=0.0)),
        ),
        (),
    ),
    "the checkpoint interval has passed: a step is saved": (
        view(job(A, B, C, saved_at=NOW - 301, started=NOW - 900), node(A), node(B), node(C)),
        (Save(StateRef(generation=1, step=56), (A, B, C)),),
    ),
    "a worker had passed the checkpoint's step already: it is given up": (
        view(
            job(A, B, C, saving=Saving(ref=StateRef(generation=1, step=49), holders=(A, B, C), since=NOW)),
            *(node(A, late=49), node(B), node(C)),
        ),
        (AbortSave("a worker was past the step already"),),
    ),
    "the job waits: the newest state goes into the bucket": (
        view(
            job(),
            node(A, phase="drained"),
            node(B, phase="drained", notice=notice(), snapshot=StateRef(generation=1, step=56)),
        ),
        (Save(StateRef(generation=1, step=56), (B,)),),
    ),
    "the job waits and the newest state is in the bucket: nothing is done": (
        view(job(checkpoints=(StateRef(generation=1, step=48),)), node(A, phase="drained")),
        (),
    ),
    "all members have finished: the last state is saved first": (
        view(job(A, B), node(A, phase="succeeded"), node(B, phase="succeeded")),
        (EndGeneration(ending=Ending(phase="succeeded", state=StateRef(generation=1, step=48))),),
    ),
    "all members have finished and the last state is in the bucket: the job succeeds": (
        view(
            job(ending=Ending(phase="succeeded"), checkpoints=(StateRef(generation=1, step=48),)),
            node(A, phase="succeeded"),
        ),
        (Finish("succeeded", ""),),
    ),
    "one of two members has finished: the other is awaited": (view(job(A, B), node(A, phase="succeeded"), node(B)), ()),
    "one member has finished and another was killed: a generation begins again": (
        view(job(A, B, C), node(A, phase="succeeded"), failed(C, "peer"), node(B, connected=False)),
        (start(A, C, cause=KILL),),
    ),
    "the set-up fails on every node: the job fails": (
        view(job(), spare(A, failure=failure("setup").replace(repeats=True), phase="failed")),
        (Finish("failed", "set-up failed on a: boom"),),
    ),
    "a silent machine is needed: it may come back": (
        view(job(), spare(A), frozen(B, 19, snapshot=None), expected=2, machines=listed(A, B)),
        (),
    ),
    "a silent machine is needed and the cloud still counts it: it is replaced after 20 s": (
        view(job(), spare(A), frozen(B, 21, snapshot=None), expected=2, machines=listed(A, B)),
        (Recreate(node=B, pool="p"),),
    ),
    "a dead machine alone holds the state: the head waits a moment": (
        view(job(), spare(A), frozen(B, 4), expected=2, machines=listed(A, B)),
        (Save(StateRef(generation=1, step=48), (B,)),),
    ),
    "all machines are silent: none is replaced": (
        view(job(), frozen(A, 40, snapshot=None), frozen(B, 40, snapshot=None), machines=listed(A, B)),
        (),
    ),
    "no machine is replaced while the last state goes into the bucket": (
        view(job(ending=Ending(phase="succeeded", deadline=NOW + 9)), node(A), frozen(B, 40), machines=listed(A, B)),
        (Save(StateRef(generation=1, step=48), (A,)),),
    ),
    "the set-up of another job failed: nothing is done": (
        view(job(), spare(A, job="i", failure=failure("setup"), phase="failed")),
        (),
    ),
    "the set-up fails on one node and others still prepare: the job waits": (
        view(job(), spare(A, failure=failure("setup"), phase="failed"), spare(B, phase="preparing")),
        (),
    ),
    "all members leave and spares are ready: the state is saved first": (
        view(
            job(A, B, draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 27)),
            *(node(n, phase="drained", notice=notice(), snapshot=StateRef(generation=1, step=56)) for n in (A, B)),
            *(spare(C), spare(D)),
        ),
        (EndGeneration(PREEMPT),),
    ),
    "the state of leaving members is being uploaded: spares wait for it": (
        view(
            job(
                generation=1,
                saving=Saving(ref=StateRef(generation=1, step=56), holders=(A, B), since=NOW - 1),
                ordered_at=NOW - 2,
            ),
            *(node(n, phase="drained", notice=notice(), snapshot=StateRef(generation=1, step=56)) for n in (A, B)),
            *(spare(C), spare(D), spare("e")),
        ),
        (),
    ),
    "the state of leaving members is in the bucket: spares begin": (
        view(
            job(generation=1, checkpoints=(StateRef(generation=1, step=56),)),
            *(node(n, phase="drained", notice=notice(), snapshot=StateRef(generation=1, step=56)) for n in (A, B)),
            *(spare(C), spare(D), spare("e")),
        ),
        (start(C, D, "e"),),
    ),
    "a node does not have the snapshot any more: its upload is given up": (
        view(
            job(saving=Saving(ref=StateRef(generation=1, step=48), holders=(A,), since=NOW - 9)),
            node(A, phase="drained", late=48),
        ),
        (AbortSave("a node does not have that snapshot any more"),),
    ),
    "a checkpoint takes 200 s: it is not given up": (
        view(
            job(A, B, saving=Saving(ref=StateRef(generation=1, step=40), holders=(A, B), since=NOW - 200)),
            *(node(A), node(B)),
        ),
        (),
    ),
    "the job is done and no holder of its last state has reported to a new head: wait": (
        view(job(last=(member(A), member(B)), ending=Ending(phase="succeeded", deadline=NOW + 50)), awake_since=NOW),
        (),
    ),
    "the job is done and the holder of its last state disconnected: wait": (
        view(job(ending=Ending(phase="succeeded", deadline=NOW + 50)), node(A, connected=False)),
        (),
    ),
    "the job is done and the holder of its last state is gone: finish": (
        view(job(ending=Ending(phase="succeeded", deadline=NOW + 50)), node(A, connected=False, cloud="gone")),
        (Finish("succeeded", ""),),
    ),
    "a new head waits for the last members before it begins with fewer": (
        view(job(generation=1, last=(member(A), member(B), member(C))), spare(A), spare(B), awake_since=NOW - 1),
        (),
    ),
    "a generation ends before rank 0 has reported that it has used its store: another node gets rank 0": (
        view(begun_a_moment_ago(A, B, C), spare(A), node(B, connected=False, cloud="gone"), spare(C)),
        (start(C, A, cause=Cause(kind="kill", node=B)),),
    ),
    "the same with more nodes than it needs: the node with the state is among them": (
        view(
            begun_a_moment_ago(A, B, spec=spec(nodes=2)),
            *(spare(A), node(B, connected=False, cloud="gone"), spare(C), spare(D)),
        ),
        (start(C, A, cause=Cause(kind="kill", node=B)),),
    ),
    "a new head does not wait for a machine that was replaced": (
        view(job(generation=1, last=(member(A), member(B))), spare(A), spare(B, boot="b2"), awake_since=NOW - 1),
        (replace(start(A, B), members=(*start(A).members, start(B).members[0].replace(boot="b2"))),),
    ),
    "all members vanished while there was no head: spares begin": (
        view(job(A, B), spare(C), spare(D), vanished=frozenset((A, B)), awake_since=NOW - 30),
        (start(C, D, cause=Cause(kind="kill", node="a, b")),),
    ),
    "one member has finished and the other hangs: the stacks are kept": (
        view(
            job(A, B, progress=Progress(base=0, step=50, stepped_at=NOW - 301, pace=0.1)),
            *(node(A, phase="succeeded", stepped_at=NOW - 301), node(B, stepped_at=NOW - 301)),
        ),
        (DumpStacks(),),
    ),
    "no member has joined the generation within start_timeout: begin again": (
        view(
            job(A, B, ordered_at=NOW - 601, generation=2, progress=Progress()),
            *(spare(n, generation=1) for n in (A, B)),
        ),
        (start(A, B, cause=Cause(kind="start", node="a, b")),),
    ),
    "workers of a member cannot be ended, so it is unfit: begin without it": (
        view(
            job(A, B, ordered_at=NOW - 2, generation=2, progress=Progress()),
            *(node(A, phase="unfit", unfit=("a worker cannot be ended",)), node(B, generation=2), spare(C)),
        ),
        (start(B, C, cause=Cause(kind="start", node=A), store="b:1"),),
    ),
    "the set-up of a member failed: begin without it": (
        view(
            job(A, B, C, ordered_at=NOW - 2, generation=2, progress=Progress()),
            *(node(A, generation=2), spare(B, failure=failure("setup"), phase="failed"), node(C, generation=2)),
        ),
        (start(A, C, cause=Cause(kind="start", node=B)),),
    ),
    "the launcher of a member ended before it was told to start: begin again, and count no failure": (
        view(
            job(A, B, generation=2, progress=Progress()),
            *(spare(A, generation=2, phase="failed", failure=failure("peer"), store="a:2"), node(B, generation=2)),
        ),
        (start(A, B, cause=Cause(kind="start", node=A), store="a:2"),),
    ),
    "slow steps: the drain fits into the notice": (
        view(
            job(A, B, C, progress=Progress(base=0, step=50, stepped_at=NOW - 5, pace=20.0)),
            *(node(A, stepped_at=NOW - 5), node(B, stepped_at=NOW - 5, notice=notice()), node(C, stepped_at=NOW - 5)),
        ),
        (Drain(51, PREEMPT, NOW + 27),),
    ),
    "slow steps: a frozen member is interrupted before three steps' time has passed": (
        slow(31, stepped=31),
        (REGROUP_SLOW,),
    ),
    "slow steps: a member that is silent for less is not interrupted": (slow(29, stepped=31), ()),
    "slow steps: a silent member is not interrupted while the others may be in a step": (slow(31, stepped=29), ()),
    "a long pause before a notice does not count as many steps": (
        view(
            job(A, B, C, progress=Progress(base=0, step=50, stepped_at=NOW - 45, pace=0.1)),
            *(node(n, stepped_at=NOW - 45, notice=notice() if n == B else None) for n in (A, B, C)),
        ),
        (Drain(56, PREEMPT, NOW + 27),),
    ),
    "nodes that are checked or unfit do not become members": (
        view(job(), spare(A), spare(B, phase="checking"), spare(C, phase="unfit")),
        (),
    ),
    "a node that is checked is no reason to grow": (
        view(job(A, B, ordered_at=NOW - 1000), node(A), node(B), spare(C, phase="checking")),
        (),
    ),
    "the job has ended: nothing is done": (view(job(phase="succeeded")), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_plan(name: str) -> None:
    given, expected = CASES[name]
    assert planned(given) == expected


def test_survivors_keep_their_order_whatever_their_names() -> None:
    """The first rank serves the store: it must be one that has the state, not a newcomer whose name sorts first."""
    given = view(job("z", "y"), failed("z", "peer"), node("y", connected=False), spare("a"))
    (action,) = planned(given)
    assert isinstance(action, Start)
    assert [m.node for m in action.members] == ["z", "a"]


def test_apply_books_what_an_interruption_cost() -> None:
    state = apply(job(A, B, C), start(A, C, cause=KILL), NOW)
    assert state.generation == 2
    assert state.current is not None
    assert state.current.number == 2
    (interruption,) = state.interruptions
    assert (interruption.kind, interruption.node, interruption.step, interruption.generation) == ("kill", B, 50, 1)
    assert state.good_seconds == pytest.approx(3 * 4.95)
    # Struck again before the first step: still the same interruption.
    again = apply(state, start(C, cause=Cause(kind="kill", node=A)), NOW + 1)
    assert [(entry.kind, entry.node) for entry in again.interruptions] == [("kill", "b, a")]


def test_generation_numbers_are_never_used_twice() -> None:
    state = job(A, B, C)
    seen = {state.generation}
    for action in (start(A), EndGeneration(), start(A), start(B), EndGeneration(KILL), start(C)):
        before = state.generation
        state = apply(state, action, NOW)
        if isinstance(action, Start):
            assert state.generation not in seen
            seen.add(state.generation)
        else:
            assert state.generation == before


def test_lost_needs_two_signals() -> None:
    """Every combination of one signal alone leaves the member alone."""
    one_signal = [
        (node(A), node(B, connected=False), node(C)),
        (node(A), node(B, cloud="gone"), node(C)),
        (failed(A, "peer"), node(B), failed(C, "peer")),
        (node(A, **STUCK), node(B, **STUCK), node(C, **STUCK)),
        (node(A), frozen(B, 30), node(C)),
    ]
    for nodes in one_signal:
        assert interrupted(view(job(A, B, C), *nodes)) == {}


def test_loss_entries_are_plain_data() -> None:
    entry = Interruption(kind="kill", node=A, at=1.0, generation=1, step=2)
    assert Interruption.model_validate_json(entry.model_dump_json()) == entry
