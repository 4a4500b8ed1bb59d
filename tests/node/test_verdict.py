"""Whether a machine is fit: judged as data."""

from __future__ import annotations

from dataclasses import replace
from email.utils import formatdate
from typing import Any

import pytest
from moto.utilities.utils import load_resource

from spotrun.machine.metadata import clock_ahead
from spotrun.node.health.verdict import Facts, Gpu, count_fabric, judge, parse_smi, remarks
from spotrun.spec.machine_types import EFAS, GPUS

L4 = Gpu(0, "NVIDIA L4", 0, False, False)
FINE = Facts("g2-standard-8", on_bus=1, nodes=1, smi=(L4,), torch_gpus=1, disk=1 << 40, clock=0.0)
H100 = tuple(Gpu(index, "NVIDIA H100 80GB HBM3", 0, False, False) for index in range(8))
P5 = Facts("p5.48xlarge", on_bus=8, nodes=8, smi=H100, torch_gpus=8, adapters=32, fabric=32, disk=1 << 40)
SMALL = Facts("e2-small", disk=1 << 40)


@pytest.mark.parametrize(
    ("facts", "problems"),
    [
        (FINE, []),
        (P5, []),
        (SMALL, []),
        (Facts(), []),
        (replace(P5, adapters=0, fabric=0), []),  # its cluster file wants no EFA
        (replace(FINE, smi=(replace(L4, ecc_errors=None, remap_pending=None, remap_failed=None),)), []),
        (replace(FINE, machine="n1-standard-4"), []),
        (replace(FINE, clock=-1.9), []),
        (replace(FINE, smi=(replace(L4, remap_pending=True),)), []),
        (replace(FINE, smi_error="WARNING: infoROM is corrupted at gpu 0000:00:1E.0"), []),
        (
            replace(FINE, smi=(), torch_gpus=None, smi_error="couldn't communicate with the NVIDIA driver"),
            [
                "g2-standard-8 has 1 GPUs, but nvidia-smi does not list them: "
                "couldn't communicate with the NVIDIA driver"
            ],
        ),
        (replace(P5, smi=H100[:7]), ["p5.48xlarge has 8 GPUs, but nvidia-smi lists 7"]),
        (replace(P5, on_bus=7, nodes=7, smi=H100[:7]), ["p5.48xlarge has 8 GPUs, but nvidia-smi lists 7"]),
        (replace(P5, torch_gpus=0), ["p5.48xlarge has 8 GPUs, but torch sees 0"]),
        (
            Facts("n1-standard-4", on_bus=1, smi_error="it cannot be run: No such file or directory"),
            ["this machine has 1 GPUs, but nvidia-smi does not list them: it cannot be run: No such file or directory"],
        ),
        (
            replace(FINE, smi=(replace(L4, ecc_errors=3, remap_pending=True),)),
            ["GPU 0 (NVIDIA L4) has 3 uncorrected memory errors"],
        ),
        (
            replace(P5, smi=H100[:7], smi_error="Unable to determine the device handle for GPU 0000:B3:00.0"),
            [
                "p5.48xlarge has 8 GPUs, but nvidia-smi lists 7: "
                "Unable to determine the device handle for GPU 0000:B3:00.0"
            ],
        ),
        (
            Facts("n1-standard-8", gpus=4, on_bus=3, nodes=3, smi=(L4,) * 3, torch_gpus=3),
            ["this machine should have 4 GPUs, but nvidia-smi lists 3"],
        ),
        (
            Facts("n1-standard-8", gpus=2, smi_error="it is not installed"),
            ["this machine should have 2 GPUs, but nvidia-smi does not list them: it is not installed"],
        ),
        (replace(P5, gpus=8, efas=32), []),
        (
            replace(P5, efas=32, adapters=0, fabric=0),
            ["this machine should have 32 EFAs, but 0 are on the bus"],
        ),
        (replace(P5, efas=16, adapters=16, fabric=16), []),  # a pool whose machines get half of them
        (
            replace(P5, plugin_error="its plugin cannot be loaded: libnccl-net.so: no such file"),
            ["NCCL cannot use the EFAs: its plugin cannot be loaded: libnccl-net.so: no such file"],
        ),
        (
            replace(FINE, smi=(replace(L4, remap_pending=True, remap_failed=True),)),
            ["GPU 0 (NVIDIA L4) could not remap rows of its memory"],
        ),
        (replace(P5, products={3: "a matrix product is wrong"}), ["GPU 3: a matrix product is wrong"]),
        (
            replace(FINE, torch_gpus=None, product_error="no answer within 180 s"),
            ["no matrix product on the GPUs: no answer within 180 s"],
        ),
        (replace(P5, adapters=31, fabric=31), ["p5.48xlarge has 32 EFAs, but 31 are on the bus"]),
        (replace(P5, fabric=0, fabric_error="fi_getinfo: -61"), ["fi_info finds no EFA: fi_getinfo: -61"]),
        (replace(P5, fabric=31), ["32 EFAs are on the bus, but fi_info lists 31"]),
        (replace(SMALL, disk=5 << 20), ["5 MiB are free on the scratch disk, 1024 are needed"]),
        (
            replace(SMALL, disk=None, disk_error="/x is not writable"),
            ["the scratch folder cannot be used: /x is not writable"],
        ),
        (replace(SMALL, clock=70.2), ["the clock is 70 s ahead of the cloud's"]),
        (replace(SMALL, clock=-3.0), ["the clock is 3 s behind the cloud's"]),
        (
            replace(FINE, smi=(), smi_error="x", disk=0, clock=9.0),
            [
                "g2-standard-8 has 1 GPUs, but nvidia-smi does not list them: x",
                "0 MiB are free on the scratch disk, 1024 are needed",
                "the clock is 9 s ahead of the cloud's",
            ],
        ),
    ],
)
def test_judge(facts: Facts, problems: list[str]) -> None:
    assert judge(facts) == tuple(problems)


