"""The dashboard's pages in a real browser, with answers that the test gives: late, wrong, or none."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from spotrun.dashboard.curves import NAMES
from spotrun.dashboard.live import Live
from spotrun.dashboard.server import PAGES, TYPES
from tests.e2e.browser import FITS, opened
from tests.e2e.harness import PATIENCE

expect.set_options(timeout=PATIENCE * 1000)

URL = "http://dashboard.test/"
LONGEST = 8190  # bytes of a line that aiohttp reads
STREAM = """window.EventSource = class extends EventTarget {
  constructor() { super(); window.stream = this; window.opened = (window.opened ?? 0) + 1; }
  close() {}
}"""
TIMELINE = {"bars": [], "marks": [], "node_seconds": 0.0, "cost": 0.0, "goodput": None, "missing": 0.0}
LOG = {"generation": 1, "node": "spot-1", "rank": 0, "bytes": 9}


def curve(name: str, values: list[float | None]) -> dict[str, Any]:
    steps = list(range(len(values)))
    void: dict[str, Any] = {"steps": [], "times": [], "samples": [], "values": []}
    return {"name": name, "count": {"steps": steps, "times": steps, "samples": steps, "values": values}, "void": void}


class Site:
    """The files of the dashboard, and a server whose answers a test gives. `held`: paths whose answers wait."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.curves: dict[str, list[dict[str, Any]]] = {}  # of each run
        self.ended: float | None = None
        self.step = 5
        self.kind = "text"  # of what the runs have logged
        self.fails: set[str] = set()
        self.held: dict[str, Route | None] = {}
        self.asked: list[str] = []
        page.add_init_script(STREAM)
        page.route("**/*", self._handle)

    def open(self, where: str) -> None:
        self.page.goto(f"{URL}#/{where}")

    def waiting(self, path: str) -> Route:
        """A request that waits for its answer."""
        self.until(lambda: self.held[path] is not None, path)
        route = self.held.pop(path)
        assert route is not None
        return route

    def until(self, good: Any, what: str) -> None:
        """Requests come while this waits."""
        for _ in range(int(PATIENCE * 20)):
            if good():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not in time: {what}")

    def count(self, path: str) -> int:
        return sum(urlsplit(each).path == path for each in self.asked)

    def draw(self, step: int) -> None:
        """Something changes, so the page is drawn again, with everything that has come."""
        self.settle()
        job = {"id": "b", "step": step, "phase": "running", "eta": None, "cost": 0.0}
        text = json.dumps({"live": True, "overview": {"jobs": [job]}})
        self.page.evaluate("text => stream.onmessage({ data: text })", text)
        expect(self.page.locator(".tile").first).to_contain_text(f"{step} of 100")

    def settle(self) -> None:
        """Return when the page has what was answered before."""
        self.page.evaluate("fetch('/api/runs/settled').then((answer) => answer.text())")

    def answer(self, route: Route) -> None:
        where = urlsplit(route.request.url)
        status, found = self._api(where.path.removeprefix("/api/"), parse_qs(where.query, keep_blank_values=True))
        route.fulfill(status=status, json=found)

    def _handle(self, route: Route) -> None:
        path = urlsplit(route.request.url).path
        if not path.startswith("/api/"):
            file = PAGES / (path.removeprefix("/pages/") if path != "/" else "index.html")
            route.fulfill(path=file, content_type=TYPES[file.suffix])
            return
        self.asked.append(route.request.url)
        if len(f"GET {route.request.url.removeprefix(URL)} HTTP/1.1") > LONGEST:
            route.fulfill(status=400, body="Got more than 8190 bytes when reading: Status line is too long.")
        elif path in self.fails:
            route.fulfill(status=503, json={"error": "the bucket does not answer"})
        elif path in self.held:
            self.held[path] = route
        else:
            self.answer(route)

    def _api(self, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        _, run, *parts = map(unquote, [*path.split("/"), ""])
        if run not in ("a", "b"):
            return 404, {"error": f"there is no job {run}"}
        item = {"kind": self.kind, "name": "note", "text": f"text of {run}", "step": 1, "time": 1.0, "generation": 1}
        documents: dict[str, Any] = {
            "": self._run(run),
            "timeline": TIMELINE,
            "curves": self._curves(run, [unquote(name) for name in query.get("names", [""])[0].split("\n")]),
            "logged": {"stamp": "1", "items": None if query.get("have") == ["1"] else [item], "left_out": 0},
            "logs": [LOG],
            "log": {"text": f"text of {run}", "start": 0, "end": 9, "size": 9},
        }
        return 200, documents[parts[0]]

    def _run(self, run: str) -> dict[str, Any]:
        known = {"id": run, "phase": "running", "step": self.step, "total_steps": 100, "ended": self.ended}
        nothing = ("reason", "failure", "goodput", "budget", "cost_to_end", "eta", "deadline", "in_time")
        zero = ("node_seconds", "cost", "generation", "submitted")
        return dict.fromkeys(nothing) | dict.fromkeys(zero, 0) | {"interruptions": [], "account": []} | known

    def _curves(self, run: str, asked: list[str]) -> dict[str, Any]:
        curves = {each["name"]: each for each in self.curves.get(run, [])}
        chosen = [name for name in asked if name][: 4 * NAMES]
        shown = [curves[name] for name in chosen if name in curves] if chosen else list(curves.values())[:NAMES]
        return {"names": list(curves), "curves": shown, "bases": [], "problems": [], "unread": 0}


@pytest.fixture
def site(chromium: Browser) -> Iterator[Site]:
    with opened(chromium, "about:blank") as page:
        yield Site(page)


def test_what_is_old_is_not_said_to_come_from_the_bucket(site: Site) -> None:
    """If the bucket does not answer either, the page still shows the head's last overview."""
    site.open("run/b")
    live = Live()
    live.publish({"jobs": []})
    for overview, words in ((None, "What you see was known before that."), ({"jobs": []}, "comes from the bucket")):
        live.lose("no route to host; the bucket does not answer", overview)
        with ThreadPoolExecutor(1) as thread:  # in this one, the browser's own loop runs
            _, text = thread.submit(asyncio.run, live.next(-1, PATIENCE)).result()
        site.page.evaluate("text => stream.onmessage({ data: text })", text)
        expect(site.page.get_by_role("alert")).to_contain_text(words)
    expect(site.page.locator("#state")).to_have_text("from the bucket")


def test_a_page_without_signs_of_life_is_not_live(site: Site) -> None:
    """A broken SSH tunnel may keep the browser's connection open. No error and no data come through it then."""
    page, mark = site.page, site.page.locator("#state")
    page.clock.install()
    site.open("run")
    send = "overview => stream.onmessage({ data: JSON.stringify({ live: true, why: '', overview }) })"
    page.evaluate(send, {"jobs": []})
    expect(mark).to_have_text("live")
    for _ in range(3):
        page.clock.run_for(10_000)
        page.evaluate("stream.dispatchEvent(new Event('alive'))")
    expect(mark).to_have_text("live")
    page.clock.run_for(20_000)
    expect(mark).to_have_text("not connected")
    assert page.evaluate("opened") == 2
    page.clock.run_for(20_000)
    assert page.evaluate("opened") == 3, "a new connection may bring nothing, too"
    page.evaluate(send, {"jobs": []})
    page.clock.run_for(1_000)
    expect(mark).to_have_text("live")


def test_late_curves_of_another_run_are_dropped(site: Site) -> None:
    site.curves = {"a": [curve("of a", [1.0, 2.0])], "b": [curve("of b", [1.0, 2.0])]}
    site.held["/api/runs/a/curves"] = None
    site.open("run/a")
    late = site.waiting("/api/runs/a/curves")
    site.open("run/b")
    expect(site.page.get_by_role("heading", name="of b")).to_be_visible()
    site.answer(late)
    site.draw(77)
    expect(site.page.get_by_role("heading", name="of b")).to_be_visible()
    assert site.page.get_by_role("heading", name="of a").count() == 0
    assert not [each for each in site.asked if "/b/curves" in each and "of%20a" in each]


@pytest.mark.parametrize(("part", "tab"), [("logged", "logged"), ("log", "logs")])
def test_late_texts_of_another_run_are_dropped(site: Site, part: str, tab: str) -> None:
    site.held[f"/api/runs/a/{part}"] = None
    site.open(f"run/a?tab={tab}")
    late = site.waiting(f"/api/runs/a/{part}")
    site.open(f"run/b?tab={tab}")
    expect(site.page.get_by_text("text of b")).to_be_visible()
    site.answer(late)
    site.draw(77)
    expect(site.page.get_by_text("text of b")).to_be_visible()
    assert site.page.get_by_text("text of a").count() == 0


def test_a_run_that_does_not_answer_delays_no_other(site: Site) -> None:
    site.held["/api/runs/a"] = None
    site.open("run/a")
    late = site.waiting("/api/runs/a")
    site.fails.add("/api/runs/a")
    site.open("run/b")
    expect(site.page.get_by_text("5 of 100")).to_be_visible()
    site.answer(late)


def test_the_last_data_of_an_ended_run_are_read(site: Site) -> None:
    """They come up to 30 s after its end. After that, the page asks no more."""
    site.page.clock.install()
    site.ended = site.page.evaluate("Date.now() / 1000")
    site.open("run/a?tab=logged")
    expect(site.page.get_by_text("text of a")).to_be_visible()
    for seconds in (2, 40):
        before = site.count("/api/runs/a/logged")
        site.page.clock.fast_forward(1000 * seconds)
        site.until(lambda before=before: site.count("/api/runs/a/logged") > before, "one more look")
    site.page.clock.run_for(4000)
    site.settle()
    before = site.count("/api/runs/a")
    site.page.clock.run_for(10_000)
    site.settle()
    assert site.count("/api/runs/a") == before


def test_a_run_that_is_relaunched_is_followed_again(site: Site) -> None:
    site.page.clock.install()
    site.ended = 1.0
    site.open("run/b?tab=logged")
    expect(site.page.get_by_text("text of b")).to_be_visible()
    site.page.clock.run_for(4000)
    site.settle()
    before = site.count("/api/runs/b")
    site.page.clock.run_for(4000)
    site.settle()
    assert site.count("/api/runs/b") == before, "the page has asked for the last time"
    site.ended, site.step = None, 9
    site.draw(9)
    site.page.clock.run_for(4000)
    site.until(lambda: site.count("/api/runs/b") > before, "a look at the run")


@pytest.mark.parametrize(
    ("part", "tab"), [("curves", "overview"), ("logged", "logged"), ("log", "logs"), ("logs", "logs")]
)
def test_a_failed_look_at_an_ended_run_is_repeated(site: Site, part: str, tab: str) -> None:
    site.ended = 1.0
    site.curves["a"] = [curve("text of a", [1.0, 2.0])]
    site.fails.add(f"/api/runs/a/{part}")
    site.open(f"run/a?tab={tab}")
    expect(site.page.get_by_text("the bucket does not answer")).to_be_visible()
    site.fails.clear()
    expect(site.page.get_by_text("text of a").first).to_be_visible()
    expect(site.page.get_by_text("the bucket does not answer")).to_have_count(0)


@pytest.mark.parametrize("run", ["%", "%E0%A4%A", "100%"])
def test_an_address_that_is_not_valid_is_said_so(site: Site, run: str) -> None:
    site.open(f"run/{run}")
    expect(site.page.get_by_text(f"there is no job {run}", exact=True)).to_be_visible()
    assert site.page.evaluate("'stream' in window")


def test_a_job_that_ends_while_the_ended_jobs_are_listed(site: Site) -> None:
    """The list that is on its way lacks it, and the head does not name it any more."""
    site.held["/api/jobs"] = None
    site.open("jobs")
    late = site.waiting("/api/jobs")
    row = {"id": "b", "phase": "running", "nodes": [], "min": 1, "max": 1, "step": 5, "submitted": 1.0}
    for jobs in ([row], []):
        text = json.dumps({"live": True, "overview": {"jobs": jobs}})
        site.page.evaluate("text => stream.onmessage({ data: text })", text)
        expect(site.page.get_by_role("link", name="b", exact=True)).to_have_count(len(jobs))
    site.held["/api/jobs"] = None
    late.fulfill(json={"rows": [], "more": False})
    site.waiting("/api/jobs").fulfill(json={"rows": [row | {"phase": "succeeded", "ended": 9.0}], "more": False})
    expect(site.page.get_by_role("link", name="b", exact=True)).to_be_visible()


@pytest.mark.parametrize("tab", ["nonsense", "valueOf", ""])
def test_a_tab_that_there_is_not(site: Site, tab: str) -> None:
    site.curves["a"] = [curve("loss", [1.0, 2.0])]
    site.open(f"run/a?tab={tab}")
    expect(site.page.get_by_role("heading", name="loss")).to_be_visible()


@pytest.mark.parametrize("kind", ["sound", "valueOf", "__proto__"])
def test_what_the_page_cannot_show(site: Site, kind: str) -> None:
    """A job's code can write any kind."""
    site.kind = kind
    site.open("run/a?tab=logged")
    expect(site.page.get_by_text("This page cannot show it.")).to_be_visible()


def test_long_names_are_asked_for_in_several_requests(site: Site) -> None:
    site.curves["a"] = [curve(f"{number:02d}" + "n" * 180, [1.0, 2.0]) for number in range(5 * NAMES)]
    site.open("run/a")
    charts = site.page.locator("figure.chart")
    for page in range(1, 5):
        expect(charts).to_have_count(NAMES * page)
        site.page.get_by_role("button", name="More curves").click()
    expect(charts).to_have_count(5 * NAMES)  # more than one request may ask for
    assert site.page.locator(".error").count() == 0


def test_a_name_with_a_line_break_is_asked_for(site: Site) -> None:
    names = ["a\nb", "a", "50%0A"]
    site.curves["b"] = [curve(name, [1.0, 2.0]) for name in names]
    site.page.clock.install()
    site.open("run/b")
    charts = site.page.locator("figure.chart h3")
    expect(charts).to_have_count(3)
    before = site.count("/api/runs/b/curves")
    site.page.clock.run_for(4000)  # from now on, the page asks for the names that it knows
    site.until(lambda: site.count("/api/runs/b/curves") > before, "one more look")
    site.draw(7)
    assert charts.all_text_contents() == names


def test_odd_names_are_compared(site: Site) -> None:
    """A name with a line break is asked for once, and a long one does not make the page wider than a phone."""
    site.page.set_viewport_size({"width": 360, "height": 740})
    names = [*(f"n{number:02d}" for number in range(NAMES)), "z\nb", "n" * 200]  # more than one answer has
    site.curves["a"] = [curve(name, [1.0, 2.0]) for name in names]
    site.open("compare?runs=a")
    site.page.get_by_label("Of", exact=True).select_option("z\nb")
    expect(site.page.get_by_role("img", name="z b. a: 2 points, last 2")).to_be_visible()
    assert site.page.evaluate(FITS)
    before = site.count("/api/runs/a/curves")
    site.page.wait_for_timeout(1500)  # the page draws every 400 ms if an answer lacks what it has asked for
    assert site.count("/api/runs/a/curves") == before


def test_values_that_are_not_numbers_are_counted(site: Site) -> None:
    """JSON has null for them. A value of 0 cannot be drawn on a logarithmic axis, and is a number."""
    site.curves["a"] = [curve("loss", [1.0, 0.0, None, 2.0, None]), curve("good", [1.0, 0.0])]
    site.open("run/a")
    note = site.page.get_by_text("loss: NaN or infinite in 2 of 5 drawn points, the first at step 2.")
    expect(note).to_be_visible()
    site.page.get_by_label("logarithmic").check()
    expect(site.page.get_by_role("img", name=re.compile("^good. good: 2 points, last [^0]$"))).to_be_visible()
    expect(note).to_be_visible()
    assert site.page.get_by_text("good: NaN").count() == 0


@pytest.mark.parametrize(("where", "field"), [("jobs", "Filter jobs"), ("compare", "Filter runs")])
def test_a_filter_says_that_there_are_older_jobs(site: Site, where: str, field: str) -> None:
    """Only the newest ones are loaded, so a job that the filter does not find may exist."""
    page = site.page
    found = {"rows": [{"id": "new", "phase": "succeeded", "ended": 1.0}], "more": True}
    page.route("**/api/jobs?*", lambda route: route.fulfill(json=found))
    site.open(where)
    page.evaluate("text => stream.onmessage({ data: text })", json.dumps({"live": True, "overview": {"jobs": []}}))
    expect(page.get_by_role("link", name="new")).to_be_visible()
    note = page.get_by_text("The filter looks at the newest 1")
    expect(note).to_have_count(0)
    page.get_by_label(field).fill("old")
    expect(note).to_be_visible()


DIFFERENCES = """async (runs) => {
  const { differences } = await import("/pages/parallel.js");
  const found = differences(runs.map((args) => ({ id: "x", run: { spec: { args }, cost: 1 } })), "");
  return [found.titles, found.rows];
}"""


def test_arguments_with_names_of_javascript_are_compared(site: Site) -> None:
    site.open("run")
    runs = [["--constructor", "a", "--__proto__=1"], ["--__proto__=2"], []]
    titles, rows = site.page.evaluate(DIFFERENCES, runs)
    assert titles == ["__proto__", "constructor"]
    none = "\N{EN DASH}"
    assert rows == [["1", "a"], ["2", none], [none, none]]


CHART = """async () => {
  const { Chart } = await import("/pages/chart.js");
  const chart = window.chart = new Chart("loss");
  document.getElementById("main").replaceChildren(chart.slot());
  window.line = (x, y, name = "loss", colour = "#ff0000") => ({ name, x, y, colour });
  let seen = false;
  window.put = async (lines, marks = [], axis = { label: "step" }) => {
    chart.update(lines, marks, axis);
    await new Promise((done) => setTimeout(done));
    if (!seen) {  // the browser tells the chart its size once, by the end of the next frame, and it draws again
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      seen = true;
    }
    return [chart.plot.scales.x.min, chart.plot.scales.x.max];
  };
  window.upTo = (end) => line([...Array(end + 1).keys()], Array(end + 1).fill(1));
  window.red = (x) => {
    const { ctx, bbox } = chart.plot, at = Math.round(chart.plot.valToPos(x, "x", true));
    const pixels = ctx.getImageData(at, bbox.top, 1, bbox.height).data;
    const is = (red, green, _, alpha) => red > 200 && green < 80 && alpha > 100;
    return Array.from({ length: bbox.height }, (_, row) => is(...pixels.slice(4 * row, 4 * row + 4))).some(Boolean);
  };
}"""


@pytest.fixture
def chart(site: Site) -> Page:
    """A page with one chart. put: other data; answers with the range of x that it shows."""
    site.open("run")
    site.page.evaluate("stream.onmessage = () => {}")
    expect(site.page.get_by_role("heading", level=1)).to_have_text("Run")
    site.page.evaluate(CHART)
    return site.page


def test_a_zoom_stays_while_data_come(chart: Page) -> None:
    assert chart.evaluate("put([upTo(100)])") == [0, 100]
    assert chart.evaluate("put([upTo(200)])") == [0, 200]
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    chart.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    chart.mouse.down()
    chart.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=5)
    chart.mouse.up()
    zoom = chart.evaluate("put([upTo(200)])")
    assert zoom == [pytest.approx(50, abs=3), pytest.approx(100, abs=3)]
    for change in ("[upTo(300)]", "[upTo(300)], [{ x: 60, text: 'kill' }]", "[upTo(300), line([60], [2], 'void')]"):
        assert chart.evaluate(f"put({change})") == zoom
    chart.evaluate("dispatchEvent(new Event('themechange'))")
    assert chart.evaluate("put([upTo(300)])") == zoom
    assert chart.evaluate("put([upTo(300)], [], { label: 'samples' })") == [0, 300], "x has another meaning"
    chart.evaluate("put([upTo(300)])")
    chart.locator(".u-over").dblclick()
    assert chart.evaluate("put([upTo(400)])") == [0, 400]


