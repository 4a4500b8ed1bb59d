"""Two thousand random and mutated inputs: each is taken or refused in words, and nothing is left behind.

The inputs are the same each time: a seed for each chunk. An error that is no `SpotrunError` fails the test with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash
import yaml
import zstandard
from invoke.context import Context
from invoke.exceptions import Exit

import fabfile
from scripts import control, display, faults, logs, report, ssh
from spotrun import text
from spotrun.errors import CorruptError, SpecError, SpotrunError
from spotrun.head.code_sweep import Sweeper
from spotrun.head.events import _event
from spotrun.head.job_state import JobState
from spotrun.head.journal import Journal
from spotrun.head.server import agent_server
from spotrun.node import bundle, notice
from spotrun.spec import check_fit, described, load_cluster, load_job
from spotrun.state import checkpoints, shards, slots
from spotrun.state.control import SIZE, TEXT, Control
from spotrun.store import Store, checkpoint_key, code_key, host_key, job_key, log_key, queue_key
from spotrun.wire import HeadRecord, HostRecord, Manifest, Order, Report, Worker
from tests.fakes.cluster import CLUSTER, machines
from tests.scripts.statuses import FAILURE, shared, status

ROOT = Path(__file__).parents[2]
CHUNKS = range(4)
DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
WORDS = [
    *("", " ", "x", "../x", "a//b", "/", ".", "-x", "--json", "nan", "inf", "-5", "0", "1e999", "1" * 400, "abc"),
    *("true", "[red]x", "*", "~", "x" * 500),
    *("é漢🎉", "\x1b[2J\x9b", "a\nb", "a\0b", "\ud800", "it's", '"', "`id`", "$(id)", "%s", "{}"),
]  # fmt: skip
VALUES: list[Any] = [
    *WORDS, None, True, -1, 0, 1.5, 1 << 70, 10**350, 1e308, float("nan"), float("inf"), [], {}, [[]], {"a": 1}, DEEP,
]  # fmt: skip
JUNK = [
    *("- ", ": ", "{", "}", "[", "]", "&a ", "*a", "!!python/object:os.system ", "|", ">", "\t", "#", "'", '"', "\n"),
    *("? ", "<<: ", "2026-99-99", "0x1g", "~", "\ufeff", "\x00", "---\n", "...", "!!binary x", "1:2:3", ".inf"),
]
JOB = """script: train.py
name: toy
args: [--epochs, "3", 4]
nodes: {min: 1, max: 3, spares: 1}
snapshot_interval: auto
checkpoint_interval: 5m
deadline: 2h
budget: 3.5
env: {A: b, B: 2}
requirements: [numpy>=1]
"""
CLOUD = """name: l4
cloud: gcp
project: my-project
region: us-central1
network: {nat: true, cidr: 10.77.0.0/16}
state: gs://mine/spotrun
labels: {team: ml}
pools:
- {name: spot, zone: us-central1-a, machine: g2-standard-8, max: 4, max_run_duration: 1d}
- {name: t4, zone: us-central1-b, machine: n1-standard-8, accelerator: {type: nvidia-tesla-t4, count: 1}}
"""


def mutate(rng: random.Random, original: str) -> str:
    """A text that was meant to be the original."""
    found = original
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.randint(0, len(found)) for _ in range(2))
        to = min(to, at + 30)
        piece = rng.choice([*JUNK, *WORDS])
        found = rng.choice([
            found[:at] + found[to:],
            found[:at] + piece + found[at:],
            found[:at] + piece + found[to:],
            found[:to] + found[at:],
            found[:at],
        ])  # fmt: skip
    return found


def junk(rng: random.Random) -> Any:
    """A value that belongs nowhere; never one that another document has, too."""
    value = rng.choice(VALUES)
    return value if value is DEEP else copy.deepcopy(value)


def warp(rng: random.Random, original: Any) -> Any:
    """A JSON value that was meant to be the original."""
    found = copy.deepcopy(original)
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        todo = [found]
        while todo:
            value = todo.pop()
            if value is DEEP or not isinstance(value, dict | list):
                continue
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                places.append((value, key))
                if value[key] is not DEEP:
                    todo.append(value[key])
        if not places:
            return junk(rng)
        holder, key = rng.choice(places)
        if isinstance(holder, dict) and rng.random() < 0.3:
            value = holder.pop(key)
            if rng.random() < 0.5:
                holder[rng.choice(WORDS)] = value
        else:
            holder[key] = junk(rng)
    return found


def document(rng: random.Random, original: Any) -> bytes:
    """The bytes of such a value, or bytes that are no JSON."""
    if rng.random() < 0.3:
        data = mutate(rng, json.dumps(original)).encode(errors="replace")
        return data if rng.random() < 0.7 else bytes(rng.choices(range(256), k=60)) + data
    if rng.random() < 0.03:
        return b"[" * 100_000
    return json.dumps(warp(rng, original)).encode()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Neither a process, nor a file in the checkout."""
    caches = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}  # of those who look at the same checkout
    before = {path.name for path in ROOT.iterdir()} | caches
    children = set(psutil.Process().children())
    yield
    assert {path.name for path in ROOT.iterdir()} <= before
    assert set(psutil.Process().children()) <= children