def test_what_is_worth_a_line_and_no_more() -> None:
    assert remarks(FINE) == remarks(SMALL) == ()
    noisy = replace(FINE, smi=(replace(L4, remap_pending=True),), smi_error="WARNING: infoROM is corrupted")
    assert judge(noisy) == ()
    assert remarks(noisy) == (
        "GPU 0 (NVIDIA L4) has rows of its memory to remap when it is reset next",
        "nvidia-smi also said: WARNING: infoROM is corrupted",
    )
    assert remarks(replace(FINE, smi=(), smi_error="no driver")) == ()  # a problem, and said as one


BUS = "00000000:00:03.0"


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("", "", ()),
        (f"0, NVIDIA L4, {BUS}, 0\n", f"{BUS}, No, No\n", (Gpu(0, "NVIDIA L4", 0, False, False),)),
        (f"0, NVIDIA L4, {BUS}, 2\n", f"{BUS}, 1, 0\n", (Gpu(0, "NVIDIA L4", 2, True, False),)),
        (f"0, Tesla T4, {BUS}, [N/A]\n", f"{BUS}, [N/A], [N/A]\n", (Gpu(0, "Tesla T4"),)),
        (f"0, Tesla T4, {BUS}, 0\n", 'Field "remapped_rows.pending" is not valid', (Gpu(0, "Tesla T4", 0),)),
    ],
)
def test_parse_smi(text: str, rows: str, expected: tuple[Gpu, ...]) -> None:
    assert parse_smi(text, rows) == (expected, ())


@pytest.mark.parametrize("junk", ["No devices were found", "0, NVIDIA L4", "x, NVIDIA L4, b, 0"])
def test_what_else_nvidia_smi_says_is_no_gpu(junk: str) -> None:
    assert parse_smi(junk) == ((), (junk,))
    assert parse_smi(f"0, Tesla T4, {BUS}, 0\n\n{junk}\n") == ((Gpu(0, "Tesla T4", 0),), (junk,))


FI_INFO = "".join(
    f"provider: efa\n    fabric: efa\n    domain: {domain}\n    version: 201.0\n    type: FI_EP_RDM\n"
    for domain in ("rdmap79s0-rdm", "rdmap79s0-dgrm", "rdmap80s0-rdm", "rdmap80s0-dgrm", "rdmap80s0-rdm")
)


def test_adapters_are_counted_once_though_they_have_several_domains() -> None:
    assert count_fabric(FI_INFO) == 2
    assert count_fabric("fi_getinfo: -61 (No data available)\n") == 0


def test_gpu_counts_are_those_of_ec2() -> None:
    """Every type with whole NVIDIA GPUs is in the table, and none that has none or another number."""
    types: dict[str, Any] = load_resource("ec2/resources/instance_types.json")
    known = {
        name: sum(gpu["Count"] for gpu in info["GpuInfo"]["Gpus"] if gpu.get("Manufacturer") == "NVIDIA")
        for name, info in types.items()
        if "GpuInfo" in info
    }
    listed = {name: count for name, count in GPUS.items() if name in types}
    assert listed == {name: count for name, count in known.items() if count}
    assert set(EFAS) <= set(GPUS)


def test_gpu_counts_of_google_are_those_in_their_names() -> None:
    named = {name: count for name, count in GPUS.items() if name.endswith("g") and name.startswith("a")}
    assert len(named) > 10
    assert all(name.endswith(f"gpu-{count}g") for name, count in named.items())


@pytest.mark.parametrize(
    ("date", "before", "after", "expected"),
    [
        ("", 0.0, 0.0, None),
        ("yesterday", 0.0, 0.0, None),
        (formatdate(1000, usegmt=True), 1000.2, 1000.4, 0.0),
        (formatdate(1000, usegmt=True), 999.0, 1000.4, 0.0),  # slow to answer
        (formatdate(1000, usegmt=True), 1000.9, 1001.1, 0.0),
        (formatdate(1000, usegmt=True), 1008.0, 1008.1, 7.0),
        (formatdate(1000, usegmt=True), 990.0, 990.5, -9.5),
    ],
)
def test_clock(date: str, before: float, after: float, expected: float | None) -> None:
    assert clock_ahead(date, before, after) == expected
