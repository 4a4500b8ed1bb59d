"""Every generator is seeded from the keys alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from spotrun.train import batches, rng
from spotrun.train.rng import derive, prepare, reseed, seed_all


def draws() -> tuple[float, ...]:
    """The first numbers of each generator, those that keep a second normal number for the next call too."""
    return (
        random.random(),
        random.gauss(),
        numpy.random.rand(),
        numpy.random.randn(),
        float(torch.rand(1)),
        float(torch.randn(1)),
    )


def test_the_keys_alone_decide() -> None:
    found = []
    for keys in ((5, 1, 0, 0), (5, 2, 0, 0), (5, 1, 0, 1), (5, 11, 0, 0), (5, 1, "loader", 0), (5, 1, 0, 0)):
        reseed(*keys)
        found.append(draws())
        draws()
    assert found[0] == found[-1]
    for numbers in zip(*found[:-1], strict=True):
        assert len(set(numbers)) == len(numbers)


def test_the_states_are_whole_and_differ_between_the_generators() -> None:
    reseed(5, 1)
    assert torch.initial_seed() == derive(5, 1)
    _, (*words, used), kept = random.getstate()
    of_numpy: Any = numpy.random.get_state()
    assert (used, kept, of_numpy[2:]) == (624, None, (624, 0, 0.0))
    both = [*words, *of_numpy[1].tolist()]
    assert len(set(both)) == len(both)  # of 1,248 numbers of 32 bits, two are equal in one of 5,000 cases
    assert 0.48 < sum(each.bit_count() for each in both) / (32 * len(both)) < 0.52


def test_the_states_come_from_splitmix64() -> None:
    """With the first numbers that the reference implementation gives for the seed 1234567."""
    words = numpy.frombuffer(prepare([1234567])[0].numpy, numpy.uint32)[:6].view(numpy.uint64)
    assert words.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_without_access_to_the_memory_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reseed(5, 1)
    wanted = draws()
    monkeypatch.setattr(rng, "_python", None)
    monkeypatch.setattr(rng, "_SHARED", None)
    reseed(5, 1)
    assert wanted == draws()


def test_what_is_prepared_does_the_same() -> None:
    """Also if nothing is drawn between two steps, if one normal number is, or if the script seeds NumPy itself."""
    odd: list[Callable[[], object]] = [lambda: None, numpy.random.randn, lambda: numpy.random.seed(1), lambda: None]
    for step, between in enumerate(odd * 2):
        reseed(5, step)
        wanted = draws()
        now, later = prepare([derive(5, step), derive(5, step + 1)])
        seed_all(now)
        seed_all(later)
        between()
        seed_all(now)
        assert wanted == draws()
        seed_all(now)
        between()


def test_if_nothing_was_drawn_numpy_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    reseed(5, 1)
    wanted = draws()
    reseed(5, 2)
    monkeypatch.setattr(rng, "_seed_numpy", None)
    reseed(5, 1)
    assert wanted == draws()


def test_a_script_may_give_numpy_another_generator() -> None:
    chosen: Any = numpy.random  # numpy's annotations do not have these functions
    own, early = chosen.get_bit_generator(), prepare([derive(5, 1)])[0]
    try:
        chosen.set_bit_generator(numpy.random.PCG64(3))
        found = []
        for step in (1, 2, 1, 1):
            reseed(5, step)
            found.append(draws())
        seed_all(early)
        assert found[0] == found[2] == found[3] == draws()
        assert found[0][2] != found[1][2]
    finally:
        chosen.set_bit_generator(own)


def test_the_seeds_of_batches_are_those_of_their_steps() -> None:
    count = 2 * batches.AT_ONCE + 6
    described = (batches.Batch(1.0, bool(at % 2), at, 1, number=at % 2) for at in range(count))  # two in a step
    for at, (batch, seeds) in enumerate(batches.with_seeds(described, seed=5, step=7, rank=3)):
        seed_all(seeds)
        found = draws()
        reseed(5, 7 + at // 2, at % 2, 3)
        assert (batch.end, found) == (at, draws())
    assert at == count - 1
