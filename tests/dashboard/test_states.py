"""The pages in a real browser, on a real server and a real head, in states that whole clusters rarely have."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pytest
from aiohttp import ClientSession, UnixConnector, web
from playwright.sync_api import Browser, Page, expect

from scripts import queue
from spotrun.cloud.base import Advice, Problem, Said
from spotrun.head.server.control import ControlServer
from spotrun.node.telemetry.gpus import Gpus
from spotrun.node.telemetry.recorder import Readings
from spotrun.store import job_key
from tests.dashboard.site import TOKEN
from tests.dashboard.site import Page as Served
from tests.dashboard.site import opened as served
from tests.e2e.browser import fits, opened
from tests.e2e.harness import PATIENCE
from tests.fakes.nvml import H100, Nvml
from tests.head.world import CODE, JOB, World, rewrite
from tests.helpers import await_for

T = TypeVar("T")

expect.set_options(timeout=PATIENCE * 1000)


class Station:
    """A world and its dashboard on an event loop of their own: the browser's calls block the thread of the test."""

    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._site = served(self.world)
        try:
            self.page: Served = self.do(self._site.__aenter__)
        except BaseException:
            self._end()
            raise

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE)

    def publish(self) -> None:
        """The pages get the overview as the head sends it."""
        self.do(self._publish)

    async def _publish(self) -> None:
        runner, path = web.AppRunner(ControlServer(self.world.head).app()), str(self.world.root / "live")
        await runner.setup()
        try:
            await web.UnixSite(runner, path).start()
            async with (
                ClientSession(connector=UnixConnector(path)) as session,
                session.get("http://head/live") as found,
            ):
                line = await found.content.readuntil(b"\n")
        finally:
            await runner.cleanup()
            Path(path).unlink(missing_ok=True)
        self.page.live.publish(json.loads(line))

    async def submitted(self, **keys: Any) -> str:
        job = await self.world.head.submit(JOB | keys, CODE)
        await self.world.turn()
        return job

    def url(self, where: str = "cluster") -> str:
        return f"{self.page.url}/?token={TOKEN}#/{where}"

    def close(self) -> None:
        async def leave() -> None:
            await self._site.__aexit__(None, None, None)

        try:
            self.do(leave)
        finally:
            self._end()

    def _end(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    found = Station(tmp_path)
    try:
        yield found
    finally:
        found.close()


def narrow_too(page: Page) -> None:
    assert fits(page)
    page.set_viewport_size({"width": 400, "height": 860})
    assert fits(page)


def test_gpus_are_drawn(station: Station, chromium: Browser) -> None:
    """Two GPUs of a node, one of which lacks a value in the newest reading."""
    job = station.do(station.submitted)
    found = Readings({"format": 1, "job": job, "node": "a", "pool": "p", "gpus": ["H100", "H100"]})
    cool = H100 | {"nvmlDeviceGetPowerUsage": 300_000, "nvmlDeviceGetCurrentClocksThrottleReasons": 0}
    for number in range(3):
        gpus = Gpus(Nvml(cool, H100)).read()
        found.add({"time": time.time() + 5 * number, "cpu": 5.0, "gpus": gpus}, {})
    found.put(station.world.store, found.waiting)
    station.publish()
    with opened(chromium, station.url(f"run/{job}?tab=machines")) as page:
        for title, values in {
            "GPU in use, %": ("97", "97"),
            "GPU memory, GB": ("64.42", "64.42"),
            "GPU temperature, °C": ("61", "61"),
            "GPU power, W": ("300", "651"),
            "GPU clock, MHz": ("1,755", "1,755"),
            "GPU uncorrected ECC errors": ("0", "0"),
        }.items():
            lines = "; ".join(f"a GPU {gpu}: 3 points, last {value}" for gpu, value in enumerate(values))
            expect(page.get_by_role("img", name=f"{title}. {lines}", exact=True)).to_be_visible()
        slow = page.get_by_role("row", name=re.compile("power cap"))
        expect(slow).to_contain_text("software thermal")
        expect(slow.get_by_role("cell").nth(1)).to_have_text("1")
        narrow_too(page)


def test_stock_outs_and_the_clouds_advice_are_drawn(station: Station, chromium: Browser) -> None:
    async def prepare() -> None:
        world = station.world
        await world.head.submit(JOB, CODE)
        world.cloud.lacks = [Problem("q", "stockout", "local-a has no such machines", world.clock())]
        prices = (Said(1.0, 1000.0, "test"), Said(1.5, 2000.0, "test"))
        said = Said(0.25, 1.0, "test"), Said(7200.0, 1.0, "test"), Said(0.5, 1.0, "test")
        world.cloud.said = {"p": Advice(*said, prices)}
        following = asyncio.create_task(world.head.fleet.follow_market())
        try:
            await asyncio.sleep(0)  # it waits for the next look
            await world.turn()
            await world.look()
            await await_for(lambda: bool(world.head.fleet.advice), what="the advice")
        finally:
            following.cancel()

    station.do(prepare)
    station.publish()
    with opened(chromium, station.url()) as page:
        pools = page.get_by_role("region", name="Pools")
        spot, other = (pools.get_by_role("row", name=re.compile(f"^{name} ")) for name in "pq")
        expect(spot).to_contain_text("chance to get all machines: 25 %")
        expect(spot).to_contain_text("a machine runs 2.0 h")
        expect(spot).to_contain_text("the cloud took 50 % of the machines that ended")
        expect(spot.get_by_role("img", name="2 prices from $1.000 to $1.500")).to_be_visible()
        expect(other.get_by_text(re.compile(r"^local-a has no such machines \(since [0-9:]+\)$"))).to_be_visible()
        expect(other).to_contain_text("nothing")
        decisions = page.get_by_role("region", name="Decisions")
        expect(decisions.get_by_role("row", name="pool q")).to_contain_text("local-a has no such machines")
        narrow_too(page)


def test_a_held_job_is_relaunched(station: Station, chromium: Browser) -> None:
    async def prepare() -> str:
        job = await station.world.started()
        queue.hold(station.world.store, "c")
        station.world.new_head()
        await station.world.turn()
        return job.id

    job = station.do(prepare)
    station.publish()
    with opened(chromium, station.url()) as page:
        rows = page.get_by_role("region", name="Decisions").get_by_role("row", name=job)
        expect(rows).to_contain_text(f"`make relaunch ID={job}` continues it")
        page.keyboard.press("2")
        row = page.get_by_role("row", name=job)
        expect(row.get_by_text("held", exact=True)).to_be_visible()
        expect(page.get_by_role("region", name="Ended jobs").get_by_text("None.")).to_be_visible()
        expect(row.get_by_role("button", name=f"stop {job}")).to_be_visible()
        expect(row.get_by_label(f"Priority of {job}")).to_have_count(0)
        narrow_too(page)
        row.get_by_role("button", name=f"relaunch {job}").click()
        expect(page.get_by_role("status").last).to_have_text(f"relaunch {job}: done")
        station.do(station.world.turn)
        station.publish()
        expect(row.get_by_role("button", name=f"pause {job}")).to_be_visible()
        expect(row.get_by_text("held", exact=True)).to_have_count(0)
    assert station.page.head.asked == ["relaunch"]


def test_a_parked_job_has_not_ended(station: Station, chromium: Browser) -> None:
    """The head cannot read its state. It may still train."""

    async def prepare() -> str:
        job = await station.world.started()
        rewrite(station.world, job_key(job.id, "state.json"), lambda state: state | {"format": 2})
        station.world.new_head(2)
        await station.world.turn()
        return job.id

    job = station.do(prepare)
    station.publish()
    with opened(chromium, station.url("jobs")) as page:
        row = page.get_by_role("row", name=job)
        expect(row.get_by_text("parked", exact=True)).to_be_visible()
        expect(row.get_by_role("button")).to_have_text(["stop"])
        expect(page.get_by_role("region", name="Ended jobs").get_by_text("None.")).to_be_visible()
        narrow_too(page)


def test_what_is_wrong_with_a_job_is_said(station: Station, chromium: Browser) -> None:
    """A node cannot upload its part of a checkpoint. The reason of the job does not say so."""

    async def prepare() -> str:
        job = await station.world.started()
        now = station.world.clock()
        trouble = {"step": 7, "tries": 3, "since": now, "at": now, "message": "no room in the bucket"}
        station.world.receive("a", job=job.id, trouble=trouble)
        await station.world.turn()
        return job.id

    job = station.do(prepare)
    station.publish()
    text = "a cannot save its part of the checkpoint of step 7 (3 tries): no room in the bucket (since "
    with opened(chromium, station.url()) as page:
        expect(page.get_by_role("region", name="Decisions").get_by_role("row", name=job)).to_contain_text(text)
        for where in ("jobs", f"run/{job}"):
            page.goto(f"{page.url.partition('#')[0]}#/{where}")
            expect(page.locator(".bad", has_text=text)).to_be_visible()
        narrow_too(page)


def test_a_failed_job_that_keeps_a_node_goes_on_costing(station: Station, chromium: Browser) -> None:
    async def prepare() -> str:
        job = await station.world.started()
        now = station.world.clock()
        kept = {"member": {"node": "a", "boot": "b", "address": "127.0.0.1"}, "until": now + 600}
        changes = {"phase": "failed", "ended": now, "current": None, "kept_node": kept}
        rewrite(station.world, job_key(job.id, "state.json"), lambda state: state | changes)
        station.world.new_head()
        await station.world.turn()
        return job.id

    job = station.do(prepare)
    station.publish()
    text = re.compile(rf"keeps a for SSH until .*[0-9]+:[0-9]+, and pays for it; `make stop ID={job}` lets it go")
    with opened(chromium, station.url("jobs")) as page:
        row = page.get_by_role("row", name=job)
        expect(row).to_contain_text(text)
        expect(row.get_by_role("button")).to_have_text(["set", "stop"])  # it cannot be paused
        for where in ("cluster", f"run/{job}"):
            page.goto(f"{page.url.partition('#')[0]}#/{where}")
            expect(page.locator(".bad", has_text=text)).to_be_visible()


def with_budget(state: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return state | changes | {"spec": state["spec"] | {"budget": 5.0}}


def test_jobs_over_their_budgets(station: Station, chromium: Browser) -> None:
    """One will cost more than its budget if it goes on. The other has spent it, and the head has stopped it."""

    async def prepare() -> tuple[str, str]:
        world = station.world
        job = await world.with_machines()
        for name in ("p-0", "p-1"):  # a dollar an hour for each
            world.receive(name, job=job)
        await world.turn()
        spent = await world.head.submit(JOB, CODE)
        await world.turn()
        now = world.clock()
        progress = {"base": 0, "step": 10, "total_steps": 1010, "pace": 10.8, "stepped_at": now, "restored_at": now}
        going = {"cost": 1.0, "counted_at": now, "progress": progress}
        for each, changes in ((job, going), (spent, {"cost": 5.5})):
            limited = functools.partial(with_budget, changes=changes)
            rewrite(world, job_key(each, "state.json"), limited)
        head = world.new_head()
        head.presence.began = head.presence.awake_since = now  # so its nodes do not count as silent
        await world.look()
        await world.turn(4)
        return job, spent

    job, spent = station.do(prepare)
    station.publish()
    with opened(chromium, station.url("jobs")) as page:
        row = page.get_by_role("region", name="Jobs without a group").get_by_role("row", name=job)
        expect(row).to_contain_text("$1.00 of $5.00")
        expect(row).to_contain_text("$7.00 at its end")
        expect(row.get_by_role("img", name="$1.00 of a budget of $5.00")).to_have_class("bar warn")
        ended = page.get_by_role("region", name="Ended jobs").get_by_role("row", name=spent)
        expect(ended.get_by_text("stopped", exact=True)).to_be_visible()
        expect(ended).to_contain_text("the budget of $5 is spent")
        expect(ended.get_by_role("img", name="$5.50 of a budget of $5.00")).to_have_class("bar warn")
        narrow_too(page)
        row.get_by_role("link", name=job, exact=True).click()
        expect(page.get_by_text(re.compile(r"^;? ?budget \$5\.00$"))).to_have_class("bad")
