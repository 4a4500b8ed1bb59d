"""`make advise`: which machines suit a job, from what is known of them."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from scripts import advise, advising, bars, candidates, control
from scripts.advise import Kind
from scripts.ssh import Access, Unreachable
from spotrun.cloud import prices
from spotrun.errors import SpotrunError
from spotrun.head.capacity.observe import SCALING
from spotrun.head.speeds import Speed
from spotrun.spec import ClusterSpec, JobSpec
from spotrun.store import Store
from tests.scripts import accounts


def kind(pool: str, price: float | None, **changes: Any) -> Kind:
    values = {"zone": "z", "machine": pool, "market": "spot", "devices": 1, "max": 4, "price": price, **changes}
    return Kind(pool=pool, **values)


def speed(pool: str, rate: float, nodes: int = 1, devices: int = 1, **changes: Any) -> Speed:
    values = {"samples": 8.0, "steps": 100, "at": 1.0, **changes}
    return Speed(pool=pool, nodes=nodes, devices=devices, samples_per_second=rate, **values)


SINGLE = kind("single", 0.3)
QUAD = kind("quad", 4.0, devices=4, max=1, market="on-demand")


# What was measured, and which option is the best: pool and machines.
FOUR = speed("quad", 40.0, 1, 4)
BEST: dict[str, tuple[tuple[Speed, ...], tuple[str, int]]] = {
    "four single-GPU spot machines that scale well": ((speed("single", 39.0, 4), FOUR), ("single", 4)),
    "four single-GPU spot machines that scale badly": ((speed("single", 2.0, 4), FOUR), ("quad", 1)),
}


@pytest.mark.parametrize("name", BEST)
def test_the_best_option(name: str) -> None:
    speeds, expected = BEST[name]
    found = advise.rank([SINGLE], (4,), speeds, 36000.0) + advise.rank([QUAD], (1,), speeds, 36000.0)
    found.sort(key=lambda option: option.cost or 0.0)
    assert (found[0].kind.pool, found[0].nodes) == expected


def test_cost_and_time_of_an_option() -> None:
    (one, four) = advise.rank([SINGLE], (1, 4), [speed("single", 10.0)], 36000.0)
    assert (one.rate, one.source, one.seconds, one.cost) == (10.0, "measured", 3600.0, pytest.approx(0.3))
    assert (four.source, four.rate) == ("scaled", pytest.approx(10 * 4**SCALING))
    assert one.per_dollar == pytest.approx(36000 / 0.3)


def test_interruptions_cost_time_and_money() -> None:
    often = kind("often", 0.3, interruptions=2.0)
    calm, shaken = advise.rank([SINGLE, often], (1,), [speed("single", 10.0), speed("often", 10.0)], 36000.0)
    assert (calm.kind.pool, shaken.kind.pool) == ("single", "often")
    assert shaken.seconds == pytest.approx(3600 / (1 - 2 * advise.RESTART / 3600))


def test_an_estimate_is_marked() -> None:
    """Of a machine type that the cluster does not have, by the ratio of the GPUs' throughputs."""
    l4, h100 = kind("l4", 1.0, throughput=121.0), kind("", 9.0, machine="a3", throughput=989.0)
    found = advise.rank([l4, h100], (1,), [speed("l4", 10.0)], None)
    assert {each.kind.machine: each.source for each in found} == {"l4": "measured", "a3": "estimate"}
    shown = advise.text(advise.document(found, "vit", None, []))
    assert "≈81.74" in shown
    assert "a rough estimate: the speed on other GPUs" in shown


def test_what_is_not_known_is_last_and_is_said() -> None:
    unpriced, unmeasured = kind("unpriced", None), kind("unmeasured", 0.1)
    found = advise.rank([unpriced, unmeasured, SINGLE], (1,), [speed("single", 1.0), speed("unpriced", 9.0)], None)
    assert [each.kind.pool for each in found] == ["single", "unpriced", "unmeasured"]
    shown = advise.text(advise.document(found, "vit", None, candidates.warnings([unpriced])))
    assert "unknown" in shown
    assert "? not known: MEASURE=2m" in shown
    assert "No price is known for unpriced." in shown


def test_a_given_speed_is_that_of_one_pool() -> None:
    l4, other, unknown = kind("l4", 0.3, throughput=121.0), kind("", 1.0, throughput=242.0, machine="b"), QUAD
    found = advise.rank([l4, other, unknown], (1,), advise.given(l4, 10.0, [speed("l4", 7.0, 4)]), 3600.0)
    assert {each.kind.machine: (each.rate, each.source) for each in found} == {
        "l4": (10.0, "given"),
        "b": (20.0, "estimate"),
        "quad": (None, ""),
    }
    four = advise.rank([l4], (4,), advise.given(l4, 10.0, [speed("l4", 7.0, 4)]), 3600.0)
    assert four[0].source == "given", "and what was measured does not count"


