"""Exact mode: when the host knows that a GPU's results are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spotrun.train import distributed, failures, group_health
from spotrun.train.exactness import Exactness

CPU = torch.device("cpu")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Each wait for the device."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    found: list[torch.device] = []
    monkeypatch.setattr(distributed, "synchronize_stream", found.append)
    yield found
    failures.void = False


@pytest.fixture
def exact(waits: list[torch.device]) -> Exactness:
    return Exactness(CPU)


def backward(_: Exactness) -> None:
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def expect(exact: Exactness) -> None:
    exact.expect()


def renew(exact: Exactness) -> None:
    exact.renew()


@pytest.mark.parametrize("exchange", [backward, expect, renew])
def test_it_waits_once_for_each_exchange(
    exact: Exactness, waits: list[torch.device], exchange: Callable[[Exactness], None]
) -> None:
    for count in (1, 2):
        exchange(exact)
        exact.wait()
        exact.wait()
        assert waits == [CPU] * count


def test_a_step_that_is_exchanged_counts_when_the_generation_ends_later(exact: Exactness) -> None:
    backward(exact)
    exact.wait()
    failures.void = True
    exact.wait()
    backward(exact)
    with pytest.raises(dist.DistError):
        exact.wait()


def abort() -> None:
    failures.void = True


def abort_by_the_script() -> None:
    group_health.count_abort()


@pytest.mark.parametrize("abort", [abort, abort_by_the_script])
def test_an_abort_while_it_waits(exact: Exactness, monkeypatch: pytest.MonkeyPatch, abort: Callable[[], None]) -> None:
    """The aborted kernel returns as if it had succeeded."""
    monkeypatch.setattr(distributed, "synchronize_stream", lambda device: abort())
    for _ in range(2):
        with pytest.raises(dist.DistError):
            exact.wait()


def test_an_error_of_the_group(exact: Exactness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_health, "error", lambda: "COMM_ERROR")
    with pytest.raises(dist.DistError, match="COMM_ERROR"):
        exact.wait()


def test_aborts_of_the_last_generation_do_not_count(exact: Exactness) -> None:
    group_health.count_abort()
    exact.renew()
    exact.wait()


def test_a_backward_pass_that_fails_may_have_begun_one(exact: Exactness, waits: list[Any]) -> None:
    exact.wait()
    with pytest.raises(RuntimeError):
        torch.ones(1).sum().backward()  # type: ignore[no-untyped-call]
    exact.wait()
    assert len(waits) == 2
