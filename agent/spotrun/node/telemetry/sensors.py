"""What a machine does now: processor, memory, disk, network and GPUs. Reading takes a fraction of a millisecond."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from spotrun.node.telemetry.gpus import Gpus

_LOOPBACK = "lo"


class Sensors:
    """The sensors of this machine. Rates are since the last reading. One thread at a time reads."""

    def __init__(self, tmpfs: Path, scratch: Path, gpus: Gpus | None = None) -> None:
        """tmpfs: the folder of the snapshots. scratch: the folder of code and logs."""
        self.gpus = gpus or Gpus()
        self._tmpfs, self._scratch = tmpfs, scratch
        self._before: dict[str, float] = {}  # counters of the last reading
        self._at = 0.0  # when the last reading was, monotonic
        self._processor = _processor_times()

    def read(self) -> dict[str, Any]:
        """The values now.

        cpu: percent of all cores. load: of one minute. memory, tmpfs, disk: bytes in use; with `_total`: all bytes.
        disk_read, disk_write, net_in, net_out: bytes a second; missing in the first reading. gpus: see `Gpus.read`.
        """
        memory = psutil.virtual_memory()
        found: dict[str, Any] = {
            "time": round(time.time(), 3),
            "cpu": self._percent(),
            "cores": psutil.cpu_count() or 1,
            "load": round(psutil.getloadavg()[0], 2),
            "memory": memory.total - memory.available,
            "memory_total": memory.total,
        }
        for name, folder in (("tmpfs", self._tmpfs), ("disk", self._scratch)):
            try:
                usage = psutil.disk_usage(str(folder))
            except OSError:  # the folder does not exist yet
                continue
            found |= {name: usage.used, f"{name}_total": usage.total}
        found |= self._rates()
        if gpus := self.gpus.read():
            found["gpus"] = gpus
        return found

    def _percent(self) -> float:
        """`psutil.cpu_percent` would compare with the last reading of the calling thread: readings change threads."""
        now, (busy, whole) = _processor_times(), self._processor
        self._processor = now
        passed = now[1] - whole
        return round(min(max((now[0] - busy) / passed, 0.0), 1.0) * 100, 1) if passed > 0 else 0.0

    def _rates(self) -> dict[str, float]:
        now, counters = time.monotonic(), _counters()
        seconds, before = now - self._at, self._before
        self._at, self._before = now, counters
        # If a device starts again, its counter begins again at 0.
        known = {name: counters[name] - before[name] for name in counters.keys() & before.keys()}
        return {name: round(more / seconds) for name, more in known.items() if more >= 0 and seconds > 0}


def _processor_times() -> tuple[float, float]:
    """Seconds of all cores since the start: in use, and all of them. Linux counts a guest's time a second time."""
    times = psutil.cpu_times()._asdict()
    whole = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return whole - times["idle"] - times.get("iowait", 0.0), whole


def _counters() -> dict[str, float]:
    found: dict[str, float] = {}
    if disk := psutil.disk_io_counters():
        found |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != _LOOPBACK]
    if cards:
        found["net_in"] = sum(card.bytes_recv for card in cards)
        found["net_out"] = sum(card.bytes_sent for card in cards)
    return found
