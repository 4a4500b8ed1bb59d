"""`make tensorboard`: what the real TensorBoard serves is what counts, while runs go on and are interrupted."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from scripts import site as sites
from scripts import tensorboards
from scripts.tensorboards import Board, chosen, first_change, launch
from spotrun.errors import SpotrunError
from spotrun.folders import FoldersRef, KeptFile, KeptFiles
from spotrun.head.job_state import JobState
from spotrun.history.curves import Points
from spotrun.state import points
from spotrun.state.points import Call, Header
from spotrun.store import Store, event_file_key, job_key, kept_key, metrics_key
from tests.helpers import wait_for
from tests.scripts.accounts import job, store

ROOT = Path(__file__).parents[2]
JOB = "train-20261122-000001"
Calls = list[tuple[int, float]]  # steps, and losses


def put(bucket: Store, generation: int, base: int, calls: Calls, block: int = 1, name: str = "loss") -> None:
    rows = [Call(step, 1000.0 * generation + step, {name: points.to_json(value)}) for step, value in calls]
    text = points.line(Header(JOB, generation, 0, base)) + b"".join(map(points.line, rows))
    bucket.put(metrics_key(JOB, generation, block), points.compress(text))


def get(url: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url.rstrip('/')}/data/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)


def shown(url: str, name: str = "loss", run: str = JOB) -> Calls:
    """The points that TensorBoard serves."""
    try:
        return [(step, value) for _, step, value in get(url, "plugin/scalars/scalars", run=run, tag=name)]
    except urllib.error.HTTPError as error:
        assert error.code in (400, 404), error  # noqa: PT017
        return []


@pytest.fixture
def bucket(tmp_path: Path) -> Store:
    return store(tmp_path / "bucket", job(1, phase="running"))


@pytest.fixture
def board(bucket: Store, tmp_path: Path) -> Board:
    return Board(bucket, "c", JOB, tmp_path / "logs" / JOB)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tensorboards, "EVERY", 0.2)
    (tmp_path / "logs").mkdir()
    return launch(tmp_path / "logs", 0)


def until(url: str, expected: Calls, name: str = "loss", run: str = JOB) -> None:
    wait_for(lambda: shown(url, name, run) == [(s, pytest.approx(v)) for s, v in expected], what=f"{name}: {expected}")


def test_a_run_that_goes_on_and_is_interrupted(bucket: Store, board: Board, url: str) -> None:
    """Steps that are repeated replace the void ones, at once, for all names."""
    assert board.update() == 0
    put(bucket, 1, 0, [(1, 0.5), (2, 0.25)])
    assert board.update() == 2
    until(url, [(1, 0.5), (2, 0.25)])
    put(bucket, 1, 0, [(3, 0.125), (4, 0.1), (5, 0.09)], block=2)
    put(bucket, 1, 0, [(2, 7.0), (5, 8.0)], block=3, name="acc")
    assert (board.update(), board.update()) == (5, 0)
    until(url, [(1, 0.5), (2, 0.25), (3, 0.125), (4, 0.1), (5, 0.09)])
    until(url, [(2, 7.0), (5, 8.0)], name="acc")
    put(bucket, 2, 3, [])
    board.update()  # of generation 2, only the header is there
    until(url, [(1, 0.5), (2, 0.25), (3, 0.125)])
    until(url, [(2, 7.0)], name="acc")
    put(bucket, 2, 3, [(4, 0.11), (5, 0.12)], block=2)
    assert board.update() == 2
    until(url, [(1, 0.5), (2, 0.25), (3, 0.125), (4, 0.11), (5, 0.12)])
    board.close()


def test_a_run_that_is_relaunched_goes_on(bucket: Store, board: Board) -> None:
    put(bucket, 1, 0, [(1, 0.5)])
    end(bucket, job(1))
    assert (board.update(), board.over) == (1, True)
    assert board.update() == 0
    bucket.put(job_key(JOB, "state.json"), job(1, phase="running").model_dump_json().encode())
    put(bucket, 2, 1, [(2, 0.25)])
    assert (board.update(), board.over) == (1, False)
    board.close()


def test_a_disk_that_refuses_ends_nothing(bucket: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be full for a moment. Here, a file is in the place of a folder."""
    put(bucket, 1, 0, [(1, 0.5)])
    (tmp_path / "logs").write_text("")
    board = Board(bucket, "c", JOB, tmp_path / "logs" / JOB)
    for _ in range(2):
        tensorboards._update([board])
    assert capsys.readouterr().err.count(f"spotrun: tensorboard: {JOB}: ") == 1
    (tmp_path / "logs").unlink()
    tensorboards._update([board])
    assert board.problem == ""
    (file,) = (tmp_path / "logs" / JOB).iterdir()
    assert file.stat().st_size > 100, "the point that was read before is there"
    board.close()


