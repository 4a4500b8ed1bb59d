"""`make runs`, `show`, `diff`, `tag`, `note`, `rm`: what the bucket says about runs, and what people change there."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scripts import bundle, provenance, run_changes, run_diff, run_show, runs
from scripts.local_site import LocalSite
from spotrun.errors import SpotrunError
from spotrun.head import events
from spotrun.head.job_state import Interruption, JobState, Progress
from spotrun.history.provenance import NodeRecord, Provenance, Remarks
from spotrun.spec import ClusterSpec
from spotrun.state import points
from spotrun.store import Store, about_key, job_key, log_key, metrics_key, provenance_key, queue_key, remarks_key
from spotrun.wire import QueueRecord
from tests.history.blocks import block
from tests.scripts.accounts import job, store


def rows(found: Store, where: str = "", sort: str = "") -> list[str]:
    """The last digits of the ids."""
    return [each["id"][-1] for each in runs.filtered(runs.rows(found, "c"), where, sort)]


VISION = {"team": "vision"}


@pytest.fixture
def four(tmp_path: Path) -> Store:
    found = store(
        tmp_path,
        job(1, phase="succeeded", ended=11.0, progress=Progress(metrics={"loss": 0.5}), group="sweep", cost=3.0),
        job(2, phase="failed", ended=4.0, progress=Progress(metrics={"loss": 0.25}), labels=VISION, cost=1.0),
        job(3, phase="running", progress=Progress(metrics={"loss": float("nan")}), cost=2.0),
        job(4, cluster="another"),
    )
    run_changes.tag(found, "c", "train-20261122-000001", "best, lr-0.1")
    run_changes.note(found, "c", "train-20261122-000002", "diverged\nat once")
    return found


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("", "321"),
        ("phase=succeeded", "1"),
        ("phase!=succeeded", "32"),
        ("loss<0.4", "2"),
        ("loss>=0.25 and loss<=0.5", "21"),
        ("cost>1.5, phase=running", "3"),
        ("tag=best", "1"),
        ("tag!=best", "32"),
        ("team=vision", "2"),
        ("group=sweep phase=failed", ""),
        ("id~000003", "3"),
        ("note~'DIVERGED at'", ""),
        ("note~Diverged", "2"),
        ("seconds<5", "2"),
    ],
)
def test_where(four: Store, where: str, wanted: str) -> None:
    assert "".join(rows(four, where)) == wanted


@pytest.mark.parametrize(
    ("sort", "wanted"), [("cost", "231"), ("-cost", "132"), ("seconds", "213"), ("loss", "213"), ("-loss", "123")]
)
def test_sort(four: Store, sort: str, wanted: str) -> None:
    """A run without a value comes last, and so does a NaN."""
    assert "".join(rows(four, "", sort)) == wanted


@pytest.mark.parametrize(
    ("where", "sort", "message"),
    [
        ("phase", "", "WHERE: 'phase': is not a condition"),
        ("phase=", "", "is not a condition"),
        ("los<1", "", "WHERE: 'los': no run has such a column; did you mean loss?"),
        ("", "costs", "SORT: 'costs': no run has such a column; did you mean cost?"),
        ("cost<cheap", "", "WHERE: cost: 'cheap': is not a number"),
    ],
)
def test_mistakes(four: Store, where: str, sort: str, message: str) -> None:
    with pytest.raises(SpotrunError) as caught:
        rows(four, where, sort)
    assert message in str(caught.value)


def test_runs_have_the_same_phases_as_other_commands(tmp_path: Path) -> None:
    """`make status` says paused and queued. The state in the bucket says waiting."""
    waiting = {"phase": "waiting", "generation": 1}
    found = store(
        tmp_path, job(1, **waiting, paused="paused by the operator"), job(2, phase="waiting"), job(3, **waiting)
    )
    assert [row["phase"] for row in runs.rows(found, "c")] == ["waiting", "queued", "paused"]


def test_a_run_that_cannot_be_read_is_listed(four: Store) -> None:
    four.put("jobs/train-20261122-000009/state.json", b'{"cluster": "c", "phase": 5}')
    four.put("jobs/train-20261122-000008/state.json", b'{"cluster": "another", "phase": 5}')
    four.put(provenance_key("train-20261122-000001"), b"junk")
    assert rows(four) == ["9", "3", "2", "1"]
    (shown,) = [line for line in runs.text(runs.rows(four, "c"), 1.8e9).splitlines() if "unreadable" in line]
    assert shown.split() == ["train-20261122-000009", "unreadable", "0", "0"], "no time of 1970"


def test_the_table_shows_results_first_and_what_is_asked_for(tmp_path: Path) -> None:
    logged = dict.fromkeys(("grad", "latest", "loss", "lr", "scale", "val_acc"), 0.5)
    found = runs.rows(store(tmp_path, job(1, progress=Progress(metrics=logged))), "c")
    shown = runs.text(found, 100.0).splitlines()
    assert shown[0].split()[7:-2] == ["grad", "loss", "val_acc"]
    assert shown[-1].startswith("also logged: latest, lr, scale; SORT= or WHERE= with a name shows it")
    assert runs.text(found, 100.0, ["lr", "scale"]).splitlines()[0].split()[7:-2] == ["loss", "lr", "scale"]
    few = runs.rows(store(tmp_path, job(1, progress=Progress(metrics={"loss": 0.5}))), "c")
    assert "also logged" not in runs.text(few, 100.0)


def test_tags_and_notes_of_several_people_at_once(four: Store) -> None:
    def say(number: int) -> None:
        run_changes.tag(four, "c", "train-20261122-000003", f"t{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(say, range(4)))
    assert set(runs.remarks(four, "train-20261122-000003").tags) == {"t0", "t1", "t2", "t3"}
    said = run_changes.tag(four, "c", "train-20261122-000003", "-t0 -t1 new")
    assert set(said.tags) == {"t2", "t3", "new"}
    with pytest.raises(SpotrunError, match="TAG: 'a!b'"):
        run_changes.tag(four, "c", "train-20261122-000003", "a!b")


def test_a_list_reads_no_metrics(tmp_path: Path) -> None:
    """Three documents are read for each run, however much it has logged: no block is listed."""
    states = [job(1).replace(id=f"train-20261122-{number:06d}") for number in range(50)]
    found = store(tmp_path, *states)
    for each in states:
        for number in range(20):
            found.put(metrics_key(each.id, 1, number + 1), b"x")
    reads: list[str] = []

    class Counting(Store):
        def find(self, key: str, most: int | None = None) -> bytes | None:
            reads.append(key)
            return super().find(key, most)

        def list(self, prefix: str) -> list[str]:
            raise AssertionError(f"lists {prefix}, with every block")

    began = time.monotonic()
    assert len(runs.rows(Counting(tmp_path.as_uri()), "c")) == 50
    print(f"50 runs listed in {time.monotonic() - began:.3f} s")
    assert len(reads) == 150


def packed(found: Store, folder: Path, **files: str) -> str:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return bundle.upload(found, folder, "train.py").sha256


@pytest.fixture
def two(tmp_path: Path) -> Store:
    """Two runs with bundles, nodes, logs, metrics."""
    found = Store((tmp_path / "bucket").as_uri())
    first = packed(found, tmp_path / "a", train="lr = 0.1\nprint(lr)\n", old="x = 1\n")
    second = packed(found, tmp_path / "b", train="lr = 0.2\nprint(lr)\n", new="key = 'very secret'\n")
    base: dict[str, Any] = {"ended": 61.0, "generation": 2, "reached": 120, "phase": "succeeded"}
    lost = Interruption(kind="preempt", node="spot-0", at=30.0, generation=1, step=60, seconds=0.5, steps_lost=3)
    states = [
        job(1, code=first, interruptions=(lost,), progress=Progress(metrics={"loss": 0.5}), **base),
        job(2, code=second, progress=Progress(metrics={"loss": 0.25, "acc": 0.9}), **base),
    ]
    env = {"WANDB_API_KEY": "very secret", "MODE": "fast"}
    states[1] = states[1].replace(spec=states[1].spec.model_copy(update={"args": ("--lr", "0.2"), "env": env}))
    for state, torch, seed in zip(states, ("2.12.0", "2.13.0"), (0, 7), strict=True):
        found.put(job_key(state.id, "state.json"), state.model_dump_json().encode())
        record = NodeRecord(
            node="spot-0", boot="b", at=1.0, type="g2", seed=seed, packages={"torch": torch, "numpy": "2.0"}
        )
        found.put(about_key(state.id, "spot-0", "b"), record.model_dump_json().encode())
        for generation, nodes in ((1, ("spot-0", "spot-1")), (2, ("spot-1", "spot-2"))):
            for rank, node in enumerate(nodes):
                found.put(log_key(state.id, generation, node, rank), b"text")
    found.put(about_key(states[0].id, "spot-1", "b"), b"junk of a job's code")
    text = points.line(block(2, 57, []).header).replace(b'"j"', f'"{states[0].id}"'.encode())
    found.put(metrics_key(states[0].id, 2, 1), points.compress(text))
    return found


A, B = "train-20261122-000001", "train-20261122-000002"


def test_show(two: Store) -> None:
    origin = Provenance(job=A, at=1.0, user="ann", host="h", version="0.1", code="x")
    two.put(provenance_key(A), origin.model_dump_json().encode())
    found = run_show.document(two, "c", A)
    json.dumps(found)
    keys = ("generation", "members", "base", "ended_by")
    generations = [tuple(each[key] for key in keys) for each in found["generation_members"]]
    assert generations == [(1, ["spot-0", "spot-1"], None, "preempt"), (2, ["spot-1", "spot-2"], 57, None)]
    assert [each["packages"]["torch"] for each in found["nodes"]] == ["2.12.0"], "junk is left out"
    assert found["objects"]["logs"] == {"objects": 4, "bytes": 16}
    text = run_show.text(found)
    for wanted in ("ann@h", "3 steps lost", "spot-1 spot-2", "torch 2.12.0", "loss", "seed:       0"):
        assert wanted in text
    note = run_changes.note(two, "c", A, "lr too high").notes[0]
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(note.at))  # as the other times there, and they say so
    assert f"  {at} {note.user}: lr too high" in run_show.text(run_show.document(two, "c", A)).splitlines()
    with pytest.raises(SpotrunError, match="has no such run"):
        run_show.document(two, "another", A)
    with pytest.raises(SpotrunError, match=f"no such run; train is a job's name; give an id: {B}, {A}; `make runs`"):
        run_show.document(two, "c", "train")


def test_show_takes_the_members_of_generations_from_the_events(two: Store) -> None:
    """After a regroup, a worker that prints nothing has no log. Generation 3 was named by a drain, and never began."""
    state = runs.state(two, "c", A).replace(generation=4)
    two.put(job_key(A, "state.json"), state.model_dump_json().encode())
    two.put(log_key(A, 3, "spot-7", 0), b"text")
    two.put(log_key(A, 4, "spot-2", 1), b"text")
    texts = [events.begun(2, ["spot-2", "spot-0"]) + " (preempt: spot-1)", "none; waiting for nodes (grow)"]
    texts += [events.begun(4, ["spot-2"])]
    lines = [json.dumps({"at": 1.0, "kind": "generation", "text": text}) for text in (*texts, "5: junk")]
    two.put(job_key(A, "events.jsonl"), "\n".join([*lines, "junk"]).encode())
    found = {each["generation"]: each["members"] for each in run_show.document(two, "c", A)["generation_members"]}
    assert found == {1: ["spot-0", "spot-1"], 2: ["spot-2", "spot-0"], 4: ["spot-2"]}


def test_diff(two: Store) -> None:
    found = run_diff.document(two, "c", A, B)
    json.dumps(found)
    assert [(each["file"], each["how"]) for each in found["code"]] == [
        ("new.py", "added"),
        ("old.py", "removed"),
        ("train.py", "changed"),
    ]
    assert found["code"][2]["lines"][3:5] == ["-lr = 0.1", "+lr = 0.2"]
    assert found["job"]["args"] == ["", "--lr 0.2"]
    assert found["job"]["seed"] == [0, 7]
    assert found["job"]["env.MODE"] == [None, "fast"]
    assert found["packages"] == {"torch": ["2.12.0", "2.13.0"]}
    assert found["results"]["metric loss"] == [0.5, 0.25]
    text = run_diff.text(found)
    assert "+key = '(hidden)'" in text
    assert "very secret" not in text + json.dumps(found)
    assert "+lr = 0.2" in text
    same = run_diff.document(two, "c", A, A)
    assert [same[key] for key in ("code", "job", "packages", "machines", "results")] == [[], {}, {}, {}, {}]


def test_a_run_that_had_no_machines_does_not_differ_in_each_package(two: Store) -> None:
    """Such as one that was stopped while it was in the queue."""
    two.delete([about_key(B, "spot-0", "b")])
    found = run_diff.document(two, "c", A, B)
    assert "seed" not in found["job"]
    lines = run_diff.text(found).splitlines()
    for what in ("packages", "machines"):
        assert f"{what}: not known: there is no record of the machines of {B}" in lines
    assert not [line for line in lines if "torch" in line]


@pytest.mark.parametrize(
    ("env", "line", "shown"),
    [
        pytest.param({"DEPLOY_KEY": "-----BEGIN-----\nAbCdEf12\n"}, "+  AbCdEf12", "+  (hidden)", id="a line of a key"),
        pytest.param({"API_KEY": "none"}, "+x = none", "+x = none", id="a short value"),
        pytest.param({"API_KEY": "none"}, "+API_KEY: none", "+API_KEY: (hidden)", id="a short value in its own line"),
        pytest.param({"MAX_NEW_TOKENS": "100000"}, "+n = 100000", "+n = 100000", id="a number of tokens"),
        pytest.param({"TOKENIZERS_PARALLELISM": "parallel"}, "+parallel", "+parallel", id="tokenizers"),
        pytest.param({"HF_TOKEN": "@@ -1,5 +1,5 @@"}, "@@ -1,5 +1,5 @@", "@@ -1,5 +1,5 @@", id="where the lines are"),
        pytest.param({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefgh"}, "abcdefgh", "(hidden)", id="one in another"),
    ],
)
def test_secrets_stay_out_of_differences(env: dict[str, str], line: str, shown: str) -> None:
    state = job(1).replace(spec=job(1).spec.model_copy(update={"env": env}))
    found = run_diff._hidden([{"lines": [line]}], run_diff._secrets(state))
    assert found == [{"lines": [shown]}]


def test_remarks_that_are_too_long(two: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hide nothing else, and nothing is added to them."""
    for module in (runs, run_changes):
        monkeypatch.setattr(module, "MOST", 200)
    run_changes.note(two, "c", A, "short")
    with pytest.raises(SpotrunError, match=f"{A}/remarks.json is full: tags and notes of a run have at most"):
        run_changes.note(two, "c", A, "x" * 200)
    assert [each.text for each in runs.remarks(two, A).notes] == ["short"]
    two.put(remarks_key(A), Remarks(tags=("x" * 200,)).model_dump_json().encode())
    assert {row["id"]: row["tags"] for row in runs.rows(two, "c")} == {A: [], B: []}
    run_changes.tag(two, "c", A, f"-{'x' * 39}")  # what there is may become shorter
    assert run_show.document(two, "c", A)["remarks"] == []


