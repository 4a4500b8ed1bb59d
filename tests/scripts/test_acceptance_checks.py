"""How the steps of `make acceptance` judge what probes have printed, and what it refuses before it begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts import preflight
from scripts import site as sites
from scripts.acceptance import accounts, devices, plan
from scripts.acceptance.checks import CHECKS
from scripts.acceptance.jobs import plans
from scripts.acceptance.probes.words import transport
from scripts.acceptance.record import Failed, Keeper, NotRun, Record
from scripts.acceptance.rig import Rig
from scripts.acceptance.start import _others, accept
from scripts.acceptance.steps import STEPS
from scripts.acceptance.trace import Trace, _parsed
from scripts.home import home
from spotrun import cloud
from spotrun.cloud import Shortfall
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, PoolSpec, load_cluster
from tests.fakes.cluster import Machines

ROOT = Path(__file__).parents[2]
G5 = load_cluster(ROOT / "clusters/aws-g5.yaml")
P5 = load_cluster(ROOT / "clusters/aws-p5.yaml")
H100 = "NVIDIA H100 80GB HBM3"


def seen(*lines: dict[str, Any], interruptions: tuple[dict[str, Any], ...] = ()) -> Trace:
    return Trace(
        "job",
        last={"interruptions": list(interruptions), "generation": 2, "step": 300},
        lines=[{"rank": 0, **line} for line in lines],
    )


def matrix(tflops: float, memory: float, name: str = H100) -> dict[str, Any]:
    return {"probe": "matrix", "name": name, "tflops": tflops, "memory": memory}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([matrix(700, 2900)], ""),
        ([matrix(700, 2900), matrix(300, 2900)], r"TFLOP/s: 30% of the data sheet's"),
        ([matrix(700, 1000)], r"memory bandwidth: 30% of the data sheet's"),
        ([matrix(3, 3, "NVIDIA Unheard-Of")], ""),
        ([], "printed nothing"),
    ],
    ids=["well", "one slow GPU", "slow memory", "a GPU that is not in the table", "no line"],
)
def test_figures_of_a_gpu(lines: list[dict[str, Any]], why: str) -> None:
    if not why:
        assert devices.matrix(seen(*lines))["GPUs"] == len(lines)
        return
    with pytest.raises(SpotrunError, match=why):
        devices.matrix(seen(*lines))


@pytest.mark.parametrize(
    ("cluster", "said", "right", "why"),
    [
        (P5, "AWS Libfabric", True, ""),
        (P5, "Socket", True, "NCCL goes over Socket, although the cluster has EFA"),
        (P5, "", True, "goes over not named"),
        (G5, "Socket", True, ""),
        (G5, "Socket", False, "the sum of the all-reduce is wrong"),
    ],
    ids=["EFA", "TCP with EFA", "no word of it", "TCP without EFA", "a wrong sum"],
)
def test_the_transport_is_named(cluster: Any, said: str, right: bool, why: str) -> None:
    line = {"probe": "all-reduce", "right": right, "bus": 4.2, "bytes": 1 << 30, "world": 16, "transport": said}
    if not why:
        assert devices.all_reduce(seen(line), cluster)["transport"] == said
        return
    with pytest.raises(Failed, match=why) as error:
        devices.all_reduce(seen(line), cluster)
    assert error.value.facts["bus GB/s"] == 4.2


def test_the_transport_in_what_nccl_prints(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    assert transport(str(log)) == ""
    log.write_text(
        "ip-10:1:2 [0] NCCL INFO NET/OFI Using aws-ofi-nccl\nip-10:1:2 [0] NCCL INFO Using network AWS Libfabric\n"
    )
    assert transport(str(log)) == "AWS Libfabric"


def test_what_placement_is_worth() -> None:
    moved = seen({"probe": "all-reduce", "bus": 5.0})
    facts = devices.placement({"bus GB/s": 10.0}, moved, G5)
    assert facts == {"near GB/s": 10.0, "anywhere GB/s": 5.0, "near is faster by": 2.0}
    with pytest.raises(NotRun):
        devices.placement({}, moved, G5)


def test_the_rate_of_a_states_way() -> None:
    loss = {"kind": "kill", "phases": [1.0, 1.1, 2.0, 3.0, 7.0, 8.0]}
    facts = devices.transfer(seen({"probe": "train", "mib": 3815}, interruptions=(loss,)))
    assert facts == {"state GB": 4.0, "restored s": 4.0, "GB/s": 1.0}


def test_workers_that_were_not_forked() -> None:
    well, slow = ({"probe": "fork", "forked": forked, "first": 0.4} for forked in (True, False))
    assert devices.fork(seen(well, well))["forked"] == 2
    with pytest.raises(Failed, match="1 workers were not forked"):
        devices.fork(seen(well, slow))


def test_what_pytest_says_of_a_gpu() -> None:
    line = {"probe": "tests", "status": 1, "summary": "1 failed, 7 passed", "failed": ["tests/test_x.py::test_y"]}
    with pytest.raises(Failed, match=r"1 failed, 7 passed; failed: .*test_y"):
        devices.tests(seen(line))
    assert devices.tests(seen(line | {"status": 0})) == {"pytest": "1 failed, 7 passed"}


def test_shared_memory_that_killed_workers_left() -> None:
    tidy = {"probe": "segments", "node": "a", "segments": 2, "left": []}
    assert devices.segments(seen(tidy, tidy | {"node": "b"})) == {"machines": 2, "segments": 4}
    with pytest.raises(Failed, match="left by killed workers: b: /dev/shm/nccl-x"):
        devices.segments(seen(tidy, tidy | {"node": "b", "left": ["/dev/shm/nccl-x"]}))
    with pytest.raises(SpotrunError, match="printed nothing"):
        devices.segments(seen())


MAINTENANCE = {"probe": "notice", "key": "maintenance-event", "value": "TERMINATE_ON_HOST_MAINTENANCE", "at": 1.0}
COMING = "c--gpu-0 will be taken at 2026-11-21 16:40 UTC: maintenance; it trains on until shortly before"


@pytest.mark.parametrize(
    ("lines", "event", "interruptions", "error", "why"),
    [
        ((MAINTENANCE,), COMING, (), None, ""),
        ((MAINTENANCE,), "c--gpu-0 will be taken: maintenance", (), Failed, "the agent did not report it"),
        ((MAINTENANCE,), COMING, ({"kind": "preempt"},), Failed, "did not train on: preempt"),
        ((), "", (), NotRun, "no notice of maintenance"),
    ],
    ids=["it trains on", "no event that it is coming", "it was drained at once", "no word in the metadata"],
)
def test_an_hour_of_notice_before_maintenance(
    lines: Any, event: str, interruptions: Any, error: type[Exception] | None, why: str
) -> None:
    found = seen(*lines, interruptions=interruptions)
    found.events[event] = None
    if error is None:
        assert accounts.maintenance_notice(found)["event"] == COMING
        return
    with pytest.raises(error, match=why):
        accounts.maintenance_notice(found)


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ([("flex", "FLEX_START"), ("spot", "SPOT")], ""),
        ([("flex", "FLEX_START"), ("flex", "STANDARD")], "machines cost the full price: pool flex is STANDARD"),
        ([("flex", "")], "pool flex is without a model"),
        ([("spot", "SPOT")], "Google lists no template of pools flex"),
    ],
)
def test_a_flex_template_is_a_flex_start_one(models: list[tuple[str, str]], why: str) -> None:
    with pytest.raises(Failed, match=why) if why else contextlib.nullcontext():
        assert accounts.judge_models({"flex"}, models) == {"pool flex": "FLEX_START"}


def test_flex_templates_are_looked_at_only_where_there_are_flex_pools() -> None:
    step = next(step for step in STEPS if step.name == "flex template")
    spot = load_cluster(ROOT / "clusters/gcp-l4.yaml")
    assert plan.missing(step, spot) == "no pool of the cluster has market flex"
    pool = PoolSpec(name="flex", market="flex", zone="us-central1-a", machine="g2-standard-8", max=1)
    assert plan.missing(step, spot.model_copy(update={"pools": (pool,)})) == ""


def test_quotas_are_enough_for_two_small_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS counts them by another quota than those with GPUs. A new account has enough for one."""
    lack = "All Standard Spot Instance Requests"

    @contextlib.contextmanager
    def asking(cluster: ClusterSpec) -> Iterator[Any]:
        has = dict.fromkeys((pool.name for pool in cluster.pools), 5.0 if cluster is not G5 else 32.0)
        needs = 8.0 if cluster is not G5 else 64.0
        yield lambda _: [Shortfall(pool, lack, few, needs) for pool, few in has.items() if few < needs]

    monkeypatch.setattr(cloud, "asking", asking)
    monkeypatch.setattr(preflight, "check_disk_key", lambda _: None)
    with pytest.raises(SpotrunError) as error:
        CHECKS["quotas"](cast(Rig, SimpleNamespace(cluster=G5)), STEPS[0])
    first, second = str(error.value).splitlines()
    assert first.startswith(f"pool small-1: quota {lack} in us-east-1 is 5; the pool's max takes 8: ask for more at ")
    assert first.endswith("(of the first steps' small machines)")
    assert second.startswith("pool small-2: ")