# Files


@pytest.mark.parametrize("chunk", CHUNKS)
def test_job_and_cluster_files(tmp_path: Path, chunk: int) -> None:
    """Two hundred: each is read, or refused with the file's name first."""
    rng = random.Random(f"files {chunk}")
    (tmp_path / "train.py").touch()
    (tmp_path / "good.yaml").write_text(CLUSTER)
    cluster = load_cluster(tmp_path / "good.yaml")
    path = tmp_path / "file.yaml"
    taken, told = 0, list[str]()
    for number in range(200):
        original = (JOB, CLOUD, CLUSTER)[number % 3]
        if rng.random() < 0.3:
            with contextlib.suppress(yaml.YAMLError):
                content = yaml.safe_dump(warp(rng, yaml.safe_load(original))).encode(errors="replace")
        else:
            content = mutate(rng, original).encode(errors="surrogatepass")
        path.write_bytes(content)
        try:
            if original is JOB:
                check_fit(load_job(path), cluster)
            else:
                described(load_cluster(path).model_dump_json().encode())
            taken += 1
        except SpecError as error:
            told.append(str(error))
    assert 0 < taken < 150
    assert all(each.startswith((str(path), "job ")) for each in told)


def test_files_that_are_made_to_be_large(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    laughs = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for this, before in zip("bcdefghi", "abcdefgh", strict=True):
        laughs += f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]\n"
    for content in (laughs, "a: &a [*a]\n", "[" * 50_000, "a: " * 1000, "x" * (1 << 20), "? " * 10_000):
        path.write_text(content)
        with pytest.raises(SpecError):
            load_job(path)
    for special in ("/dev/zero", "/dev/null", "/", "/proc/self/mem"):
        with pytest.raises(SpecError):
            load_cluster(special)


# What is typed


class Typed:
    """Runs tasks in this process. home: an empty one, or the stand-in's."""

    def __init__(self, capsys: pytest.CaptureFixture[str], cluster: Path) -> None:
        self._capsys, self._cluster = capsys, str(cluster)

    def run(self, task: str, **options: Any) -> int:
        """The exit status; it has said why if it is not 0, and in JSON if that was asked."""
        self._capsys.readouterr()
        code = 0
        try:
            getattr(fabfile, task).body(Context(), **{"cluster": self._cluster, **options})
        except Exit as ended:
            code = ended.code
        out, err = self._capsys.readouterr()
        assert code in (0, 1, 2, 3), (task, options, err)
        assert "Traceback" not in out + err, (task, options, err)
        if code in (2, 3):
            assert err.startswith("spotrun: "), (task, options, err)
        if options.get("json"):
            for line in out.splitlines():
                json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
            assert out or code == 0 or task == "run"
        else:
            assert out == text.clean(out)
        return code


