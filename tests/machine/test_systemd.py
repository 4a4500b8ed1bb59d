"""What systemd is told, on a real socket of each kind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotrun.machine.systemd import Systemd
from spotrun.spec import ClusterSpec
from spotrun.store import Store, cluster_key, head_key
from tests.fakes.head import FakeHead, FakeMetadata
from tests.fakes.node import AGENT
from tests.helpers import await_for


class Manager:
    """A service manager's ear. address: as NOTIFY_SOCKET has it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.reported_at: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def receive(self) -> list[str]:
        """All that has been said so far, line by line."""
        while True:
            try:
                self.reported_at += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self.reported_at

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@spotrun-{uuid.uuid4().hex}"
    found = Manager(address)
    yield found
    found.close()


def test_what_is_said(manager: Manager) -> None:
    systemd = Systemd(manager.address)
    systemd.ready("joined\nthe head")
    systemd.status("x" * 1000)
    systemd.stopping()
    assert manager.receive() == ["READY=1", "STATUS=joined the head", "STATUS=" + "x" * 500, "STOPPING=1"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Systemd()),
        ({"WATCHDOG_USEC": "2000000"}, Systemd()),
        ({"NOTIFY_SOCKET": "/s"}, Systemd("/s")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "3000000"}, Systemd("/s", 1.5)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "junk"}, Systemd("/s")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, Systemd("/s", 1.5)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, Systemd("/s")),
    ],
)
def test_variables_are_taken_out_of_the_environment(given: dict[str, str], expected: Systemd) -> None:
    environ = {"HOME": "/h", **given}
    assert Systemd.from_env(environ) == expected
    assert environ == {"HOME": "/h"}


async def test_nothing_without_a_manager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent = Systemd.from_env({})
    silent.ready("")
    await silent.watch()
    assert caplog.text == ""
    Systemd(str(tmp_path / "nobody")).ready("")  # a manager that is gone is no reason to fail
    assert "systemd was not told 'READY=1'" in caplog.text


async def test_a_loop_that_is_blocked_gives_no_sign_of_life(manager: Manager) -> None:
    watching = asyncio.create_task(Systemd(manager.address, interval=0.02).watch())
    await await_for(lambda: len(manager.receive()) >= 3, what="signs of life")
    before = len(manager.receive())
    time.sleep(0.3)  # the loop stands still: this is what is tested
    assert len(manager.receive()) == before
    await await_for(lambda: len(manager.receive()) >= before + 2, what="signs of life again")
    watching.cancel()
    assert set(manager.reported_at) == {"WATCHDOG=1"}


@pytest.mark.parametrize(("machine", "phase"), [("small", "idle"), ("a2-megagpu-16g", "checking")])
async def test_an_agent_says_when_it_has_joined_and_that_it_lives(
    tmp_path: Path, manager: Manager, machine: str, phase: str
) -> None:
    """It joins while its driver does not answer."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    bucket = tmp_path / "bucket"
    names = {"spotrun-cluster": "test", "spotrun-bucket": str(bucket), "spotrun-pool": "p"}
    metadata, head = FakeMetadata("gce", names), FakeHead(Store(str(bucket)))
    metadata.type = machine
    environment = {
        **os.environ,
        "GCE_METADATA_HOST": await metadata.start(),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SPOTRUN_TMPFS": str(tmp_path / "tmpfs"),
        "SPOTRUN_SCRATCH": str(tmp_path / "scratch"),
        "SPOTRUN_SSH_KEYS": str(tmp_path),
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "200000",
    }
    environment.pop("AWS_EC2_METADATA_SERVICE_ENDPOINT", None)
    agent = subprocess.Popen([sys.executable, "-c", AGENT], env=environment, stderr=subprocess.DEVNULL)
    try:
        await await_for(lambda: manager.receive().count("WATCHDOG=1") >= 3, what="signs of life")
        assert "READY=1" not in manager.receive()  # there is no head to join
        await head.start()
        await await_for(lambda: "READY=1" in manager.receive(), what="that it has joined")
        await head.wait("n", lambda r: r.phase == phase, "that node's report")
        joined = f"STATUS=joined the head of test at {head.record.address}:{head.record.port}: "
        await await_for(lambda: f"{joined}{phase}" in manager.receive(), what="that systemd knows")
        before = manager.reported_at.count("WATCHDOG=1")
        await await_for(lambda: manager.receive().count("WATCHDOG=1") > before + 2, what="signs of life again")
        said = [line.removeprefix(joined) for line in manager.reported_at if line.startswith("STATUS=joined")]
        assert said in ([phase], ["checking", phase])
        agent.send_signal(signal.SIGTERM)
        await await_for(lambda: "STOPPING=1" in manager.receive(), what="that it ends")
    finally:
        agent.terminate()
        await asyncio.to_thread(agent.wait)
        await head.stop()
        await metadata.stop()


async def test_a_head_says_when_it_serves(tmp_path: Path, manager: Manager) -> None:
    """One whose cloud does not answer, which must not matter."""
    store = Store(str(tmp_path / "bucket"))
    cluster = {"name": "test", "cloud": "local", "region": "zone", "pools": [{"name": "p", "zone": "zone-a"}]}
    store.put(cluster_key("test"), ClusterSpec.model_validate(cluster).document().encode())
    names = {"spotrun-cluster": "test", "spotrun-bucket": store.url}
    metadata = FakeMetadata("gce", names, address="127.0.9.77")
    environment = {
        **os.environ,
        "GCE_METADATA_HOST": await metadata.start(),
        "SPOTRUN_LOCAL_CLOUD": "http://127.0.9.77:9",
        "SPOTRUN_LOCAL_CLOUD_TOKEN": "t",
        "SPOTRUN_TMPFS": str(tmp_path),
        "SPOTRUN_SSH_KEYS": str(tmp_path),
        "SPOTRUN_SCRATCH": str(tmp_path),
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "200000",
    }
    environment.pop("AWS_EC2_METADATA_SERVICE_ENDPOINT", None)
    command = [sys.executable, "-m", "spotrun.cli", "head"]
    head = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        await await_for(lambda: "READY=1" in manager.receive(), what="that it serves")
        states = [each for each in manager.reported_at if each.startswith("STATUS=")]
        assert states[-1] == "STATUS=head 1 of test listens on 127.0.9.77:8470"
        assert store.exists(head_key("test"))
        before = manager.reported_at.count("WATCHDOG=1")
        await await_for(lambda: manager.receive().count("WATCHDOG=1") > before + 2, what="signs of life")
        head.send_signal(signal.SIGTERM)
        await await_for(lambda: "STOPPING=1" in manager.receive(), what="that it ends")
    finally:
        head.terminate()
        await asyncio.to_thread(head.wait)
        await metadata.stop()
