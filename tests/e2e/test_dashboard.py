"""The dashboard in a real browser, on a cluster that is preempted and whose head is killed while the page is open."""

from __future__ import annotations

import functools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from prometheus_client.parser import text_string_to_metric_families

from scripts import site as sites
from scripts.home import home
from spotrun.history.provenance import Git, Provenance
from spotrun.state.points import Call, Extra, Header, compress, line
from spotrun.store import extras_key, job_key, log_key, metrics_key, provenance_key
from spotrun.train import extras
from tests.e2e.browser import SIZES, dashboard, faint, fits, opened, shot
from tests.e2e.harness import PATIENCE, Harness, running
from tests.helpers import wait_for

expect.set_options(timeout=PATIENCE * 1000)


@pytest.fixture
def url(chromium: Browser, cluster: Harness) -> Iterator[str]:
    with dashboard(cluster) as found:
        yield found


HANGING = "hangs-20260101-000000"  # a run
# `make dashboard`, with a bucket that does not answer about this run. The file says that the bucket was asked.
HANGS = f"""
import threading
from pathlib import Path
from fabric.main import program
from spotrun.store import Store

find = Store.find

def hang(store, key, *more):
    if key == "jobs/{HANGING}/state.json":
        Path("FILE").touch()
        threading.Event().wait()
    return find(store, key, *more)

Store.find = hang
program.run()
"""


def go(page: Page, where: str) -> None:
    """Another page of the dashboard, by its link."""
    page.get_by_role("navigation").get_by_role("link", name=where, exact=True).click()
    expect(page.get_by_role("heading", level=1, name=where)).to_be_visible()


def test_a_preemption_shows_while_the_page_is_open(cluster: Harness, chromium: Browser, url: str) -> None:
    with opened(chromium, url) as page:
        assert "token" not in page.url
        expect(page.locator("#state")).to_have_text("live")
        job = cluster.submit(nodes={"min": 2, "max": 3}, epochs=2, samples=4000, pause=0.02, slow=60)
        cluster.until(lambda s: len(s["job"]["members"]) == 3 and s["job"]["phase"] == "running", "three nodes")
        nodes = page.get_by_role("region", name="Nodes")
        expect(nodes.get_by_text("running", exact=True)).to_have_count(3)
        cluster.until_step(60)
        victim = cluster.members()[1]
        cluster.fault("preempt", victim)
        events = page.get_by_role("region", name="Events").last
        expect(events.get_by_text(f"{victim} will be taken: preempt")).to_be_visible()
        recovery = re.compile(r"after [0-9.]+ s, 0 steps lost \([a-z+]*preempt[a-z+]*\)")
        expect(events.get_by_text(recovery).first).to_be_visible()
        expect(nodes.get_by_text("running", exact=True)).to_have_count(3)
        assert fits(page)
        shot(page, "cluster")
        page.set_viewport_size({"width": 400, "height": 860})
        assert fits(page)
        job.go()
    cluster.until_ended()


def test_jobs_are_changed_with_the_keyboard(cluster: Harness, chromium: Browser, url: str) -> None:
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=4000, slow=1, deadline=7200.0, budget=5.0)
    cluster.until_step(10)
    with opened(chromium, url, "narrow", "dark") as page:
        page.keyboard.press("2")
        expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")
        row = page.get_by_role("row", name=job.id)
        expect(row.get_by_text(re.compile("deadline .* met if the job keeps its pace"))).to_be_visible()
        expect(row).to_contain_text("if machines are lost or missing, the deadline may be missed")
        assert fits(page)
        row.get_by_role("button", name=f"pause {job.id}").focus()
        page.keyboard.press("Enter")
        expect(row.get_by_text("paused", exact=True)).to_be_visible()
        field = row.get_by_label(f"Priority of {job.id}", exact=True)
        field.focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("7")
        page.keyboard.press("Enter")
        expect(page.get_by_role("status").last).to_have_text(re.compile(f"priority {job.id}: done"))
        cluster.until(lambda s: s["job"]["priority"] == 7, "the new priority")
        row.get_by_role("button", name=f"resume {job.id}").focus()
        page.keyboard.press("Enter")
        expect(row.get_by_text("running", exact=True)).to_be_visible()
        page.set_viewport_size({"width": 1600, "height": 1000})
        assert fits(page)
        shot(page, "jobs")
        page.on("dialog", lambda dialog: dialog.accept())
        row.get_by_role("button", name=f"stop {job.id}").click()
        ended = page.get_by_role("region", name="Ended jobs")
        expect(ended.get_by_role("row", name=job.id).get_by_text("stopped", exact=True)).to_be_visible()
    assert cluster.until_ended()["phase"] == "stopped"


