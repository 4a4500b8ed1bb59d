"""The node of a failed job that is kept for a person: until when, how to get in, and how to let it go. Pure."""

from __future__ import annotations

import time
from typing import Any

from scripts.make_command import LOCAL, make_command

Status = dict[str, Any]  # of a job


def lines(job: Status, file: str = LOCAL) -> list[str]:
    """What a person needs to know about the node; no lines if the job keeps none. Older heads keep no node."""
    kept = job.get("kept")
    if not kept:
        return []
    ssh, stop = make_command(file, "ssh", f"NODE={kept['node']}"), make_command(file, "stop", f"ID={job['id']}")
    within = ", within the job's budget" if job.get("budget") else ""
    found = [
        f"node {kept['node']} is kept until {utc(kept['until'])}{within}",
        f"  log in:       {ssh}",
    ]
    if "run" in kept:  # an agent of an older version does not say where its files are
        found += [f"  run it again: {kept['run']}", f"  logs:         {kept['logs']}"]
    return [*found, f"  let it go:    {stop}"]


def short(job: Status) -> str:
    """The same for one line: keeps spot-1 until 2026-11-22 12:30:05 UTC"""
    kept = job.get("kept")
    return f"keeps {kept['node']} until {utc(kept['until'])}" if kept else ""


def utc(at: float) -> str:
    """2026-11-22 12:30:05 UTC"""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