OPTIONS = {
    "plan": ("cluster",), "up": ("cluster",), "train": ("cluster", "job", "faults"), "status": ("cluster", "id"),
    "follow": ("id",), "logs": ("cluster", "id", "node", "rank", "tail"), "ssh": ("node",),
    "run": ("cluster", "cmd", "node", "timeout"), "preempt": ("node", "notice"), "kill": ("cluster", "node"),
    "relaunch": ("id",), "stop": ("cluster", "id"), "down": ("cluster",),
}  # fmt: skip


@pytest.mark.parametrize("chunk", CHUNKS)
def test_each_variable_of_each_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chunk: int
) -> None:
    """A hundred and fifty, where no cluster is up: a mistake, or out of reach; a `down` has nothing to do."""
    rng = random.Random(f"typed {chunk}")
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    (tmp_path / "c.yaml").write_text(CLUSTER.replace("name: c", f"name: fuzz-{os.getpid() % 10**6}"))
    typed = Typed(capsys, tmp_path / "c.yaml")
    for _ in range(150):
        task = rng.choice(list(OPTIONS))
        options = {name: rng.choice(WORDS) for name in OPTIONS[task] if rng.random() < 0.6}
        if task in ("up", "train", "plan"):  # never one that would come up
            options |= {"cluster": rng.choice(WORDS)}
        if task == "train":
            options |= {"job": rng.choice(WORDS)}
        code = typed.run(task, **options, json=rng.random() < 0.3)
        assert code in ((0, 2) if task == "down" else (2, 3)), (task, options)
    assert not (tmp_path / "home/local").exists()


