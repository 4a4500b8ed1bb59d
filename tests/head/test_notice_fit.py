"""Whether a drain fits into the notice, and that operators are told beforehand if it does not."""

from __future__ import annotations

from typing import Any

import pytest

from spotrun.head.agents import Agents
from spotrun.head.planner.notice_fit import notice_of, too_long
from spotrun.spec import ClusterSpec
from spotrun.spec.cluster import PoolSpec
from spotrun.wire import Bundle, JobOrder, Order, Report, Worker

TEXT = (
    "a drain of a takes about 38 s: 36 s for the snapshot and 2.0 s for a step. "
    "A preemption gives 30 s of notice, so it will cost the steps since the newest snapshot"
)


def report(took: float, step: int = 50, **changes: Any) -> Report:
    """A node that took up the work at step 0, two seconds a step."""
    worker = Worker(rank=0, pid=1, step=step, base=0, stepped_at=1.0, stepping=2.0 * step, took=took)
    idle = Worker(rank=1, pid=2, step=step, base=0, stepped_at=1.0)
    values = {"node": "a", "boot": "1", "pool": "p", "zone": "z", "address": "10.0.0.1", "job": "j"}
    return Report.model_validate({**values, "workers": (worker, idle), **changes})


@pytest.mark.parametrize(
    ("took", "notice", "said"),
    [
        pytest.param(36.0, 30.0, TEXT, id="too long"),
        pytest.param(36.0, 120.0, "", id="EC2's notice is longer"),
        pytest.param(25.0, 30.0, "", id="just"),
        pytest.param(36.0, 0.0, "", id="a machine that is never preempted"),
        pytest.param(0.0, 30.0, "", id="not measured yet"),
    ],
)
def test_a_drain_is_measured_against_the_notice(took: float, notice: float, said: str) -> None:
    assert too_long("a", report(took).jobs[0], notice) == said


def cluster(cloud: str, **pool: Any) -> ClusterSpec:
    """As decisions see it: only these keys count."""
    return ClusterSpec.model_construct(cloud=cloud, pools=(PoolSpec(name="p", zone="z").model_copy(update=pool),))


@pytest.mark.parametrize(
    ("cloud", "pool", "seconds"),
    [
        ("gcp", {}, 30.0),
        ("gcp", {"market": "on-demand"}, 0.0),
        ("aws", {}, 120.0),
        ("gcp", {"name": "q"}, 0.0),
        ("gcp", {"notice": 120.0}, 120.0),
    ],
)
def test_what_notice_a_pool_gets(cloud: str, pool: dict[str, Any], seconds: float) -> None:
    assert notice_of(cluster(cloud, **pool), "p") == seconds


def test_operators_are_told_once_at_the_first_snapshot_of_a_job() -> None:
    said: list[tuple[str, str]] = []

    def send(order: Order) -> None:
        """A link."""

    order = Order(epoch=1, jobs=tuple(JobOrder(bundle=Bundle(id=job, code="", job={})) for job in ("j", "k")))
    agents = Agents(lambda kind, text: said.append((kind, text)), {"p": 30.0}.__getitem__)
    for each in (report(0.0), report(36.0), report(37.0), report(36.0, job="k"), report(0.0, boot="2"), report(36.0)):
        agents.receive(each, send, 1.0)
        agents.known["a"].sent = order
    assert [text for kind, text in said if kind == "snapshot"] == [TEXT, TEXT]
