"""Which points count, and which of them a chart needs."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotrun.history.curves import Curve, Points, merge, pieces, thin, thin_curve
from spotrun.state.points import Block, Call, Header
from tests.history.blocks import block


def curve(*blocks: Block[Call]) -> Curve:
    found: dict[int, Points] = {}
    for each in blocks:
        for piece in pieces(each).values():
            found.setdefault(each.header.generation, Points()).extend(piece)
    return merge("loss", found, [each.header for each in blocks])


def counting(found: Curve) -> list[tuple[int, int]]:
    """Generation and step of the points that count."""
    rows = [row for row, void in enumerate(found.void) if not void]
    return [(found.generations[row], found.points.steps[row]) for row in rows]


def test_steps_done_again_supersede_the_void_ones() -> None:
    found = curve(block(1, 0, range(1, 8)), block(2, 4, range(5, 10)), block(3, 8, range(9, 12)))
    assert counting(found) == [(1, 1), (1, 2), (1, 3), (1, 4), *((2, n) for n in range(5, 9)), (3, 9), (3, 10), (3, 11)]
    assert len(found.points) == 7 + 5 + 3, "void ones are marked, not erased"
    assert list(found.counting().values) == [1.001, 1.002, 1.003, 1.004, 2.005, 2.006, 2.007, 2.008, 3.009, 3.01, 3.011]


def test_a_later_generation_from_an_earlier_state_voids_all_between() -> None:
    """All nodes were lost: the third generation goes on from an old checkpoint."""
    found = curve(block(1, 0, range(1, 11)), block(2, 10, range(11, 15)), block(3, 5, range(6, 9)))
    assert counting(found) == [*((1, n) for n in range(1, 6)), (3, 6), (3, 7), (3, 8)]


def test_a_generation_without_points_voids_too() -> None:
    found = curve(block(1, 0, range(1, 11)), block(2, 6, []))
    assert counting(found) == [(1, n) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("base_epoch", "again"),
    [(0, True), (1, False)],
    ids=["the epoch's end is done again", "the finished state has the epoch's end"],
)
def test_what_is_logged_after_an_epoch(base_epoch: int, again: bool) -> None:
    """The code after the steps of an epoch runs again if the state was saved at its last step."""
    first = Block(
        Header("j", 1, 0, 0),
        [Call(4, 1.0, {"loss": 1.0}), Call(4, 1.5, {"loss": 9.0}, between=True)],
    )
    found = curve(first, Block(Header("j", 2, 0, 4, base_epoch), []))
    assert list(found.counting().values) == ([1.0] if again else [1.0, 9.0])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8))
def test_what_counts_is_one_line_of_training(spans: list[tuple[int, int]]) -> None:
    """Whatever the bases: the counting steps rise, and from each step the newest generation that did it counts."""
    done, wanted, blocks = 0, dict[int, int](), []
    for number, (back, steps) in enumerate(spans, 1):
        base = max(0, done - back)
        done = base + steps
        wanted = {step: g for step, g in wanted.items() if step <= base} | dict.fromkeys(
            range(base + 1, done + 1), number
        )
        blocks.append(block(number, base, range(base + 1, done + 1)))
    assert {step: generation for generation, step in counting(curve(*blocks))} == wanted
    steps_found = [step for _, step in counting(curve(*blocks))]
    assert steps_found == sorted(wanted)


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=300),
    st.integers(2, 60),
)
def test_a_thinned_curve_has_the_extremes(values: list[float], most: int) -> None:
    numbers = array("d", values)
    whole = Points(
        array("q", range(1, len(values) + 1)),
        array("q", [0] * len(values)),
        array("d", [0.0] * len(values)),
        array("d", [0.0] * len(values)),
        numbers,
        bytearray(len(values)),
    )
    found = thin(whole, most)
    assert len(found) <= max(1.5 * most + 3, 3)
    assert all(repr(value) == repr(values[step - 1]) for step, value in zip(found.steps, found.values, strict=True))
    finite = [value for value in values if math.isfinite(value)]
    kept = [value for value in found.values if math.isfinite(value)]
    assert (min(kept, default=None), max(kept, default=None)) == (min(finite, default=None), max(finite, default=None))
    assert any(map(math.isfinite, values)) == any(map(math.isfinite, found.values))
    assert all(map(math.isfinite, values)) == all(map(math.isfinite, found.values)), "a NaN is seen"


def test_a_chart_shows_void_points_too() -> None:
    found = thin_curve(curve(block(1, 0, range(1, 1001)), block(2, 900, range(901, 2001))), 100)
    assert 40 < len(found.points) < 160
    assert {*zip(found.generations, found.void, strict=True)} == {(1, 0), (1, 1), (2, 0)}
    assert found.points.steps[0] == 1
    assert found.points.steps[-1] == 2000
