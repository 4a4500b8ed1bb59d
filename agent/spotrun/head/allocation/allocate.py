"""Whose is each device? `allocate(claims, hosts)` is pure, and its tests are tables and properties.

The rules:

- A job has no node or at least its `min`. No two of its nodes are on the same machine.
- Priorities are strict. A job takes what it needs, up to its `max`, from jobs of lower priority. The lowest priority
  gives first. Within it, jobs first give what they have over their `min`, then whole jobs stop. Each time, the job that
  was submitted last gives first.
- Within a priority, each job gets its `min` before any job gets more: first jobs that run, then jobs that lost nodes
  and still have some, then the others by submission. What is left is shared evenly, up to `max`. A job that runs gives
  a job of its own priority only what it has over its `min`.
- A job that waits reserves the machines that become free soonest: later jobs of its priority do not start there. Jobs
  that run may grow there, and jobs of lower priority may start there, because moving them away loses no step.
- A job that has fewer nodes than its `min` keeps what it holds (`Allocation.kept`). Later and lower jobs do not get it.
- Spares are served last of all, from what is free. Any job may take them.
- No job is moved without need. A device that a job loses goes to another job in the same allocation, unless the first
  job has no nodes afterwards or asks for less.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import groupby

from spotrun.head.allocation.board import Board, Job, Place, Undo
from spotrun.head.allocation.claims import Allocation, Claim, Host
from spotrun.head.allocation.reasons import Reasons

ROUNDS = 10  # a limit, so that the head can never hang here; random clusters took at most five

__all__ = ["Allocation", "Claim", "Host", "allocate"]


def allocate(claims: Iterable[Claim], hosts: Iterable[Host]) -> Allocation:
    """Whose each device of the hosts is. The order of the claims and of the hosts does not matter."""
    claims = list(claims)
    board = Board(claims, hosts)
    for _ in range(ROUNDS):
        before = board.state()
        for _priority, level in groupby(board.jobs, key=lambda job: job.priority):
            _serve(board, list(level))
        _swap_back(board)
        _add_spares(board)
        # A node that one job gains can let another one start. So go on until another round would change nothing.
        if board.state() == before or all(job.count >= job.most for job in board.jobs):
            break
    reasons = {claim.job: "is paused" for claim in claims if claim.paused}
    why = Reasons(board)
    reasons |= {job.id: why.of(job) for job in board.jobs if job.count < job.most}
    return Allocation(
        nodes={job.id: dict(sorted(job.nodes.items())) for job in board.jobs if job.runs},
        kept={job.id: dict(sorted(job.nodes.items())) for job in board.jobs if job.nodes and not job.runs},
        reasons=reasons,
    )


def _serve(board: Board, level: Sequence[Job]) -> None:
    """Serve the jobs of one priority."""
    while True:
        board.forget()
        _rejoin(board, level)
        board.forget()
        _start(board, level)
        board.forget()
        # A job that has grown can give nodes again. A job that waits may be able to use these, but not the free ones.
        if not _grow(board, level) or all(job.runs for job in level):
            break
    _return(board, level)


def _rejoin(board: Board, level: Sequence[Job]) -> None:
    """Bring jobs that still have nodes back to their `min`, but not with nodes of other such jobs."""
    for job in level:
        if job.nodes and not job.runs:
            undo = _fill(board, job, rejoin=True)
            if not job.runs:
                _undo(undo)


def _start(board: Board, level: Sequence[Job]) -> None:
    """Give each waiting job its `min`, in order of submission."""
    waiting: list[tuple[Job, list[Undo]]] = []
    for job in level:
        if job.runs:
            continue
        undo = _fill(board, job)
        if job.runs:
            continue
        _undo(undo)
        job.reserves = True
        can_ever = len(board.usable(job)) >= job.min
        waiting.append((job, board.reserve(job) if can_ever else []))
    for job, undo in reversed(waiting):
        _undo(undo)
        job.reserves = False


def _fill(board: Board, job: Job, rejoin: bool = False) -> list[Undo]:
    """Give a job nodes until it has its `min` or there are no more."""
    done: list[Undo] = []
    while not job.runs and (move := board.best(job, "rejoin" if rejoin else "start")):
        done += board.make(move, job)
    return done


def _undo(done: list[Undo]) -> None:
    for undo in reversed(done):
        undo()


def _grow(board: Board, level: Sequence[Job]) -> bool:
    """Share evenly what is left: the next node goes to the job with fewest nodes that can use it. False: none grew."""
    grown, again = False, True
    jobs = {job.rank: job for job in level}
    while again:
        again = False
        most = max(job.count for job in level)
        queue = [_turn(job) for job in level if job.runs and job.count < job.most]
        heapq.heapify(queue)
        while queue:
            job = jobs[heapq.heappop(queue)[2]]
            if job.count >= job.most:
                continue
            move = board.best(job, "grow")
            if move is None and job.count + 2 <= most:
                move = board.best_of_equals(job, level)
            if move:
                board.make(move, job)
                most = max(most, job.count)
                grown = again = True
                heapq.heappush(queue, _turn(job))
    return grown


def _turn(job: Job) -> tuple[int, bool, int]:
    """Sorts jobs: fewest nodes first, then the job that had more before, then the job that was submitted first."""
    return job.count, job.count >= len(job.held), job.rank


def _return(board: Board, level: Sequence[Job]) -> None:
    """Return nodes that lower jobs had over their `min`. Take nodes of a lower job that has stopped instead."""
    lower = [job for job in board.jobs if job.priority < level[0].priority]
    if not any(job.nodes and not job.runs for job in lower):
        return
    shrunk = [job for job in lower if job.runs and job.held.keys() - job.nodes.keys()]
    for job in level:
        for name in sorted(job.nodes.keys() - job.held.keys()):
            place = board.places[name]
            losers = [other for other in lower if name in other.held.keys() - other.nodes.keys()]
            if any(other in shrunk for other in losers):
                board.take(place, job)
                for other in losers:
                    _go_back(board, place, other)
                move = board.best(job, "grow")
                assert move  # at least the same one again
                board.make(move, job)


def _go_back(board: Board, place: Place, job: Job) -> None:
    """Give a job the devices that it had on a host, if they are free. A job at its `max` gives up a new node first."""
    before, gained = job.held[place.host.name], sorted(job.nodes.keys() - job.held.keys())
    if any(place.owners[index] for index in before):
        return
    if job.count >= job.most and gained:
        board.take(board.places[gained[-1]], job)
    if job.count < job.most:
        board.put(place, before, job)


def _swap_back(board: Board) -> None:
    """Let a job that loses a machine and gains an equal one stay where it is: the other job gets the new machine."""
    for job in board.jobs:
        gained = sorted(job.nodes.keys() - job.held.keys())
        for lost in sorted(job.held.keys() - job.nodes.keys()) if gained else []:
            place = board.places[lost]
            other = place.owners[0]
            if other is None or lost in other.held or any(owner is not other for owner in place.owners):
                continue
            for name in gained:
                new = board.places[name]
                alike = (new.host.pool, len(new.owners)) == (place.host.pool, len(place.owners))
                alone = all(owner is job for owner in new.owners) and len(job.held[lost]) == len(place.owners)
                if alike and alone and name not in other.nodes and other.claim.may_use(new.host):
                    board.take(place, other)
                    board.take(new, job)
                    board.give(place, job)
                    board.give(new, other)
                    gained.remove(name)
                    break


def _add_spares(board: Board) -> None:
    board.forget()
    for job in board.jobs:
        while job.most <= job.count < job.most + job.claim.spares and (move := board.best(job, "spare")):
            board.make(move, job)
