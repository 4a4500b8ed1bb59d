"""`spotrun ctl`: the command line of the head's control socket. JSON on stdout; an error is one line on stderr."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotrun.errors import SpotrunError
from spotrun.machine import private_paths

if TYPE_CHECKING:
    import aiohttp

NO_ANSWER = "the head does not answer"  # operators' commands try again after this error
STREAMS = ("follow", "live")  # verbs whose answer has a line for each change
SILENCE = 30.0  # seconds without a line after which a followed head counts as gone; it sends one every 5 s


def add_parser(commands: Any) -> None:
    """Add `ctl` and its own commands."""
    parser = commands.add_parser("ctl", help="ask the head or change its jobs (on the head's machine)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("submit", help="queue a job: JSON {job, code} on stdin")
    for verb, text in (
        ("status", "one status document"),
        ("follow", "a status document per line, until the job ends"),
    ):
        verbs.add_parser(verb, help=text).add_argument("--job")
    verbs.add_parser("metrics", help="the metrics for Prometheus, as JSON {text}")
    verbs.add_parser("live", help="the overview of the cluster: a line of JSON after each change")
    verbs.add_parser("jobs", help="the jobs that have not ended, then the newest of the others")
    stop = verbs.add_parser("stop", help="stop a job, or all jobs of a group; their state goes into the bucket")
    stop.add_argument("--job")
    stop.add_argument("--group")
    verbs.add_parser("pause", help="take a job's devices away; its state goes into the bucket").add_argument("--job")
    verbs.add_parser("resume", help="let a paused job have devices again").add_argument("--job")
    priority = verbs.add_parser("priority", help="change the priority of a job")
    priority.add_argument("--job")
    priority.add_argument("--to", type=int, required=True)
    budget = verbs.add_parser("budget", help="change what a job may cost; it may have ended")
    budget.add_argument("--job")
    budget.add_argument("--to", type=float, required=True, help="dollars")
    verbs.add_parser("relaunch", help="continue an ended job, or restart an active one").add_argument("--job")
    preempt = verbs.add_parser("preempt", help="have the cloud take a node, with notice, as a test")
    preempt.add_argument("node")
    preempt.add_argument("--notice", type=float, help="seconds; default: the cloud's own")
    verbs.add_parser("kill", help="have the cloud take a node without notice, as a test").add_argument("node")
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


def control_path() -> Path:
    """Where the head's control socket is on this machine."""
    return Path(os.environ.get("SPOTRUN_TMPFS", "/dev/shm/spotrun")) / "head.sock"


async def _run(args: argparse.Namespace) -> int:
    import aiohttp  # not at the top: agents parse the same command line, and start often

    path = control_path()
    if not path.exists():
        raise SpotrunError(f"no head runs on this machine (there is no {path})")
    private_paths.check_socket(path)
    following = args.verb in STREAMS
    timeout = aiohttp.ClientTimeout(total=None if following else 60, sock_read=SILENCE if following else None)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session:
            return await _ask(session, args)
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise SpotrunError(f"{NO_ANSWER} on {path}: {reason}") from None


async def _ask(session: aiohttp.ClientSession, args: argparse.Namespace) -> int:
    base = "http://head"
    query = {key: value for key in ("job", "group", "to") if (value := getattr(args, key, None)) is not None}
    match args.verb:
        case "status" | "jobs" | "follow" | "live" | "metrics":
            request = session.get(f"{base}/{args.verb}", params=query)
        case "submit":
            request = session.post(f"{base}/submit", data=sys.stdin.buffer.read())
        case "preempt":
            request = session.post(f"{base}/preempt", json={"node": args.node, "notice": args.notice})
        case "kill":
            request = session.post(f"{base}/preempt", json={"node": args.node, "notice": 0})
        case _:
            request = session.post(f"{base}/{args.verb}", json=query)
    async with request as response:
        if response.status != 200:
            text = await response.text()
            try:
                text = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                text = f"the head answered {response.status}: {text[:200]}"
            raise SpotrunError(f"{NO_ANSWER}: {text}" if response.status == 503 else text)
        # Chunks, not lines: a status document may be longer than the reader's line limit.
        async for chunk in response.content.iter_any():
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        if args.verb not in STREAMS:
            print()
    return 0
