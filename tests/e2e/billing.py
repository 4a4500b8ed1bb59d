"""What a cluster has cost: as `make cost` says, and as the local cloud would bill it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.home import home
from spotrun.cloud.local.layout import Layout
from tests.e2e.harness import PATIENCE, Harness
from tests.helpers import SLOW, wait_for

ROOT = Path(__file__).parents[2]


def billed(ledger: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Dollars and machine-seconds by pool: from the cloud's own list of starts, ends and prices, and nothing else."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    prices: dict[str, list[tuple[float, float]]] = {}  # by pool: from when on, dollars an hour
    starts = {line["id"]: line["at"] for line in lines if line["what"] == "running"}
    dollars: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for line in lines:
        if line["what"] == "price":
            prices.setdefault(line["pool"], []).append((line["at"], line["price"]))
    for line in lines:
        if line["what"] != "taken" or line["id"] not in starts:
            continue
        start, end, pool = starts.pop(line["id"]), line["at"], line["pool"]
        changes = [*prices[pool], (float("inf"), 0.0)]
        for (since, price), (until, _) in pairwise(changes):
            dollars[pool] = dollars.get(pool, 0.0) + max(0.0, min(end, until) - max(start, since)) * price / 3600
        seconds[pool] = seconds.get(pool, 0.0) + end - start
    assert starts == {}, "all machines have ended"
    return dollars, seconds


def cost(cluster: Harness, *words: str) -> dict[str, Any]:
    """What `make cost JSON=1` prints."""
    return answer(cluster, "cost", *words)


def answer(cluster: Harness, task: str, *words: str) -> dict[str, Any]:
    """What an operator's command prints for a program."""
    fab = str(Path(sys.executable).with_name("fab"))
    command = [fab, task, "--cluster", str(cluster.folder / "cluster.yaml"), "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def until_all_is_written(cluster: Harness) -> dict[str, Any]:
    """The cost once the machines are gone, and the account of the idle devices is in the bucket."""
    gone_at: list[float] = []

    def look() -> dict[str, Any] | None:
        status = cluster.status()
        if status["nodes"] or any(pool["target"] for pool in status["pools"]):
            gone_at.clear()
            return None
        gone_at.append(time.time())
        if status["counted_at"] < gone_at[0]:
            return None
        found = cost(cluster)
        return found if found["idle"]["seconds"] == pytest.approx(status["idle_node_seconds"], abs=1e-6) else None

    return wait_for(look, what="the end of all machines, and the account of the idle devices", timeout=PATIENCE / SLOW)


def check(cluster: Harness) -> dict[str, Any]:
    """The cost report once all machines have ended: to the cent what the cloud bills."""
    found = until_all_is_written(cluster)
    dollars, seconds = billed(Layout.of(home(), cluster.spec.name).ledger)
    by_pool = {row["pool"]: row for row in found["pools"]}
    assert by_pool.keys() == dollars.keys()
    for pool, row in by_pool.items():
        assert row["cost"] == pytest.approx(dollars[pool], abs=0.01), (pool, row["seconds"], seconds[pool])
    assert found["total"]["cost"] == pytest.approx(sum(dollars.values()), abs=0.01)
    assert found["total"]["cost"] == pytest.approx(sum(row["cost"] for row in found["pools"]))
    return found
