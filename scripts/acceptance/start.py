"""The command `make acceptance`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts import site as sites
from scripts.acceptance import plan, report
from scripts.acceptance.checks import CHECKS
from scripts.acceptance.jobs import plans
from scripts.acceptance.record import Keeper
from scripts.acceptance.rig import Rig
from scripts.acceptance.runner import Runner
from scripts.acceptance.steps import STEPS
from scripts.home import home
from scripts.make_command import make_command
from spotrun.errors import SpotrunError


def accept(file: str, again: bool, only_list: bool, say: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Run the steps on the cluster of this file, or list them. Returns the exit status and the report.

    again: repeat the steps that have passed. Raises `SpotrunError` if the cluster is up, unless an acceptance brought
    it up.
    """
    operated = sites.of_file(file)
    cluster = operated.cluster
    folder = home() / "acceptance" / cluster.name
    keeper = Keeper(folder, operated.bucket, cluster.name)
    record = keeper.load(cluster.digest)
    chosen = plan.todo(STEPS, record.results, again, record.standing, cluster)
    say(report.overview(chosen, cluster))
    if only_list:
        return 0, report.document(STEPS, record, cluster)
    rig = Rig(cluster, file, folder, chosen)
    if record.standing and (others := _others(operated)):
        raise SpotrunError(
            f"cluster {cluster.name} was brought up by an acceptance, but has other jobs now: {', '.join(others)}. An"
            " acceptance takes its cluster down at the end: wait for them, or take a cluster file with another name"
        )
    if not record.standing and rig.is_up():
        raise SpotrunError(
            f"cluster {cluster.name} is up, and an acceptance takes its cluster down at the end: run"
            f" `{make_command(file, 'down')}` first, or take a cluster file with another name"
        )
    checks = {name: partial(check, rig) for name, check in CHECKS.items()}
    runner = Runner(cluster, STEPS, checks, keeper, say, record)
    rig.facts_of = lambda step: runner.record.results[step].facts if step in runner.record.results else {}
    code = runner.run(again)
    return code, report.document(STEPS, runner.record, cluster)


def _others(operated: sites.Site) -> list[str]:
    """The jobs that have not ended, and that no acceptance has submitted."""
    own = {name.replace(" ", "-") for name in plans(operated.cluster.cloud)}
    with contextlib.suppress(SpotrunError):  # nothing answers, so no job is known: a step reports that
        jobs = [each.job for each in operated.unfinished()]
        return [job for job in jobs if re.sub(r"-[0-9]{8}-[0-9]{6}(-[0-9]+)?$", "", job) not in own]
    return []
