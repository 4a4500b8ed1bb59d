"""A head that dies while machines move between jobs: the real head, and nodes that obey it without processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.fenced import FencedStore
from spotrun.wire import Order
from tests.head.puppets import Theatre


class Killed(BaseException):
    """The head dies here."""


class Fuse:
    """Kills the head before the write or order of that number, counted from the moment when it is lit."""

    def __init__(self) -> None:
        self.left, self.lit = 0, False

    def burn(self) -> None:
        if self.lit:
            self.left -= 1
            if self.left == 0:
                raise Killed

    def put(self, put: Callable[..., Any]) -> Callable[..., Any]:
        async def put_or_die(store: FencedStore, key: str, data: bytes) -> None:
            self.burn()
            await put(store, key, data)

        return put_or_die

    def send(self, send: Callable[[Order], None]) -> Callable[[Order], None]:
        def send_or_die(order: Order) -> None:
            self.burn()
            send(order)

        return send_or_die


CHANGES: dict[str, tuple[int, list[dict[str, Any]], dict[str, Any]]] = {
    "a job shrinks, then grows again": (1, [{"nodes": {"min": 1, "max": 3}}], {"nodes": 2}),
    "a job makes room for all of another one": (1, [{"nodes": {"min": 2, "max": 3}}], {"nodes": 2}),
    "two jobs leave a machine that they share": (2, [{"nodes": {"min": 2, "max": 3}, "devices": 1}] * 2, {"nodes": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_head_that_dies_at_any_point_while_machines_move_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It dies before each write and order, from the submission of an urgent job until the others have all back.

    No device is ordered for two jobs meanwhile: the puppets would find out.
    """
    fuse, number = Fuse(), 0
    monkeypatch.setattr(FencedStore, "put", fuse.put(FencedStore.put))
    while fuse.left <= 0:  # until a head comes through
        number += 1
        kinds = await die_while_machines_move(tmp_path / f"{number}", fuse, number, *CHANGES[change])
        assert "move" in kinds
    assert number > 30


async def die_while_machines_move(
    root: Path, fuse: Fuse, number: int, devices: int, jobs: list[dict[str, Any]], urgent: dict[str, Any]
) -> set[str]:
    """The kinds of interruptions of the lower jobs."""
    stage = Theatre(root, machines=3, devices=devices, total=25)
    low = [await stage.queue_job(f"low-{index}", **job) for index, job in enumerate(jobs)]
    await stage.round(8)
    sizes = [len(stage.nodes(job)) for job in low]
    high = await stage.queue_job("high", priority=1, **urgent)
    for puppet in stage.puppets.values():
        puppet.send = fuse.send(puppet.send)
    fuse.left, fuse.lit = number, True
    for _ in range(300):
        try:
            await stage.round()
        except Killed:
            stage.restart_head()
        fuse.lit = high in stage.head.states or [len(stage.nodes(job)) for job in low] != sizes
        if not stage.queue():
            break
    assert [stage.written(job).phase for job in (*low, high)] == ["succeeded"] * (len(low) + 1)
    assert stage.lost([*low, high]) == 0
    return {each.kind for job in low for each in stage.written(job).interruptions}
