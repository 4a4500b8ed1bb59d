"""What workers are told of the network, as data; the interface is looked up on this computer."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from spotrun.node.network import Facts, environment, find_interface, gather
from spotrun.wire import Order
from tests.fakes.node import world

SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(), {}),
        (Facts("lo"), {"GLOO_SOCKET_IFNAME": "lo"}),
        (Facts("lo", gpus=1), {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", **SOON}),
        (Facts("ens4"), {"GLOO_SOCKET_IFNAME": "ens4"}),
        (Facts("ens5", gpus=8), {"GLOO_SOCKET_IFNAME": "ens5", "NCCL_SOCKET_IFNAME": "=ens5", **SOON}),
        (
            Facts("ens5", gpus=8, adapters=32),
            {
                "GLOO_SOCKET_IFNAME": "ens5",
                "NCCL_SOCKET_IFNAME": "=ens5",
                "NCCL_NET": "AWS Libfabric",
                "FI_EFA_USE_HUGE_PAGE": "0",
                **SOON,
            },
        ),
        (Facts("", gpus=8, adapters=1), {"NCCL_NET": "AWS Libfabric", "FI_EFA_USE_HUGE_PAGE": "0", **SOON}),
        (Facts("ens5", adapters=1), {"GLOO_SOCKET_IFNAME": "ens5", "FI_EFA_USE_HUGE_PAGE": "0"}),
    ],
)
def test_environment(facts: Facts, expected: dict[str, str]) -> None:
    assert environment(facts) == expected


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("127.0.9.2", "lo"), ("192.0.2.1", "")])
def test_interface(address: str, name: str) -> None:
    assert find_interface(address) == name


def test_interfaces_of_this_computer() -> None:
    found = {
        name: next((each.address for each in addresses if each.family is socket.AF_INET), "")
        for name, addresses in psutil.net_if_addrs().items()
    }
    assert found["lo"] == "127.0.0.1"
    assert {name: find_interface(address) for name, address in found.items() if address} == {
        name: name for name, address in found.items() if address
    }


def test_adapters_are_those_of_the_efa_driver(tmp_path: Path) -> None:
    for device, driver in (("rdmap0s6", "efa"), ("rdmap1s6", "efa"), ("mlx5_0", "mlx5_core")):
        place = tmp_path / "verbs" / device / "device"
        place.mkdir(parents=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (place / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert gather("192.0.2.1", tmp_path / "verbs").adapters == 2
    assert gather("192.0.2.1", tmp_path / "none").adapters == 0
    assert gather("127.0.9.2", tmp_path / "verbs").adapters == 0  # a local cloud's machines have no EFA in between


SCRIPT = """
import os
print("seen", os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"), flush=True)
"""


async def test_workers_get_it_and_the_job_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    async with world(tmp_path, "node-a") as w:
        plain = w.bundle(files={"train.py": SCRIPT})
        own = w.bundle(
            files={"train.py": SCRIPT}, env={"GLOO_SOCKET_IFNAME": "lo,eth9", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        )
        for bundle, seen in ((plain, "seen lo None"), (own, "seen lo,eth9 0")):
            await w.ready(bundle, ["node-a"])
            await w.begin(bundle, 1, ["node-a"])
            await w.bucket_log(bundle, 1, "node-a", 0, f"{seen}\n")
            await w.head.order("node-a", Order(epoch=1))
            await w.head.wait("node-a", lambda r: r.job is None, "idle")
        assert w.machines[0].log.count("workers' environment: GLOO_SOCKET_IFNAME=lo") == 1
