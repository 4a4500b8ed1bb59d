"""Each sample exactly once an epoch, whatever the number of workers is along the way."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from spotrun import ElasticSampler
from spotrun.errors import SpotrunError
from spotrun.train import batches
from spotrun.train.sampler import share, taken

worlds = st.integers(1, 7)
batch_sizes = st.integers(1, 9)
lengths = st.integers(1, 200)


@given(n=lengths, batch=batch_sizes, plan=st.lists(st.tuples(worlds, st.integers(1, 5)), max_size=12), rest=worlds)
def test_every_sample_once_whatever_the_worlds(n: int, batch: int, plan: list[tuple[int, int]], rest: int) -> None:
    seen: Counter[int] = Counter()
    position = 0
    for world, steps in [*plan, (rest, n)]:
        for _ in range(steps):
            for rank in range(world):
                seen.update(share(position, n, batch, world, rank))
            position += taken(position, n, batch, world)
    assert seen == Counter(range(n))


@given(
    n=lengths, batch=batch_sizes, world=worlds, accumulate=st.integers(1, 4), drop_last=st.booleans(), data=st.data()
)
def test_ranks_make_equal_steps_of_nearly_equal_shares(
    n: int, batch: int, world: int, accumulate: int, drop_last: bool, data: st.DataObject
) -> None:
    position, size = data.draw(st.integers(0, n)), batches.StepSize(accumulate)
    ranks = [list(batches.elastic(position, n, batch, world, rank, size, drop_last)) for rank in range(world)]
    assert len({len(each) for each in ranks}) == 1
    for together in zip(*ranks, strict=True):
        samples = [one.samples for one in together]
        assert max(samples) - min(samples) <= 1
        assert max(samples) <= batch
        assert len({(one.last, one.end, one.number) for one in together}) == 1
    if position == 0:
        steps = sum(one.last for one in ranks[0])
        assert steps == batches.steps_in(n, batch, world, size, drop_last)
    if not drop_last:
        assert sum(one.samples for each in ranks for one in each) == n - position


@given(n=lengths, batch=batch_sizes, world=worlds, accumulate=st.integers(1, 4))
def test_weights_make_the_mean_over_a_step(n: int, batch: int, world: int, accumulate: int) -> None:
    """DDP's gradient is sum(weight x mean of the share) / world: each sample of a step must count the same."""
    ranks = [list(batches.elastic(0, n, batch, world, rank, batches.StepSize(accumulate))) for rank in range(world)]
    weights: list[float] = []
    for together in zip(*ranks, strict=True):
        weights += [one.weight / one.samples / world for one in together for _ in range(one.samples)]
        assert all(one.weight == 0 for one in together if one.padding)
        if together[0].last:
            assert weights == pytest.approx([1 / len(weights)] * len(weights))
            weights = []
    assert not weights


@given(n=lengths, batch=batch_sizes, world=worlds, count=st.integers(1, 9), drop_last=st.booleans(), data=st.data())
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_workers(
    n: int, batch: int, world: int, count: int, drop_last: bool, data: st.DataObject
) -> None:
    size = batches.StepSize(global_batch=count * batch)
    position = data.draw(st.integers(0, n))
    ranks = [list(batches.elastic(position, n, batch, world, rank, size, drop_last)) for rank in range(world)]
    assert len({len(each) for each in ranks}) == 1
    weights: list[float] = []
    for together in zip(*ranks, strict=True):
        assert len({(one.last, one.end) for one in together}) == 1
        own = [each for one in together for each in one.own or ()]
        weights += [one.weight / one.samples / world for one in together for _ in range(one.samples)]
        if together[0].last:
            assert weights == pytest.approx([1 / len(weights)] * len(weights))
            assert len(weights) == min(size.global_batch, n - position)
            position, weights = position + len(weights), []
            assert together[0].end == position
        assert own == list(range(together[0].end - len(own), together[0].end))
    assert not weights
    assert position == n or (drop_last and n - position < size.global_batch)
    numbers = [one.number for each in ranks for one in each]
    assert len(set(numbers)) * sum(one.last for one in ranks[0]) >= len(numbers)  # no two of a step are equal
    steps = n // size.global_batch if drop_last else -(-n // size.global_batch)
    assert batches.steps_in(n, batch, world, size, drop_last) == steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch", "world", "count"), [(4, 1, 3), (4, 2, 3), (4, 3, 2), (1, 5, 4), (7, 2, 5)])
def test_a_loader_gives_the_batches_of_a_step(
    monkeypatch: pytest.MonkeyPatch, batch: int, world: int, count: int, drop_last: bool
) -> None:
    """Also if a rank has no sample of its own in a step: then it repeats some."""
    n, seen = 103, Counter[int]()
    size = batches.StepSize(global_batch=count * batch)
    for rank in range(world):
        monkeypatch.setattr("spotrun.train.sampler.rank_and_world", lambda rank=rank: (rank, world))
        sampler = ElasticSampler(range(n), seed=3)
        sampler.bind(batch, drop_last, size.global_batch)
        loader: DataLoader[int] = DataLoader(list(range(n)), batch, sampler=sampler, drop_last=drop_last)
        described = batches.elastic(0, n, batch, world, rank, size, drop_last)
        for one, samples in zip(described, loader, strict=True):
            assert one.own is not None
            assert one.padding or samples.tolist() == sampler.indices(one.own)
            seen.update([] if one.padding else samples.tolist())
    assert set(seen.values()) == {1}
    assert len(seen) == (n - n % size.global_batch if drop_last else n)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    sampler = ElasticSampler(range(23), seed=3)
    loader: DataLoader[int] = DataLoader(list(range(23)), batch_size=4, sampler=sampler, num_workers=workers)
    first = [value for batch in loader for value in batch.tolist()]
    assert sorted(first) == list(range(23))
    assert first != sorted(first)
    assert len(loader) == 6
    sampler.position = 8
    sampler.resume()
    assert [value for batch in loader for value in batch.tolist()] == first[8:]
    sampler.set_epoch(1)
    second = [value for batch in loader for value in batch.tolist()]
    assert sorted(second) == sorted(first)
    assert second != first


def test_state_goes_on_where_it_was() -> None:
    sampler = ElasticSampler(range(10), seed=3)
    sampler.set_epoch(2)
    sampler.position = 6
    other = ElasticSampler(range(10))
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(sampler)
    other.set_epoch(2)
    assert other.position == 6


def test_another_dataset_is_an_error() -> None:
    state = ElasticSampler(range(10)).state_dict()
    with pytest.raises(SpotrunError, match="10 samples, this one has 11"):
        ElasticSampler(range(11)).load_state_dict(state)


def test_an_empty_dataset_is_an_error() -> None:
    with pytest.raises(SpotrunError, match="empty"):
        ElasticSampler([])


def test_without_shuffling_in_order() -> None:
    assert list(ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]
