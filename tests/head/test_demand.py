"""What `allocate` is asked."""

from __future__ import annotations

from spotrun.head.allocation.demand import question
from spotrun.head.capacity.situation import Placement
from spotrun.head.job_state import Cause, Drain, apply
from spotrun.spec import ClusterSpec
from tests.head.views import NOW, A, B, C, fleet, job, node, spare, start, view

CLUSTER = ClusterSpec.model_validate(
    {"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a", "max": 3}]}
)


def test_a_job_keeps_the_newcomer_that_its_drain_has_named() -> None:
    """A head that has just taken over has given no machine to the job."""
    grow = Cause(kind="grow")
    draining = apply(job(A, B, regroups=True), Drain(56, grow, NOW + 27, start(A, B, C, cause=grow)), NOW - 0.1)
    seen = fleet(view(draining, node(A), node(B), spare(C)))
    placement = Placement(use=frozenset({"p"}), needs=(), min=2, max=3)
    (claim,) = question(seen, CLUSTER, {}, before={}, placements={"j": placement}).claims
    assert claim.keeps == {A, B, C}


def test_a_machine_that_is_still_checked_has_the_devices_of_its_pool() -> None:
    """The machine has replaced a member of the same name. Its agent counts the devices after the checks."""
    pool = {"name": "p", "zone": "local-a", "max": 3, "devices": 2}
    cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": [pool]})
    seen = fleet(view(job(A, B), node(A, devices=2), spare(B, boot="b2", phase="checking", devices=1)))
    placement = Placement(use=frozenset({"p"}), needs=(), min=2, max=3)
    hosts = question(seen, cluster, {}, before={}, placements={"j": placement}).hosts
    assert {host.name: host.devices for host in hosts} == {A: 2, B: 2}