HOVER = re.compile(
    r"^(preempt of spot-[0-9]|kill of spot-[0-9]|grow) at step [0-9,]+\n[0-9.]+ s to the next step\n"
    r"[0-9]+ steps? lost\n"
    r"\$0\.[0-9]+ for lost steps and all node time until the next step, at the run's average price$"
)


def test_a_run_shows_what_each_interruption_cost(cluster: Harness, chromium: Browser, url: str) -> None:
    job = cluster.submit(nodes={"min": 2, "max": 3}, epochs=2, samples=6000, pause=0.02, slow=400, flood=10)
    cluster.until_step(60)
    with opened(chromium, url) as page:
        page.goto(f"{page.url.partition('#')[0]}#/run/{job.id}")
        expect(page.get_by_role("heading", level=1)).to_contain_text(job.id)
        timeline = page.get_by_role("region", name="Timeline")
        expect(timeline.locator(".lane").first).to_have_attribute("aria-label", re.compile("stepping [0-9.]+"))
        for fault in ("preempt", "kill"):
            whole = cluster.until(is_whole, "three nodes")["job"]["generation"]
            cluster.fault(fault, cluster.members()[-1])
            row = timeline.get_by_role("row", name=re.compile(rf"^[a-z+]*\b{fault}\b"))
            expect(row.get_by_text(re.compile(r"^[0-9.]+ m?s"))).to_be_visible()
            cluster.until(functools.partial(is_whole, after=whole), "three nodes again")
        chart = page.get_by_role("img", name=re.compile(r"^loss\. loss: [0-9]+ points"))
        expect(chart).to_be_visible()
        hover_the_mark(page, chart)
        expect(page.get_by_role("tooltip")).to_have_text(HOVER)
        cluster.until_step(400)
        assert fits(page)
        shot(page, "run")
        look_at_the_other_parts(page)
        page.set_viewport_size({"width": 400, "height": 860})
        assert fits(page)
        job.go()
    final = cluster.until_ended()
    with opened(chromium, url, "narrow", "dark") as page:
        page.goto(f"{page.url.partition('#')[0]}#/run/{job.id}")
        expect(page.get_by_text(f"Goodput {100 * final['goodput']:.1f} %")).to_be_visible()
        assert shares(page) == {
            "stepping": pytest.approx(100 * final["node_time"]["counted"] / final["node_seconds"], abs=0.06),
            "all": pytest.approx(100, abs=0.6),
        }
        assert fits(page)
        go(page, "Compare")
        page.get_by_role("checkbox", name=f"Compare {job.id}").check()
        page.get_by_label("Of", exact=True).select_option("loss")
        for axis in ("samples", "dollars", "time", "step"):
            page.get_by_label("Over").select_option(label=axis)
            expect(page.get_by_role("img", name=re.compile(rf"^loss\. {job.id}: [0-9]{{2,}} points"))).to_be_visible()
        assert fits(page)


def look_at_the_other_parts(page: Page) -> None:
    """Machines, logs with search, and files of the run."""
    parts = page.get_by_role("navigation", name="Parts")
    parts.get_by_role("link", name="Logs").click()
    expect(page.get_by_role("region", name="Text of the log")).to_contain_text("says too much")
    search = page.get_by_role("searchbox", name="Search this log")
    search.focus()
    page.keyboard.type("TOO MUCH")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Lines that were found")).to_contain_text("says too much")
    parts.get_by_role("link", name="Machines").click()
    expect(
        page.get_by_role("img", name=re.compile(r"^Processor, % of all cores\. spot-[0-9]+: [0-9]+ p"))
    ).to_be_visible()
    rank = page.get_by_role("region", name="Ranks").get_by_role("row", name="rank 0")
    expect(rank.get_by_text(re.compile(r"^[0-9.]+ ms$")).first).to_be_visible()
    assert fits(page)
    parts.get_by_role("link", name="Files").click()
    expect(page.get_by_role("row", name="state.json")).to_be_visible()


