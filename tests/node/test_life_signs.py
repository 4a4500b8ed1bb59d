"""The signs of life that an agent leaves in the bucket while it has a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.store import alive_key
from spotrun.wire import AliveRecord, Order
from tests.fakes.node import order_of
from tests.fakes.node import world as machines
from tests.helpers import await_for

PATIENCE = 120.0  # seconds that an agent with torch may take on a busy machine


@pytest.mark.timeout(900)
async def test_an_agent_signs_while_it_has_a_job(tmp_path: Path) -> None:
    async with machines(tmp_path, "node-a") as w:
        bundle = w.bundle("--steps", "1000000", hang_timeout=5)
        await w.ready(bundle, ["node-a"])
        order = await w.begin(bundle, 1, ["node-a"])
        key = alive_key("test", "node-a")

        def signed(step: int) -> AliveRecord | None:
            data = w.store.find(key)
            found = AliveRecord.model_validate_json(data) if data else None
            return found if found and found.step >= step else None

        first = await await_for(lambda: signed(1), PATIENCE, "a sign with a step")
        assert (first.node, first.job, first.generation, first.every) == ("node-a", bundle.id, 1, 1.0)
        assert first.boot == w.head.reports["node-a"].boot
        await await_for(lambda: signed(first.step + 1), PATIENCE, "a later one")
        await w.head.order("node-a", Order(epoch=order.epoch))
        await await_for(lambda: not w.store.exists(key), PATIENCE, "no sign without a job")


@pytest.mark.timeout(900)
async def test_an_agent_that_ends_well_leaves_no_sign(tmp_path: Path) -> None:
    """It has taken a job; whether that is ready yet does not matter."""
    async with machines(tmp_path, "node-a") as w:
        await w.head.order("node-a", order_of(w.bundle(), w.head.epoch))
        key = alive_key("test", "node-a")
        await await_for(lambda: w.store.exists(key), PATIENCE, "a sign")
        await w.machines[0].end()
        assert not w.store.exists(key)
