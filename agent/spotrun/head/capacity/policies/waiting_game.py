"""When does waiting for spot pay, and when does returning to it? Dynamic programming over work left and spare time.

The market is up or down, for exponential times of mean `up` and `down`. A job has `work` seconds left on its safe
machines, and `spare` seconds more than that until it must be done. Waiting takes spare time. A start on other machines
takes `restart` of the spare time, or `move` if the old machines serve meanwhile, and that time is paid too.

The four tables have the least expected cost from each state on: on spot, on safe machines while spot is down or up, and
waiting. A second on spot costs 1. If losing the spot machines in a state would break the deadline, that state costs
infinitely much. So the tables keep the deadline too, as exactly as their grid allows. See docs/capacity.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WORK, SPARE = 80, 64  # steps of the grid
STEP = 1.5  # parameters are rounded to powers of this, so that tables can be reused: they are rough estimates anyway

Row = Sequence[float]


@dataclass(frozen=True)
class Game:
    """The parameters. Times are seconds."""

    up: float  # mean time that spot machines stay
    down: float  # mean time until there are some again
    restart: float  # from asking for machines to the first step on them
    move: float  # the time without training, if the old machines serve until the new ones are ready
    dear: float  # cost of a second on safe machines; one on spot costs 1
    speed: float  # work per second on spot; 1 on safe machines
    work: float  # the most work left
    spare: float  # the most spare time


@dataclass(frozen=True)
class Tables:
    """Costs from each state on, by work and spare time."""

    game: Game
    spot: tuple[Row, ...]  # on spot machines
    safe: tuple[Row, ...]  # on safe machines, spot is down
    stay: tuple[Row, ...]  # on safe machines, spot is up, and the job stays
    wait: tuple[Row, ...]  # without machines, spot is down, and the job waits

    def at(self, rows: tuple[Row, ...], work: float, spare: float) -> float:
        """The cost from a state on, between the points of the grid."""
        i = min(max(work * WORK / self.game.work, 0.0), WORK - 1e-9)
        a = int(i)
        low, high = (_at(row, spare * SPARE / self.game.spare) for row in rows[a : a + 2])
        return math.inf if math.inf in (low, high) else low + (high - low) * (i - a)


def solve(game: Game) -> Tables:
    """The tables for about these parameters."""
    return _solve(rounded(game))


def rounded(game: Game) -> Game:
    """The parameters that the tables are for."""
    rough = {name: _power(getattr(game, name), STEP) for name in ("up", "down", "dear", "speed")}
    most = {name: _power(getattr(game, name), 2.0, math.ceil) for name in ("work", "spare")}
    fixed = {name: _power(getattr(game, name), 1.05) for name in ("restart", "move")}
    return Game(**rough, **most, **fixed)


@functools.lru_cache(maxsize=512)  # of 170 kB each
def _solve(game: Game) -> Tables:
    zero = [0.0] * (SPARE + 1)
    spot, safe, stay, wait = ([array("d", zero)] for _ in range(4))
    s, f = zero, zero
    b = zero  # on safe machines, spot is up: the better of staying and moving
    r = zero  # without machines, spot is down: the better of waiting and safe machines
    step = game.work / WORK  # of work
    took = step / game.speed  # seconds on spot for it
    lost, back, off = _chance(took / game.up), _chance(step / game.down), _chance(step / game.up)
    grid = SPARE / game.spare
    begin, change, slow = game.restart * grid, game.move * grid, (took - step) * grid
    pay, first = game.dear * step, game.dear * game.restart
    for _ in range(WORK):
        fallen = _least(_later(r, slow), _later(f, slow + begin), first)
        s = [took + (1 - lost) * x + lost * y for x, y in zip(_later(s, slow), fallen, strict=True)]
        staying = [pay + (1 - off) * x + off * y for x, y in zip(b, f, strict=True)]
        f = [pay + (1 - back) * x + back * y for x, y in zip(f, b, strict=True)]
        b = _least(staying, _later(s, change), game.move)
        waits, r = _waits(game, s, f, staying, begin)
        for rows, row in ((spot, s), (safe, f), (stay, staying), (wait, waits)):
            rows.append(array("d", row))
    return Tables(game, tuple(spot), tuple(safe), tuple(stay), tuple(wait))


def _waits(game: Game, spot: Row, safe: Row, stay: Row, begin: float) -> tuple[list[float], list[float]]:
    """The costs of waiting with one amount of work left, and of the better of waiting and of safe machines."""
    found, first = _chance(game.spare / SPARE / game.down), game.dear * game.restart
    # The mean time until spot machines come, if they come within one step of the grid: that is less than the step.
    short = game.down * SPARE / game.spare
    after = begin + max(0.0, short - (1 - found) / found)
    up_later = _least([game.restart + x for x in _later(spot, after)], _later(stay, after), first)
    waits, rests, missed = list[float](), list[float](), 1 - found
    rest = math.inf
    for up, sure in zip(up_later, [first + x for x in _later(safe, begin)], strict=True):
        wait = found * up + missed * rest  # at first there is no spare time left, and so no `rest`
        rest = wait if wait < sure else sure
        waits.append(wait)
        rests.append(rest)
    return waits, rests


def _least(one: Iterable[float], other: Iterable[float], more: float) -> list[float]:
    """The smaller one of each pair, after `more` is added to the second."""
    return [x if x < y + more else y + more for x, y in zip(one, other, strict=True)]


def _later(row: Row, by: float) -> list[float]:
    """`_at(row, j - by)` for each point j of the grid."""
    low = math.floor(-by)
    share = -by - low
    if share > 1 - 1e-9:
        low, share = low + 1, 0.0
    values = list(row)
    if share >= 1e-9:
        rest = 1 - share
        values = [rest * x + share * y for x, y in itertools.pairwise(values)] + values[-1:]
    if low <= 0:
        return [math.inf] * min(-low, len(row)) + values[: max(0, len(row) + low)]
    return values[low:] + values[-1:] * min(low, len(row))


def _at(row: Row, place: float) -> float:
    """A value between the points of a row; infinite before the first point, the last value after the last one."""
    if place < -1e-9:
        return math.inf
    if place >= len(row) - 1:
        return row[-1]
    low = max(0, int(place))
    share = place - low
    if share < 1e-9 or row[low] == math.inf:
        return row[low]
    return row[low] + (row[low + 1] - row[low]) * share


def _chance(times: float) -> float:
    """The probability that an exponential time of mean 1 is over; never 0 or 1, so infinite costs stay infinite."""
    return min(max(1 - math.exp(-times), 1e-12), 1 - 1e-12)


def _power(value: float, base: float, whole: Callable[[float], int] = round) -> float:
    return float(base ** whole(math.log(max(value, 1e-6)) / math.log(base)))