def test_that_notice_is_tried_on_on_demand_machines_only() -> None:
    step = next(step for step in STEPS if step.name == "maintenance notice")
    spot = load_cluster(ROOT / "clusters/gcp-l4.yaml").model_copy(update={"pools": ()})
    pool = {"zone": "us-central1-a", "machine": "g2-standard-8", "max": 1}
    pools = [PoolSpec(name=market, market=market, **pool) for market in ("spot", "on-demand")]
    mixed = spot.model_copy(update={"pools": tuple(pools)})
    assert plan.missing(step, mixed) == ""
    only_spot = plan.missing(step, spot.model_copy(update={"pools": tuple(pools[:1])}))
    assert only_spot == "no pool of the cluster has on-demand machines with GPUs"
    assert plan.missing(step, load_cluster(ROOT / "clusters/local.yaml")) == "it is only for gcp, and this is local"
    assert plans("gcp")["gpu maintenance"].job_file("x", plan.steady(mixed))["pools"] == ["on-demand"]


class Played:
    """A site whose jobs have been run."""

    def __init__(self, **traces: Trace) -> None:
        self._traces = traces

    def trace(self, name: str) -> Trace:
        return self._traces[name]


def check(name: str, **traces: Trace) -> Any:
    step = next(step for step in STEPS if step.name == name)
    return partial(CHECKS[name], cast(Rig, Played(**traces)), step)


