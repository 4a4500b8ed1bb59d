"""A small cluster of the local cloud."""

from __future__ import annotations

from typing import Any

from spotrun.spec import ClusterSpec

IDLE = ("sleep", "infinity")


def spec(**values: Any) -> ClusterSpec:
    pools = [
        {"name": "a", "zone": "local-a", "max": 4},
        {"name": "b", "zone": "local-b", "max": 2, "market": "on-demand"},
    ]
    local = {"boot_delay": 0, "recreate_delay": 0.1} | values.pop("local", {})
    return ClusterSpec.model_validate({"name": "tiny", "cloud": "local", "pools": pools, "local": local} | values)
