"""The operator's commands as Fabric tasks: `fab --list`, or better `make`, which sets up what they need.

Exit status: 0: success. 1: the job or the command failed. 2: a mistake of the user. 3: something is out of reach.
"""

# ruff: noqa: E402  # the modules below take most of a second to load
from __future__ import annotations

from scripts import ctrl_c

ctrl_c.exit_quietly()

import functools
import sys
from pathlib import Path
from typing import Any

from invoke.context import Context

from scripts import console, control, display, following, inputs, log_lines, on_nodes
from scripts import cost as costs
from scripts import logs as joblogs
from scripts import site as sites
from scripts import ssh as remote
from scripts.following import DIGITS
from scripts.make_command import LOCAL, make_command
from scripts.run_tasks import diff, export, note, rerun, rm, runs, show, tag, tensorboard
from scripts.tasks import command
from spotrun.cloud import prices

__all__ = ["diff", "export", "note", "rerun", "rm", "runs", "show", "tag", "tensorboard"]  # tasks, like those below


@command
def up(_: Context, cluster: str = LOCAL, json: bool = False) -> None:
    """Bring the cluster up: a head and a bucket."""
    site = sites.of_file(cluster)
    status = site.up()
    text = f"`{make_command(cluster, 'train')}` runs a job, `{make_command(cluster, 'down')}` takes it down"
    again = make_command(cluster, "relaunch", "ID=")
    held = [
        f"\n{job} had not ended when the cluster went down: `{again}{job}` continues it"
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
    return following.train(cluster, job, faults, json)


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
    """What jobs have cost so far and will cost to the end, by pool and market. Also works while the cluster is down."""
    wanted, job = inputs.group(group, id, cluster), inputs.job(id, cluster)
    period, site = inputs.month(month), sites.of_file(cluster)
    books, old = costs.read(site.bucket(), site.cluster.name, job, cluster), prices.warning(site.cluster.cloud)
    found = costs.document(books, site.cluster.name, job, period, wanted, old, cluster)
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
        return following.follow_group(sites.of_file(cluster), wanted, json)
    return following.follow(sites.of_file(cluster), inputs.job(id, cluster), json)


@command
def dashboard(_: Context, cluster: str = LOCAL, port: str = "", json: bool = False) -> None:
    """Serve a page about the cluster, its jobs and runs on a local address, until Ctrl-C."""
    from scripts import dashboard as page  # loads aiohttp

    found, wanted = sites.of_file(cluster), int(inputs.number("PORT", port, most=65535) or 0)

    def say(url: str, token: str) -> None:
        text = f"open {url}\nThe address has a secret token. Ctrl-C ends the dashboard, and nothing else."
        _print({"url": url, "token_file": token}, json, text)

    page.serve(found, wanted, say)


@command
def logs(
    _: Context,
    cluster: str = LOCAL,
    id: str = "",
    node: str = "",
    rank: str = "",
    tail: str = "",
    grep: str = "",
    since: str = "",
    gen: str = "",
    follow: bool = False,
    raw: bool = False,
    json: bool = False,
) -> None:
    """What the workers of the newest generation printed: rank 0, or those of a node. RANK=all: all, by time.

    tail: only this many lines at the end. grep: only lines in which this regular expression is found. since: only what
    was printed in this time, such as 10m. gen: another generation, or all. follow: go on with what is printed from now
    on. raw: with escape sequences.
    """
    if grep or since or gen or follow or rank == log_lines.ALL:
        wanted = log_lines.Wanted(inputs.job(id, cluster), node, rank, grep, since, gen, tail)
        return log_lines.show(sites.of_file(cluster), wanted, follow, raw, json)
    which = inputs.job(id, cluster), inputs.node(node, cluster) if node else None, inputs.number("RANK", rank)
    lines = inputs.number("TAIL", tail, least=1)
    try:
        access = _access(cluster)
        found = joblogs.find(access, *which)
    except remote.Unreachable as error:
        more = f"`{make_command(cluster, 'logs', 'RANK=all')}` also prints logs while the cluster is down"
        raise remote.Unreachable(f"{error}; {more}") from error
    joblogs.show(access, found, int(lines) if lines else None, raw, json)


@command
def stacks(_: Context, cluster: str = LOCAL, id: str = "", node: str = "", json: bool = False) -> int:
    """Where each worker of a job is now: its Python stacks, those of equal workers together. Training goes on."""
    from scripts import stack_requests

    job, wanted = inputs.job(id, cluster), inputs.node(node, cluster) if node else None
    return stack_requests.show(_access(cluster), job, wanted, json)


@command
def profile(
    _: Context,
    cluster: str = LOCAL,
    id: str = "",
    steps: str = "",
    rank: str = "",
    node: str = "",
    json: bool = False,
) -> int:
    """Record the next steps of a running job on rank 0, or on another rank, or on all ranks of a node.

    steps: how many; default: 5. The trace is then in exports/ID and in the bucket.
    """
    from scripts import profile_requests
    from spotrun.node.profiles import MOST_STEPS

    job, wanted = inputs.job(id, cluster), inputs.node(node, cluster) if node else None
    number, count = inputs.number("RANK", rank), inputs.number("STEPS", steps, 1, MOST_STEPS)
    which = None if number is None else int(number)
    return profile_requests.show(_access(cluster), job, wanted, which, int(count or 5), json)


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
    on_nodes.check(cmd, cluster)
    patience = inputs.seconds("TIMEOUT", timeout, default=60.0)
    if node:
        inputs.node(node, cluster)
    return on_nodes.run(_access(cluster), node, cmd, patience, json)


@command
def preempt(_: Context, cluster: str = LOCAL, node: str = "", notice: str = "", json: bool = False) -> None:
    """Have the cloud take a node away, with notice, as a test.

    A local node counts on the cloud's usual notice. If NOTICE is shorter, the node goes earlier than it expects, so
    steps can be lost.
    """
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
    """Continue a failed, stopped or held job from its checkpoint, or restart the workers of a running job."""
    answer = _change(cluster, "relaunch", id)
    _print(answer, json, f"job {answer['job']} relaunched; {_follow(cluster, answer)}")


@command
def stop(_: Context, cluster: str = LOCAL, id: str = "", group: str = "", json: bool = False) -> None:
    """Stop a job, or all jobs of a group; their state goes into the bucket. If a failed job keeps a node: let it go."""
    if wanted := inputs.group(group, id, cluster):
        answer = control.ask(_access(cluster), "stop", "--group", wanted)
        _print(answer, json, f"group {wanted} stops: {', '.join(answer['jobs'])}")
        return
    answer = _change(cluster, "stop", id)
    does = f"lets node {answer['kept']} go" if answer.get("kept") else "stops"
    _print(answer, json, f"job {answer['job']} {does}; {_continue(cluster, 'relaunch', answer)}")


@command
def pause(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Take a job's machines away until `resume`; its state goes into the bucket."""
    answer = _change(cluster, "pause", id)
    _print(answer, json, f"job {answer['job']} pauses; {_continue(cluster, 'resume', answer)}")


@command
def resume(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Let a paused job have machines again."""
    answer = _change(cluster, "resume", id)
    _print(answer, json, f"job {answer['job']} resumes; {_follow(cluster, answer)}")


@command
def priority(_: Context, cluster: str = LOCAL, id: str = "", to: str = "", json: bool = False) -> None:
    """Change a job's priority. Jobs of a higher priority get their machines first."""
    wanted = inputs.priority(to)
    answer = _change(cluster, "priority", id, "--to", str(wanted))
    _print(answer, json, f"job {answer['job']} has priority {wanted} now")


@command
def budget(_: Context, cluster: str = LOCAL, id: str = "", to: str = "", json: bool = False) -> None:
    """Change what a job may cost in all. A job that ended because its budget was spent can then be relaunched."""
    wanted = inputs.budget(to)
    answer = _change(cluster, "budget", id, "--to", f"{wanted:.12g}")
    _print(answer, json, f"job {answer['job']} has a budget of ${wanted:.12g} now")


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

    count = int(inputs.number("RUNS", runs, 1, replays.MOST) or replays.RUNS)
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


def _access(cluster: str) -> remote.Access:
    return sites.of_file(cluster).access()


def _of(job: str | None) -> list[str]:
    return ["--job", job] if job else []


def _change(cluster: str, verb: str, id: str, *options: str) -> Any:
    """Ask the head to change a job. Without an id, this is the only job that has not ended."""
    job = inputs.job(id, cluster)
    return control.ask(_access(cluster), verb, *_of(job), *options)


def _follow(cluster: str, answer: dict[str, str]) -> str:
    return f"follow it with: {make_command(cluster, 'follow', 'ID=' + answer['job'])}"


def _continue(cluster: str, verb: str, answer: dict[str, str]) -> str:
    return f"`{make_command(cluster, verb, 'ID=' + answer['job'])}` continues it"


def _print(document: object, json: bool, text: str) -> None:
    console.answer(document) if json else console.say(text)
