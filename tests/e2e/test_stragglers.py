"""A rank that is slower than the others: an event says so, and another one says that it is over."""

from __future__ import annotations

import re

from tests.e2e.harness import Harness


def test_a_slow_rank_is_told(cluster: Harness) -> None:
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=40, samples=3200, lag=1, pause=0.1)
    node = cluster.members()[1]

    def texts() -> list[str]:
        return [each["text"] for each in cluster.status()["events"] if each["kind"] == "slow"]

    cluster.until(lambda s: s["job"]["conditions"], "a condition")
    [text] = texts()
    assert re.match(rf"rank 1 \({node}\) is slow: it takes [0-9.]+ times as long as the others", text)
    job.go()
    cluster.until(lambda s: not s["job"]["conditions"], "that it is over")
    assert texts() == [text, f"rank 1 ({node}) is not slower than the others any more"]
    cluster.ctl("stop")
    cluster.until_ended()