def test_equal_data_are_not_drawn_again(chart: Page) -> None:
    chart.evaluate("put([upTo(100)])")
    chart.evaluate("window.draws = 0; chart.plot.hooks.draw.push(() => { draws += 1; })")
    chart.evaluate("put([upTo(100)])")
    assert chart.evaluate("draws") == 0
    chart.evaluate("put([upTo(100)], [{ x: 3, text: 'kill' }])")
    assert chart.evaluate("draws") == 1
    chart.evaluate("put([upTo(101)], [{ x: 3, text: 'kill' }])")
    assert chart.evaluate("draws") == 2
    expect(chart.get_by_role("img", name="loss. loss: 102 points, last 1")).to_be_visible()


def test_a_line_has_a_gap_where_it_has_no_number(chart: Page) -> None:
    """The x of another line is no gap. A number between two gaps is a point."""
    chart.evaluate(
        "put([line([0, 10, 20, 30, 40, 50, 60], [1, 1, NaN, 1, NaN, 1, 1]), line([5], [2], 'void', '#0000ff')])"
    )
    assert [chart.evaluate("x => red(x)", x) for x in (3, 5, 7, 15, 20, 25, 30, 35, 55)] == [
        *(True, True, True),
        *(False, False, False),
        *(True, False, True),
    ]
    long = "[...Array(100).keys()]"  # points are not drawn at all values
    chart.evaluate(f"put([line({long}, {long}.map((x) => (x > 50 && x !== 60 ? NaN : 1)), 'long')])")
    assert [chart.evaluate("x => red(x)", x) for x in (30, 55, 60, 65)] == [True, False, True, False]


