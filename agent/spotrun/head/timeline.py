"""What each machine of a job did, and when: `node_time` with times and machines. Pure.

The head counts a machine's time with `node_time.kind`. The same kind, for the same seconds, goes into the timeline. So
all spans add up to what the job's account has. The spans of one kind also do, unless time was counted by mistake. The
account takes such time back from the machine's present kind, and the timeline from the spans that had it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spotrun.document import FORMAT
from spotrun.head.costs.bill import Use

MOST = 4000  # spans that are kept. If there are more, the oldest ones of each machine become one of kind `MIXED`
MACHINES = 1000  # machines that have such a span. If there are more, those of the oldest machines become one
EARLIER = "earlier machines"  # the name of that span's machine; no machine has a space in its name
MIXED = "mixed"  # the time of several kinds
NEAR = 0.01  # seconds: two spans of the same kind with a shorter gap are joined
GONE = 60.0  # seconds after which a machine that is not counted any more is not expected back


class Span(NamedTuple):
    """Time of one machine that went into one thing."""

    node: str  # the machine's name, or `EARLIER`
    kind: str  # as in `node_time`; `booting` is the part of `starting` before the agent is connected
    start: float  # epoch seconds
    end: float  # epoch seconds
    share: float = 1.0  # the part of the machine that the job pays for; of `EARLIER`: how many machines, on average

    @property
    def seconds(self) -> float:
        """Node-seconds."""
        return (self.end - self.start) * self.share


@dataclass(frozen=True)
class Timeline:
    """The spans of one job."""

    closed: tuple[Span, ...] = ()  # those that do not grow any more
    growing: Mapping[str, Span] = field(default_factory=dict)  # the newest span of each machine, by its name

    def __iter__(self) -> Iterator[Span]:
        """All spans, by their starts."""
        return iter(sorted((*self.closed, *self.growing.values()), key=lambda span: span.start))

    def __bool__(self) -> bool:
        return bool(self.closed or self.growing)

    def add(self, uses: Iterable[Use], kind: Callable[[str], str]) -> Timeline:
        """The timeline with more machine time. kind: what a machine did."""
        growing, closed, older = dict(self.growing), list[Span](), self.closed
        for use in uses:
            if use.end <= use.start:  # a machine had ended earlier than was known
                older, closed = tuple(_without(use, older)), list(_without(use, closed))
                parts = list(_without(use, [growing.pop(use.machine)] if use.machine in growing else []))
                closed += parts[:-1]
                if parts:
                    growing[use.machine] = parts[-1]
                continue
            what, last = kind(use.machine), growing.get(use.machine)
            if last and (last.kind, last.share) == (what, use.share) and abs(use.start - last.end) < NEAR:
                growing[use.machine] = last._replace(end=use.end)
                continue
            if last is not None and use.late:  # time before the newest span
                closed.append(Span(use.machine, what, use.start, use.end, use.share))
                continue
            if last is not None:
                closed.append(last)
            growing[use.machine] = Span(use.machine, what, use.start, use.end, use.share)
        newest = max((span.end for span in growing.values()), default=0.0)
        for name in [name for name, span in growing.items() if newest - span.end > GONE]:
            closed.append(growing.pop(name))
        if not closed:
            return replace(self, closed=older, growing=growing)
        return Timeline(_bounded((*older, *closed)), growing)

    def text(self) -> bytes:
        """The document for the bucket."""
        return json.dumps({"format": FORMAT, "spans": list(self)}).encode()


def read(data: bytes | None, until: float = 0.0) -> Timeline:
    """The timeline in a document; an empty one if there is none, or if it is not readable.

    until: leave out later times, which will be counted again; 0: nothing is left out.
    """
    try:
        found = json.loads(data) if data else {"spans": []}
        rows = found["spans"] if found.get("format", FORMAT) <= FORMAT else []
        spans = (Span(str(row[0]), str(row[1]), *map(float, row[2:5])) for row in rows)
        kept = (span._replace(end=min(span.end, until or span.end)) for span in spans)
        return Timeline(tuple(sorted((span for span in kept if span.end > span.start), key=lambda span: span.start)))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return Timeline()


def _without(use: Use, spans: Iterable[Span]) -> Iterator[Span]:
    """The spans without a machine's time that was counted by mistake: from the use's end to its start."""
    for span in spans:
        if span.node != use.machine or span.end <= use.end or span.start >= use.start:
            yield span
            continue
        if span.start < use.end:
            yield span._replace(end=use.end)
        if span.end > use.start:
            yield span._replace(start=use.start)


def _bounded(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """About `MOST` spans at most. Of the older ones, those of a machine become one, and the oldest machines too."""
    if len(spans) <= MOST:
        return spans
    ordered = sorted(spans, key=lambda span: span.start)
    older, newer = ordered[: -MOST // 2], ordered[-MOST // 2 :]
    joined: dict[str, Span] = {}
    for span in older:
        joined[span.node] = _mixed(joined.get(span.node, span._replace(end=span.start)), span)
    if len(joined) > MACHINES:
        earlier = joined.pop(EARLIER, None)
        machines = sorted(joined.values(), key=lambda span: span.end)
        gone, kept = machines[: -MACHINES // 2], machines[-MACHINES // 2 :]
        for span in gone:
            earlier = _mixed(earlier or span._replace(node=EARLIER, end=span.start), span)
        joined = {span.node: span for span in (*([earlier] if earlier else ()), *kept)}
    return (*joined.values(), *newer)


def _mixed(last: Span, span: Span) -> Span:
    """Both spans as one of kind `MIXED`, with the node-seconds of both."""
    start, end = min(last.start, span.start), max(last.end, span.end)
    share = (last.seconds + span.seconds) / (end - start) if end > start else last.share
    return Span(last.node, MIXED, start, end, share)
