"""The command `make acceptance`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scripts import site as sites
from scripts.acceptance import plan, report
from scripts.acceptance.checks import CHECKS
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