@pytest.mark.parametrize(
    ("digest", "world", "error"),
    [("a", 2, None), ("b", 2, Failed), ("b", 16, NotRun), ("a", 16, None)],
    ids=["equal", "different", "different, where the order of a sum may change", "equal there too"],
)
def test_bit_equality_where_it_can_hold(digest: str, world: int, error: type[Exception] | None) -> None:
    one, two = (seen({"probe": "train", "digest": each, "world": world}) for each in ("a", digest))
    equality = check("equality", reference=one, faults=two)
    if error is None:
        assert equality()["workers"] == world
        return
    with pytest.raises(error):
        equality()


def test_a_notice_loses_no_step() -> None:
    loss = {"kind": "preempt", "at": 1.0, "seconds": 2.0, "phases": [], "steps_lost": 0}
    assert check("preempt", faults=seen(interruptions=(loss,)))()["pause s"] == 2.0
    with pytest.raises(Failed, match="2 steps were lost although there was a notice"):
        check("preempt", faults=seen(interruptions=(loss | {"steps_lost": 2},)))()
    with pytest.raises(SpotrunError, match="no interruption of kind preempt is in its record; others: crash"):
        check("preempt", faults=seen(interruptions=(loss | {"kind": "crash"},)))()
    assert check("kill", faults=seen(interruptions=(loss | {"kind": "preempt+kill"},)))()["pause s"] == 2.0


def test_every_line_of_the_gate() -> None:
    line = {"probe": "fitness", "node": "a", "gpus": 8, "problems": [], "remarks": ["GPU 1 has rows to remap"]}
    assert check("gate", single=seen(line))() == {"gpus": 8, "remarks": "GPU 1 has rows to remap"}
    with pytest.raises(Failed, match="a: no EFA"):
        check("gate", single=seen(line | {"problems": ["no EFA"]}))()
    with pytest.raises(SpotrunError, match="printed nothing"):
        check("gate", single=seen())()


def test_the_order_of_googles_words() -> None:
    words = [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", 10.0), ("preempted", "TRUE", 11.5)]
    lines = [{"probe": "notice", "key": key, "value": value, "at": at} for key, value, at in words]
    order = accounts.notice_order(seen(*lines))["order"]
    assert order == "maintenance-event=TERMINATE_ON_HOST_MAINTENANCE after 0.0 s, preempted=TRUE after 1.5 s"
    with pytest.raises(Failed, match="did not set `preempted`"):
        accounts.notice_order(seen(lines[0]))
    with pytest.raises(SpotrunError, match="neither"):
        accounts.notice_order(seen())


@pytest.mark.parametrize("text", ["", "step 3", '{"probe": ', '{"probe": 3}', '{"probe": "x"', "[" * 100_000])
def test_lines_that_are_no_probes(text: str) -> None:
    assert _parsed(text) == {}


def test_a_cluster_that_is_up_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    file = tmp_path / "cluster.yaml"
    file.write_text("name: mine\ncloud: local\npools: [{name: spot, zone: local-a, max: 2}]\n")
    layout = Layout.of(home(), "mine")
    layout.make()
    layout.key.touch()
    layout.record.touch()
    said: list[str] = []
    with pytest.raises(SpotrunError, match="cluster mine is up, and an acceptance takes its cluster down at the end"):
        accept(str(file), False, False, said.append)


def test_jobs_on_a_cluster_that_an_acceptance_has_left_are_not_ended(
    standin: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run left it up. It was then taken down by hand, and brought up again for work."""
    monkeypatch.setenv("SPOTRUN_HOME", str(standin.home))
    own = [
        {"job": "gpu-pair-20261122-101530", "phase": "running"},
        {"job": "faults-20261122-101530-2", "phase": "queued"},
    ]
    standin.write(jobs_json=[*own, {"job": "gpu-20261122-101530", "phase": "failed"}])
    Keeper(standin.home / "acceptance/c", lambda: standin.store, "c").save(
        Record(cluster="c", digest="", standing=True)
    )
    assert _others(sites.of_file(str(standin.cluster))) == []
    standin.write(jobs_json=[*own, {"job": "gpu-llama-20261122-101530", "phase": "running"}])
    with pytest.raises(SpotrunError, match=r"but has other jobs now: gpu-llama-20261122-101530\. An"):
        accept(str(standin.cluster), False, False, print)


def test_a_dry_run_only_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    said: list[str] = []
    code, document = accept(str(ROOT / "clusters/local.yaml"), False, True, said.append)
    assert code == 0
    assert {step["state"] for step in document["steps"]} == {"not run"}
    assert said[0].splitlines()[-1] == "all of it: costs nothing"
    assert not (tmp_path / "home/acceptance").exists()