def test_nan_does_not_differ_from_nan() -> None:
    a, b = {"loss": float("nan"), "acc": 0.5}, {"loss": float("nan"), "acc": float("nan")}
    assert list(run_diff.changes(a, b)) == ["acc"]


def test_diff_without_a_bundle(two: Store) -> None:
    two.delete(two.list("code"))
    assert "no longer in the bucket" in run_diff.text(run_diff.document(two, "c", A, B))


class Here(LocalSite):
    """A cluster that is down, with its bucket."""

    def __init__(self, found: Store) -> None:
        cluster = {"name": "c", "cloud": "local", "pools": [{"name": "a", "zone": "local-a"}], "bucket": found.url}
        super().__init__(ClusterSpec.model_validate(cluster), "clusters/local.yaml")
        self._found = found

    def bucket(self) -> Store:
        return self._found


def test_rm_lists_what_goes_and_asks(two: Store) -> None:
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "yes"

    before = two.list("jobs")
    with pytest.raises(SpotrunError, match="stays: its id was not typed"):
        run_changes.remove(Here(two), A, False, answer)
    assert two.list("jobs") == before
    assert "logs: 4 objects, 16 bytes" in asked[0]
    with pytest.raises(SpotrunError, match="FORCE=1"):
        run_changes.remove(Here(two), A, False)
    run_changes.remove(Here(two), A, False, lambda _: f" {A} ")
    assert two.list("jobs") == [key for key in before if key.startswith(f"jobs/{B}/")]
    assert run_changes.remove(Here(two), B, True)["removed"]["state.json"]["objects"] == 1
    assert two.list("jobs") == []


