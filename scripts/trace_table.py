"""What took the time in a trace of torch's profiler (Chrome's trace format). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Kinds of events, as torch names them: what the processor does, and what a GPU does.
ON_CPU = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NAME = 60  # characters of a name that are shown


@dataclass(frozen=True)
class Row:
    """All calls of one operation."""

    name: str
    calls: int
    seconds: float  # without the operations that it has called itself ("self time")
    share: float  # of all rows' seconds


def processor(trace: Mapping[str, Any]) -> list[Row]:
    """Operations on the processor, the longest first. Raises `ValueError` if the trace is malformed."""
    threads: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for each in _events(trace, ON_CPU):
        place = (str(each.get("pid")), str(each.get("tid")))
        threads.setdefault(place, []).append((each["ts"], each["dur"], each["name"]))
    return _rows(own for events in threads.values() for own in _own_times(events))


def gpu(trace: Mapping[str, Any]) -> list[Row]:
    """What ran on GPUs, the longest first. Raises `ValueError` if the trace is malformed."""
    return _rows((each["name"], each["dur"]) for each in _events(trace, ON_GPU))


def table(title: str, rows: list[Row], most: int) -> list[str]:
    """The first rows as lines of text."""
    if not rows:
        return []
    lines = [f"{'ms':>10} {'share':>6} {'calls':>7}  {title}"]
    lines += [f"{row.seconds * 1e3:10.2f} {row.share:6.1%} {row.calls:7}  {row.name[:_NAME]}" for row in rows[:most]]
    left = rows[most:]
    if left:
        others = f"({len(left)} more)"
        lines.append(
            f"{sum(row.seconds for row in left) * 1e3:10.2f} {sum(row.share for row in left):6.1%} {'':7}  {others}"
        )
    return lines


def _events(trace: Mapping[str, Any], kinds: frozenset[str]) -> Iterable[dict[str, Any]]:
    try:
        for each in trace["traceEvents"]:
            if each.get("ph") == "X" and each.get("cat") in kinds:
                yield each | {"ts": float(each["ts"]), "dur": float(each["dur"]), "name": str(each["name"])}
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a trace of torch's profiler: {error!r}") from None


def _own_times(events: list[tuple[float, float, str]]) -> Iterable[tuple[str, float]]:
    """The name and the own microseconds of each event of a thread. The events of a thread are nested."""
    open_: list[list[Any]] = []  # end, name, own microseconds; the innermost last
    for start, took, name in sorted(events, key=lambda each: (each[0], -each[1])):
        while open_ and open_[-1][0] <= start:
            yield open_[-1][1], open_.pop()[2]
        if open_:
            open_[-1][2] -= took
        open_.append([start + took, name, took])
    yield from ((name, own) for _, name, own in open_)


def _rows(found: Iterable[tuple[str, float]]) -> list[Row]:
    calls: dict[str, int] = {}
    times: dict[str, float] = {}
    for name, microseconds in found:
        calls[name] = calls.get(name, 0) + 1
        times[name] = times.get(name, 0.0) + microseconds
    total = sum(times.values()) or 1.0
    rows = [Row(name, calls[name], took / 1e6, took / total) for name, took in times.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))
