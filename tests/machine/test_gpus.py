"""Which GPUs a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.machine.gpus import DEVICES, device_count, gpu_count, uses_gpus


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 3
    assert gpu_count(tmp_path / "none") == 0


def test_a_machine_of_the_local_cloud_does_not_use_this_computers_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv(DEVICES, "4")
    assert (gpu_count(tmp_path), device_count(), uses_gpus()) == (0, 4, False)
    monkeypatch.delenv(DEVICES)
    assert (gpu_count(tmp_path), uses_gpus()) == (1, True)