def is_whole(status: dict[str, Any], after: int = 0) -> bool:
    """Whether three nodes train, in a later generation. A job begins with two if the third boots much later."""
    job = status["job"]
    return len(job["members"]) == 3 and job["generation"] > after and job["phase"] == "running"


def hover_the_mark(page: Page, chart: Locator) -> None:
    """Move the pointer along the chart until it is on a mark."""
    over = chart.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    for x in range(0, int(box["width"]), 3):
        page.mouse.move(box["x"] + x, box["y"] + box["height"] / 2)
        if page.get_by_role("tooltip").count():
            return
    raise AssertionError("no mark on the chart")


def shares(page: Page) -> dict[str, float]:
    """The percentages of the timeline's legend: of stepping, and the sum of all."""
    lines = page.locator(".legend li").all_inner_texts()
    found = [(line.split()[0], float(re.findall(r"([0-9.]+) %", line)[0])) for line in lines]
    return {"stepping": dict(found)["stepping"], "all": sum(value for _, value in found)}


def test_names_and_logs_with_html_stay_text(cluster: Harness, chromium: Browser, url: str) -> None:
    """A job's code writes them into its own part of the bucket. The name of the group is from outside too."""
    job = cluster.submit(nodes={"min": 1, "max": 1}, epochs=1, samples=40)
    cluster.until_ended()
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    store = cluster.access.store
    store.put(log_key(job.id, 1, "spot-0", 0), f"{evil}\n".encode())
    lines = [Header(job=job.id, generation=1, rank=0, base=0), Call(step=1, time=1.0, values={evil: 1.0})]
    store.put(f"jobs/{job.id}/metrics/0001/900000.jsonl.zst", compress(b"".join(map(line, lines))))
    key = job_key(job.id, "events.jsonl")
    store.put(key, store.get(key) + json.dumps({"at": 1.0, "kind": evil, "text": evil}).encode() + b"\n")
    with opened(chromium, url) as page:
        where = f"{page.url.partition('#')[0]}#/run/{job.id}"
        for tab, text in (("overview", page.get_by_role("heading", name=evil)), ("events", page.get_by_role("row"))):
            page.goto(f"{where}?tab={tab}")
            expect(text.filter(has_text=evil).first).to_be_visible()
        page.goto(f"{where}?tab=logs")
        expect(page.get_by_role("region", name="Text of the log")).to_contain_text(evil)
        assert page.title() != "taken"
        assert page.locator("main img, main script").count() == 0


