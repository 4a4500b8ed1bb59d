"""What a node measures of its machine, and how it gets into the bucket."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard

from spotrun.errors import StoreError
from spotrun.node.telemetry import gpus as gpus_module
from spotrun.node.telemetry.gpus import Gpus, throttling
from spotrun.node.telemetry.recorder import WAITING, Readings
from spotrun.node.telemetry.sensors import Sensors
from spotrun.store import Store, system_folder
from tests.fakes.node import world as machines
from tests.fakes.nvml import H100, Nvml
from tests.helpers import await_for

PATIENCE = 120.0  # seconds that an agent with torch may take on a busy machine


def blocks(store: Store, job: str) -> list[list[dict[str, Any]]]:
    """The lines of each block."""
    keys = [key for key in store.list(system_folder(job)) if key.endswith(".zst")]
    found = (zstandard.decompress(store.get(key), 1 << 20) for key in keys)
    return [[json.loads(line) for line in block.splitlines()] for block in found]


def test_the_values_of_this_machine(tmp_path: Path) -> None:
    sensors = Sensors(tmp_path, tmp_path / "none", Gpus(Nvml()))
    first, second = sensors.read(), sensors.read()
    assert 0 <= second["cpu"] <= 100
    assert 0 < second["memory"] < second["memory_total"]
    assert 0 < second["tmpfs"] <= second["tmpfs_total"]
    assert not {"disk", "gpus"} & second.keys(), "a folder that there is not, and no GPUs"
    assert not {"net_in", "disk_read"} & first.keys(), "rates need two readings"
    rates = {name: second[name] for name in ("disk_read", "disk_write", "net_in", "net_out") if name in second}
    assert all(value >= 0 for value in rates.values())
    json.dumps(second, allow_nan=False)


def test_the_rates_are_those_between_two_readings(tmp_path: Path) -> None:
    """Traffic of this computer with itself is not the network's."""
    sensors = Sensors(tmp_path, tmp_path, Gpus(Nvml()))
    before = sensors.read()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sent = 0
            while sent < 50 << 20:
                sender.sendall(bytes(1 << 16))
                sent += 1 << 16
                got = 0
                while got < 1 << 16:
                    got += len(receiver.recv(1 << 16))
    after = sensors.read()
    seconds = after["time"] - before["time"]
    assert after.get("net_in", 0) * seconds < 40 << 20


def test_the_processor_is_compared_with_the_last_reading_of_any_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of threads reads, and a thread's first reading was 0 %."""
    times = namedtuple("times", "user idle iowait guest")
    seconds = iter([times(10.0, 80.0, 10.0, 5.0), times(16.0, 83.0, 11.0, 5.0), times(18.0, 91.0, 11.0, 6.0)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(seconds))
    sensors = Sensors(tmp_path, tmp_path)
    found: list[float] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(sensors.read()["cpu"]))
        thread.start()
        thread.join()
    assert found == [60.0, 20.0], "a guest's time is in the user's, too"


def test_the_values_of_gpus() -> None:
    old = {name: value for name, value in H100.items() if "Ecc" not in name and "Power" not in name}
    gpus = Gpus(Nvml(H100, old, {}))
    full, less, lost = gpus.read()
    assert full == {
        "use": 97, "memory": 60 << 30, "memory_total": 80 << 30, "temperature": 61, "power": 651.0, "sm_clock": 1755,
        "memory_clock": 1755, "ecc": 0, "throttle": ["power cap", "software thermal"],
        "throttle_bits": 0x24,
    }  # fmt: skip
    assert less == {name: value for name, value in full.items() if name not in ("ecc", "power")}
    assert lost == {}
    assert gpus.names() == ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "GPU"]


def test_a_driver_may_load_after_the_agent_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "gpu_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(H100))
    gpus = Gpus()
    assert gpus.read() == []
    monkeypatch.setattr(gpus_module, "gpu_count", lambda: 1)
    assert [each["use"] for each in gpus.read()] == [97]


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        pytest.param(0, [], id="nothing"),
        pytest.param(1, [], id="an idle GPU is not throttled"),
        pytest.param(0x48, ["hardware slowdown", "hardware thermal"], id="two reasons"),
        pytest.param(0x10000, ["unknown (0x10000)"], id="a reason of a newer driver"),
    ],
)
def test_why_clocks_are_low(bits: int, reasons: list[str]) -> None:
    assert throttling(bits) == reasons


def test_readings_wait_for_the_bucket_and_none_is_there_twice(tmp_path: Path) -> None:
    readings = Readings({"format": 1, "job": "j", "node": "n"})
    for number in range(3):
        readings.add({"time": 1.0 + number}, {0: (number, 0.5, 0.25)})
    folder = tmp_path / "bucket"
    folder.mkdir()
    store = Store(str(folder))
    (folder / "jobs").write_text("in the way")
    with pytest.raises(StoreError):
        readings.put(store, readings.begin())
    assert len(readings.waiting) == 3
    (folder / "jobs").unlink()
    for number in range(2):  # the answer to the first upload got lost
        readings.add({"time": 9.0 + number}, {})
        readings.put(store, readings.begin())
    readings.drop()
    assert len(readings.waiting) == 2, "those that came after the first try"
    (block,) = blocks(store, "j")
    assert [line.get("time") for line in block] == [None, 1.0, 2.0, 3.0]
    assert block[1]["ranks"] == {"0": [0, 0.5, 0.25]}


def test_what_waits_is_bounded() -> None:
    readings = Readings({})
    for number in range(2 * WAITING):
        readings.add({"time": float(number)}, {})
    assert len(readings.waiting) == WAITING
    assert json.loads(readings.waiting[-1])["time"] == 2 * WAITING - 1


@pytest.mark.timeout(900)
async def test_an_agent_measures_while_it_has_a_job(tmp_path: Path) -> None:
    """Readings have the steps of its workers. The agent uploads the last readings when the job leaves."""
    async with machines(tmp_path, "node-a") as w:
        bundle = w.bundle("--steps", "1000000", hang_timeout=5)
        await w.ready(bundle, ["node-a"])
        await w.begin(bundle, 1, ["node-a"])

        def stepped() -> list[dict[str, Any]]:
            lines = [line for block in blocks(w.store, bundle.id) for line in block]
            return [line for line in lines if line.get("ranks", {}).get("0", [0])[0] > 0]

        reading = (await await_for(stepped, PATIENCE, "a reading with steps"))[0]
        steps, whole, alone = reading["ranks"]["0"]
        assert steps > 0
        assert 0 <= alone <= whole
        (header, *_) = blocks(w.store, bundle.id)[0]
        assert (header["node"], header["job"], header["format"]) == ("node-a", bundle.id, 1)