def test_a_block_that_comes_late(bucket: Store, board: Board, url: str) -> None:
    put(bucket, 1, 0, [(1, 0.5)])
    put(bucket, 1, 0, [(3, 0.125)], block=3)
    board.update()
    until(url, [(1, 0.5), (3, 0.125)])
    put(bucket, 1, 0, [(2, math.inf)], block=2)
    board.update()
    wait_for(lambda: [step for step, _ in shown(url)] == [1, 2, 3], what="the late block")
    board.close()


def end(bucket: Store, state: JobState) -> None:
    bucket.put(job_key(JOB, "state.json"), state.model_dump_json().encode())


def test_event_files_of_the_script(bucket: Store, board: Board, url: str, tmp_path: Path) -> None:
    """What torch.utils.tensorboard wrote into a folder of `keep` is a run of its own. Nothing else is fetched."""
    with SummaryWriter(str(tmp_path / "kept/logs/a")) as writer:
        writer.add_scalar("accuracy", 0.75, 3)
    (path,) = (tmp_path / "kept/logs/a").iterdir()
    name = f"logs/a/{path.name}"
    names = (name, "logs/model.pt", "../../events.out.tfevents.1", "logs/link.tfevents", "events.out.tfevents.2/x")
    files = [KeptFile(name=each, link="/etc/passwd" if "link" in each else "") for each in names]
    kept = KeptFiles(folders=("logs",), files=tuple(files))
    bucket.put(kept_key(JOB, 2), kept.model_dump_json().encode())
    bucket.put(kept_key(JOB, 2, name), path.read_bytes())
    put(bucket, 1, 0, [(1, 0.5)])
    end(bucket, job(1, phase="succeeded", ended=9.0, folders=FoldersRef(generation=2, sha256="x")))
    board.update()
    assert board.over
    until(url, [(1, 0.5)])
    until(url, [(3, 0.75)], name="accuracy", run=f"{JOB}/logs/a")
    found = [each for each in tmp_path.joinpath("logs").rglob("*") if each.is_file()]
    assert len(found) == 2
    board.close()


def test_event_files_that_grow_while_the_job_trains(bucket: Store, board: Board, url: str, tmp_path: Path) -> None:
    """The script's own event files are shown while it runs, those of all nodes as one run. It need not succeed."""
    put(bucket, 1, 0, [(1, 0.5)])
    steps = {"spot-0": 1, "spot-1": 2}
    with ExitStack() as stack:
        writers = {node: stack.enter_context(SummaryWriter(str(tmp_path / node))) for node in steps}
        early = {}
        for node, step in steps.items():
            writers[node].add_scalar("accuracy", step / 4, step)
            writers[node].flush()
            early[node] = upload(bucket, tmp_path, node)
            board.update()
            until(url, [(each, each / 4) for each in range(1, step + 1)], name="accuracy", run=f"{JOB}/logs/a")
        for node, step in steps.items():
            writers[node].add_scalar("loss", 0.1, step)
    for node in steps:
        assert len(upload(bucket, tmp_path, node)) > len(early[node])
    end(bucket, job(1, phase="failed", ended=time.time()))
    board.update()
    until(url, [(1, 0.1), (2, 0.1)], run=f"{JOB}/logs/a")
    assert not board.over, "the last part of an event file may still be on its way"
    assert len([each for each in tmp_path.joinpath("logs").rglob("*") if each.is_file()]) == 3
    end(bucket, job(1, phase="failed", ended=time.time() - 60))
    board.update()
    assert board.over
    board.close()


def upload(bucket: Store, folder: Path, node: str) -> bytes:
    """Put a node's event file into the bucket as the agent does. Its bytes."""
    (path,) = (folder / node).iterdir()
    bucket.put(event_file_key(JOB, node, f"logs/a/{path.name}"), path.read_bytes())
    return path.read_bytes()