def test_each_variable_where_a_cluster_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixty; what is refused reaches no head."""
    rng = random.Random("up")
    with machines(tmp_path) as standin:
        monkeypatch.setenv("SPOTRUN_HOME", str(standin.home))
        standin.write(status_json=status(step=1))
        typed = Typed(capsys, standin.cluster)
        good = {
            "id": "digits-1",
            "node": "spot-1",
            "cmd": "echo x",
            "timeout": "5",
            "notice": "5",
            "rank": "0",
            "tail": "3",
        }
        for _ in range(60):
            task = rng.choice(["status", "logs", "ssh", "run", "preempt", "kill", "stop", "relaunch"])
            options = {name: good[name] for name in OPTIONS[task] if name != "cluster"}
            options[rng.choice(list(options))] = rng.choice(WORDS)
            typed.run(task, **options, json=task == "ssh" or rng.random() < 0.5)
        assert all(
            call.split()[0] in ("status", "jobs", "preempt", "kill", "stop", "relaunch") for call in standin.calls()
        )


def test_faults() -> None:
    rng = random.Random("faults")
    for _ in range(100):
        with contextlib.suppress(SpotrunError):
            assert all(fault.at >= 0 for fault in faults.parse(mutate(rng, "preempt@25%,kill@120")))


# Archives


def archive(rng: random.Random) -> bytes:
    """A bundle that was packed by someone else."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for _ in range(rng.randint(1, 4)):
            member = tarfile.TarInfo(
                rng.choice(["train.py", "a/b", "../evil", "/tmp/spotrun-evil", "a", *WORDS[5:12]]) or "x"
            )
            member.type = rng.choice(
                [tarfile.REGTYPE] * 4 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, b"6", b"Z"]
            )
            member.linkname = rng.choice(["a", "train.py", "../../evil", "/etc/passwd", "", "x" * 300])
            member.mode = rng.choice([0o644, 0, 0o7777])
            data = bytes(rng.choices(range(256), k=rng.choice([0, 10, 700])))
            member.size = len(data) if member.type == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(data) if member.size else None)
    plain = bytearray(buffer.getvalue())
    for _ in range(rng.choice([0, 0, 1, 5, 40])):
        plain[rng.randrange(len(plain))] = rng.randrange(256)
    packed = bytearray(zstandard.compress(bytes(plain)))
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        packed[rng.randrange(len(packed))] = rng.randrange(256)
    return bytes(packed[: rng.choice([len(packed)] * 4 + [len(packed) // 2])])


def below(folder: Path) -> Iterator[Path]:
    """All that is in the folder. `rglob` of Python 3.11.2 fails at a link with a target that is too long."""
    for where, folders, files in os.walk(folder):
        yield from (Path(where, name) for name in (*folders, *files))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_archives(tmp_path: Path, chunk: int) -> None:
    """Seventy-five: unpacked, or refused; nothing appears outside the folder."""
    rng = random.Random(f"archives {chunk}")
    for number in range(75):
        target = tmp_path / "jobs" / str(number)
        target.mkdir(parents=True)
        (tmp_path / "archive").write_bytes(archive(rng))
        with contextlib.suppress(CorruptError):
            bundle.unpack(tmp_path / "archive", target, "code/x")
            for path in below(target):
                assert Path(os.path.realpath(path)).is_relative_to(target.resolve()), path
    assert all(path.name != "evil" for path in below(tmp_path))
    assert not Path("/tmp/spotrun-evil").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"jobs", "archive"}


# Documents


SPEC = {"name": "toy", "script": "train.py", "nodes": {"min": 1, "max": 2, "spares": 0}}
REF = {"generation": 1, "step": 5}
MEMBER = {"node": "spot-0", "boot": "b", "address": "127.0.0.1"}
WORKER = {"rank": 0, "pid": 1, "step": 5, "stepped_at": 1.0, "metrics": {"loss": 0.5}}
ORDER = {
    "epoch": 1, "bundle": {"id": "toy-1", "code": "a" * 64, "job": SPEC}, "stop_at": 3, "upload": REF,
    "generation": {"number": 1, "members": [MEMBER], "store": "h:1", "checkpoints": [REF]},
    "save": {"step": 5, "index": 0, "parts": 1},
}  # fmt: skip
REPORT = {
    "node": "spot-0", "boot": "b", "pool": "spot", "address": "127.0.0.1", "phase": "running", "job": "toy-1",
    "workers": [WORKER], "snapshot": REF, "generation": 1, "failure": None, "notice": None, "parts": [],
}  # fmt: skip
STATE = {
    "id": "toy-20260101-000000", "name": "toy", "cluster": "c", "code": "a" * 64, "spec": SPEC, "submitted": 1.0,
    "ordered_at": 1.0, "phase": "running", "checkpoints": [REF], "progress": {"metrics": {"loss": 1.0}},
}  # fmt: skip
HOST = {"node": "spot-1", "address": "127.0.0.1", "port": 22, "keys": ["ssh-ed25519 AAAA"]}
HEAD = {"epoch": 1, "address": "127.0.0.1", "port": 1, "fingerprint": "f", "token": "t"}
MANIFEST = {
    "job": "toy-1",
    "generation": 1,
    "step": 5,
    "created": 1.0,
    "files": [{"name": "a", "size": 1, "xxh3": "0"}],
}
EVENT = {"at": 1.0, "kind": "node", "text": "spot-1 joined"}


def refused(read: Callable[[], object]) -> None:
    """Read, or refused: by our own error, or by the one that a caller of a model is prepared for."""
    with contextlib.suppress(SpotrunError, ValueError):
        read()


def in_bucket(rng: random.Random, store: Store) -> None:
    """What the head, nodes and operators read in the bucket."""
    job = "toy-20260101-000000"
    store.put(job_key(job, "state.json"), document(rng, STATE))
    store.put(queue_key("c"), document(rng, rng.choice([["toy-1"], {"jobs": ["toy-1"]}])))
    store.put(checkpoint_key("toy-1", 5), document(rng, MANIFEST))
    store.put(checkpoint_key("toy-1", 5, "a"), b"x")
    store.put(host_key("c", "spot-1"), document(rng, HOST))
    store.put(code_key("a" * 64), b"")

    async def head() -> None:
        journal = Journal(store, "c")
        assert isinstance(await journal.read_queue(), list)
        await journal.newest(5)
        with contextlib.suppress(SpotrunError):
            await journal.read(job)

    asyncio.run(head())
    for ref in checkpoints.list_complete(store, "toy-1"):
        assert ref.step == 5
    with contextlib.suppress(SpotrunError):
        ssh.read_host(ssh.Access("c", store, None, Path()), "spot-1")  # type: ignore[arg-type]
    with contextlib.suppress(SpotrunError):
        Sweeper(store).sweep()
    assert store.exists(code_key("a" * 64))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_documents(tmp_path: Path, chunk: int) -> None:
    """Two hundred, each of another kind."""
    rng = random.Random(f"documents {chunk}")
    store = Store(str(tmp_path / "bucket"))
    block = Control(tmp_path / "block", create=True)
    models: list[tuple[Any, Any]] = [
        (Order, ORDER), (HostRecord, HOST), (HeadRecord, HEAD), (Manifest, MANIFEST), (JobState, STATE)
    ]  # fmt: skip
    for number in range(200):
        kind = number % 8
        if kind == 0:
            found = agent_server._report(document(rng, REPORT).decode(errors="replace"))
            assert isinstance(found, Report | str)
            if isinstance(found, Report):
                found.model_dump_json().encode(errors="replace")
        elif kind == 1:
            model, original = models[number // 8 % len(models)]
            refused(functools.partial(model.model_validate_json, document(rng, original)))
        elif kind in (2, 3):
            in_bucket(rng, store)
        elif kind == 4:
            record = json.dumps(
                warp(rng, {"job": "t", "generation": 1, "step": 2, "size": 3, "xxh3": "0", "state": {}})
            )
            outer = {"record": record, "xxh3": xxhash.xxh3_128_hexdigest(record.encode())}
            slots.record_path(tmp_path, 0).write_bytes(
                json.dumps(outer).encode() if number % 2 else document(rng, outer)
            )
            slots.newest(tmp_path, "t")
        elif kind == 5:
            header = {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
            refused(functools.partial(shards.parse_header, document(rng, header)))
            refused(lambda: described(document(rng, {"name": "c", "cloud": "local", "pools": [{"name": "p"}]})))
        elif kind == 6:
            data = document(rng, {"loss": 0.5, "n": 3})[: SIZE - TEXT - 8]
            block._map[TEXT + 8 : TEXT + 8 + len(data)] = data
            block._map[TEXT : TEXT + 8] = len(data).to_bytes(8, "little")
            Worker(rank=0, pid=1, step=1, stepped_at=0.0, metrics=block.read_metrics()).model_dump_json()
        else:
            refused(
                lambda: notice.parse_ec2(
                    "preempt", document(rng, {"action": "terminate", "time": "x"}).decode("latin1"), 0.0
                )
            )
    block.close()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_status_documents(chunk: int) -> None:
    """Fifty of a head of another version, or of none: shown, or refused as such."""
    rng = random.Random(f"status {chunk}")
    whole = status(**{"phase": "failed", "failure": FAILURE, "ended": 5.0, "interruptions": [
        {"kind": "kill", "node": "spot-1", "seconds": 1.0, "steps_lost": 1, "at": 1.0, "generation": 1}
    ]})  # fmt: skip
    several = shared()
    for _ in range(50):
        data = document(rng, rng.choice([whole, several]))
        with contextlib.suppress(SpotrunError):
            found = control._parsed(data)
            text.to_json(found)
            plain = io.StringIO()
            with display.opened(False, plain) as view:
                view.show(found)
            shown = display.text(found, [{"job": "a", "phase": "queued"}])
            told = report.report(found["job"]) if found.get("job") else ""
            listed = display.listing(found.get("jobs", []), found.get("idle_cost"))
            for out in (plain.getvalue(), shown, told, listed):
                assert out == text.clean(out)


# Lines


def test_log_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred and fifty: logs and events."""
    rng = random.Random("lines")
    store, key = Store(str(tmp_path)), log_key("toy-1", 1, "spot-0", 0)
    monkeypatch.setattr(logs, "RANGE", 64)
    for _ in range(150):
        data = b"".join(
            rng.choice(
                [mutate(rng, "step 5 loss 0.3\n").encode(errors="replace"), bytes(rng.choices(range(256), k=40))]
            )
            for _ in range(6)
        )
        store.put(key, data)
        pieces = "".join(logs.read(store, key, rng.choice([None, 1, 3])))
        assert data.decode(errors="replace").endswith(pieces)
        assert text.clean(text.clean(pieces)) == text.clean(pieces)
        event = _event(document(rng, EVENT))
        if event is not None:
            assert "\n" not in text.line(display.event_line(event))
