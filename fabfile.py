"""The operator's commands as Fabric tasks: `fab --list`, or better `make`, which sets up what they need.

Exit status: 0 well, 1 the job or the command failed, 2 a mistake of the user's, 3 something is out of reach.
"""

# ruff: noqa: E402  # the modules below take most of a second to load
from __future__ import annotations

from scripts import ctrl_c

ctrl_c.exit_quietly()

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from scripts import console, control, display, faults, inputs, report
from scripts import cost as costs
from scripts import group as groups
from scripts import jobs as jobruns
from scripts import logs as joblogs
from scripts import site as sites
from scripts import ssh as remote
from scripts.make_command import LOCAL, make_command
from spotrun.cloud import prices
from spotrun.errors import CloudError, SpotrunError, StoreError
from spotrun.text import clean

DIGITS = "examples/digits/job.yaml"


def command(function: Callable[..., int | None]) -> Any:
    """A task whose errors are one message on stderr and an exit status, never a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> None:
        ctrl_c.raise_again()
        complain = functools.partial(_complain, bool(options.get("json")))
        try:
            if function.__name__ in os.environ.get("SPOTRUN_TARGETS", "").split():
                inputs.variables(os.environ)
            code = function(*args, **inputs.typed(options)) or 0
        except (remote.Unreachable, CloudError, StoreError) as error:
            code = complain(str(error), 3)
        except SpotrunError as error:
            code = complain(str(error), 2)
        except BrokenPipeError:  # `make logs | head`
            sys.stderr.close()
            code = 0
        except OSError as error:  # an error of this machine: a folder without the right to write, a full disk
            where = f"{error.filename}: " if error.filename else ""
            code = complain(f"{where}{error.strerror or error}", 2)
        except KeyboardInterrupt:
            code = 130
        if code:
            raise Exit(code=code)

    return task(wrapped, auto_shortflags=False)


@command
def up(_: Context, cluster: str = LOCAL, json: bool = False) -> None:
    """Bring the cluster up: a head and a bucket."""
    site = sites.of_file(cluster)
    status = site.up()
    text = f"`{make_command(cluster, 'train')}` runs a job, `{make_command(cluster, 'down')}` takes it down"
    again = make_command(cluster, "relaunch", "ID=")
    held = [
        f"\n{job} was not ended when the cluster went down: `{again}{job}` continues it"
        for job in status.get("held", ())
    ]
    _print(status, json, f"cluster {site.cluster.name} is up; {text}{''.join(held)}")


@command
def plan(_: Context, cluster: str = LOCAL, json: bool = False) -> None:
    """Show what `up` would change in the cloud."""
    changes = sites.of_file(cluster).plan()
    _print(
        {"changes": changes},
        json,
        f"`{make_command(cluster, 'up')}` makes these changes" if changes else "nothing would change",
    )


@command
def train(_: Context, cluster: str = LOCAL, job: str = DIGITS, faults: str = "auto", json: bool = False) -> int:
    """Run a job and follow it to its end; brings the cluster up first. Fails if the job fails."""
    return _train(cluster, job, faults, json)


@command
def jobs(_: Context, cluster: str = LOCAL, json: bool = False) -> None:
    """All jobs, by group: those that have not ended, then the newest of the others."""
    with control.open_head(_access(cluster)) as head:
        rows = head.ask("jobs")
        idle_cost = None if json else head.ask("status").get("idle_cost")
    _print(rows, json, "" if json else display.listing(rows, idle_cost))


@command
def status(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """What the cluster does now."""
    job = inputs.job(id, cluster)
    with control.open_head(_access(cluster)) as head:
        document = head.ask("status", *_of(job))
        others = [] if json else head.ask("jobs")
    _print(document, json, display.text(document, others, cluster))


@command
def cost(_: Context, cluster: str = LOCAL, id: str = "", month: str = "", group: str = "", json: bool = False) -> None:
    """What jobs have cost, by pool and market, and what they will cost; also while the cluster is down."""
    wanted, job = inputs.group(group, id, cluster), inputs.job(id, cluster)
    period, site = inputs.month(month), sites.of_file(cluster)
    books, old = costs.read(site.bucket(), site.cluster.name, job), prices.warning(site.cluster.cloud)
    found = costs.document(books, site.cluster.name, job, period, wanted, old)
    _print(found, json, "" if json else costs.text(found))


@command
def advise(
    _: Context,
    cluster: str = LOCAL,
    job: str = DIGITS,
    measure: str = "",
    rate: str = "",
    out: str = "",
    json: bool = False,
) -> None:
    """Rank the machines that a job could train on by cost and time; can measure on the cluster's pools first.

    measure: seconds on one node of each pool. rate: samples per second of one machine. out: a folder for a table and a
    plot.
    """
    from scripts import advising

    advice = advising.advise(
        sites.of_file(cluster),
        job,
        inputs.interval("MEASURE", measure),
        inputs.rate(rate),
        functools.partial(console.say, out=sys.stderr if json else sys.stdout),
    )
    if out:
        advising.write(advice, Path(out))
    _print(advice, json, "" if json else advising.text(advice))


@command
def follow(_: Context, cluster: str = LOCAL, id: str = "", group: str = "", json: bool = False) -> int:
    """Follow a job, or all jobs of a group, to the end; Ctrl-C stops following, and they run on."""
    if wanted := inputs.group(group, id, cluster):
        return _follow_group(sites.of_file(cluster), wanted, json)
    return _follow(sites.of_file(cluster), inputs.job(id, cluster), [], json)


@command
def logs(
    _: Context,
    cluster: str = LOCAL,
    id: str = "",
    node: str = "",
    rank: str = "",
    tail: str = "",
    raw: bool = False,
    json: bool = False,
) -> None:
    """What the workers of the newest generation printed: rank 0, or those of a node.

    tail: only this many lines at the end. raw: with escape sequences.
    """
    which = inputs.job(id, cluster), inputs.node(node, cluster) if node else None, inputs.number("RANK", rank)
    lines = inputs.number("TAIL", tail, least=1)
    access = _access(cluster)
    for log in joblogs.find(access, *which):
        if not json:
            console.say(f"generation {log.generation}, {log.node}, rank {log.rank}:")
        end = "\n"
        for text in joblogs.read(access.store, log.key, int(lines) if lines else None):
            if json:
                console.answer({"generation": log.generation, "node": log.node, "rank": int(log.rank), "text": text})
            elif text:
                console.say(text, raw=raw, end="")
                end = text[-1]
        if not json and end != "\n":
            console.say("")


@command
def ssh(_: Context, cluster: str = LOCAL, node: str = remote.HEAD, json: bool = False) -> None:
    """A shell on a node, or on the head."""
    inputs.node(node, cluster)
    access = _access(cluster)
    if json:
        console.answer(remote.shell_command(access, node))
    else:
        remote.shell(access, node)


@command
def run(_: Context, cluster: str = LOCAL, cmd: str = "", node: str = "", timeout: str = "", json: bool = False) -> int:
    """Run a shell command on all nodes, or on one."""
    if not cmd.strip():
        example = make_command(cluster, "run", "CMD='nvidia-smi -L'")
        raise SpotrunError(f"run: no command; for example: {example}")
    patience = inputs.seconds("TIMEOUT", timeout, default=60.0)
    if node:
        inputs.node(node, cluster)
    access = _access(cluster)
    nodes = [node] if node else [each["name"] for each in control.ask(access, "status")["nodes"] if _reachable(each)]
    if not nodes:
        raise SpotrunError("run: the cluster has no nodes now; they come with a job. NODE=head is always there")

    outcomes = []

    def show(outcome: remote.Outcome) -> None:
        outcomes.append(outcome)
        if json:
            keys = ("node", "code", "output", "left_out")
            console.answer({key: getattr(outcome, key) for key in keys})
        elif not outcome.reached or not outcome.output:
            show_output(outcome.node, outcome.output or f"(exit status {outcome.code})")

    def show_output(node: str, text: str) -> None:
        for line in clean(text).splitlines():
            console.say(f"{node}: {line}")

    try:
        if remote.run(access, nodes, cmd, patience, show, (lambda *_: None) if json else show_output):
            return 0
    except KeyboardInterrupt:
        console.warn(f"\nspotrun: run: interrupted; the command may still run there, for at most {patience:g} s")
        return 130
    failed = [each for each in outcomes if each.code]
    console.warn(f"spotrun: run: {report.failures(failed, len(nodes))}")
    return 1 if any(each.reached for each in failed) else 3


@command
def preempt(_: Context, cluster: str = LOCAL, node: str = "", notice: str = "", json: bool = False) -> None:
    """Have the cloud take a node away, with notice, as a test."""
    inputs.node(node, cluster)
    extra = ["--notice", f"{inputs.seconds('NOTICE', notice):g}"] if notice else []
    answer = control.ask(_access(cluster), "preempt", node, *extra)
    _print(answer, json, f"the cloud takes {node} away, with notice")


@command
def kill(_: Context, cluster: str = LOCAL, node: str = "", json: bool = False) -> None:
    """Have the cloud take a node away without notice, as a test."""
    inputs.node(node, cluster)
    answer = control.ask(_access(cluster), "kill", node)
    _print(answer, json, f"the cloud has taken {node} away")


@command
def relaunch(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Continue an ended or held job from its checkpoint, or restart the workers of a running job."""
    which = _of(inputs.job(id, cluster))
    answer = control.ask(_access(cluster), "relaunch", *which)
    _print(answer, json, f"job {answer['job']} relaunched; follow it with: {_hint(cluster, answer['job'])}")


