"""Shows status documents to a person: a live picture on a terminal, plain lines elsewhere.

A document has texts from machines where a job's code runs. So `show`, `say` and `text` remove control characters, and
no console here interprets rich's markup.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TextIO, TypeVar

from rich.console import Console, Group, RenderableType
from rich.errors import NotRenderableError
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scripts import console, job_table, kept
from scripts.control import ENDED, Status
from scripts.job_table import COLOURS, job_id, money, steps
from scripts.make_command import LOCAL, here, make_command
from spotrun.errors import SpotrunError
from spotrun.text import clean, count, tidy

T = TypeVar("T")
_MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError),
    NotRenderableError,  # a list where there should be text
)
_EVENTS = 8  # shown on a terminal
_METRICS = 8  # the same
_EVERY = 10.0  # seconds between two lines of progress where there is no terminal


def understood(show: Callable[..., T]) -> Callable[..., T]:
    """Turn an error about a malformed document into a message: another version of the head may have sent it."""

    @functools.wraps(show)
    def wrapped(*args: Any, **options: Any) -> T:
        try:
            return show(*args, **options)
        except _MALFORMED as error:
            what = f"{type(error).__name__}: {error}"
            raise SpotrunError(f"this version of spotrun cannot read the head's status ({what})") from None

    return wrapped


class Display(Protocol):
    """Shows a job to the person or program that follows it."""

    def show(self, status: Status) -> None:
        """Show a new status document."""

    def say(self, text: str) -> None:
        """Show a line that is not from a status document."""


@contextlib.contextmanager
def opened(as_json: bool, out: TextIO | None = None, file: str = LOCAL) -> Iterator[Display]:
    """The display for `out`: JSON lines for programs, live on a terminal, else plain lines. file: the cluster file."""
    out = out or sys.stdout
    if as_json:
        yield Lines(out)
    elif not out.isatty():  # rich believes variables such as FORCE_COLOR, which CI systems set
        yield Plain(out)
    else:
        live = Terminal(Console(file=out, highlight=False, markup=False, emoji=False), file)
        with live.live:
            yield live


class Lines:
    """One JSON line for each status document. Other lines go to stderr."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, status: Status) -> None:
        console.answer(status, self._out)

    def say(self, text: str) -> None:
        console.warn(text)


