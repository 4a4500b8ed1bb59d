"""What must hold after a run. Pure: each check takes what was observed and returns a list of problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WAIT = 120.0  # seconds: to notice an interruption, boot machines, fork and import, on a busy computer
Span = tuple[float, float]


@dataclass(frozen=True)
class Beat:
    """The job at one moment. at: epoch seconds. saved: the newest step in the bucket; 0: none."""

    at: float
    step: int
    saved: int = 0


def samples(entries: Iterable[dict[str, Any]], epochs: int) -> dict[int, list[int]]:
    """The samples of each epoch, sorted. If a step was done again, only its latest generation counts.

    With fewer workers, a step done again may be in an earlier epoch than before.
    """
    steps: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        steps[entry["step"]][entry["generation"]].append(entry)
    found: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for generations in steps.values():
        for entry in generations[max(generations)]:
            found[entry["epoch"]] += entry["ids"]
    return {epoch: sorted(ids) for epoch, ids in found.items()}


def check_samples(entries: Iterable[dict[str, Any]], epochs: int, size: int) -> list[str]:
    """Each sample is seen exactly once in an epoch."""
    wrong = []
    for epoch, ids in samples(entries, epochs).items():
        twice = len(ids) - len(set(ids))
        missing = size - len(set(ids))
        if twice or missing:
            wrong.append(f"epoch {epoch}: {missing} samples of {size} never seen, {twice} seen again")
    return wrong


def check_weights(digest: str, undisturbed: str) -> list[str]:
    """The final state is bit-equal to that of the undisturbed run."""
    return [] if digest == undisturbed else [f"final state {digest[:12]}, undisturbed {undisturbed[:12]}"]


def check_failures(counted: int) -> list[str]:
    """No failure counts against the job: its script never fails, and only machines and heads are lost."""
    return [f"{counted} failures were counted, and the script never fails"] if counted else []


def check_waits(beats: Sequence[Beat], excused: Sequence[Span], constant: float = WAIT) -> list[str]:
    """No wait is longer than the work that it could save, plus a constant.

    A wait is the time from one new step to the next, without the time in which the scenario itself kept the job from
    stepping (`excused`). The work that a wait could save is the time since the job reached the newest safe state.
    """
    wrong = []
    reached: dict[int, float] = {}
    last: Beat | None = None
    for beat in beats:
        if last is None or beat.step > last.step:
            if last is not None:
                waited = beat.at - last.at - _overlap((last.at, beat.at), excused)
                allowed = work(last, reached) + constant
                if waited > allowed:
                    wrong.append(f"{waited:.0f} s without a step after step {last.step}; allowed {allowed:.0f} s")
            reached.setdefault(beat.step, beat.at)
            last = beat
    return wrong


def work(beat: Beat, reached: dict[int, float]) -> float:
    """Seconds that the steps since the newest safe state have taken."""
    since = [at for step, at in reached.items() if step >= beat.saved]
    return beat.at - min(since, default=beat.at)


def _overlap(span: Span, others: Sequence[Span]) -> float:
    """Seconds of a span that any of the others covers."""
    covered, end = 0.0, span[0]
    for begin, stop in sorted(others):
        begin, stop = max(begin, end), min(stop, span[1])
        if stop > begin:
            covered += stop - begin
            end = stop
    return covered
