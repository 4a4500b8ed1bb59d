"""Every generator is seeded from the keys alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from spotrun.train.batches import Batch
from spotrun.train.rng import reseed, seed_all
from spotrun.train.seeds import AT_ONCE, Seeds


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


def test_each_generator_is_seeded_as_by_its_own_function() -> None:
    reseed(5, 1)
    own = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    value = torch.initial_seed()
    random.seed(value)
    numpy.random.seed(value & 0xFFFFFFFF)
    assert own == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[index, union-attr]


def test_a_script_may_give_numpy_another_generator() -> None:
    chosen: Any = numpy.random  # numpy's annotations do not have these functions
    own = chosen.get_bit_generator()
    try:
        chosen.set_bit_generator(numpy.random.PCG64(3))
        found = []
        for step in (1, 2, 1, 1):
            reseed(5, step)
            found.append(draws())
        assert found[0] == found[2] == found[3]
        assert found[0][2] != found[1][2]
    finally:
        chosen.set_bit_generator(own)


def described(count: int) -> Iterator[Batch]:
    """Steps of two batches."""
    return (Batch(1.0, bool(at % 2), at, 1, at % 2) for at in range(count))


def test_prepared_seeds_give_the_same_numbers() -> None:
    chosen: Any = numpy.random
    own = chosen.get_bit_generator()
    count = 2 * AT_ONCE + 6  # a generator is used again
    for seeds, first in ((Seeds(), 7), (one := Seeds(), 9), (one, 9)):
        reseed("before")
        numpy.random.randn()  # numpy keeps the second normal number of two
        for at, (batch, value, bits) in enumerate(seeds.along(described(count), 5, first, 3)):
            seed_all(value, bits)
            found = draws(), draws()
            reseed(5, first + at // 2, batch.number, 3)
            assert found == (draws(), draws())
        assert at == count - 1
    chosen.set_bit_generator(own)


def test_prepared_seeds_leave_a_generator_of_the_script_in_place() -> None:
    chosen: Any = numpy.random
    own = chosen.get_bit_generator()
    found = {}
    try:
        for kind in (numpy.random.MT19937, numpy.random.PCG64):
            mine = kind(3)
            for _, value, bits in Seeds().along(described(4), 5, 0, 0):
                chosen.set_bit_generator(mine)  # in the step before
                seed_all(value, bits)
                assert chosen.get_bit_generator() is mine
                found[kind, value] = draws()
        reseed(5, 1, 0, 0)
        assert draws() == found[numpy.random.PCG64, torch.initial_seed()]
        assert len(set(found.values())) == len(found) == 8
    finally:
        chosen.set_bit_generator(own)