def test_texts_images_and_provenance(cluster: Harness, chromium: Browser, url: str) -> None:
    """HTML in them stays text, and a broken picture is only a broken picture."""
    job = cluster.submit(nodes={"min": 1, "max": 1}, epochs=1, samples=40)
    cluster.until_ended()
    store, evil = cluster.access.store, "<img src=x onerror=\"document.title='taken'\">"
    pixels = extras.prepare(picture := Extra(3, 1.0, "image", "sample"), np.full((8, 8, 3), 200, np.uint8))
    extras.complete(picture, pixels)
    calls = [
        Extra(2, 1.0, "text", evil, text=evil),
        picture,
        Extra(4, 2.0, "image", "broken", text=f'"><{evil}'),
        Extra(5, 3.0, "histogram", "weights", edges=[-1.0, 0.0, 2.5], counts=[3, 9]),
    ]
    header = Header(job=job.id, generation=1, rank=0, base=0)
    store.put(extras_key(job.id, 1, 900000), compress(b"".join(map(line, [header, *calls]))))
    git = Git(commit="0123456789abcdef", branch=evil, diff=f"-old\n+{evil}\n")
    origin = Provenance(job=job.id, at=1.0, user="ann", host="desk", code="c0de", git=git, job_file=f"script: {evil}\n")
    store.put(provenance_key(job.id), origin.model_dump_json().encode())
    with opened(chromium, url) as page:
        where = f"{page.url.partition('#')[0]}#/run/{job.id}"
        page.goto(f"{where}?tab=logged")
        expect(page.get_by_role("region", name=evil).locator("pre")).to_have_text(evil)
        image = page.get_by_role("img", name=re.compile("^sample, step 3"))
        expect(image).to_be_visible()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
        expect(page.get_by_role("img", name=re.compile("^weights, step 5.*: 12 values from -1 to 2.5"))).to_be_visible()
        assert fits(page)
        page.get_by_role("navigation", name="Parts").get_by_role("link", name="Provenance").click()
        submission = page.get_by_role("region", name="Submission")
        expect(submission.get_by_role("row", name="commit")).to_contain_text(
            f"0123456789abcdef on {evil}, with changes"
        )
        expect(submission.get_by_role("row", name="seed")).to_contain_text("1")
        expect(page.get_by_role("region", name="Changes")).to_contain_text(f"+{evil}")
        expect(page.get_by_role("region", name="Job file")).to_contain_text(evil)
        expect(page.get_by_role("region", name="Nodes").get_by_role("row", name="spot-")).to_have_count(1)
        expect(page.get_by_role("region", name="Packages")).to_contain_text("torch==")
        for width in (400, 1600):
            page.set_viewport_size({"width": width, "height": 860})
            assert fits(page)
        assert page.title() != "taken"


def test_another_server_on_this_computer_gets_no_cookie(chromium: Browser, url: str) -> None:
    """A browser does not tell ports apart. The page of another server asks for a picture, as a trap would."""
    seen: list[tuple[str, str]] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Cookie", "")))
            body = b"<img src='/picture'>" if self.path == "/" else b""
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other, opened(chromium, url) as page:
        expect(page.get_by_role("navigation")).to_be_visible()
        assert [each["name"] for each in page.context.cookies(page.url)] == ["spotrun"]
        assert "token" not in page.url
        Thread(target=other.serve_forever, daemon=True).start()
        try:
            page.goto(f"http://127.0.0.1:{other.server_port}/", wait_until="networkidle")
        finally:
            other.shutdown()
    assert {path for path, _ in seen} >= {"/", "/picture"}
    assert {cookie for _, cookie in seen} == {""}


