"""Whether a machine is fit: judged as data, gathered with programs and a PCI bus made up for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from moto.utilities.utils import load_resource

from spotrun.node import fitness
from spotrun.node.fitness import Facts, Gpu, check, count_fabric, gather, judge, parse_smi
from spotrun.node.metadata import clock_ahead, detect
from spotrun.spec import efa, gpus
from spotrun.store import Store, unfit_key
from spotrun.wire import Order, UnfitRecord
from tests.fakehead import FakeMetadata
from tests.fakenode import Machine, world
from tests.helpers import await_for

L4 = Gpu(0, "NVIDIA L4", 0, False, False)
FINE = Facts("g2-standard-8", on_bus=1, nodes=1, smi=(L4,), torch_gpus=1, disk=1 << 40, clock=0.0)
H100 = tuple(Gpu(index, "NVIDIA H100 80GB HBM3", 0, False, False) for index in range(8))
P5 = Facts("p5.48xlarge", 8, 8, smi=H100, torch_gpus=8, adapters=32, fabric=32, disk=1 << 40)
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
            [
                "GPU 0 (NVIDIA L4) has 3 uncorrected memory errors",
                "GPU 0 (NVIDIA L4) has rows of its memory to remap, and must be reset",
            ],
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
    assert parse_smi(text, rows) == expected


@pytest.mark.parametrize("junk", ["No devices were found", "0, NVIDIA L4", "x, NVIDIA L4, b, 0"])
def test_junk_of_nvidia_smi_is_no_gpu(junk: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi said"):
        parse_smi(junk)


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
    listed = {name: count for name, count in gpus.TABLE.items() if name in types}
    assert listed == {name: count for name, count in known.items() if count}
    assert set(efa.TABLE) <= set(gpus.TABLE)


def test_gpu_counts_of_google_are_those_in_their_names() -> None:
    named = {name: count for name, count in gpus.TABLE.items() if name.endswith("g") and name.startswith("a")}
    assert len(named) > 10
    assert all(name.endswith(f"gpu-{count}g") for name, count in named.items())


Tools = Callable[[str, str], None]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Puts shell scripts on the PATH, before everything else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


def bus(folder: Path, *entries: tuple[str, str, str]) -> Path:
    for number, values in enumerate(entries):
        (folder / str(number)).mkdir(parents=True)
        for name, value in zip(("vendor", "device", "class"), values, strict=True):
            (folder / str(number) / name).write_text(f"{value}\n")
    return folder


GPU, SWITCH = ("0x10de", "0x2330", "0x030200"), ("0x10de", "0x22a3", "0x068000")
ADAPTER, DISK = ("0x1d0f", "0xefa2", "0x020000"), ("0x1d0f", "0x8061", "0x010802")
SMI = f'case "$1" in --query-gpu=*) echo "0, NVIDIA L4, {BUS}, 1";; *) echo "{BUS}, No, Yes";; esac'


async def test_gathered_on_a_machine_with_everything(tmp_path: Path, tools: Tools) -> None:
    tools("nvidia-smi", SMI)
    tools("fi_info", f'test "$*" = "-p efa" || exit 1\ncat <<END\n{FI_INFO}END')
    pci = bus(tmp_path / "pci", GPU, SWITCH, ADAPTER, ADAPTER, DISK)
    facts = await gather("unheard.of", "10.0.0.2", tmp_path / "scratch", 0.5, pci)
    assert (facts.on_bus, facts.adapters, facts.fabric, facts.fabric_error) == (1, 2, 2, "")
    assert (facts.smi, facts.smi_error) == ((Gpu(0, "NVIDIA L4", 1, False, True),), "")
    assert facts.torch_gpus is not None  # a real process with the real torch, whatever it sees here
    assert facts.product_error == ""
    assert facts.disk
    assert facts.clock == 0.5


async def test_a_machine_without_gpus_starts_no_program(tmp_path: Path, tools: Tools) -> None:
    for name in ("nvidia-smi", "fi_info"):
        tools(name, f"touch {tmp_path / 'called'}")
    began = time.perf_counter()
    facts = await gather("e2-small", "10.0.0.2", tmp_path, None, bus(tmp_path / "pci", DISK))
    assert time.perf_counter() - began < 0.5
    assert judge(facts) == ()
    assert not (tmp_path / "called").exists()


async def test_the_bus_of_the_computer_is_not_that_of_a_local_machine(tmp_path: Path) -> None:
    facts = await gather("local", "127.0.9.2", tmp_path, None, bus(tmp_path / "pci", GPU, ADAPTER))
    assert (facts.on_bus, facts.adapters) == (0, 0)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'NVIDIA-SMI has failed because of the driver.'; echo more; exit 9", "NVIDIA-SMI has failed because"),
        ("exit 3", "status 3"),
        ("echo nonsense", "nvidia-smi said 'nonsense'"),
        ("exec sleep 60", "no answer within 0.5 s"),
    ],
)
async def test_a_driver_in_trouble(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(fitness, "ANSWER", 0.5)
    tools("nvidia-smi", script)
    facts = await gather("g2-standard-8", "127.0.9.2", tmp_path, None)
    assert facts.smi_error.startswith(why)
    assert facts.torch_gpus is None


async def test_programs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fitness, "FI_INFO_FOLDER", str(tmp_path))
    facts = await gather("g2-standard-8", "10.0.0.2", tmp_path, None, bus(tmp_path / "pci", ADAPTER))
    assert facts.smi_error == "it cannot be run: No such file or directory"
    assert facts.fabric_error == "it is not installed"


async def test_a_scratch_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = await gather("e2-small", "127.0.9.2", tmp_path / "file" / "scratch", None)
    assert "Not a directory" in facts.disk_error


async def test_what_passes_is_no_problem() -> None:
    seen = iter([replace(SMALL, clock=9.0), SMALL])

    async def look() -> Facts:
        return next(seen)

    assert await check(look, pauses=(0.0, 0.0)) == ()
    seen = iter([replace(SMALL, clock=9.0)] * 3)
    assert await check(look, pauses=(0.0, 0.0)) == ("the clock is 9 s ahead of the cloud's",)
    assert list(seen) == []


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


@pytest.mark.parametrize(
    ("flavour", "variable"), [("gce", "GCE_METADATA_HOST"), ("ec2", "AWS_EC2_METADATA_SERVICE_ENDPOINT")]
)
async def test_the_metadata_tell_the_machine_type_and_the_time(
    monkeypatch: pytest.MonkeyPatch, flavour: str, variable: str
) -> None:
    server = FakeMetadata(flavour, {})
    server.type = "g6.xlarge"
    place = await server.start()
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", raising=False)
    monkeypatch.setenv(variable, place if flavour == "gce" else f"http://{place}/")
    async with await detect() as metadata:
        assert (await metadata.identity()).type == "g6.xlarge"
        assert metadata.ahead == 0.0
    await server.stop()


async def test_an_unfit_machine_says_so_and_takes_no_job(tmp_path: Path, tools: Tools) -> None:
    """Its nvidia-smi fails; the check's own pauses are waited for, as on a machine."""
    tools("nvidia-smi", "echo 'no driver'; exit 9")
    async with world(tmp_path) as w:
        machine = Machine("node-a", "127.0.9.2", tmp_path, tmp_path / "bucket")
        machine.metadata.type = "a2-megagpu-16g"
        w.machines.append(machine)
        await machine.start()
        bundle = w.bundle()
        report = await w.head.wait("node-a", lambda r: r.phase == "unfit", "that it is not fit")
        why = "a2-megagpu-16g has 16 GPUs, but nvidia-smi does not list them: no driver"
        assert report.unfit == (why,)
        data = await await_for(
            lambda: Store(str(tmp_path / "bucket")).find(unfit_key("test", "node-a")), what="a record"
        )
        record = UnfitRecord.model_validate_json(data)
        assert (record.node, record.boot, record.type, record.problems) == (
            "node-a", report.boot, "a2-megagpu-16g", (why,)
        )  # fmt: skip
        assert f"this machine takes no job: {why}" in machine.log
        await w.head.order("node-a", Order(epoch=1, bundle=bundle))
        before = len(w.head.history)
        await await_for(lambda: len(w.head.history) > before + 2, what="reports since the order")
        assert {(r.phase, r.job) for r in w.head.history} == {("unfit", None)}
        assert len(machine.processes()) == 1  # no launcher
