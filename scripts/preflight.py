"""What an operator's machine and account must have before Terraform is asked for anything: a line for what is not."""

from __future__ import annotations

import sys

from scripts import stacks
from scripts.doors import require
from spotrun import cloud
from spotrun.cloud import Shortfall
from spotrun.errors import QuotaError
from spotrun.spec import ClusterSpec

_QUOTAS = {
    "gcp": "console.cloud.google.com/iam-admin/quotas",
    "aws": "console.aws.amazon.com/servicequotas",
}


def check_tools(cluster: ClusterSpec) -> None:
    """Raise `SpotrunError` unless this machine has the programs that the cluster's cloud takes."""
    stacks.check_tools()
    for tool in ("gcloud",) if cluster.cloud == "gcp" else ("aws", "session-manager-plugin"):
        require(tool)


def check_quotas(cluster: ClusterSpec) -> None:
    """Raise `QuotaError` if a pool could not have a single machine; say on stderr if it could not have all."""
    none: list[str] = []
    for shortfall in cloud.ask(cluster, lambda each: each.shortfalls()):
        pool = cluster.pool(shortfall.pool)
        one = shortfall.needs / (pool.max if pool else 1)
        line = _line(cluster, shortfall)
        if shortfall.has - shortfall.used < one:
            none.append(line)
        else:
            print(f"spotrun: {line}", file=sys.stderr, flush=True)
    if none:
        raise QuotaError("\n".join(none))


def _line(cluster: ClusterSpec, found: Shortfall) -> str:
    used = f", {found.used:g} of them in use" if found.used else ""
    return (
        f"pool {found.pool}: quota {found.quota} in {cluster.region} is {found.has:g}{used}; the pool's max takes"
        f" {found.needs:g}: ask for more at {_QUOTAS[cluster.cloud]}, or lower max"
    )