def test_recorded_runs_of_the_same_script_count(tmp_path: Path) -> None:
    """The newest measurement of each kind; not those of other arguments."""
    old, new = speed("single", 5.0, at=1.0), speed("single", 7.0, at=2.0)
    progress = {"total_steps": 100}
    jobs = [
        accounts.job(1, speeds=[old], progress=progress),
        accounts.job(2, speeds=[new], progress=progress),
        accounts.job(4, speeds=[speed("double", 3.0, at=3.0)]).replace(
            spec=JobSpec(script="train.py", name="job-measure")
        ),
        accounts.job(3, speeds=[speed("single", 99.0, at=9.0)]).replace(
            spec=JobSpec(script="train.py", name="job", args=("--big",))
        ),
    ]
    store = accounts.store(tmp_path, *jobs)
    assert candidates.recorded(store, "c", JobSpec(script="train.py")) == (
        [new, speed("double", 3.0, at=3.0)],
        800.0,
    )


def test_the_name_of_a_measurement_is_a_name() -> None:
    for name in ("a", "a" * 40, f"{'a' * 31}-b"):
        found = candidates.measuring(name)
        assert found.endswith("-measure")
        assert JobSpec(script="train.py", name=found).name != name


def test_a_stop_that_the_head_has_not_heard_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a measurement would train on to its end, and cost money."""
    answers: list[Exception] = [Unreachable("the connection to the head broke"), SpotrunError("not now")]

    def ask(*_: object) -> None:
        if answers:
            raise answers.pop(0)

    monkeypatch.setattr(control, "ask", ask)
    access = cast(Access, None)
    assert [candidates._asked_to_stop(access, "a-1") for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("phase", "told"), [(None, True), ("running", True), ("stopped", False)])
def test_only_a_job_that_may_run_is_warned_about(
    phase: str | None, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(_: object, verb: str, *words: str) -> object:
        if verb == "stop" or phase is None:
            raise SpotrunError("not stopped")
        return {"job": {"phase": phase}}

    monkeypatch.setattr(control, "ask", ask)
    candidates._stop(cast(Access, SimpleNamespace(file="c.yaml")), "a-1")
    assert ("may still run, and cost money" in capsys.readouterr().err) == told


def test_other_machine_types_of_the_region_are_compared() -> None:
    pools = [{"name": "l4", "zone": "us-central1-a", "machine": "g2-standard-8", "max": 4}]
    values = {"name": "c", "cloud": "gcp", "region": "us-central1", "project": "my-project", "pools": pools}
    cluster, said = ClusterSpec.model_validate(values), []  # type: ignore[var-annotated]
    found = candidates.kinds(cluster, JobSpec(script="a.py", nodes=2), {"l4": (0.5, None)}, said.append)
    assert (found[0].pool, found[0].price, found[0].priced_at) == ("l4", 0.34057, prices.DATE)
    assert (found[0].interruptions, found[0].obtained) == (0.5, None)
    assert said == []
    others = {(each.machine, each.market) for each in found[1:]}
    assert {("g2-standard-48", "spot"), ("g2-standard-48", "on-demand")} <= others
    assert ("g2-standard-8", "spot") not in others
    assert all(each.throughput for each in found if each.machine.startswith("g2-"))


def test_what_the_head_has_seen_of_pools_counts(tmp_path: Path) -> None:
    pools = {"p": {"hours": 10.0, "interruptions": 5.0, "up": 9.0, "down": 1.0}, "q": {"hours": 0.1}}
    cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a"}]})
    store = Store(tmp_path.as_uri())
    assert candidates.history(store, cluster) == {}
    store.put("clusters/c/history.json", json.dumps({"pools": pools}).encode())
    assert candidates.history(store, cluster) == {"p": (0.5, 0.9), "q": (None, None)}
    store.put("clusters/c/history.json", b"[1]")
    assert candidates.history(store, cluster) == {}


def test_old_prices_are_told() -> None:
    assert prices.old(date(2026, 12, 1)) == ""
    assert prices.old(date(2027, 1, 1)).startswith("The shipped prices are from 2026-11-21, 41 days ago")
    source = Path(prices.__file__).with_name("prices.SOURCE.md").read_text()
    assert f"taken on {prices.DATE}" in source


def test_a_table_and_a_plot(tmp_path: Path) -> None:
    found = advise.document(advise.rank([SINGLE], (1, 4), [speed("single", 10.0)], None), "vit", None, [])
    advising.write(found, tmp_path / "out")
    table = (tmp_path / "out" / "machines.md").read_text()
    assert "| 1 x single | 1 | spot | single | z | 0.30 | 10 | 120,000 | measured |" in table
    drawn = ElementTree.fromstring((tmp_path / "out" / "machines.svg").read_text())
    assert len([each for each in drawn if each.get("fill") == "#0072b2"]) == 2
    assert ElementTree.fromstring(bars.plot("a < b", {})) is not None