class Plain:
    """A line for each event, and a line of progress from time to time."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._seen: set[tuple[float, str]] = set()
        self._state: tuple[object, ...] = ()
        self._doing: dict[str, str] = {}  # what each node was doing when it was last shown
        self._at = 0.0

    @understood
    def show(self, status: Status) -> None:
        status = tidy(status)
        for event in status["events"]:
            key = (float(event["at"]), event["text"])
            if key not in self._seen:
                self._seen.add(key)
                self.say(event_line(event))
        job = status["job"]
        for node in status["nodes"]:
            if not _concerns(node, job):
                continue
            own = next((each for each in node.get("jobs", ()) if job and each["job"] == job["id"]), node)
            doing = own.get("doing", "")  # an older head does not send this key
            if doing and doing != self._doing.get(node["name"]):
                self.say(f"{clock(time.time())} {'node':<11} {node['name']}: {doing}")
            self._doing[node["name"]] = doing
        if job is None:
            return
        state = (job["phase"], job["generation"])
        if state != self._state or time.monotonic() - self._at >= _EVERY:
            self._state, self._at = state, time.monotonic()
            self.say(f"{clock(time.time())} {'progress':<11} {progress(job)}")

    def say(self, text: str) -> None:
        console.say(text, self._out)


class Terminal:
    """A picture that is redrawn in place. Other lines scroll by above it."""

    def __init__(self, console: Console, file: str = LOCAL) -> None:
        self._file = file
        self.live = Live(console=console, refresh_per_second=5, transient=False)

    @understood
    def show(self, status: Status) -> None:
        self.live.update(picture(tidy(status), self._file))

    def say(self, text: str) -> None:
        self.live.console.print(Text(clean(text)))


def progress(job: Status) -> str:
    """One line: digits-3 running, generation 2, step 120/400, 812 samples/s, loss 0.31, snapshot 119, checkpoint 100"""
    words = [f"{job['id']} {job['phase']}" + (f" ({job['reason']})" if job["reason"] else "")]
    if job["generation"]:
        words.append(f"generation {job['generation']}")
    words.append(f"step {steps(job)}")
    if job["samples_per_second"] and job["phase"] not in ENDED:
        words.append(f"{job['samples_per_second']:,.0f} samples/s")
    words += values(job["metrics"])
    words += [f"{name} {job[name]}" for name in ("snapshot", "checkpoint") if job[name] is not None]
    return ", ".join(words)


@understood
def text(status: Status, jobs: Sequence[Status] = (), file: str = LOCAL) -> str:
    """The whole document as plain text. jobs: those that the head knows of, from `ctl jobs`. file: the cluster file."""
    status, jobs = tidy(status), tidy(jobs)
    shown = _plain(picture(status, file, whole=True))
    known = [job_id(each) for each in status.get("jobs", ())] + [status["job"]["id"] if status["job"] else None]
    others = [f"{job_id(each)} {each['phase']}" for each in jobs if job_id(each) not in known]
    return f"{shown}\nother jobs: {', '.join(others)}" if others else shown


@understood
def listing(jobs: Sequence[Status], idle_cost: float | None = None) -> str:
    """The jobs as plain text. jobs: rows of `ctl jobs`. idle_cost: dollars, for devices that no job held."""
    if not jobs:
        return "no job has run on this cluster yet"
    shown = _plain(job_table.table(tidy(jobs), time.time()))
    return "\n".join([shown, *idle(idle_cost)])


def idle(dollars: float | None) -> list[str]:
    """A line about what idle devices have cost; none if that is less than a cent, or not known."""
    return [f"devices that no job held: {money(dollars)} so far"] if (dollars or 0.0) >= 0.005 else []


def picture(status: Status, file: str = LOCAL, whole: bool = False) -> RenderableType:
    """The document, for a console without markup. whole: also what is only about other jobs."""
    parts: list[RenderableType] = [_headline(status)]
    if parked := status.get("parked"):  # a head of spotrun 0.1 does not send this key
        parts.append(Text(here(parked["text"], file), style="red"))
    parts += [Text(text, style="red") for text in status.get("troubles", ())]  # nor this one
    for held in status.get("held", ()):
        again = make_command(file, "relaunch", f"ID={held}")
        parts.append(Text(f"{held}: held since the cluster was brought up; `{again}` continues it"))
    if status["job"] is not None:
        parts.append(_job(status["job"]))
        # A command on two lines could not be copied.
        parts += [Text(line, no_wrap=True, overflow="ignore") for line in kept.lines(status["job"], file)]
        for condition in status["job"].get("conditions", ()):
            if condition["text"] != status["job"]["reason"]:  # said once is enough
                parts.append(Text(f"since {clock(condition['since'])}: {condition['text']}", style="red"))
    if whole and len(status.get("jobs", ())) > 1:
        parts.append(job_table.table(status["jobs"], time.time()))
    if nodes := [node for node in status["nodes"] if whole or _concerns(node, status["job"])]:
        parts.append(_nodes(nodes))
    parts += [Text(line) for line in idle(status.get("idle_cost"))]
    for pool in status["pools"]:
        if pool["problem"]:
            parts.append(Text(f"pool {pool['name']}: {pool['problem']}", style="yellow"))
    if status["events"]:
        lines = [event_line(event) for event in status["events"][-_EVENTS:]]
        parts.append(Text("\n".join(lines), style="dim"))
    return Group(*parts)


def event_line(event: Status) -> str:
    """05:43:17 recovered   after 0.4 s, 0 steps lost (preempt)"""
    return f"{clock(event['at'])} {event['kind']:<11} {event['text']}"


def clock(at: float) -> str:
    """A time of day, in the operator's time zone; --:--:-- if the value is not a time."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def number(value: float | None) -> str:
    """Four significant digits. None stands for a number that is not finite: JSON has null for it."""
    return "nan or inf" if value is None else f"{value:.4g}"


