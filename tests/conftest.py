"""Tests marked `gpu` need CUDA devices. Without one they are skipped; under `--gpu` that is an error."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu alone; fail without a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu"):
        config.option.markexpr = "gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not wanted:
        return
    import torch  # not at the top: most tests do without, and this takes seconds

    devices = torch.cuda.device_count()  # asks NVML: forks can use CUDA after that
    if not devices and config.getoption("--gpu"):
        raise pytest.UsageError("--gpu: torch finds no CUDA device on this machine: `nvidia-smi` says why")
    for item, mark in wanted:
        if reason := missing(int(mark.kwargs.get("devices", 1)), devices):
            item.add_marker(pytest.mark.skip(reason=reason))


def missing(needs: int, devices: int) -> str:
    """Why a test that needs so many devices cannot run; empty if it can."""
    if needs <= devices:
        return ""
    return f"needs {'a CUDA device' if needs == 1 else f'{needs} CUDA devices'}; this machine has {devices}"