@pytest.mark.parametrize(
    ("changes", "queue", "message"),
    [
        ({"phase": "running"}, (), "has not ended"),
        ({}, (A,), "has not ended"),
        ({"phase": "running"}, ("held", A), "has not ended|is held"),
    ],
    ids=["running", "relaunched", "held"],
)
def test_rm_never_removes_a_run_that_goes_on(
    two: Store, changes: dict[str, Any], queue: tuple[str, ...], message: str
) -> None:
    state = JobState.model_validate_json(two.get(job_key(A, "state.json"))).replace(**changes)
    two.put(job_key(A, "state.json"), state.model_dump_json().encode())
    record = QueueRecord(jobs=(), held=queue[1:]) if queue[:1] == ("held",) else QueueRecord(jobs=queue)
    two.put(queue_key("c"), record.model_dump_json().encode())
    with pytest.raises(SpotrunError, match=message):
        run_changes.remove(Here(two), A, True)
    assert two.exists(job_key(A, "state.json"))


def test_rm_keeps_a_run_that_was_relaunched_while_it_asked(two: Store) -> None:
    """A person may answer minutes later. Until then, a colleague has continued the job from its checkpoint."""
    ended = two.get(job_key(A, "state.json"))

    def relaunched(_: str) -> str:
        state = JobState.model_validate_json(ended).replace(phase="running", ended=None)
        two.put(job_key(A, "state.json"), state.model_dump_json().encode())
        two.put(queue_key("c"), QueueRecord(jobs=(A,)).model_dump_json().encode())
        return A

    before = two.list(f"jobs/{A}")
    with pytest.raises(SpotrunError, match=f"{A} stays: it has not ended"):
        run_changes.remove(Here(two), A, False, relaunched)
    assert two.list(f"jobs/{A}") == before