def values(metrics: Status) -> list[str]:
    """loss 0.31: what the script has logged last. Of many numbers, the first ones: the nodes must stay in sight."""
    shown = [f"{name} {number(value)}" for name, value in islice(metrics.items(), _METRICS)]
    return [*shown, *([f"… {len(metrics) - _METRICS} more"] if len(metrics) > _METRICS else [])]


def _headline(status: Status) -> Text:
    pools = ", ".join(f"{pool['name']} {pool['running']}/{pool['target']}" for pool in status["pools"])
    job = status["job"]
    line = Text(f"cluster {status['cluster']}  pools {pools}  ")
    return line.append("no job") if job is None else line


def _job(job: Status) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    phase = Text(job["phase"], style=COLOURS.get(job["phase"], "cyan")).append(f"  {job['reason']}", style="dim")
    table.add_row("job", Text(job["id"], style="bold"), phase)
    most = count(job["max_restarts"], "restart")
    table.add_row("generation", str(job["generation"]), f"failures {job['restarts']}, at most {most}")
    bar: RenderableType = ""
    if job["total_steps"]:
        bar = ProgressBar(total=job["total_steps"], completed=min(job["step"], job["total_steps"]), width=40)
    table.add_row("step", steps(job), bar)
    metrics = "  ".join(values(job["metrics"]))
    table.add_row("speed", f"{job['samples_per_second'] or 0:,.0f} samples/s", metrics)
    goodput = "" if job["goodput"] is None else f"goodput {job['goodput']:.0%}"
    if job.get("placement"):  # an older head does not send this key
        table.add_row("machines", "", Text(job["placement"]))
    if job.get("cost") is not None:
        budget = f" of {money(job['budget'])}" if job.get("budget") else ""
        end = f"about {money(job['cost_to_end'])} at the end" if job.get("cost_to_end") and not job["ended"] else ""
        table.add_row("cost", f"{money(job['cost'])}{budget}", end)
    table.add_row(
        "saved", f"snapshot {_or(job['snapshot'], 'none')}  checkpoint {_or(job['checkpoint'], 'none')}", goodput
    )
    return table


def _nodes(nodes: list[Status]) -> Table:
    """A line for each node, and another one for each further job on it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("node", "pool", "zone", "address", "machine", "devices", "phase", "step", ""):
        table.add_column(title)
    for node in nodes:
        left = f"taken in {max(0.0, node['notice'] - time.time()):.0f} s" if node["notice"] else ""
        names = [node[key] for key in ("name", "pool", "zone", "address", "state")]
        for job, devices in job_table.holds(node.get("jobs", ()), node.get("devices") or 0) or [(None, "")]:
            found = job or node
            doing = f"{found['doing']}, {found['doing_seconds']:.0f} s" if found.get("doing") else ""
            end = ", ".join(filter(None, [left, "" if job is None and node.get("jobs") else doing]))
            table.add_row(*names, *_work(node, job, devices), Text(end, style="yellow"))
            names, left = [""] * len(names), ""
    return table


def _work(node: Status, job: Status | None, devices: str) -> list[str | Text]:
    """What some devices of a node do: their job, its phase, its step."""
    owner = "idle" if job is None else job["job"]
    if job is None and node.get("jobs"):
        return [f"{devices}: {owner}", "", ""]
    found = node if job is None else job
    phase, step = found["phase"] or "", found["step"]
    return [
        f"{devices or '-'}: {owner}" if devices or job else "",
        Text(phase, style=COLOURS.get(phase, "")),
        _or(step) if step != -1 else "",
    ]


def _concerns(node: Status, job: Status | None) -> bool:
    """Whether a node works for a job, or for none yet."""
    found = [each["job"] for each in node.get("jobs", ())]
    return job is None or not found or job["id"] in found


def _plain(shown: RenderableType) -> str:
    blank = io.StringIO()
    paper = Console(width=120, highlight=False, markup=False, emoji=False, record=True, file=blank, color_system=None)
    paper.print(shown, crop=False)
    return "\n".join(line.rstrip() for line in paper.export_text().splitlines()).rstrip()


def _or(value: object, other: str = "") -> str:
    return other if value is None else str(value)
