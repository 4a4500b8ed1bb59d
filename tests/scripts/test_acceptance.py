"""`make acceptance` without its machines: what is run in what order, what stops it, what a later run goes on from."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import bundle, programs
from scripts.acceptance import plan, report, trace
from scripts.acceptance.accounts import judge
from scripts.acceptance.checks import CHECKS
from scripts.acceptance.devices import figures
from scripts.acceptance.jobs import plans
from scripts.acceptance.record import Facts, Failed, Keeper, NotRun, Record, Result
from scripts.acceptance.rig import cluster_file, stage_job
from scripts.acceptance.runner import INTERRUPTED, Runner
from scripts.acceptance.steps import MACHINES, STAGES, STEPS, Step
from spotrun.cloud import Left
from spotrun.errors import CloudError, SpotrunError, StoreError
from spotrun.spec import ClusterSpec, load_cluster, load_job
from spotrun.store import Store

ROOT = Path(__file__).parents[2]
LOCAL = load_cluster(ROOT / "clusters/local.yaml")
L4 = load_cluster(ROOT / "clusters/gcp-l4.yaml")
FLEX = L4.model_copy(update={"pools": (*L4.pools, L4.pools[0].model_copy(update={"name": "late", "market": "flex"}))})
P5 = load_cluster(ROOT / "clusters/aws-p5.yaml")
PASSED, FAILED = Result(state="passed"), Result(state="failed", reason="no")


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


class Work:
    """A runner whose checks are played: what each raises is in `raising`; what was done is in `done`."""

    def __init__(self, folder: Path, cluster: ClusterSpec = L4) -> None:
        self.folder, self.cluster = folder, cluster
        self.done: list[str] = []
        self.said: list[str] = []
        self.raising: dict[str, BaseException | Callable[[], None]] = {}

    def run(self, again: bool = False) -> int:
        keeper = Keeper(self.folder / "here", lambda: Store(str(self.folder / "bucket")), self.cluster.name)
        record = keeper.load(self.cluster.digest)
        self.done.clear()
        checks = {step.name: self._check for step in STEPS}
        self.runner = Runner(self.cluster, STEPS, checks, keeper, self.said.append, record)
        return self.runner.run(again)

    def state(self, step: str) -> str:
        return self.runner.record.results[step].state

    def reason(self, step: str) -> str:
        return self.runner.record.results[step].reason

    def report(self) -> dict[str, Any]:
        """The JSON report, as it is in the bucket."""
        data = Store(str(self.folder / "bucket")).get(f"clusters/{self.cluster.name}/acceptance/report.json")
        found: dict[str, Any] = json.loads(data)
        return found

    def _check(self, step: Step) -> Facts:
        self.done.append(step.name)
        what = self.raising.get(step.name)
        if isinstance(what, BaseException):
            raise what
        if what is not None:
            what()
        return {"seen": 1}


def names(*stages: str) -> list[str]:
    return [step.name for step in STEPS if step.stage in stages]


def test_every_step_has_a_check_and_a_job_that_exists() -> None:
    assert CHECKS.keys() == {step.name for step in STEPS}
    for cloud in ("local", "gcp", "aws"):
        assert {step.job for step in STEPS if step.job} == plans(cloud).keys()
    assert [step.stage for step in STEPS] == sorted((step.stage for step in STEPS), key=STAGES.index)


@pytest.mark.parametrize("name", ["gcp-l4", "gcp-t4", "gcp-h100", "aws-g5", "aws-p4d", "aws-p5"])
def test_later_stages_cost_more_by_the_hour(name: str) -> None:
    cluster = load_cluster(ROOT / f"clusters/{name}.yaml")
    hourly = []
    for stage in STAGES[:-1]:
        steps = [step for step in STEPS if step.stage == stage]
        found = [dollars / step.limit for step in steps if (dollars := plan.dollars(step, cluster)) is not None]
        assert found, f"no price of stage {stage} is known"
        hourly.append(max(found))
    assert hourly == pytest.approx(sorted(hourly))
    assert hourly[0] == 0 < hourly[1]


@pytest.mark.parametrize("failing", [step.name for step in STEPS if step.stage != "end"])
def test_a_failure_stops_what_costs_more(failing: str, work: Work) -> None:
    """Whatever step fails: no later stage begins, the cluster is taken down, the report says what to do."""
    step = next(step for step in STEPS if step.name == failing)
    if plan.missing(step, work.cluster):
        work = Work(work.folder, FLEX if failing == "flex template" else P5)
    work.raising[failing] = CloudError("the cloud said no")
    assert work.run() == 1
    assert work.state(failing) == "failed"
    later = STAGES[STAGES.index(step.stage) + 1 : -1]
    assert not set(names(*later)) & set(work.done)
    after = [other.name for other in STEPS if other.stage == step.stage][names(step.stage).index(failing) + 1 :]
    assert bool(set(after) & set(work.done)) <= (not step.gate)
    assert ("down" in work.done) == ("up" in work.done)
    found = work.report()
    assert found["failed"] == [failing]
    entry = next(each for each in found["steps"] if each["step"] == failing)
    assert (entry["reason"], entry["remedy"]) == ("the cloud said no", step.remedy)
    text = (work.folder / "here/report.md").read_text()
    assert f"- **{failing}**: the cloud said no. To do: {step.remedy}." in text


def test_the_end_can_fail_too(work: Work) -> None:
    work.raising["down"] = CloudError("terraform destroy failed")
    assert work.run() == 1
    assert work.done[-2:] == ["down", "left"], "what is left is listed all the same"
    assert work.runner.record.standing, "the next run takes it down"
    work.raising.clear()
    assert work.run() == 0
    assert work.done == ["down", "left"]


def test_all_passes_and_a_second_run_has_nothing_to_do(work: Work) -> None:
    assert work.run() == 0
    assert work.done == [step.name for step in STEPS if not plan.missing(step, L4)]
    first = list(work.done)
    assert work.run() == 0
    assert work.done == []
    assert work.run(again=True) == 0
    assert work.done == first


def test_another_checkout_learns_that_the_cluster_was_taken_down(work: Work, tmp_path: Path) -> None:
    """Otherwise a run there would take the cluster for its own, and take it down with the jobs that train by then."""
    assert work.run() == 0
    other = Keeper(tmp_path / "another home", lambda: Store(str(tmp_path / "bucket")), work.cluster.name)
    record = other.load(work.cluster.digest)
    assert record.results["down"].state == "passed"
    assert not record.standing


def test_the_bucket_learns_later_that_the_cluster_was_taken_down(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one write of `taken down` may fail."""
    put = Store.put
    failed: list[str] = []

    def once(store: Store, key: str, data: bytes) -> None:
        if b'"standing": false' in data and not failed:
            failed.append(key)
            raise StoreError("no answer")
        put(store, key, data)

    monkeypatch.setattr(Store, "put", once)
    assert work.run() == 0
    assert failed
    other = Keeper(tmp_path / "another home", lambda: Store(str(tmp_path / "bucket")), work.cluster.name)
    assert not other.load(work.cluster.digest).standing