@pytest.mark.parametrize(
    "values",
    [[26.8485, 26.851], [0, 5000], [0.1, 0.7], [0, 5e-7], [1_000_000, 1_000_010], [-3e9, 7e12], [0.25, 0.3]],
    ids=["close together", "thousands", "usual", "very small", "large and close together", "very large", "quarters"],
)
def test_the_texts_of_an_axis_tell_its_values_apart(chart: Page, values: list[float]) -> None:
    """They are at equal distances, and there is room for them."""
    chart.evaluate("values => put([line(values.map((_, row) => row), values)])", values)
    texts = chart.evaluate("chart.plot.axes[1]._values")
    numbers = [float(text.replace(",", "")) for text in texts]
    distances = [after - before for before, after in pairwise(numbers)]
    assert len(distances) > 1
    assert distances == pytest.approx([distances[0]] * len(distances))
    assert distances[0] > 0
    width = "texts => Math.max(...texts.map((text) => chart.plot.ctx.measureText(text).width / devicePixelRatio))"
    assert chart.evaluate(width, texts) <= chart.evaluate("chart.plot.axes[1]._size - 14")


def test_a_time_axis_has_24_hours_and_the_date(chart: Page) -> None:
    for seconds in (20, 7200):
        chart.evaluate(
            "seconds => put([line([1793527000, 1793527000 + seconds], [1, 2])], [], { label: 'time', time: true })",
            seconds,
        )
        first, *texts = [text for text in chart.evaluate("chart.plot.axes[0]._values") if text]
        assert re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?\n2026-11-01", first)
        assert all(re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?", text) for text in texts)


def test_a_legend_has_the_newest_values_while_no_pointer_is_there(chart: Page) -> None:
    legend = chart.locator(".u-legend")
    chart.evaluate("put([line([0, 10, 20], [1, 2, 3], 'one'), line([5, 15], [7, 8], 'other', '#0000ff')])")
    expect(legend).to_have_text(re.compile("20.*one.*3.*other.*8"))
    over = chart.locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    chart.mouse.move(box["x"] + 1, box["y"] + 50)
    expect(legend).to_have_text(re.compile("0.*one.*1"))
    chart.mouse.move(0, 0)
    expect(legend).to_have_text(re.compile("20.*one.*3.*other.*8"))
    chart.evaluate("put([line([0, 10, 20, 30], [1, 2, 3, 4], 'one'), line([5, 15], [7, 8], 'other', '#0000ff')])")
    expect(legend).to_have_text(re.compile("30.*one.*4.*other.*8"))
    chart.evaluate("put([line([0, 10, 20, 30], [1, 2, 3, NaN], 'one'), line([5, 15], [7, 8], 'other', '#0000ff')])")
    expect(legend).to_have_text(re.compile(r"30.*one\W*other.*8"))


@pytest.mark.parametrize("left_out", [0, 9], ids=["all blocks are read", "blocks are left out"])
def test_a_line_of_a_machine_has_a_gap_while_the_machine_is_gone(site: Site, left_out: int) -> None:
    """If blocks are left out, the page cannot tell them from a machine that was gone."""
    site.open("run")
    times = {"back": [0, 5, 500, 505, 510], "gone": [0, 5, 10], "late": [440, 445, 450]}
    nodes = [{"node": name, "times": at, "series": {"cpu": [7] * len(at)}} for name, at in times.items()]
    lines = """async (found) => (await import("/pages/machines.js")).lines(found, "cpu", 1).map(({ x, y }) => [x, y])"""
    back, gone, late = site.page.evaluate(lines, {"nodes": nodes, "left_out": left_out})
    whole = [[0, 5, 500, 505, 510], [7, 7, 7, 7, 7]]
    assert back == (whole if left_out else [[0, 5, 6, 500, 505, 510], [7, 7, None, 7, 7, 7]])
    assert gone == [[0, 5, 10, 11], [7, 7, 7, None]]  # so the legend shows no old value
    assert late == [[440, 445, 450], [7, 7, 7]]


def test_a_time_has_a_date_if_it_is_not_today(site: Site) -> None:
    site.open("run")
    clock = "async ([at, seconds]) => (await import('/pages/dom.js')).clock(at, seconds)"
    new_year = datetime(2026, 1, 1, 0, 3, 9, tzinfo=UTC).timestamp()
    assert site.page.evaluate(clock, [new_year, True]) == "2026-01-01 00:03:09"
    assert site.page.evaluate(clock, [new_year, False]) == "2026-01-01 00:03"
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", site.page.evaluate(clock, [time.time(), False]))


def test_a_time_of_an_event_stays_in_one_line(site: Site) -> None:
    event = {"at": time.time(), "kind": "machines", "job": "b", "text": "no on-demand pool has room; " * 30}
    overview = {"jobs": [{"id": "b", "phase": "running"}], "nodes": [], "pools": [], "events": [event]}
    site.open("cluster")
    site.page.evaluate("text => stream.onmessage({ data: text })", json.dumps({"live": True, "overview": overview}))
    expect(site.page.locator("time")).to_have_text(re.compile("^[0-9]{2}:[0-9]{2}:[0-9]{2}$"))
    assert site.page.locator("time").evaluate("node => node.getClientRects().length") == 1
    expect(site.page.locator(".tile").nth(2)).to_contain_text("1 has not ended")


def test_each_job_has_a_colour_of_its_own(site: Site) -> None:
    """Up to eight jobs. A job keeps its colour when others come."""
    site.open("run")
    colours = """async (count) => {
      const { coloursOf } = await import("/pages/dom.js");
      return [...coloursOf(Array.from({ length: count }, (_, index) => `job-${index % 3}-${index}`)).values()];
    }"""
    assert len({*site.page.evaluate(colours, 8)}) == 8
    assert site.page.evaluate(colours, 9)[:8] == site.page.evaluate(colours, 8)


def test_a_node_that_has_made_no_step_shows_none(site: Site) -> None:
    """A node that is kept has no worker. A worker that has made no step says -1."""
    held = {"pool": "p", "state": "running", "devices": 1, "jobs": [{"job": "b", "devices": [0]}]}
    steps = {"kept": None, "starting": -1, "begun": 0, "later": 7}
    nodes = [held | {"name": name, "step": step} for name, step in steps.items()]
    overview = {"jobs": [], "nodes": nodes, "pools": [], "events": []}
    site.open("cluster")
    site.page.evaluate("text => stream.onmessage({ data: text })", json.dumps({"live": True, "overview": overview}))
    for name, text in {"kept": "", "starting": "", "begun": "step 0", "later": "step 7"}.items():
        row = site.page.get_by_role("region", name="Nodes").get_by_role("row", name=name)
        expect(row.get_by_role("cell").nth(3)).to_have_text(text)


@pytest.mark.parametrize("names", [["val/loss", "accuracy"], ["accuracy", "val/loss"]], ids=" before ".join)
def test_the_server_orders_the_curves(site: Site, names: list[str]) -> None:
    site.curves["a"] = [curve(name, [1.0, 2.0]) for name in names]
    site.open("run/a")
    expect(site.page.locator("figure.chart h3")).to_have_text(names)


def test_the_keys(site: Site) -> None:
    """Digits change the page, but not while somebody types them. `/` goes to the search, `t` changes the theme."""
    site.open("run/a")
    title = site.page.get_by_role("heading", level=1)
    site.draw(5)
    for key, name in (("1", "Cluster"), ("4", "Compare"), ("3", "Run"), ("2", "Jobs")):
        site.page.evaluate("""() => {
          const none = { jobs: [], nodes: [], pools: [], events: [] };
          stream.onmessage({ data: JSON.stringify({ live: true, overview: none }) });
        }""")
        site.page.keyboard.press(key)
        expect(title).to_have_text(name)
        expect(site.page.get_by_role("navigation").get_by_role("link", name=name)).to_have_attribute(
            "aria-current", "page"
        )
    site.page.keyboard.press("/")
    search = site.page.get_by_role("searchbox", name="Filter jobs")
    expect(search).to_be_focused()
    site.page.keyboard.type("1t/")
    expect(search).to_have_value("1t/")
    expect(title).to_have_text("Jobs")
    site.page.keyboard.press("Tab")
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for _ in range(3):
        site.page.locator("body").press("t")
        seen.append((site.page.locator("#theme").inner_text(), site.page.evaluate(colour)))
    light, dark = "rgb(255, 255, 255)", "rgb(20, 25, 29)"
    assert seen == [("theme: light", light), ("theme: dark", dark), ("theme: auto", light)]
