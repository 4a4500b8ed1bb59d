"""How workers meet at a store before they form a group."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from spotrun.train.distributed import Meeting, NotBegun, _meet
from tests.train.meeting import meeting


def timed(world: int, given_up: threading.Event) -> float:
    """Meet the others. Returns when that has ended."""
    _meet(world, Meeting("1", given_up.is_set))
    return time.monotonic()


def test_a_worker_that_waits_prints_nothing_and_goes_on_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    with meeting(2) as variables, ThreadPoolExecutor(2) as pool:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        first = pool.submit(timed, 2, never)
        never.wait(0.5)
        second = pool.submit(timed, 2, never)
        assert first.result(10) - second.result(10) < 0.05
    assert capfd.readouterr().err == ""


def test_a_worker_that_waits_notices_that_the_group_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with meeting(2) as variables, ThreadPoolExecutor(1) as pool:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        waiting = pool.submit(timed, 2, over)
        over.wait(0.3)
        began = time.monotonic()
        over.set()
        with pytest.raises(NotBegun):
            waiting.result(10)
        assert time.monotonic() - began < 0.1


def test_a_worker_that_waits_notices_that_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with meeting(2) as variables:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            waiting = pool.submit(timed, 2, never)
            never.wait(0.3)
        with pytest.raises(dist.DistNetworkError):
            waiting.result(2)
