"""The operator's commands as Fabric tasks: `fab --list`, or better `make`, which sets up what they need.

Exit status: 0 well, 1 the job or the command failed, 2 a mistake of the user's, 3 something is out of reach.
"""

from __future__ import annotations

import functools
import json as jsonlib
import sys
from collections.abc import Callable
from typing import Any

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from scripts import cluster as clusters
from scripts import control, display, faults, jobs, report
from scripts import ssh as remote
from scripts.hint import LOCAL, make
from spotrun.errors import CloudError, SpotrunError, StoreError

DIGITS = "examples/digits/job.yaml"


def command(function: Callable[..., int | None]) -> Any:
    """A task whose errors are one message on stderr and an exit status, never a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            code = function(*args, **_typed(options)) or 0
        except (remote.Unreachable, CloudError, StoreError) as error:
            code = _complain(error, 3)
        except SpotrunError as error:
            code = _complain(error, 2)
        except BrokenPipeError:  # `make logs | head`
            sys.stderr.close()
            code = 0
        except KeyboardInterrupt:
            code = 130
        if code:
            raise Exit(code=code)

    return task(wrapped, auto_shortflags=False)


@command
def up(_: Context, cluster: str = LOCAL, json: bool = False) -> None:
    """Bring the cluster up: a head and a bucket."""
    spec = clusters.load(cluster)
    status = clusters.up(spec, cluster)
    text = f"`{make(cluster, 'train')}` runs a job, `{make(cluster, 'down')}` takes it down"
    _print(status, json, f"cluster {spec.name} is up; {text}")


@command
def plan(_: Context, cluster: str = LOCAL, json: bool = False) -> None:
    """Show what `up` would change in the cloud."""
    changes = clusters.plan(clusters.load(cluster), cluster)
    _print({"changes": changes}, json, f"`{make(cluster, 'up')}` makes it so" if changes else "nothing would change")


@command
def train(_: Context, cluster: str = LOCAL, job: str = DIGITS, faults: str = "auto", json: bool = False) -> int:
    """Run a job and follow it to its end; brings the cluster up first. Fails if the job fails."""
    return _train(cluster, job, faults, json)


@command
def status(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """What the cluster does now."""
    document = control.ask(_access(cluster), "status", *_of(id))
    _print(document, json, display.text(document))


@command
def follow(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> int:
    """Follow a job to its end; Ctrl-C ends only the following."""
    return _follow(_access(cluster), cluster, id or None, [], json)


@command
def logs(_: Context, cluster: str = LOCAL, id: str = "", node: str = "", rank: str = "", json: bool = False) -> None:
    """What the workers of the newest generation printed: rank 0, or those of a node."""
    access = _access(cluster)
    for log in jobs.logs(access, id or None, node or None, rank or None):
        text = access.store.get(log.key).decode(errors="replace")
        if json:
            record = {"generation": log.generation, "node": log.node, "rank": int(log.rank), "text": text}
            print(jsonlib.dumps(record), flush=True)
        else:
            print(f"generation {log.generation}, {log.node}, rank {log.rank}:\n{text.rstrip()}", flush=True)


@command
def ssh(_: Context, cluster: str = LOCAL, node: str = remote.HEAD, json: bool = False) -> None:
    """A shell on a node, or on the head."""
    access = _access(cluster)
    if json:
        print(jsonlib.dumps(remote.shell_command(access, node)))
    else:
        remote.shell(access, node)


@command
def run(
    _: Context, cluster: str = LOCAL, cmd: str = "", node: str = "", timeout: float = 60.0, json: bool = False
) -> int:
    """Run a shell command on all nodes, or on one."""
    if not cmd.strip():
        example = make(cluster, "run", "CMD='nvidia-smi -L'")
        raise SpotrunError(f"run: no command; for example: {example}")
    access = _access(cluster)
    nodes = [node] if node else [each["name"] for each in control.ask(access, "status")["nodes"] if _reachable(each)]
    if not nodes:
        raise SpotrunError("run: the cluster has no nodes now; they come with a job. NODE=head is always there")

    outcomes = []

    def show(outcome: remote.Outcome) -> None:
        outcomes.append(outcome)
        if json:
            print(jsonlib.dumps({"node": outcome.node, "code": outcome.code, "output": outcome.output}), flush=True)
        else:
            for line in outcome.output.splitlines() or [f"(exit status {outcome.code})"]:
                print(f"{outcome.node}: {line}", flush=True)

    if remote.run(access, nodes, cmd, timeout, show):
        return 0
    failed = [each for each in outcomes if each.code]
    print(f"spotrun: run: {report.failures(failed, len(nodes))}", file=sys.stderr, flush=True)
    return 1 if any(each.reached for each in failed) else 3


@command
def preempt(_: Context, cluster: str = LOCAL, node: str = "", notice: str = "", json: bool = False) -> None:
    """Have the cloud take a node away, with notice, as a test."""
    extra = ["--notice", notice] if notice else []
    answer = control.ask(_access(cluster), "preempt", _named(cluster, node), *extra)
    _print(answer, json, f"the cloud takes {node} away, with notice")


@command
def kill(_: Context, cluster: str = LOCAL, node: str = "", json: bool = False) -> None:
    """Have the cloud take a node away without a word, as a test."""
    answer = control.ask(_access(cluster), "kill", _named(cluster, node))
    _print(answer, json, f"the cloud has taken {node} away")


@command
def relaunch(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Run an ended job on from its checkpoint, or restart a running one's workers."""
    answer = control.ask(_access(cluster), "relaunch", *_of(id))
    _print(answer, json, f"job {answer['job']} relaunched; follow it with: {_hint(cluster, answer['job'])}")