@command
def stop(_: Context, cluster: str = LOCAL, id: str = "", group: str = "", json: bool = False) -> None:
    """Stop a job, or all jobs of a group; their state goes into the bucket. Of a failed job: let its kept node go."""
    if wanted := inputs.group(group, id, cluster):
        answer = control.ask(_access(cluster), "stop", "--group", wanted)
        _print(answer, json, f"group {wanted} stops: {', '.join(answer['jobs'])}")
        return
    which = _of(inputs.job(id, cluster))
    answer = control.ask(_access(cluster), "stop", *which)
    again = make_command(cluster, "relaunch", f"ID={answer['job']}")
    does = f"lets node {answer['kept']} go" if answer.get("kept") else "stops"
    _print(answer, json, f"job {answer['job']} {does}; `{again}` continues it")


@command
def pause(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Take a job's machines away until `resume`; its state goes into the bucket."""
    which = _of(inputs.job(id, cluster))
    answer = control.ask(_access(cluster), "pause", *which)
    again = make_command(cluster, "resume", f"ID={answer['job']}")
    _print(answer, json, f"job {answer['job']} pauses; `{again}` continues it")


@command
def resume(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Let a paused job have machines again."""
    which = _of(inputs.job(id, cluster))
    answer = control.ask(_access(cluster), "resume", *which)
    _print(answer, json, f"job {answer['job']} resumes; follow it with: {_hint(cluster, answer['job'])}")


@command
def priority(_: Context, cluster: str = LOCAL, id: str = "", to: str = "", json: bool = False) -> None:
    """Change a job's priority. Jobs of a higher priority get their machines first."""
    which = _of(inputs.job(id, cluster))
    wanted = inputs.priority(to)
    answer = control.ask(_access(cluster), "priority", *which, "--to", str(wanted))
    _print(answer, json, f"job {answer['job']} has priority {wanted} now")


@command
def simulate(
    _: Context,
    cluster: str = LOCAL,
    job: str = DIGITS,
    traces: str = "",
    polarity: str = "",
    runs: str = "",
    seed: str = "",
    json: bool = False,
) -> None:
    """What a job would cost and when it would end, by policy, on traces of spot markets. Starts nothing."""
    from scripts import simulate as replays  # loads numpy

    count = int(inputs.number("RUNS", runs, least=1) or replays.RUNS)
    found = replays.simulate(cluster, job, traces, polarity, count, int(inputs.number("SEED", seed) or 1))
    _print(found, json, replays.text(found))


@command
def down(_: Context, cluster: str = LOCAL, force: bool = False, all: bool = False, json: bool = False) -> None:
    """Take the cluster down; refuses while a job runs, unless forced. all: a cloud's network and bucket too."""
    site = sites.of_file(cluster)
    text = sites.take_down(site, force, everything=all)
    _print({"cluster": site.cluster.name, "up": False}, json, text)


@command
def acceptance(_: Context, cluster: str = LOCAL, all: bool = False, dry: bool = False, json: bool = False) -> int:
    """Try everything that only real machines can show, cheapest first; takes the cluster down again.

    all: also what has passed in an earlier run. dry: list what would be tried, and what it would cost.
    """
    from scripts.acceptance.start import accept

    code, document = accept(cluster, all, dry, console.warn if json else console.say)
    if json:
        console.answer(document)
    return code


def _train(cluster: str, job: str, wanted: str, json: bool) -> int:
    if wanted == "auto":
        wanted = faults.DEMO if (cluster, job) == (LOCAL, DIGITS) else "none"
    plan = faults.parse(wanted)
    site = sites.of_file(cluster)
    jobruns.check(site.cluster, job)
    say = functools.partial(console.say, out=sys.stderr if json else sys.stdout)
    say(f"bringing cluster {site.cluster.name} up")
    site.ready()
    return _follow(site, jobruns.submit(site.access(), site.cluster, job, say), plan, json)


def _follow(site: sites.Site, job: str | None, plan: list[faults.Fault], json: bool) -> int:
    access = site.access()
    try:
        with display.opened(json, file=site.file) as view:
            document = jobruns.follow(access, job, view, plan, site.access)
    except KeyboardInterrupt:
        console.warn(f"\ndetached; the job goes on. Follow it again with: {_hint(site.file, job)}")
        return 130
    last = document["job"]
    if not json:
        words = joblogs.last_words(access, last["id"]) if last["phase"] == "succeeded" else []
        console.say("\n".join(["", *words, report.report(last, document.get("idle_cost"), site.file)]))
    return 0 if last["phase"] == "succeeded" else 1


def _follow_group(site: sites.Site, group: str, json: bool) -> int:
    listener = groups.Lines() if json else groups.Plain(group)
    try:
        ended = groups.follow(site.access(), group, listener, site.access)
    except KeyboardInterrupt:
        again = make_command(site.file, "follow", f"GROUP={group}")
        console.warn(f"\ndetached; the jobs go on. Follow them again with: {again}")
        return 130
    if not json:
        console.say(display.listing(ended))
    return 0 if all(job["phase"] == "succeeded" for job in ended) else 1


def _access(cluster: str) -> remote.Access:
    return sites.of_file(cluster).access()


def _of(job: str | None) -> list[str]:
    return ["--job", job] if job else []


def _reachable(node: dict[str, Any]) -> bool:
    return bool(node["state"] == "running" and node["pool"] != remote.HEAD)


def _hint(cluster: str, job: str | None) -> str:
    return make_command(cluster, "follow", *([f"ID={job}"] if job else []))


def _print(document: object, json: bool, text: str) -> None:
    console.answer(document) if json else console.say(text)


def _complain(json: bool, error: str, code: int) -> int:
    """Print an error on stderr, and for programs on stdout too. Returns the exit status."""
    console.warn(f"spotrun: {error}")
    if json:
        console.answer({"error": error})
    return code