def test_rm_keeps_what_another_job_waits_for(two: Store) -> None:
    state = JobState.model_validate_json(two.get(job_key(B, "state.json"))).replace(phase="waiting", after=(A,))
    two.put(job_key(B, "state.json"), state.model_dump_json().encode())
    two.put(queue_key("c"), QueueRecord(jobs=(B,)).model_dump_json().encode())
    with pytest.raises(SpotrunError, match=f"{B}, which has not ended, needs"):
        run_changes.remove(Here(two), A, True)


def test_rm_looks_again_when_its_question_is_answered(two: Store) -> None:
    """Meanwhile, another person has relaunched the job."""
    before = two.list("jobs")

    def relaunch(_: str) -> str:
        two.put(queue_key("c"), QueueRecord(jobs=(A,)).model_dump_json().encode())
        return A

    with pytest.raises(SpotrunError, match="has not ended"):
        run_changes.remove(Here(two), A, False, relaunch)
    assert two.list("jobs") == before


def test_rm_keeps_what_a_job_may_need_that_cannot_be_read(two: Store) -> None:
    two.put(queue_key("c"), QueueRecord(jobs=(B,)).model_dump_json().encode())
    two.put(job_key(B, "state.json"), b'{"format": 99}')
    said = f"{A} stays: {B}, which has not ended, may need its files: .*state.json.*; `make stop ID={B}` takes it out"
    with pytest.raises(SpotrunError, match=said):
        run_changes.remove(Here(two), A, True)
    two.put(queue_key("c"), b"{")
    with pytest.raises(SpotrunError, match=f"{A} stays: .*queue.json cannot be read"):
        run_changes.remove(Here(two), A, True)
    assert two.exists(job_key(A, "state.json"))


def test_what_a_rerun_says(two: Store) -> None:
    state = runs.state(two, "c", A)
    state = state.replace(spec=state.spec.model_copy(update={"requirements": ("a==1", "b>=2")}))
    other = Provenance(job=A, at=1.0, user="ann", host="h", email="ann@example.org", version="0.1", code="x")
    now = provenance.again(other, A, "clusters/local.yaml", state.code)
    assert "ann" not in now.email, "who runs it again is another person"
    found = run_changes.differences(state, "0.0.1", "another text", now)
    assert len(found) == 3
    assert "0.0.1 then" in found[0]
    assert "cluster file" in found[1]
    assert "b>=2" in found[2]
    assert "a==1" not in found[2]


def test_remarks_that_cannot_be_read_are_not_replaced(two: Store) -> None:
    two.put(remarks_key(A), b'{"format": 99}')
    with pytest.raises(SpotrunError, match="cannot be read"):
        run_changes.tag(two, "c", A, "best")
    assert two.get(remarks_key(A)) == b'{"format": 99}'
