"""Ranks that are slower than the others for some time. Operators are told once, and again when it is over.

Pure, except for `Stragglers`.

A rank's *own time* is its time in a step before the step's first gradients: until then, no rank waits for another. The
*factor* of a rank is its own time divided by the median of the others' own times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spotrun.head.job_state import JobState
from spotrun.head.speeds import Slow
from spotrun.head.view import Node, View

# A rank is judged by parts of its steps. It is slow if it was slow in each of `PARTS` parts, so that one long pause (an
# evaluation, a stalled disk) is not enough, however long it was.
PARTS = 5
STEPS = 10  # of a part, at least: 50 steps in all
SECONDS = 6.0  # of a part, at least: with steps of 5 ms, 50 steps would be a quarter of a second
# A rank becomes slow at the first factor, and is no longer slow below the second. At 1.5, a job whose own time is half
# of a step takes a quarter longer. Between the two factors, everything stays as it is. So operators are not told again
# and again about a rank whose factor is near a limit.
SLOW, OVER = 1.5, 1.2
# How much longer than the others' the own time must be, as a part of a step. Less is not worth an event: to read a
# batch in 2 ms instead of 1 ms is a factor of 2, and nothing in a step of 100 ms.
SHARE = 0.1
NORMAL = 1.0

Key = tuple[str, int]  # a worker: its node, and its number on the node. They stay when ranks change


class Stragglers:
    """What is known about the speeds of all jobs' workers. A new head begins with nothing."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}

    def observe(self, view: View, add_event: Callable[[str, str], None]) -> JobState:
        """The job of a view, with the workers that are slow now. Operators are told of changes."""
        job, before = view.job, self._windows.get(view.job.id, Window())
        if job.generation == before.generation and 0 <= view.now - before.began < SECONDS:
            return job  # no part is complete: with thousands of workers, counting takes time in each turn
        window = look(before, job.generation, view.now, counts(view.members()))
        if window is before:
            return job
        self._windows[job.id] = window
        slow, said = judge(job.slow, window)
        for each in said:
            add_event("slow", each)
        return job if slow == job.slow else job.replace(slow=slow)

    def forget(self, job: str) -> None:
        """The job has ended."""
        self._windows.pop(job, None)


@dataclass(frozen=True)
class Count:
    """What a worker has done in its generation."""

    rank: int
    device: str  # such as `GPU 1`; empty: the node has one worker, or no GPUs
    steps: int
    seconds: float  # of these steps
    own: float  # the part of `seconds` that is the worker's own time


@dataclass(frozen=True)
class Part:
    """One part of a generation's steps."""

    factors: Mapping[Key, float]
    steps: int  # that all workers have completed in it


@dataclass(frozen=True)
class Window:
    """What is known about the speed of a generation's workers."""

    generation: int = 0
    began: float = 0.0  # when the present part began
    counts: Mapping[Key, Count] = field(default_factory=dict)  # at that time
    parts: tuple[Part, ...] = ()  # the newest ones that are complete


def counts(members: Sequence[Node | None]) -> dict[Key, Count]:
    """The workers of a generation; empty if one of them does not report a step."""
    found: dict[Key, Count] = {}
    for node in members:
        workers = node.work.workers if node is not None and node.connected and node.phase == "running" else ()
        if node is None or not workers:
            return {}
        for number, each in enumerate(workers):
            if not 0 <= each.base < each.step:
                return {}
            device = _device(node, number)
            found[node.name, number] = Count(each.rank, device, each.step - each.base, each.stepping, each.alone)
    return found


def look(window: Window, generation: int, now: float, found: Mapping[Key, Count]) -> Window:
    """The window with the newest counts. It is another window if a part is complete."""
    if generation != window.generation or found.keys() != window.counts.keys():
        return Window(generation, now, found)
    if now - window.began < SECONDS or not found:
        return window
    steps = {key: each.steps - window.counts[key].steps for key, each in found.items()}
    if min(steps.values()) < 0:
        return Window(generation, now, found)
    if min(steps.values()) < STEPS:
        return window
    own = {key: (each.own - window.counts[key].own) / steps[key] for key, each in found.items()}
    whole = {key: (each.seconds - window.counts[key].seconds) / steps[key] for key, each in found.items()}
    part = Part(factors(own, _middle(sorted(whole.values()))), min(steps.values()))
    return Window(generation, now, found, (*window.parts, part)[-PARTS:])


def factors(own: Mapping[Key, float], step: float) -> dict[Key, float]:
    """The factor of each worker; `NORMAL` if the difference is too small to matter. own, step: seconds a step."""
    order = sorted(own, key=lambda key: own[key])
    times = [own[key] for key in order]
    found: dict[Key, float] = {}
    for index, key in enumerate(order):
        others = _middle(times, without=index)
        matters = others > 0 and abs(own[key] - others) >= SHARE * step
        found[key] = own[key] / others if matters else NORMAL
    return found


def judge(slow: Sequence[Slow], window: Window) -> tuple[tuple[Slow, ...], list[str]]:
    """The workers that are slow now, and what to tell operators. slow: those that were slow before."""
    if not window.counts:
        return tuple(slow), []
    now: list[Slow] = []
    said: list[str] = []
    for each in slow:
        known = window.counts.get((each.node, each.process))
        if known is None:
            said.append(f"{name(each)} was slow, and has left")
        elif _all(window, (each.node, each.process), lambda factor: factor < OVER):
            said.append(f"{name(each.replace(rank=known.rank))} is not slower than the others any more")
        else:
            now.append(each.replace(rank=known.rank))
    for key in sorted(window.counts.keys() - {(each.node, each.process) for each in slow}):
        if _all(window, key, lambda factor: factor >= SLOW):
            count, found = window.counts[key], [part.factors[key] for part in window.parts]
            each = Slow(node=key[0], process=key[1], rank=count.rank, device=count.device, at=window.began)
            now.append(each := each.replace(factor=round(_middle(sorted(found)), 2)))
            steps = sum(part.steps for part in window.parts)
            said.append(f"{text(each)}, in {steps} steps; `make profile RANK={each.rank}` says what it does")
    return tuple(now), said


def text(slow: Slow) -> str:
    """Which worker is slow, and by how much."""
    return f"{name(slow)} is slow: it takes {slow.factor:.1f} times as long as the others before its gradients"


def name(slow: Slow) -> str:
    """A worker for operators."""
    return f"rank {slow.rank} ({slow.node}{', ' + slow.device if slow.device else ''})"


def _all(window: Window, key: Key, good: Callable[[float], bool]) -> bool:
    return len(window.parts) == PARTS and all(good(part.factors[key]) for part in window.parts)


def _middle(times: Sequence[float], without: int | None = None) -> float:
    """The median of sorted numbers, without the number at an index; 0: there are none."""
    count = len(times) - (without is not None)
    if count <= 0:
        return 0.0

    def at(index: int) -> float:
        return times[index + (without is not None and index >= without)]

    return (at((count - 1) // 2) + at(count // 2)) / 2


def _device(node: Node, number: int) -> str:
    """The GPU of a worker, if the worker has one of its own and the node has measured GPUs."""
    devices = node.devices or tuple(range(node.report.devices))
    own = len(node.work.workers) == len(devices) and node.report.readings.gpus
    return f"GPU {devices[number]}" if own else ""
