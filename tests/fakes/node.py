"""Machines of a test: real agents on loopback addresses with a bucket in a folder, and a script that they can run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import uuid
import zipfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from spotrun.errors import NotFound
from spotrun.spec import JobSpec
from spotrun.store import Store, code_key, log_key
from spotrun.wire import Bundle, Generation, JobOrder, Member, Order
from tests.fakes.head import FakeHead, FakeMetadata, Seen
from tests.helpers import await_for

AGENT = (
    "import asyncio, logging; logging.basicConfig(level=logging.INFO);"
    "from spotrun.node.boot import run; asyncio.run(run())"
)

# Data-parallel "training" that needs torch.distributed and the control block and nothing else.
TOY = """
import argparse, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from helper_module import pause
from spotrun.state import shards, slots
from spotrun.state.control import EXIT_DRAINED, NONE, Context, Control

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--fail", default="")
parser.add_argument("--hang", default="")
parser.add_argument("--slow-commit", type=float, default=0.0)
args = parser.parse_args()
context = Context.from_env()
control = Control(Path(context.control))
folder = Path(context.slots)
control.entered = time.time()
dist.init_process_group("gloo")
control.grouped = time.time()
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
held = slots.newest(folder, context.job)
step = torch.tensor(held[0][1].step if held else 0)
dist.all_reduce(step, dist.ReduceOp.MAX)
step = int(step)
control.base = step
control.restored = time.time()
control.step = step
print("hello from", rank, "of", dist.get_world_size(), "cwd", os.getcwd(), "argv", sys.argv, flush=True)
print("tone", os.environ.get("TONE"), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], "name", __name__)
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), "restarts", os.environ["SPOTRUN_RESTARTS"])


def snapshot():
    control.copied = step
    time.sleep(args.slow_commit)
    slot = step % 2
    slots.revoke(folder, slot)
    entries = shards.layout([("weight", "F32", (4,)), ("bias", "F32", (2,))])
    data = torch.full((6,), float(step)).numpy().tobytes()
    slots.data_path(folder, slot).write_bytes(shards.header(entries) + data)
    size, xxh3 = slots.digest(slots.data_path(folder, slot))
    slots.commit(folder, slot, slots.Record(context.job, context.generation, step, size, xxh3, {"run": {}}))
    control.committed = step


def wedge():
    while True:
        time.sleep(3600)


while step < args.steps:
    here = f"{rank}@{step}@{context.generation}"
    if args.fail == here:
        raise ValueError(f"bad luck on rank {rank}")
    if args.hang == here:
        wedge()
    dist.all_reduce(torch.ones(8))
    pause()
    step += 1
    control.step = step
    control.stepped_at = time.time()
    control.samples = step
    draining = control.stop_at != NONE and step >= control.stop_at
    if local_rank == 0 and (draining or step == control.snapshot_at):
        snapshot()
    if draining:
        control.exit = EXIT_DRAINED
        os._exit(EXIT_DRAINED)
print("done at", step)
"""
HELPER = "import time\n\n\ndef pause():\n    time.sleep(0.01)\n"


def pack(files: dict[str, str]) -> bytes:
    """A bundle with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return zstandard.compress(buffer.getvalue())


def put_code(store: Store, data: bytes) -> str:
    """Upload a bundle; its sha256."""
    sha256 = hashlib.sha256(data).hexdigest()
    store.put(code_key(sha256), data)
    return sha256


def order_of(bundle: Bundle, epoch: int = 1, **job: Any) -> Order:
    """An order for one job."""
    return Order(epoch=epoch, jobs=(JobOrder(bundle=bundle, **job),))


def changed(order: Order, **values: object) -> Order:
    """The order of one job with other values for that job."""
    return order.replace(jobs=(order.jobs[0].replace(**values),))


def wheel(folder: Path) -> Path:
    """A package of one empty module, as a wheel."""
    path = folder / "tiny_package-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_package.py", "")
        info = "tiny_package-1.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@contextlib.contextmanager