def column(*steps: int, at: float = 0.0) -> Points:
    found = Points()
    for step in steps:
        one = Points()
        one.steps.append(step)
        one.epochs.append(0)
        one.samples.append(0.0)
        one.times.append(at + step)
        one.values.append(0.0)
        one.between.append(0)
        found.extend(one)
    return found


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param({}, {"a": column(1, 2)}, None, id="all is new"),
        pytest.param({"a": column(1, 2)}, {"a": column(1, 2)}, None, id="nothing is new"),
        pytest.param({"a": column(1, 2)}, {"a": column(1, 2, 3), "b": column(1)}, None, id="more points"),
        pytest.param({"a": column(1, 2, 3)}, {"a": column(1)}, 2, id="points are void"),
        pytest.param({"a": column(1, 2)}, {"a": column(1, 2, at=9.0)}, 1, id="the same steps again"),
        pytest.param({"a": column(1, 5)}, {"a": column(1, 3, 5)}, 3, id="a point in between"),
        pytest.param({"a": column(1), "b": column(4, 6)}, {"a": column(1), "b": column(4)}, 6, id="of another name"),
        pytest.param({"a": column(1, 5), "b": column(4)}, {"a": column(1), "b": Points()}, 4, id="of several names"),
    ],
)
def test_the_first_step_that_changes(before: dict[str, Points], now: dict[str, Points], expected: int | None) -> None:
    assert first_change(before, now) == expected


def cluster_file(folder: Path) -> Path:
    path = folder / "c.yaml"
    path.write_text(
        f"name: c\ncloud: local\nbucket: {folder / 'bucket'}\npools:\n  - {{name: spot, zone: local-a, max: 2}}\n"
    )
    return path


def test_which_runs(tmp_path: Path) -> None:
    jobs = [job(1, ended=5.0, group="a"), job(2, ended=6.0), job(3, phase="running", group="a")]
    store(tmp_path / "bucket", *jobs)
    site = sites.of_file(str(cluster_file(tmp_path)))
    assert chosen(site, [], None) == [jobs[2].id]
    assert chosen(site, [], "a") == [jobs[2].id, jobs[0].id]
    assert chosen(site, [jobs[1].id, jobs[0].id, jobs[1].id], None) == [jobs[1].id, jobs[0].id]
    end(site.bucket(), jobs[0])
    site.bucket().put(job_key(jobs[2].id, "state.json"), job(3, ended=7.0).model_dump_json().encode())
    assert chosen(site, [], None) == [jobs[2].id]
    site.bucket().put(job_key("train-20261122-000004", "state.json"), b'{"cluster": "c", "format": 9}')
    assert chosen(site, [], None) == [jobs[2].id], "a run that cannot be read does not count as one that goes on"
    with pytest.raises(SpotrunError, match="group b has no runs"):
        chosen(site, [], "b")
    with pytest.raises(SpotrunError, match="has no such run"):
        chosen(site, ["train-20261122-000009"], None)


def test_ctrl_c_ends_all(bucket: Store, tmp_path: Path) -> None:
    """The whole command, as a process. Nothing stays: no folder, no process."""
    put(bucket, 1, 0, [(1, 0.5)])
    (tmp_path / "tmp").mkdir()
    words = ["tensorboard", "--cluster", str(cluster_file(tmp_path)), "--id", JOB, "--json"]
    environment = {**os.environ, "SPOTRUN_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.fab", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert answer["runs"] == [JOB]
        assert answer["url"].startswith("http://127.0.0.1:")
        until(answer["url"], [(1, 0.5)])
        assert list((tmp_path / "tmp").glob("spotrun-tensorboard-*"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (0, False), err
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_port_that_is_taken(tmp_path: Path, url: str) -> None:
    port = urllib.parse.urlparse(url).port
    assert port is not None
    with pytest.raises(SpotrunError, match=f"TensorBoard does not start: .*{port}"):
        launch(tmp_path / "logs", port)


def test_it_is_not_installed(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    before = set(Path(tempfile.gettempdir()).glob("spotrun-tensorboard-*"))
    with pytest.raises(SpotrunError, match=r"make tensorboard: needs a package .* -e '\.\[tensorboard\]'` installs it"):
        tensorboards.serve(bucket, "c", [JOB], 0, print)
    assert set(Path(tempfile.gettempdir()).glob("spotrun-tensorboard-*")) == before
