"""The tasks `train` and `follow`: they show jobs until their end, then a report. Functions return the exit status."""

from __future__ import annotations

import functools
import sys

from scripts import console, display, group, jobs, logs, report
from scripts import faults as planned
from scripts.make_command import LOCAL, make_command
from scripts.site import Site, of_file

DIGITS = "examples/digits/job.yaml"


def train(cluster: str, job: str, faults: str, json: bool) -> int:
    """Bring the cluster up, submit the job and follow it.

    faults: as in `faults.parse`. `auto`: the faults of the demonstration if this is the demonstration, else none.
    """
    if faults == "auto":
        faults = planned.DEMO if (cluster, job) == (LOCAL, DIGITS) else "none"
    plan = planned.parse(faults)
    site = of_file(cluster)
    jobs.check(site.cluster, job)
    say = functools.partial(console.say, out=sys.stderr if json else sys.stdout)
    say(f"making sure that cluster {site.cluster.name} is up")
    site.ready()
    return follow(site, jobs.submit(site.access(), site.cluster, job, say), json, plan)


def follow(site: Site, job: str | None, json: bool, plan: list[planned.Fault] | None = None) -> int:
    """Follow a job to its end, and take machines away as planned. job: None: the one that runs, or that ended last."""
    access = site.access()
    try:
        with display.opened(json, file=site.file) as view:
            document = jobs.follow(access, job, view, plan, site.access)
    except KeyboardInterrupt:
        again = make_command(site.file, "follow", *([f"ID={job}"] if job else []))
        return _detached(f"the job goes on. Follow it again with: {again}")
    last = document["job"]
    if not json:
        words = logs.last_words(access, last["id"]) if last["phase"] == "succeeded" else []
        console.say("\n".join(["", *words, report.report(last, document.get("idle_cost"), site.file)]))
    return 0 if last["phase"] == "succeeded" else 1


def follow_group(site: Site, name: str, json: bool) -> int:
    """Follow all jobs of a group to their ends. The exit status is 0 if all have succeeded."""
    listener = group.Lines() if json else group.Plain(name)
    try:
        ended = group.follow(site.access(), name, listener, site.access)
    except KeyboardInterrupt:
        again = make_command(site.file, "follow", f"GROUP={name}")
        return _detached(f"the jobs go on. Follow them again with: {again}")
    if not json:
        console.say(display.listing(ended))
    return 0 if all(job["phase"] == "succeeded" for job in ended) else 1


def _detached(text: str) -> int:
    console.warn(f"\ndetached; {text}")
    return 130