def small_memory(folder: Path) -> Iterator[None]:
    """A tmpfs of 32 MiB on a folder. Not every user may mount one; then the test is skipped."""
    command = ["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Machine:
    """One node: its metadata server and its agent. before: Python that the agent's process runs first.

    bucket: its URL or folder. environment: of the agent, besides the test's.
    """

    def __init__(
        self, name: str, address: str, root: Path, bucket: Path | str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.address, self.root = name, address, root / name
        self.mark = uuid.uuid4().hex
        attributes = {"spotrun-cluster": "test", "spotrun-bucket": str(bucket), "spotrun-pool": "pool"}
        self.metadata = FakeMetadata("gce", attributes, name, address)
        self.process: asyncio.subprocess.Process | None = None
        self.keys = self.root / "ssh"
        self.tmpfs, self.scratch = self.root / "tmpfs", self.root / "scratch"
        self.before = ""
        self._environment = environment or {}

    @property
    def log(self) -> str:
        return (self.root / "agent.log").read_text()

    async def start(self) -> None:
        self.keys.mkdir(parents=True, exist_ok=True)
        (self.keys / "ssh_host_ed25519_key.pub").write_text(f"ssh-ed25519 AAAA{self.name} root@{self.name}\n")
        env = {**os.environ, **self._environment} | {
            "GCE_METADATA_HOST": await self.metadata.start(),
            "SPOTRUN_TMPFS": str(self.tmpfs),
            "SPOTRUN_SCRATCH": str(self.scratch),
            "SPOTRUN_SSH_KEYS": str(self.keys),
            "SPOTRUN_SSH_PORT": "2222",
            "SPOTRUN_TEST_MARK": self.mark,
            "OMP_NUM_THREADS": "1",
        }
        for name in ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "SPOTRUN_NODE"):
            env.pop(name, None)
        with (self.root / "agent.log").open("a") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", f"{self.before}\n{AGENT}", env=env, stderr=log
            )

    def processes(self) -> list[int]:
        """All of its processes, wherever they are in the tree."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
        return found

    async def kill(self) -> None:
        """As a machine dies: everything at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.gone()

    async def end(self) -> None:
        """SIGTERM to the agent alone."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
        await self.gone()

    async def gone(self) -> None:
        assert self.process is not None
        await self.process.wait()
        await await_for(lambda: not self.processes(), 10, f"no process of {self.name} left")


class World:
    """A bucket, a head without a mind, machines."""

    def __init__(self, root: Path, url: str = "", environment: Mapping[str, str] | None = None) -> None:
        """url: of the bucket; default: a folder. environment: of the agents, besides the test's."""
        self.root = root
        self.url, self.environment = url or str(root / "bucket"), environment or {}
        self.store = Store(self.url)
        self.head = FakeHead(self.store)
        self.machines: list[Machine] = []

    async def add(self, *names: str) -> list[Machine]:
        new = []
        for name in names:
            machine = Machine(name, f"127.0.9.{len(self.machines) + 2}", self.root, self.url, self.environment)
            self.machines.append(machine)
            await machine.start()
            new.append(machine)
        return new

    def bundle(self, *args: str, files: dict[str, str] | None = None, **job: object) -> Bundle:
        code = put_code(self.store, pack(files or {"src/train.py": TOY, "src/helper_module.py": HELPER}))
        script = next(iter(files)) if files else "src/train.py"
        spec = JobSpec.model_validate({"name": "toy", "script": script, "args": list(args), **job})
        return Bundle(id=f"toy-{uuid.uuid4().hex[:6]}", code=code, job=spec.model_dump(mode="json"))

    async def ready(self, bundle: Bundle, names: Iterable[str]) -> list[Seen]:
        """Order the bundle, wait until the nodes are ready for it."""
        for name in names:
            await self.head.order(name, order_of(bundle, self.head.epoch))
        return [
            await self.head.wait(name, lambda r: r.phase == "ready" and r.job == bundle.id and r.store, f"{name} ready")
            for name in names
        ]

    def generation(self, number: int, names: Iterable[str]) -> Generation:
        reports = [self.head.reports[name] for name in names]
        members = tuple(Member(node=r.node, boot=r.boot, address=r.address) for r in reports)
        return Generation(number=number, members=members, store=reports[0].store)

    async def begin(
        self, bundle: Bundle, number: int, names: Iterable[str], regroup: bool = False, **more: Any
    ) -> Order:
        """Order a generation of these nodes, first rank first. more: other values of the `JobOrder`."""
        names = list(names)
        generation = self.generation(number, names).replace(regroup=regroup)
        order = order_of(bundle, self.head.epoch, generation=generation, **more)
        for name in names:
            await self.head.order(name, order)
        return order

    async def steps(self, names: Iterable[str], number: int, step: int) -> list[Seen]:
        """Wait until all workers of a generation have done this many steps."""
        return [
            await self.head.wait(
                name,
                lambda r: r.generation == number and r.workers and all(w.step >= step for w in r.workers),
                f"{name}: generation {number} at step {step}",
            )
            for name in names
        ]

    async def phase(self, names: Iterable[str], number: int, phase: str) -> list[Seen]:
        return [
            await self.head.wait(
                name, lambda r: r.generation == number and r.phase == phase, f"{name}: generation {number} {phase}"
            )
            for name in names
        ]

    async def bucket_log(self, bundle: Bundle, generation: int, node: str, rank: int | str, text: str) -> str:
        """A log in the bucket, once it has `text`."""

        def look() -> str:
            try:
                found = self.store.get(log_key(bundle.id, generation, node, rank)).decode()
            except NotFound:
                return ""
            return found if text in found else ""

        return await await_for(look, 20, f"{text!r} in the log of rank {rank}")


@contextlib.asynccontextmanager
async def world(
    root: Path, *names: str, head: bool = True, url: str = "", environment: Mapping[str, str] | None = None
) -> AsyncIterator[World]:
    """A world with these machines; afterwards nothing of it is left running. url, environment: as of `World`."""
    found = World(root, url, environment)
    try:
        if head:
            await found.head.start()
        await found.add(*names)
        yield found
    except BaseException:
        for machine in found.machines:
            print(f"--- {machine.name}\n{machine.log[-6000:]}")
        raise
    finally:
        for machine in found.machines:
            if machine.process is not None:
                await machine.end()
            await machine.metadata.stop()
        await found.head.stop()
