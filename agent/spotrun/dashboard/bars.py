"""The timeline of a run, for drawing: the head's spans, with training cut into steps that counted and void time.

The sums are the head's own (`node_time.split`). The head does not know which moment of which machine was void. So void
time is drawn before each interruption, for as long as the lost steps took, and after the interruption, until the
generation ended. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spotrun.head import node_time
from spotrun.head.account import HOUR
from spotrun.head.accounting import goodput
from spotrun.head.job_parts import Interruption
from spotrun.head.job_state import JobState
from spotrun.head.timeline import Span, Timeline

Row = tuple[str, float, float, float]  # kind, start, end (epoch seconds), share of the machine


def document(job: JobState, timeline: Timeline) -> dict[str, Any]:
    """What the page draws: a bar for each node, marks, and the sums of the account.

    `node_time` is in node-seconds by kind and adds up to `node_seconds`. `missing`: node-seconds that the account has
    and the timeline does not: an older head counted them, or a head was killed before it wrote the timeline.
    """
    spans = [each for span in timeline for each in _told_apart(span, job.interruptions)]
    bars: dict[str, list[Row]] = {}
    for span in spans:
        bars.setdefault(span.node, []).append((span.kind, span.start, span.end, span.share))
    drawn = sum(span.seconds for span in timeline)
    booting = sum(span.seconds for span in timeline if span.kind == node_time.BOOTING)
    return {
        "bars": [{"node": node, "spans": _joined(rows)} for node, rows in bars.items()],
        "marks": [mark(job, each, spans) for each in job.interruptions],
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


def mark(job: JobState, each: Interruption, spans: Iterable[Span]) -> dict[str, Any]:
    """An interruption with its cost: the node-seconds void or recovering, at the job's average price so far."""
    price = job.cost / job.node_seconds if job.node_seconds > 0 else 0.0
    end = each.at + each.seconds if each.seconds is not None else job.counted_at
    paused = sum(
        max(0.0, min(span.end, end) - max(span.start, each.at)) * span.share
        for span in spans
        if span.kind in (node_time.RECOVERY, node_time.LOST)
    )
    void = (each.steps_lost or 0) * each.step_cost
    return {
        "kind": each.kind,
        "node": each.node,
        "at": each.at,
        "step": each.step,
        "generation": each.generation,
        "seconds": each.seconds,
        "steps_lost": each.steps_lost,
        "dollars": (void + paused) * price if job.cost else None,
        "price": price * HOUR,
    }


def _told_apart(span: Span, interruptions: Sequence[Interruption]) -> Iterator[Span]:
    """A span of training, cut into steps that counted and void time. A span of another kind stays as it is."""
    if span.kind != node_time.TRAINING:
        yield span
        return
    at = span.start
    for each in interruptions:
        # The lost steps took `step_cost` node-seconds each, on all nodes together: see `Interruption`.
        start = each.at - (each.steps_lost or 0) * _seconds_a_step(each)
        ends = each.seconds is None or span.end <= each.at + each.seconds + 1.0
        if not (span.start < each.at <= span.end + 1.0 and ends):
            continue
        cut = min(max(at, start), span.end)
        if cut > at:
            yield span._replace(kind=node_time.COUNTED, start=at, end=cut)
        if span.end > cut:
            yield span._replace(kind=node_time.LOST, start=cut)
        return
    yield span._replace(kind=node_time.COUNTED)


def _seconds_a_step(each: Interruption) -> float:
    return each.step_cost / max(1, each.nodes)


def _joined(rows: Sequence[Row]) -> list[Row]:
    """The rows, with neighbours of the same kind joined: there are fewer rows to draw."""
    found: list[Row] = []
    for kind, start, end, share in rows:
        if found and found[-1][0] == kind and found[-1][3] == share and abs(found[-1][2] - start) < 0.05:
            found[-1] = (kind, found[-1][1], end, share)
        else:
            found.append((kind, start, end, share))
    return found
