"""Documents."""

from __future__ import annotations

import json

import pytest

from spotrun.wire import JobReport, Order, Report, StateRef


def test_replace_changes_fields_that_exist_and_refuses_others() -> None:
    assert StateRef(generation=1, step=2).replace(step=3) == StateRef(generation=1, step=3)
    with pytest.raises(TypeError, match="StateRef has no field stpe"):
        StateRef(generation=1, step=2).replace(stpe=3)


OLD_ORDER = {"kind": "order", "epoch": 3, "bundle": {"id": "j", "code": "c", "job": {}}, "stop_at": 7, "save": None}
OLD_REPORT = {
    **{"kind": "report", "node": "a", "boot": "b", "pool": "p", "zone": "z", "address": "h", "devices": 2},
    **{"job": "j", "phase": "running", "generation": 4, "store": "h:1", "late": 5, "notice": None},
}


def test_documents_of_version_1_are_read() -> None:
    order = Order.model_validate_json(json.dumps(OLD_ORDER))
    assert (order.version, order.epoch, order.jobs[0].bundle.id, order.jobs[0].stop_at) == (1, 3, "j", 7)
    assert Order.model_validate_json(json.dumps(OLD_ORDER | {"bundle": None})).jobs == ()
    report = Report.model_validate_json(json.dumps(OLD_REPORT))
    assert (report.version, report.phase, report.devices) == (1, "ready", 2)
    (work,) = report.jobs
    assert (work.job, work.phase, work.generation, work.late, work.devices) == ("j", "running", 4, 5, (0, 1))
    unfit = Report.model_validate_json(json.dumps(OLD_REPORT | {"job": None, "phase": "unfit"}))
    assert (unfit.phase, unfit.jobs) == ("unfit", ())


@pytest.mark.parametrize("phase", ["checking", "unfit", "ready"])
@pytest.mark.parametrize("works", [True, False], ids=["with a job", "without a job"])
def test_a_report_for_a_head_of_unknown_version_can_be_read_by_both(phase: str, works: bool) -> None:
    own = {key: OLD_REPORT[key] for key in ("node", "boot", "pool", "zone", "address", "devices")}
    jobs = (JobReport(job="j", phase="running", generation=4),) if works else ()
    report = Report.model_validate({**own, "phase": phase, "jobs": jobs})
    assert Report.model_validate_json(report.text(0)) == report
    assert Report.model_validate_json(report.text(2)) == report
    old = json.loads(report.text(0))
    expected = phase if phase != "ready" else "running" if works else "idle"
    assert (old["job"], old["phase"]) == ("j" if works else None, expected)


def test_an_order_for_an_agent_of_version_1_has_its_keys() -> None:
    order = Order.model_validate(OLD_ORDER)
    old = json.loads(order.text(1))
    assert (old["bundle"]["id"], old["stop_at"], old["generation"]) == ("j", 7, None)
    assert json.loads(Order(epoch=1).text(1))["bundle"] is None
    assert "bundle" not in json.loads(order.text(2))