def test_a_later_run_goes_on_where_the_first_one_failed(work: Work) -> None:
    """It skips what passed, and brings the cluster up for what did not."""
    work.raising["kill"] = SpotrunError("it did not go on")
    assert work.run() == 1
    work.raising.clear()
    assert work.run() == 0
    rest = [name for name in names("gpu", "gpus", "moved") if name not in ("efa layout", "flex template")]
    assert work.done == ["up", "kill", *rest, "down", "left"]


def test_another_description_is_another_acceptance(work: Work) -> None:
    assert work.run() == 0
    work.cluster = L4.model_copy(update={"pools": L4.pools[:1]})
    assert work.run() == 0
    assert "tools" in work.done


ENDS = {"Ctrl-C": signal.SIGINT, "a cancelled CI job": signal.SIGTERM, "a lost terminal": signal.SIGHUP}


@pytest.mark.parametrize("number", ENDS.values(), ids=ENDS.keys())
def test_an_interrupted_run_takes_the_cluster_down(number: signal.Signals, work: Work) -> None:
    work.raising["notice"] = lambda: os.kill(os.getpid(), number)
    assert work.run() == 130
    assert work.done[-3:] == ["notice", "down", "left"]
    assert work.reason("kill") == INTERRUPTED
    assert not work.runner.record.standing
    work.raising.clear()
    assert work.run() == 0
    assert work.done[:2] == ["up", "notice"]


def terraform() -> None:
    """It waits, as `make up` does, until a signal stops it."""
    waiting = "import os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
    waiting += "os.kill(os.getppid(), int(os.environ['FIRST'])); time.sleep(60)"
    programs.run([sys.executable, "-c", waiting], Path(), os.environ, "stopping", quiet=True)