def test_prometheus_gets_metrics_through_the_tunnel(cluster: Harness, url: str) -> None:
    where, _, token = url.partition("?token=")
    request = urllib.request.Request(f"{where}metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    (head,) = families["spotrun_head"].samples
    assert (head.labels["cluster"], head.value) == (cluster.spec.name, cluster.status()["head"]["epoch"])
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{where}metrics", timeout=PATIENCE)


def test_the_tokens_file_comes_back_when_a_second_dashboard_has_ended(cluster: Harness) -> None:
    """Prometheus reads the token there, as long as any dashboard of the cluster runs."""
    file = home() / "dashboard" / f"{cluster.spec.name}.token"
    with dashboard(cluster) as first:
        with dashboard(cluster) as second:
            assert file.read_text() == second.partition("token=")[2]
        wait_for(lambda: file.exists() and file.read_text() == first.partition("token=")[2], what="the first token")
        assert file.stat().st_mode & 0o777 == 0o600
    assert not file.exists()


def test_history_is_there_while_the_cluster_is_down(tmp_path: Path, chromium: Browser) -> None:
    """The page becomes live without a reload when the cluster comes up."""
    pools = [{"name": "spot", "zone": "local-a", "max": 1}]
    with running(tmp_path, {"name": "offline", "cloud": "local", "pools": pools}) as own:
        for samples in (40, 80):
            job = own.submit(nodes={"min": 1, "max": 1}, epochs=1, samples=samples, group="search")
            own.until_ended()
        many = Call(80, 1.0, {f"m{number:02d}": 0.5 for number in range(30)})
        own.access.store.put(metrics_key(job.id, 1, 900), compress(line(Header(job.id, 1, 0, 0)) + line(many)))
        own.close()
        with dashboard(own) as url, opened(chromium, url) as page:
            expect(page.get_by_role("alert")).to_contain_text("cluster offline is not up")
            expect(page.get_by_text("Only the head knows the nodes")).to_be_visible()
            expect(page.get_by_text("Only the head decides")).to_be_visible()  # not: nothing is wrong
            go(page, "Jobs")
            page.get_by_role("link", name=job.id).click()
            charts = page.locator("figure.chart")
            expect(charts).to_have_count(12)
            page.get_by_role("button", name="More curves").click()
            expect(charts).to_have_count(24)
            page.get_by_label("Filter curves").fill("m29")
            expect(charts).to_have_count(1)
            page.get_by_label("Filter curves").fill("loss")
            expect(page.get_by_role("img", name=re.compile(r"^loss\. loss: [0-9]+ points"))).to_be_visible()
            expect(page.get_by_role("region", name="Timeline").locator(".lane")).to_have_count(1)
            assert page.get_by_role("button", name=f"pause {job.id}").count() == 0
            go(page, "Compare")
            page.get_by_label("Group").select_option("search")
            expect(page.get_by_role("img", name="Parallel coordinates of 2 runs: out, samples, last")).to_be_visible()
            row = page.get_by_role("region", name="Differences").get_by_role("row", name=job.id)
            expect(row.get_by_role("cell", name="80", exact=True)).to_be_visible()
            page.set_viewport_size({"width": 400, "height": 860})
            assert fits(page)
            sites.site(own.spec).up()
            expect(page.locator("#state")).to_have_text("live")
            expect(page.get_by_role("alert")).to_be_hidden()


def test_pages_come_back_when_the_head_is_killed(cluster: Harness, chromium: Browser, url: str) -> None:
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=2000, slow=1)
    cluster.until_step(5)
    epoch = cluster.status()["head"]["epoch"]
    with opened(chromium, url) as page:
        expect(page.locator("#state")).to_have_text("live")
        cluster.kill_head()
        expect(page.get_by_role("alert")).to_contain_text("The head does not answer")
        expect(page.get_by_text("Only the head knows the nodes")).to_be_visible()
        go(page, "Jobs")
        expect(page.get_by_role("row", name=job.id)).to_be_visible()  # from the bucket
        expect(page.locator("#state")).to_have_text("live")
        expect(page.get_by_role("alert")).to_be_hidden()
        go(page, "Cluster")
        expect(page.get_by_text(f"number {epoch + 1}")).to_be_visible()
    job.go()
    cluster.until_ended()


def test_all_pages_follow_preemptions_and_the_loss_of_the_head(cluster: Harness, chromium: Browser, url: str) -> None:
    """All pages are open at the same time. No page is loaded again."""
    other = cluster.submit(nodes={"min": 1, "max": 1}, epochs=1, samples=40, group="pair")
    cluster.until_ended()
    job = cluster.submit(
        nodes={"min": 2, "max": 3}, epochs=2, samples=8000, pause=0.02, slow=500, group="pair", grow_interval=1
    )
    cluster.until(lambda s: is_whole(s) and s["job"]["step"] >= 20, "three nodes train")
    status = cluster.status()
    epoch, grown = status["head"]["epoch"], len(status["job"]["interruptions"])
    with ExitStack() as stack:
        board, queue, run, compare = (
            stack.enter_context(opened(chromium, url, size, scheme))
            for size, scheme in (("wide", "dark"), ("narrow", "light"), ("wide", "light"), ("narrow", "dark"))
        )
        pages = {"cluster": board, "jobs": queue, f"run/{job.id}": run, f"compare?runs={job.id},{other.id}": compare}
        for where, page in pages.items():
            page.goto(f"{page.url.partition('#')[0]}#/{where}")
            page.evaluate("window.loaded = 'once'")
            expect(page.locator("#state")).to_have_text("live")
        row = queue.get_by_role("row", name=job.id)
        expect(row).to_contain_text(re.compile("3 of 2.3"))
        timeline = run.get_by_role("region", name="Timeline")
        compared = compare.get_by_role("row", name=f"{job.id} ").filter(has_text="%").get_by_role("cell").last
        expect(compared).to_have_text(re.compile(rf"^{grown}(, |$)"))
        for number, fault in enumerate(("preempt", "kill"), grown + 1):
            whole, victim = lose(cluster, fault, lambda: expect(row).to_contain_text(re.compile("2 of 2.3")))
            expect(board.get_by_role("region", name="Events").last).to_contain_text(f"{fault}: {victim}")
            listed = timeline.get_by_role("row", name=re.compile(rf"^{fault}\b")).filter(has_text=victim)
            expect(listed.get_by_role("cell", name=re.compile(r"^\$0\.0[0-9]+$"))).to_be_visible()
            expect(compared).to_have_text(re.compile(rf"^[{number}-9], \$[0-9.]+: [0-9.]+ % of the cost"))
            cluster.until(functools.partial(is_whole, after=whole), "three nodes again")
            expect(row).to_contain_text(re.compile("3 of 2.3"))
        before = {page: drawn(page) for page in (run, compare)}
        cluster.kill_head()
        for page in pages.values():
            expect(page.get_by_role("alert")).to_contain_text("The head does not answer")
        for page in pages.values():
            expect(page.locator("#state")).to_have_text("live")
            expect(page.get_by_role("alert")).to_be_hidden()
        expect(board.get_by_text(f"number {epoch + 1}")).to_be_visible()
        expect(row.get_by_role("button", name=f"pause {job.id}")).to_be_visible()
        for page, points in before.items():
            wait_for(lambda page=page, points=points: drawn(page) > points, what="new points")  # type: ignore[misc]
        job.go()
        cluster.until_ended()
        expect(queue.get_by_role("region", name="Ended jobs").get_by_role("row", name=job.id)).to_be_visible()
        expect(run.get_by_role("heading", level=1)).to_contain_text("succeeded")
        assert all(page.evaluate("window.loaded") == "once" for page in pages.values())


