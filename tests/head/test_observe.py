"""What the policies see of a job: whether one generation may have machines of several zones."""

from __future__ import annotations

import pytest

from spotrun.head.capacity.observe import demand
from spotrun.head.view import FleetView
from spotrun.spec import ClusterSpec
from tests.head.views import NOW, job, spec


def cluster(efa: bool) -> ClusterSpec:
    """Two zones with four machines each."""
    pools = [{"name": z, "zone": f"us-west-2{z}", "machine": "p4d.24xlarge", "max": 4} for z in ("b", "c")]
    keys = {"name": "a", "cloud": "aws", "region": "us-west-2", "pools": pools, "network": {"efa": efa}}
    return ClusterSpec.model_validate(keys)


ANY, LARGE, SMALL = {"zones": "any"}, {"nodes": {"min": 5, "max": 8}}, {"nodes": {"min": 4, "max": 8}}


@pytest.mark.parametrize(
    ("keys", "plain", "efa", "efa_and_tcp"),
    [(ANY, True, False, True), (LARGE, True, False, True), (SMALL, False, False, False)],
    ids=["zones: any", "no zone has nodes.min machines", "each zone has nodes.min machines"],
)
def test_a_generation_on_efa_stays_in_one_zone(
    keys: dict[str, object], plain: bool, efa: bool, efa_and_tcp: bool
) -> None:
    def across(with_efa: bool, env: dict[str, str]) -> bool:
        state = job(spec=spec(**keys, env=env))
        return demand(FleetView(now=NOW, jobs=(state,), nodes=()), cluster(with_efa), state, 0).across

    assert across(False, {}) == plain
    assert across(True, {"NCCL_NET": "AWS Libfabric"}) == efa
    assert across(True, {}) == efa
    assert across(True, {"NCCL_NET": "Socket"}) == efa_and_tcp
