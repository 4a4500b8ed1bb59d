"""The dashboard over HTTP: who may ask, what changes, and what the stream of live changes does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from yarl import URL

from scripts import queue
from spotrun.dashboard import history, logs, records, runs
from spotrun.dashboard.records import Records
from spotrun.dashboard.server import READERS, Dashboard
from spotrun.head import journal, overview
from spotrun.state import points
from spotrun.state.points import Call, Header
from spotrun.store import Store, job_key, log_key, metrics_key, queue_key
from spotrun.wire import QueueRecord
from tests.dashboard.site import TOKEN, Page, opened
from tests.head.world import CODE, JOB, World, asked, stepping

READS = ("/", "/pages/app.js", "/api/live", "/api/jobs", "/api/runs/x", "/metrics", "/nothing")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def page(world: World) -> AsyncIterator[Page]:
    async with opened(world) as found:
        yield found


async def submitted(world: World, **keys: Any) -> str:
    job = await world.head.submit(JOB | keys, CODE)
    await world.turn()
    return job


def contents(world: World) -> dict[str, bytes]:
    return {key: world.store.get(key) for key in world.store.list("")}


@pytest.mark.parametrize("path", READS)
async def test_nothing_is_answered_without_the_token(page: Page, path: str) -> None:
    for query in ("", "?token=wrong", "?token="):
        status, text = await page.get(path + query)
        assert status == 403
        assert "open the address that `make dashboard` has printed" in text
    assert (await page.get(path, Authorization="Bearer wrong"))[0] == 403
    assert (await page.get(path, Cookie="spotrun=wrong"))[0] == 403


def paths(app: web.Application) -> list[str]:
    """The paths of all routes, below the path of the pages, with a job that there is not."""
    found = {route.resource.canonical for route in app.router.routes() if route.resource}
    return [path.replace("{job}", "x").replace("{verb}", "stop").replace("{name}", "app.js") for path in sorted(found)]


@pytest.mark.parametrize(
    ("method", "status"),
    [("GET", 403), ("HEAD", 403), ("POST", 403), ("PUT", 405), ("DELETE", 405), ("OPTIONS", 405)],
)
async def test_no_route_answers_without_the_token(world: World, page: Page, method: str, status: int) -> None:
    """Also one that somebody adds later."""
    dashboard = Dashboard(Records(world.store, "c"), page.live, page.head, TOKEN)
    routes = paths(dashboard.app())
    assert len(routes) > 15
    for path in routes:
        async with page.session.request(method, page.url + path, json={}) as response:
            assert response.status == status, path
            assert TOKEN not in await response.text()
    assert page.head.asked == []


async def test_the_url_with_the_token_is_for_the_page_alone(page: Page) -> None:
    assert (await page.get(f"/api/jobs?token={TOKEN}"))[0] == 403
    await page.enter()
    assert (await page.get("/api/jobs"))[0] == 200


async def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(page: Page) -> None:
    async with page.session.get(f"{page.url}/?token={TOKEN}", allow_redirects=False) as response:
        (cookie,) = response.headers.getall("Set-Cookie")
    assert cookie.startswith(f"spotrun={TOKEN};")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert f"Path={response.headers['Location']};" in cookie
    assert len(response.headers["Location"]) > 32


async def test_the_cookie_is_for_the_pages_alone(page: Page) -> None:
    """All servers on a computer have the same cookies of 127.0.0.1. The path, which others cannot know, keeps it."""
    door = page.url
    await page.enter()
    assert (await page.get("/api/jobs"))[0] == 200
    assert [str(c["path"]) for c in page.session.cookie_jar] == [page.url.removeprefix(door) + "/"]
    async with page.session.get(f"{door}/metrics") as response:
        assert response.status == 403
    async with page.session.get(f"{door}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}) as response:
        assert response.status == 200


async def test_an_event_of_the_cluster_comes_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier head are only in the lists of all jobs, and none of these jobs is concerned."""
    monkeypatch.setattr(journal, "PROGRESS_EVERY", 0.0)
    jobs = [await submitted(world) for _ in range(3)]
    world.head.add_event("pool", "pool p has no capacity")
    world.head.add_event("job", "of one", jobs[1])
    await world.turn()

    def told(events: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
        known = [(each["text"], each.get("job")) for each in events]
        return [each for each in known if each[0] in ("pool p has no capacity", "of one")]

    wanted = [("pool p has no capacity", None), ("of one", jobs[1])]
    assert told(world.head.events.newest(100)) == wanted
    world.new_head(2)
    await world.turn(2)
    assert world.head.jobs == jobs
    assert told(world.head.events.newest(100)) == wanted
    assert told(history.read(Records(world.store, "c"), world.cluster)["events"]) == wanted


@pytest.mark.parametrize("path", READS)
async def test_other_origins_and_hosts_are_refused_with_the_token(page: Page, path: str) -> None:
    await page.enter()
    for name, value in (("Origin", "http://evil.example"), ("Host", "evil.example"), ("Sec-Fetch-Site", "cross-site")):
        status, text = await page.get(path, **{name: value})
        assert status == 403, name
        assert TOKEN not in text


async def test_no_answer_lets_other_sites_in(page: Page) -> None:
    await page.enter()
    for path in ("/", "/pages/app.js", "/api/jobs", "/nothing", "/api/runs/none", "/?token=wrong"):
        async with page.session.get(page.url + path) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert "unsafe" not in response.headers["Content-Security-Policy"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "name", ["../server.py", "..%2fserver.py", "vendor/../../server.py", "vendor", "x.js", "%2fetc"]
)
async def test_only_files_of_the_pages_are_served(page: Page, name: str) -> None:
    await page.enter()
    assert (await page.get(f"/pages/{name}"))[0] == 404


async def test_no_absolute_path_is_served(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    private = tmp_path_factory.mktemp("elsewhere") / "private.html"
    private.write_text("of another program")
    await page.enter()
    async with page.session.get(URL(f"{page.url}/pages/{private}", encoded=True)) as response:
        assert response.status == 404


async def test_a_token_that_is_no_text_is_refused(page: Page) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\nConnection: close\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
    writer.close()
    await writer.wait_closed()


async def test_a_get_writes_nothing(world: World, page: Page) -> None:
    job = await submitted(world)
    await page.enter()
    world.store.put(log_key(job, 1, "a", 0), b"text\n")
    before = contents(world)
    for verb in ("pause", "resume", "stop", "priority", "relaunch"):
        status, _ = await page.get(f"/api/jobs/{job}/{verb}")
        assert status in (404, 405), verb
    parts = ["", *(f"/{name}" for name in (*runs.ANSWERS, "curves", "machines", "logged") if name)]
    for path in ("/api/jobs", *(f"/api/runs/{job}{part}" for part in parts)):
        assert (await page.get(f"{path}?generation=1&node=a&rank=0"))[0] == 200, path
    assert contents(world) == before
    assert page.head.asked == []


async def test_a_job_is_paused_resumed_and_stopped(world: World, page: Page) -> None:
    job = await submitted(world)
    await page.enter()
    for verb, phase in (("pause", "paused"), ("resume", "queued")):
        assert await page.post(f"/api/jobs/{job}/{verb}", {}) == (200, {"job": job})
        (row,) = overview.of(world.head)["jobs"]
        assert row["phase"] == phase
    assert await page.post(f"/api/jobs/{job}/priority", {"to": 7}) == (200, {"job": job})
    assert overview.of(world.head)["jobs"][0]["priority"] == 7
    assert (await page.post(f"/api/jobs/{job}/stop", {}))[0] == 200
    await world.turn(2)
    assert world.written(job).phase == "stopped"


async def test_the_words_of_the_head_reach_the_page(world: World, page: Page) -> None:
    job = await submitted(world)
    await page.enter()
    status, found = await page.post(f"/api/jobs/{job}/resume", {})
    assert (status, f"job {job} is not paused" in found["error"]) == (400, True)
    bodies: tuple[Any, ...] = ({"to": "5"}, {"to": 1.5}, {}, [], {"to": True})
    for body in bodies:
        assert (await page.post(f"/api/jobs/{job}/priority", body))[0] == 400, body
    assert (await page.post(f"/api/jobs/{job}/explode", {}))[0] == 400


async def test_a_change_needs_the_pages_own_origin_and_json(world: World, page: Page) -> None:
    job = await submitted(world)
    await page.enter()
    assert (await page.post(f"/api/jobs/{job}/stop", {}, Origin="http://evil.example"))[0] == 403
    async with page.session.post(f"{page.url}/api/jobs/{job}/stop", data="{}") as response:
        assert response.status == 415
    assert page.head.asked == []


async def test_names_and_logs_stay_text(world: World, page: Page) -> None:
    """JSON is never a page: its type is not HTML, and the browser must not guess one."""
    job = await submitted(world)
    world.store.put(log_key(job, 1, "a", 0), b"<script>alert(1)</script>\n\x1b[31mred\x1b[0m\n")
    await page.enter()
    async with page.session.get(f"{page.url}/api/runs/{job}/log?generation=1&node=a&rank=0") as response:
        assert response.content_type == "application/json"
        assert (await response.json())["text"] == "<script>alert(1)</script>\nred\n"


async def test_curves_of_names_with_line_breaks(world: World, page: Page) -> None:
    job = await submitted(world)
    lines = [Header(job, 1, 0, 0), Call(1, 100.0, {"a\nb": 1.0, "a": 2.0, "50%0A": 3.0})]
    world.store.put(metrics_key(job, 1, 1), points.compress(b"".join(map(points.line, lines))))
    await page.enter()
    _, found = await page.get(f"/api/runs/{job}/curves?names=a%250Ab%0A50%25250A")
    assert [(each["name"], each["count"]["values"]) for each in found["curves"]] == [("a\nb", [1.0]), ("50%0A", [3.0])]


@pytest.mark.parametrize("job", ["../../x", "%2e%2e%2fx", "none", "A", "a" * 300, "a%00b"])
async def test_a_job_that_there_is_not(page: Page, job: str) -> None:
    await page.enter()
    status, _ = await page.get(f"/api/runs/{job}")
    assert status == 404


@pytest.mark.parametrize("query", ["node=..%2fx&rank=0&generation=1", "node=a&rank=x&generation=1", "node=a", ""])
async def test_a_log_that_there_is_not(world: World, page: Page, query: str) -> None:
    job = await submitted(world)
    await page.enter()
    assert (await page.get(f"/api/runs/{job}/log?{query}"))[0] == 400


async def test_a_log_is_searched_to_its_end_in_pieces(
    world: World, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line is found once, whatever the sizes of the pieces that are read and answered."""
    job = await submitted(world)
    text = "".join(f"line {number} {'Needle' if number % 7 == 0 else 'hay'} é\n" for number in range(2000))
    world.store.put(log_key(job, 1, "a", 0), text.encode())
    await page.enter()
    wanted = [line for line in text.splitlines() if "Needle" in line]
    for name, value in (("RANGE", 1000), ("SEARCHED", 5000), ("HITS", 20)):
        monkeypatch.setattr(logs, name, value)
        found, start = list[str](), 0
        while start is not None:
            path = f"/api/runs/{job}/log?generation=1&node=a&rank=0&grep=needle&from={start}"
            status, answer = await page.get(path)
            assert status == 200
            found += [hit["text"] for hit in answer["hits"]]
            start = answer["next"]
        assert found == wanted, name
    whole = await page.get(f"/api/runs/{job}/log?generation=1&node=a&rank=0&grep=needle&from=0")
    assert await page.get(f"/api/runs/{job}/log?generation=1&node=a&rank=0&grep=needle&from=-5") == whole


async def test_a_log_is_read_from_its_end(world: World, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PIECE", 1000)
    job = await submitted(world)
    text = "".join(f"line {number}\n" for number in range(500))
    world.store.put(log_key(job, 1, "a", 0), text.encode())
    await page.enter()
    found, end = "", f"&end={len(text)}"
    while end:
        _, piece = await page.get(f"/api/runs/{job}/log?generation=1&node=a&rank=0{end}")
        found, end = piece["text"] + found, f"&end={piece['start']}" if piece["start"] else ""
    assert found == text


async def test_what_is_before_a_progress_bar_is_reached(
    world: World, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar is one long line: a piece of the log may end with its only end of a line."""
    monkeypatch.setattr(logs, "PIECE", 1000)
    job = await submitted(world)
    text = "the first line\n" + "".join(f"\repoch {number:5d}" for number in range(500)) + "\nthe end of it\n"
    world.store.put(log_key(job, 1, "a", 0), text.encode())
    await page.enter()
    end, starts = text.index("the end of it"), list[int]()
    while end and len(starts) < 99:
        _, piece = await page.get(f"/api/runs/{job}/log?generation=1&node=a&rank=0&end={end}")
        end = piece["start"]
        starts.append(end)
    assert starts == sorted(set(starts), reverse=True)
    assert starts[-1] == 0
    assert piece["text"].startswith("the first line")


async def message(stream: ClientResponse) -> dict[str, Any]:
    """The next document of the stream."""
    async with asyncio.timeout(60):
        async for line in stream.content:
            if line.startswith(b"data: {") and len(line) > 20:
                return json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream has ended")


async def test_the_stream_has_the_newest_overview_and_its_loss(world: World, page: Page) -> None:
    await page.enter()
    job = await submitted(world)
    page.live.publish(overview.of(world.head))
    async with page.session.get(f"{page.url}/api/live") as stream:
        assert stream.content_type == "text/event-stream"
        first = await message(stream)
        assert (first["live"], [row["id"] for row in first["overview"]["jobs"]]) == (True, [job])
        page.live.lose("no answer", history.read(Records(world.store, "c"), world.cluster))
        second = await message(stream)
        assert (second["live"], second["why"]) == (False, "no answer")
        assert [row["id"] for row in second["overview"]["jobs"]] == [job]
        world.new_head(2)
        await world.turn()
        page.live.publish(overview.of(world.head))
        assert (await message(stream))["overview"]["head"]["epoch"] == 2


async def test_a_slow_page_gets_the_newest_document_and_not_all(world: World, page: Page) -> None:
    await page.enter()
    page.live.publish({"cluster": "c", "number": 0})
    async with page.session.get(f"{page.url}/api/live") as stream:
        assert (await message(stream))["overview"]["number"] == 0
        for number in range(1, 1001):
            page.live.publish({"cluster": "c", "number": number})
        assert (await message(stream))["overview"]["number"] == 1000


async def test_the_bucket_tells_the_same_as_the_head(world: World) -> None:
    """The keys of both overviews are equal, and so are the values of what does not move."""
    job = await world.started()
    for name in ("a", "b"):
        world.receive(name, job=job.id, phase="running", generation=1, workers=stepping(3))
    await world.turn()
    live = overview.of(world.head)
    read = await asyncio.to_thread(history.read, Records(world.store, "c"), world.cluster)
    assert live.keys() - read.keys() <= {"counted_at", "idle_node_seconds", "idle_account"}
    assert [pool["name"] for pool in read["pools"]] == [pool["name"] for pool in live["pools"]]
    (here,), (there,) = live["jobs"], read["jobs"]
    assert here.keys() - there.keys() == {"placement"}
    assert (there["id"], there["phase"], there["step"]) == (here["id"], here["phase"], here["step"])


async def test_a_held_job_says_why_while_the_cluster_is_down(world: World) -> None:
    job = await world.started()
    await asyncio.to_thread(queue.hold, world.store, "c")
    world.new_head()
    await world.turn()
    read = await asyncio.to_thread(history.read, Records(world.store, "c"), world.cluster)
    (row,) = read["jobs"]
    assert (row["id"], row["phase"], row["name"]) == (job.id, "held", "toy")
    assert row["reason"].endswith(f"`make relaunch ID={job.id}` continues it")


async def test_jobs_that_are_left_out_are_counted(world: World) -> None:
    """While the head does not answer, only some of the jobs that have not ended are read."""
    jobs = tuple(f"run-20260101-{number:06d}" for number in range(history.JOBS + 7))
    world.store.put(queue_key("c"), QueueRecord(jobs=jobs).model_dump_json().encode())
    read = await asyncio.to_thread(history.read, Records(world.store, "c"), world.cluster)
    assert (len(read["jobs"]), read["jobs_left_out"]) == (history.JOBS, 7)


async def test_jobs_are_listed_newest_first_in_pieces(world: World, page: Page) -> None:
    jobs = [await submitted(world) for _ in range(5)]
    key = job_key("other-20200101-000000", "state.json")
    world.store.put(key, world.written(jobs[0]).replace(cluster="another").model_dump_json().encode())
    world.store.put(job_key("broken-20200101-000000", "state.json"), b"{")
    await page.enter()
    _, found = await page.get("/api/jobs?most=3")
    assert ([row["id"] for row in found["rows"]], found["more"]) == (jobs[:1:-1], True)
    _, found = await page.get(f"/api/jobs?before={jobs[2]}")
    assert [row["id"] for row in found["rows"]] == [jobs[1], jobs[0], "broken-20200101-000000"]
    assert found["rows"][-1]["phase"] == "unreadable"


async def test_a_relaunched_job_is_read_again(world: World, page: Page) -> None:
    job = await submitted(world)
    await page.enter()
    await page.post(f"/api/jobs/{job}/stop", {})
    await world.turn(2)
    assert (await page.get("/api/jobs"))[1]["rows"][0]["phase"] == "stopped"
    await page.post(f"/api/jobs/{job}/relaunch", {})
    await world.turn(2)
    assert (await page.get("/api/jobs"))[1]["rows"][0]["phase"] == "queued"


async def test_a_job_that_was_relaunched_and_ended_between_two_looks_is_read_again(world: World, page: Page) -> None:
    job = await submitted(world)
    await page.enter()
    await page.post(f"/api/jobs/{job}/stop", {})
    await world.turn(2)
    assert (await page.get("/api/jobs"))[1]["rows"][0]["cost"] in (None, 0)
    page.live.publish({"jobs": [{"id": job}]})  # somebody has relaunched it in a terminal
    state = world.written(job).replace(cost=7.0)
    world.store.put(job_key(job, "state.json"), state.model_dump_json().encode())
    page.live.publish({"jobs": []})
    assert (await page.get("/api/jobs"))[1]["rows"][0]["cost"] == 7.0


async def test_the_budget_of_an_ended_job_changes(world: World, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `make budget`, before the job is relaunched. The head does not name the job then."""
    monkeypatch.setattr(records, "FRESH", 0.1, raising=False)
    await page.enter()
    await world.look()  # a budget needs prices
    job = await submitted(world, budget=5.0)
    await page.post(f"/api/jobs/{job}/stop", {})
    await world.turn(3)
    assert (await page.get("/api/jobs"))[1]["rows"][0]["budget"] == 5.0
    await asked(world, world.head, "budget", job, to=9.0)
    await asyncio.sleep(0.2)
    assert (await page.get("/api/jobs"))[1]["rows"][0]["budget"] == 9.0


class Slow(Store):
    """A client of a bucket that answers when `go` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.go = threading.Event()
        self.waiting = threading.Semaphore(0)

    def find(self, key: str, most: int | None = None) -> bytes | None:
        self.waiting.release()
        assert self.go.wait(60)
        return super().find(key, most)


async def test_a_bucket_that_does_not_answer_delays_no_change(world: World) -> None:
    """More pages ask than there are threads for the bucket. The stream and the buttons work meanwhile."""
    job = await submitted(world)
    slow = Slow(world.store.url)
    async with opened(world, slow) as page:
        await page.enter()
        asked = [asyncio.create_task(page.get(f"/api/runs/{job}")) for _ in range(2 * READERS)]
        try:
            for _ in range(READERS):
                assert await asyncio.to_thread(slow.waiting.acquire, timeout=60)
            page.live.publish(overview.of(world.head))
            async with page.session.get(f"{page.url}/api/live") as stream:
                assert [row["id"] for row in (await message(stream))["overview"]["jobs"]] == [job]
            assert await page.post(f"/api/jobs/{job}/pause", {}) == (200, {"job": job})
            assert not any(each.done() for each in asked)
        finally:
            slow.go.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}


async def test_a_thousand_runs_are_listed(world: World, page: Page) -> None:
    """In pieces, each run once, newest first. Ended runs are read once."""
    state = world.written(await submitted(world)).replace(phase="succeeded", ended=2.0)
    jobs = [f"run-20260101-{number:06d}" for number in range(1000)]
    for job in jobs:
        world.store.put(job_key(job, "state.json"), state.replace(id=job).model_dump_json().encode())
    await page.enter()
    found, before, more = list[str](), "", True
    while more:
        _, answer = await page.get(f"/api/jobs?most=100&before={before}")
        found += [row["id"] for row in answer["rows"]]
        before, more = found[-1], answer["more"]
    assert [each for each in found if each in set(jobs)] == jobs[::-1]
    assert len(found) == 1001