def lose(cluster: Harness, fault: str, seen: Callable[[], None]) -> tuple[int, str]:
    """Take the last of three nodes, and no other comes until `seen` returns. The generation before, and the node."""
    whole = cluster.until(is_whole, "three nodes")["job"]
    cluster.fault("stockout", "local-a")
    cluster.fault(fault, whole["members"][-1])
    seen()
    cluster.fault("restock", "local-a")
    return whole["generation"], whole["members"][-1]


def drawn(page: Page) -> int:
    """Points in the first line of the chart of the loss."""
    text = page.get_by_role("img", name=re.compile("^loss[.]")).get_attribute("aria-label") or ""
    return int(re.findall(r": ([0-9]+) points", text)[0])


PARTS = ("overview", "machines", "logged", "logs", "events", "files", "origin", "job")
# What each page shows as soon as it is drawn.
PLACES = {
    "cluster": "h1:text('Cluster')",
    "jobs": "h1:text('Jobs')",
    **{f"run/{{job}}?tab={part}": f"[data-key='tab {part}']" for part in PARTS},
    "compare?group=read": "h1:text('Compare')",
}


def test_everything_can_be_read_at_each_width_and_in_each_theme(cluster: Harness, chromium: Browser, url: str) -> None:
    """Nothing sticks out, and each text has the contrast that WCAG 2 asks for at its level AA."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=800, group="read", deadline=3600.0, slow=20)
    cluster.until_step(20)
    cluster.fault("kill", cluster.members()[1])
    job.go()
    cluster.until_ended()
    for size in SIZES:
        for scheme in ("light", "dark"):
            with opened(chromium, url, size, scheme) as page:
                for where, drawn in PLACES.items():
                    where = where.format(job=job.id)
                    page.goto(f"{page.url.partition('#')[0]}#/{where}")
                    expect(page.locator(drawn).first).to_be_visible()
                    expect(page.locator("main .error, main p:text('Loading')")).to_have_count(0)
                    assert fits(page), (size, where)
                    assert faint(page) == [], (size, scheme, where)


def test_ctrl_c_ends_it_while_the_bucket_does_not_answer(cluster: Harness, chromium: Browser, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with dashboard(cluster, "-c", HANGS.replace("FILE", str(asked))) as url, opened(chromium, url) as page:
        page.goto(f"{page.url.partition('#')[0]}#/run/{HANGING}")
        wait_for(asked.exists, what="a question to the bucket")
