"""Exact mode: when the host knows that a GPU's results are right. Here, gloo's collectives count as the GPU's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from spotrun.train import distributed, failures, group_health
from spotrun.train.exactness import Exactness
from tests.train.forks import forked
from tests.train.meeting import meeting

CPU = torch.device("cpu")


def together(scenario: Callable[[int, Exactness], object], folder: Path) -> list[str]:
    """What the scenario returns on each of two ranks."""
    with meeting(2) as group:
        places = [folder / str(rank) for rank in range(2)]
        processes = [forked.Process(target=play, args=(group, rank, scenario, places[rank])) for rank in range(2)]
        for each in processes:
            each.start()
        for each in processes:
            each.join(60)
            each.kill()
    return [place.read_text() for place in places]


def play(group: dict[str, str], rank: int, scenario: Callable[[int, Exactness], object], out: Path) -> None:
    os.environ.update({**group, "RANK": str(rank)})
    dist.init_process_group("gloo")
    exact = Exactness(CPU)
    exact.renew(None)
    out.write_text(str(scenario(rank, exact)))
    os._exit(0)


def outcome(exact: Exactness) -> str:
    """Whether a wait says that the results are right."""
    try:
        exact.wait()
    except Exception as error:
        return "wrong" if failures.is_peer_failure(error) else repr(error)
    return "right"


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def functional_all_reduce() -> None:
    torch.relu(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))


def backward() -> None:
    """Of a script that does not call `run.backward`."""
    DistributedDataParallel(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()


def counts_waits(_: int, exact: Exactness) -> object:
    waits: list[torch.device] = []
    distributed.synchronize = waits.append  # type: ignore[assignment]
    found = []
    for exchange in (all_reduce, functional_all_reduce, backward):
        exchange()
        found += [outcome(exact), outcome(exact)]
    return found.count("right"), len(waits)


def test_it_waits_once_for_each_exchange(tmp_path: Path) -> None:
    assert together(counts_waits, tmp_path) == [str((6, 3))] * 2


def knows_it_before(_: int, exact: Exactness) -> object:
    all_reduce()
    found = [outcome(exact)]
    failures.void = True
    found.append(outcome(exact))
    all_reduce()
    return [*found, outcome(exact)]


def test_a_step_that_is_exchanged_counts_if_the_generation_ends_later(tmp_path: Path) -> None:
    assert together(knows_it_before, tmp_path) == [str(["right", "right", "wrong"])] * 2


def aborts(rank: int, exact: Exactness) -> object:
    """Rank 1's kernel is aborted, and that of rank 0 gets what it has left."""
    all_reduce()
    if rank == 1:
        failures.void = True
    return outcome(exact)


def aborts_by_itself(rank: int, exact: Exactness) -> object:
    all_reduce()
    if rank == 1:
        group_health.count_abort()
    return outcome(exact)


def reports_an_error(rank: int, exact: Exactness) -> object:
    all_reduce()
    if rank == 1:
        group_health.error = lambda: "COMM_ERROR"
    return outcome(exact)


@pytest.mark.parametrize("scenario", [aborts, aborts_by_itself, reports_an_error])
def test_no_rank_trusts_a_step_in_which_one_has_aborted(
    tmp_path: Path, scenario: Callable[[int, Exactness], object]
) -> None:
    assert together(scenario, tmp_path) == ["wrong"] * 2


def has_aborted_before(_: int, exact: Exactness) -> object:
    group_health.count_abort()
    exact.renew(None)
    all_reduce()
    return outcome(exact)


def test_aborts_of_the_last_generation_do_not_count(tmp_path: Path) -> None:
    assert together(has_aborted_before, tmp_path) == ["right"] * 2