@pytest.mark.parametrize("during", ["plain work", "Terraform's work"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGTERM")],
    ids=["a CI system, and make", "GitHub", "a lost terminal second", "a lost terminal first"],
)
def test_a_second_signal_leaves_no_cluster_standing(
    during: str, first: str, second: str, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CI system sends signals to all processes of a job, and make sends its own on to the command."""
    monkeypatch.setenv("FIRST", str(signal.Signals[first].value))
    plain = during == "plain work"
    work.raising["notice"] = (lambda: os.kill(os.getpid(), signal.Signals[first])) if plain else terraform
    work.raising["down"] = lambda: os.kill(os.getpid(), signal.Signals[second])
    assert work.run() == 130
    assert work.done[-3:] == ["notice", "down", "left"]
    assert not work.runner.record.standing


def test_another_ctrl_c_while_the_bucket_is_slow_leaves_no_cluster_standing(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, interrupts = Store.put, 2

    def slow(store: Store, *words: Any) -> None:
        nonlocal interrupts
        if interrupts == 1 and "down" not in work.done:
            interrupts = 0
            raise KeyboardInterrupt
        put(store, *words)

    def interrupt() -> None:
        nonlocal interrupts
        interrupts = 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "put", slow)
    work.raising["notice"] = interrupt
    assert work.run() == 130
    assert work.done[-3:] == ["notice", "down", "left"]
    assert work.reason("kill") == INTERRUPTED


@pytest.mark.parametrize("what", ["no terminal", "a full disk"])
def test_a_cluster_is_taken_down_though_nothing_can_be_written(
    what: str, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make acceptance | tee log`: Ctrl-C ends tee as well. Or something has filled the disk meanwhile."""

    def refuse(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe") if what == "no terminal" else OSError(errno.ENOSPC, "full")

    def interrupt() -> None:
        if what == "no terminal":
            work.runner.say = refuse
        else:
            monkeypatch.setattr(Path, "write_text", refuse)
        os.kill(os.getpid(), signal.SIGINT)

    work.raising["notice"] = interrupt
    assert work.run() == 130
    assert work.done[-3:] == ["notice", "down", "left"]
    assert not work.runner.record.standing


def test_what_a_killed_run_left_is_taken_down(work: Work) -> None:
    class Killed(BaseException):
        """The process ends here: nothing of it is run any more."""

    def end() -> None:
        work.runner._end = lambda steps: None  # type: ignore[method-assign]
        raise Killed

    work.raising["join"] = end
    with pytest.raises(Killed):
        work.run()
    work.raising = {"up": CloudError("no quota")}
    assert work.run() == 1
    assert work.done[-2:] == ["down", "left"]


def test_a_mistake_of_ours_leaves_nothing_running(work: Work) -> None:
    work.raising["join"] = KeyError("members")
    assert work.run() == 1
    assert work.reason("join") == "KeyError: 'members'"
    assert work.done[-2:] == ["down", "left"]


def test_what_cannot_be_tried_is_never_passed(tmp_path: Path) -> None:
    local = Work(tmp_path, LOCAL)
    local.raising["reference"] = NotRun("disturbed")
    assert local.run() == 0
    for step in STEPS:
        if step.needs != "local":
            assert local.state(step.name) == "not run", step.name
            assert local.reason(step.name)
            assert step.name not in local.done
    assert (local.state("reference"), local.reason("reference")) == ("not run", "disturbed")
    (line,) = (line for line in local.said if line.startswith("not run: it needs machines with GPUs, and the local"))
    assert "matrix product" in line
    assert local.said[-1].startswith("13 passed, 0 failed, 33 not run; the report: ")


def test_nothing_is_taken_down_that_was_not_brought_up(work: Work) -> None:
    work.raising["login"] = CloudError("sign in")
    assert work.run() == 1
    assert "down" not in work.done
    assert "plan" in work.done, "what is free is tried all the same: a person sees all problems at once"


def test_facts_of_a_failed_step_are_kept(work: Work) -> None:
    work.raising["matrix product"] = Failed("too slow", {"TFLOP/s": 3.5})
    assert work.run() == 1
    assert work.runner.record.results["matrix product"].facts == {"TFLOP/s": 3.5}
    assert "| matrix product | TFLOP/s | 3.5 |" in (work.folder / "here/report.md").read_text()


def test_the_state_is_in_the_bucket_once_there_is_one(work: Work, tmp_path: Path) -> None:
    """Another computer goes on from it."""
    work.raising["login"] = CloudError("sign in")
    work.run()
    store = Store(str(tmp_path / "bucket"))
    assert not store.exists(f"clusters/{L4.name}/acceptance/state.json"), "nothing was brought up"
    work.raising = {"kill": SpotrunError("no")}
    work.run()
    (tmp_path / "here/state.json").unlink()
    work.raising.clear()
    work.run()
    assert work.done[:2] == ["up", "kill"]


def test_a_state_that_cannot_be_read_is_no_state(work: Work, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/state.json").write_text('{"cluster": 3')
    assert work.run() == 0
    assert "tools" in work.done


@pytest.mark.parametrize(
    ("cluster", "names_", "machine"),
    [(L4, ["small-1", "small-2"], "e2-standard-4"), (P5, ["small-1"], "m5.xlarge")],
    ids=["two zones of Google's", "one zone of Amazon's, with EFA"],
)
def test_the_first_machines_are_small(tmp_path: Path, cluster: ClusterSpec, names_: list[str], machine: str) -> None:
    found = plan.small(cluster)
    assert [pool.name for pool in found.pools] == names_
    assert {pool.machine for pool in found.pools} == {machine}
    assert {pool.zone for pool in found.pools} == {pool.zone for pool in cluster.pools}
    file = tmp_path / "small.yaml"
    file.write_text(cluster_file(found))
    assert load_cluster(file) == found, "a cluster file that says the same"
    assert plan.small(LOCAL) is LOCAL


@pytest.mark.parametrize("cloud", ["local", "gcp", "aws"])
def test_every_job_has_a_valid_job_file(cloud: str, tmp_path: Path) -> None:
    for name, planned in plans(cloud).items():
        job = load_job(stage_job(tmp_path / name, name, planned))
        bundle.check(tmp_path / name, job.script)
        assert job.nodes.min == job.nodes.max == planned.nodes
    assert (tmp_path / "gpu tests/tests/conftest.py").exists()


def test_boot_by_part() -> None:
    seen = trace.Trace("job")
    node = {"name": "a", "state": "provisioning", "phase": None, "notice": None}
    job = {"submitted": 100.0, "members": [], "step": 0}
    trace.note(seen, job, [node], 101.0)
    trace.note(seen, job, [node | {"state": "running"}], 120.0)
    trace.note(seen, job, [node | {"state": "running", "phase": "checking"}], 125.0)
    trace.note(seen, job | {"members": ["a"]}, [node | {"state": "running", "phase": "running"}], 130.0)
    trace.note(seen, job | {"members": ["a"], "step": 3}, [node | {"state": "running", "phase": "running"}], 131.5)
    assert trace.boot(seen) == {
        "listed after s": 1.0,
        "running after s": 20.0,
        "joined after s": 25.0,
        "fit after s": 30.0,
        "chosen after s": 30.0,
        "first step after s": 31.5,
    }


def test_pause_by_part_adds_up() -> None:
    loss = {"at": 100.0, "seconds": 4.0, "steps_lost": 2, "phases": [101.0, 101.5, 102.0, 102.25, 103.75, 104.0]}
    facts = trace.pause(loss)
    assert facts["steps lost"] == 2
    parts = [value for key, value in facts.items() if key not in ("steps lost", "pause s")]
    assert sum(map(float, parts)) == facts["pause s"] == 4.0
    assert facts["restored s"] == 1.5
    assert trace.pause({"at": 1.0, "seconds": None, "steps_lost": None, "phases": []}) == {"steps lost": 0}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_known_figures(name: str, known: float | None) -> None:
    found = figures(name)
    assert (found.tflops if found else None) == known


def test_what_is_left_is_listed_with_its_price() -> None:
    network, disk = Left("network", "vpc-1", stays=True), Left("disk", "vol-1", 0.011)
    assert judge([network], {"bucket": "x"}) == {"bucket": "x", "network vpc-1": "free"}
    with pytest.raises(Failed, match=r"still there: disk vol-1 \(\$0.0110 an hour\)"):
        judge([network, disk], {})


def test_prices_and_machines_of_the_overview() -> None:
    text = report.overview(STEPS, L4)
    assert "efa layout" not in text, "it is about another cloud"
    assert text.splitlines()[-1].startswith("all of it: at most $")
    assert MACHINES["gpus"] == 2


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_record_of_another_version_is_read() -> None:
    record = Record(cluster="l4", digest="d", results={"up": PASSED, "kill": FAILED})
    data = json.loads(record.model_dump_json()) | {"newer": 1}
    found = Record.model_validate_json(json.dumps(data))
    assert found.failed == ["kill"]