@command
def stop(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Stop a job; its state goes into the bucket."""
    answer = control.ask(_access(cluster), "stop", *_of(id))
    again = make(cluster, "relaunch", f"ID={answer['job']}")
    _print(answer, json, f"job {answer['job']} stops; `{again}` runs it on")


@command
def down(_: Context, cluster: str = LOCAL, force: bool = False, all: bool = False, json: bool = False) -> None:
    """Take the cluster down; refuses while a job runs, unless forced. all: a cloud's network and bucket too."""
    spec = clusters.load(cluster)
    text = clusters.down(spec, force, cluster, everything=all)
    _print({"cluster": spec.name, "up": False}, json, text)


def _train(cluster: str, job: str, wanted: str, json: bool) -> int:
    if wanted == "auto":
        wanted = faults.DEMO if (cluster, job) == (LOCAL, DIGITS) else "none"
    plan = faults.parse(wanted)
    spec = clusters.load(cluster)
    jobs.check(spec, job)
    say = functools.partial(print, file=sys.stderr if json else sys.stdout, flush=True)
    say(f"bringing cluster {spec.name} up")
    clusters.ready(spec, cluster)
    access = clusters.access(spec, cluster)
    return _follow(access, cluster, jobs.submit(access, spec, job, say), plan, json)


def _follow(access: remote.Access, cluster: str, job: str | None, plan: list[faults.Fault], json: bool) -> int:
    try:
        with display.opened(json) as view:
            last = jobs.follow(access, job, view, plan)
    except KeyboardInterrupt:
        print(f"\ndetached; the job goes on. Follow it again with: {_hint(cluster, job)}", file=sys.stderr)
        return 130
    if not json:
        words = jobs.last_words(access, last["id"]) if last["phase"] == "succeeded" else []
        print("\n".join(["", *words, report.report(last)]), flush=True)
    return 0 if last["phase"] == "succeeded" else 1


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they were typed: the Makefile puts a space before each, so that none looks like an option."""
    found = {name: value.removeprefix(" ") if isinstance(value, str) else value for name, value in options.items()}
    for name, value in found.items():
        if isinstance(value, str) and not value.isprintable() and any("\ud800" <= each <= "\udfff" for each in value):
            raise SpotrunError(f"{name.upper()}: {value.encode(errors='surrogateescape')!r}: is not UTF-8")
    return found


def _access(cluster: str) -> remote.Access:
    return clusters.access(clusters.load(cluster), cluster)


def _of(job: str) -> list[str]:
    return ["--job", job] if job else []


def _named(cluster: str, node: str) -> str:
    if not node:
        raise SpotrunError(f"no node named: NODE=<name>; `{make(cluster, 'status')}` lists them")
    return node


def _reachable(node: dict[str, Any]) -> bool:
    return bool(node["state"] == "running" and node["pool"] != remote.HEAD)


def _hint(cluster: str, job: str | None) -> str:
    return make(cluster, "follow", *([f"ID={job}"] if job else []))


def _print(document: object, json: bool, text: str) -> None:
    print(jsonlib.dumps(document) if json else text, flush=True)


def _complain(error: SpotrunError, code: int) -> int:
    print(f"spotrun: {error}", file=sys.stderr, flush=True)
    return code
