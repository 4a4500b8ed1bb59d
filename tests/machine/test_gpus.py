"""Which GPUs a machine has."""

from __future__ import annotations

from pathlib import Path

from spotrun.machine.gpus import gpu_count


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 3
    assert gpu_count(tmp_path / "none") == 0
