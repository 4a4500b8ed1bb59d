"""When is it worth to wait for spot, and when to return to it? Dynamic programming over work left and spare time.

The market is up or down, with exponential times of mean `up` and `down`. A job has `work` seconds left on its safe
machines, and `spare` seconds more than that until it must be done. To wait takes spare time. To start on
other machines takes `restart` (or `move`, if the old ones serve meanwhile) of it, and pays for that time. The four
tables have the least expected cost from each state on: on spot, on safe machines while spot is down or up, and waiting.
The cost counts an hour on spot as one. States in which a loss of the spot machines would break the deadline cost
infinitely much: so the tables keep the deadline too, as far as their grid is fine enough. See docs/capacity.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

WORK, SPARE = 80, 64  # steps of the grid
STEP = 1.25  # parameters are rounded to powers of this, so that a table serves for long: they are estimates anyway

Row = list[float]


@dataclass(frozen=True)
class Game:
    """The parameters. Times are seconds."""

    up: float  # mean time that spot machines stay
    down: float  # mean time until there are some again
    restart: float  # until the first step on machines that are not there yet
    move: float  # without training, if the old machines serve until the new ones are ready
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
    rounded = {name: _power(getattr(game, name), STEP) for name in ("up", "down", "dear", "speed")}
    most = {name: _power(getattr(game, name), 1.5, math.ceil) for name in ("work", "spare")}
    fixed = {name: _power(getattr(game, name), 1.05) for name in ("restart", "move")}
    return _solve(Game(**rounded, **most, **fixed))


@functools.lru_cache(maxsize=512)
def _solve(game: Game) -> Tables:
    spot, safe, stay, wait = ([[0.0] * (SPARE + 1)] for _ in range(4))
    both = [[0.0] * (SPARE + 1)]  # on safe machines, spot is up: the better of staying and moving
    rest = [[0.0] * (SPARE + 1)]  # without machines, spot is down: the better of waiting and safe machines
    step = game.work / WORK  # of work
    took = step / game.speed  # seconds on spot for it
    lost, back = 1 - math.exp(-took / game.up), 1 - math.exp(-step / game.down)
    off = 1 - math.exp(-step / game.up)
    grid = SPARE / game.spare
    begin, change = game.restart * grid, game.move * grid
    for _ in range(WORK):
        s, f, b, r = spot[-1], safe[-1], both[-1], rest[-1]
        slower = [_at(s, j - (took - step) * grid) for j in range(SPARE + 1)]
        fallen = [
            min(_at(r, j - (took - step) * grid), game.dear * game.restart + _at(f, j - (took - step) * grid - begin))
            for j in range(SPARE + 1)
        ]
        spot.append(
            [took + (1 - lost) * x + lost * y if y < math.inf else y for x, y in zip(slower, fallen, strict=True)]
        )
        safe.append([game.dear * step + _mean(back, y, x) for x, y in zip(f, b, strict=True)])
        stay.append([game.dear * step + _mean(off, x, y) for x, y in zip(f, b, strict=True)])
        moved = [game.move + _at(spot[-1], j - change) for j in range(SPARE + 1)]
        both.append([min(pair) for pair in zip(stay[-1], moved, strict=True)])
        waits, rests = _waits(game, spot[-1], safe[-1], stay[-1], begin)
        wait.append(waits)
        rest.append(rests)
    return Tables(game, tuple(spot), tuple(safe), tuple(stay), tuple(wait))


def _waits(game: Game, spot: Row, safe: Row, stay: Row, begin: float) -> tuple[Row, Row]:
    """The costs of waiting with one amount of work left, and of the better of waiting and of safe machines."""
    found = 1 - math.exp(-game.spare / SPARE / game.down)
    waits, rests = [math.inf], [math.inf]
    for j in range(SPARE + 1):
        if j:
            up = min(game.restart + _at(spot, j - 1 - begin), game.dear * game.restart + _at(stay, j - 1 - begin))
            waits.append(_mean(found, up, rests[-1]))
            rests.append(math.inf)
        rests[-1] = min(waits[-1], game.dear * game.restart + _at(safe, j - begin))
    return waits, rests


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


def _mean(chance: float, then: float, other: float) -> float:
    """The expected cost; infinite if one of both is."""
    return math.inf if math.inf in (then, other) else chance * then + (1 - chance) * other


def _power(value: float, base: float, whole: Callable[[float], int] = round) -> float:
    return float(base ** whole(math.log(max(value, 1e-6)) / math.log(base)))
