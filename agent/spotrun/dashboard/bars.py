"""The timeline of a run, for drawing. It cuts the head's spans of training into counted time and void time.

The sums are the head's own (`node_time.split`). The head does not know which moment of which machine was void. So void
time is drawn before each interruption, for as long as the lost steps took, and after the interruption, until the
generation ended. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from spotrun.head.costs import node_time
from spotrun.head.costs.bill import HOUR
from spotrun.head.costs.job_totals import goodput
from spotrun.head.job_parts import Interruption
from spotrun.head.job_state import JobState
from spotrun.head.timeline import Span, Timeline

Row = tuple[str, float, float, float]  # kind, start, end (epoch seconds), share of the machine
# What machines do from an interruption to the next step. They may train as well, but then the time is void.
PAUSED = (node_time.RECOVERY, node_time.WAITING, node_time.STARTING, node_time.BOOTING)


def document(job: JobState, timeline: Timeline) -> dict[str, Any]:
    """What the page draws: a bar for each node, marks, and the sums of the account.

    A mark's `dollars` are None while they are not known: the run has no price, or the head has not written the time up
    to the next step yet (`counted` is false). If there is no next step yet, `dollars` is the cost so far.

    `node_time` is in node-seconds by kind and adds up to `node_seconds`. `missing`: node-seconds that the account has
    and the timeline does not: an older head counted them, or a head was killed before it wrote the timeline.
    """
    interruptions = sorted(job.interruptions, key=_at)
    spans = [each for span in timeline for each in _told_apart(span, interruptions)]
    bars: dict[str, list[Row]] = {}
    for span in spans:
        bars.setdefault(span.node, []).append((span.kind, span.start, span.end, span.share))
    drawn = sum(span.seconds for span in timeline)
    booting = sum(span.seconds for span in timeline if span.kind == node_time.BOOTING)
    return {
        "bars": [{"node": node, "spans": _joined(rows)} for node, rows in bars.items()],
        "marks": list(_marks(job, interruptions, timeline)),
        "node_time": node_time.split(job),
        "booting": booting,
        "node_seconds": job.node_seconds,
        "missing": max(0.0, job.node_seconds - drawn - _following(job, timeline)),
        "goodput": goodput(job),
        "cost": job.cost,
    }


def _following(job: JobState, timeline: Timeline) -> float:
    """Node-seconds that the head has counted since it last wrote the timeline of a job that has not ended."""
    until = max((span.end for span in timeline), default=job.counted_at)
    running = [span for span in timeline if span.end > until - 1.0]
    return 0.0 if job.ended_already else max(0.0, job.counted_at - until) * sum(span.share for span in running)


def _marks(job: JobState, interruptions: Sequence[Interruption], timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The interruptions in order, each with its cost: the lost steps, and all node time until the next step.

    No node time is in the cost of two interruptions. The price is the job's average price so far.
    """
    price = job.cost / job.node_seconds if job.node_seconds > 0 else 0.0
    paused = _until(each for span in timeline for each in _paused(span, interruptions))
    until = max((span.end for span in timeline), default=0.0)
    for each, following in zip_longest(interruptions, interruptions[1:]):
        end = each.at + each.seconds if each.seconds is not None else job.counted_at
        end = min(end, following.at) if following else end
        void = (each.steps_lost or 0) * each.step_cost
        counted = job.ended_already or (each.at if each.seconds is None else end) <= until
        yield {
            "kind": each.kind,
            "node": each.node,
            "at": each.at,
            "step": each.step,
            "generation": each.generation,
            "seconds": each.recovery,
            "steps_lost": each.steps_lost,
            "dollars": (void + max(0.0, paused(end) - paused(each.at))) * price if job.cost and counted else None,
            "counted": counted,
            "price": price * HOUR,
        }


def _paused(span: Span, interruptions: Sequence[Interruption]) -> Iterator[Span]:
    """The part of a span in which its machine did not train, or trained on before the head noticed an interruption."""
    if span.kind in PAUSED:
        yield span
    elif (each := _ends(span, interruptions)) and span.end > each.at:
        yield span._replace(start=each.at)


def _until(spans: Iterable[Span]) -> Callable[[float], float]:
    """A function that returns how many node-seconds the spans have before a moment."""
    slopes: defaultdict[float, float] = defaultdict(float)
    for span in spans:
        slopes[span.start] += span.share
        slopes[span.end] -= span.share
    times = sorted(slopes)
    rates = list(accumulate(slopes[at] for at in times))  # from each time on, how many machines are in a span
    steps = ((after - before) * rate for (before, after), rate in zip(pairwise(times), rates, strict=False))
    sums = list(accumulate(steps, initial=0.0))

    def until(time: float) -> float:
        index = bisect_right(times, time) - 1
        return sums[index] + (time - times[index]) * rates[index] if index >= 0 else 0.0

    return until


def _told_apart(span: Span, interruptions: Sequence[Interruption]) -> Iterator[Span]:
    """A span of training, cut into steps that counted and void time. A span of another kind stays as it is."""
    each = _ends(span, interruptions)
    if each is None:
        yield span._replace(kind=node_time.COUNTED) if span.kind == node_time.TRAINING else span
        return
    # The lost steps took `step_cost` node-seconds each, on all nodes together: see `Interruption`.
    start = each.at - (each.steps_lost or 0) * _seconds_a_step(each)
    cut = min(max(span.start, start), span.end)
    if cut > span.start:
        yield span._replace(kind=node_time.COUNTED, end=cut)
    if span.end > cut:
        yield span._replace(kind=node_time.LOST, start=cut)


def _ends(span: Span, interruptions: Sequence[Interruption]) -> Interruption | None:
    """The interruption that ended a span of training. interruptions: the oldest first."""
    if span.kind != node_time.TRAINING:
        return None
    for index in range(bisect_right(interruptions, span.start, key=_at), len(interruptions)):
        each = interruptions[index]
        if each.at > span.end + 1.0:
            return None
        if each.seconds is None or span.end <= each.at + each.seconds + 1.0:
            return each
    return None


def _at(each: Interruption) -> float:
    return each.at


def _seconds_a_step(each: Interruption) -> float:
    return each.step_cost / max(1, each.nodes)


def _joined(rows: Sequence[Row]) -> list[Row]:
    """Join neighbouring rows of the same kind, so that there are fewer rows to draw."""
    found: list[Row] = []
    for kind, start, end, share in rows:
        if found and found[-1][0] == kind and found[-1][3] == share and abs(found[-1][2] - start) < 0.05:
            found[-1] = (kind, found[-1][1], end, share)
        else:
            found.append((kind, start, end, share))
    return found
