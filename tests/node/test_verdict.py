"""Whether a machine is fit: judged as data, gathered with programs and a PCI bus made up for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard.backend_c
from moto.utilities.utils import load_resource

from spotrun.machine.metadata import clock_ahead, detect
from spotrun.node.health import gpu_check, probe
from spotrun.node.health.probe import Programs, probe_disk, probe_hardware
from spotrun.node.health.verdict import Facts, Gpu, count_fabric, judge, parse_smi, remarks
from spotrun.spec.machine_types import EFAS, GPUS
from tests.fakes.head import FakeMetadata
from tests.helpers import await_for

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
            ["this machine is to have 4 GPUs, but nvidia-smi lists 3"],
        ),
        (
            Facts("n1-standard-8", gpus=2, smi_error="it is not installed"),
            ["this machine is to have 2 GPUs, but nvidia-smi does not list them: it is not installed"],
        ),
        (replace(P5, gpus=8, efas=32), []),
        (
            replace(P5, efas=32, adapters=0, fabric=0),
            ["this machine is to have 32 EFAs, but 0 are on the bus"],
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
        "nvidia-smi said besides: WARNING: infoROM is corrupted",
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


def soon() -> float:
    return asyncio.get_running_loop().time() + 120


async def test_a_machine_with_everything(tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl-net.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    tools("nvidia-smi", SMI)
    tools("fi_info", f'test "$*" = "-p efa" || exit 1\ncat <<END\n{FI_INFO}END')
    pci = bus(tmp_path / "pci", GPU, SWITCH, ADAPTER, ADAPTER, DISK)
    facts = await probe_hardware(Facts("unheard.of"), "10.0.0.2", Programs(), soon(), pci)
    assert (facts.on_bus, facts.adapters, facts.fabric, facts.fabric_error) == (1, 2, 2, "")
    assert (facts.smi, facts.smi_error) == ((Gpu(0, "NVIDIA L4", 1, False, True),), "")
    assert facts.torch_gpus is not None  # a real process with the real torch, whatever it sees here
    assert facts.product_error == ""
    place = tmp_path / "libnccl-net.so"
    assert facts.plugin_error == f"its plugin cannot be loaded: {place}: file too short"  # a real process here, too


async def test_a_machine_without_gpus_starts_no_program(tmp_path: Path, tools: Tools) -> None:
    for name in ("nvidia-smi", "fi_info"):
        tools(name, f"touch {tmp_path / 'called'}")
    pci = bus(tmp_path / "pci", DISK)
    facts = await probe_hardware(Facts("e2-small"), "10.0.0.2", Programs(), soon(), pci)
    assert facts == Facts("e2-small")
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("machine", ["local", "a2-megagpu-16g"])
async def test_what_the_computer_has_is_not_a_local_machines(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """On a computer with GPUs, too, it is only looked for what there must be."""
    monkeypatch.setattr(probe, "gpu_count", lambda: 8)
    tools("nvidia-smi", f"touch {tmp_path / 'called'}; {SMI}")
    pci = bus(tmp_path / "pci", GPU, ADAPTER)
    facts = await probe_hardware(Facts(machine), "127.0.9.2", Programs(), soon(), pci)
    assert (facts.on_bus, facts.nodes, facts.adapters) == (0, 0, 0)
    assert (tmp_path / "called").exists() == bool(facts.smi) == (machine in GPUS)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'NVIDIA-SMI has failed because of the driver.'; echo more; exit 9", "NVIDIA-SMI has failed because"),
        ("exit 3", "status 3"),
        ("echo nonsense", "nonsense"),
        ("echo 'no library' >&2; exit 12", "no library"),
        ("exec sleep 60", "no answer within 0.5 s"),
    ],
)
async def test_a_driver_in_trouble(tools: Tools, monkeypatch: pytest.MonkeyPatch, script: str, why: str) -> None:
    if "sleep" in script:
        monkeypatch.setattr(probe, "ANSWER", 0.5)
    tools("nvidia-smi", script)
    facts = await probe_hardware(Facts("g2-standard-8"), "127.0.9.2", Programs(), soon())
    assert facts.smi == ()
    assert facts.smi_error.startswith(why)
    assert facts.torch_gpus is None
    assert len(judge(facts)) == 1


WARNING = "WARNING: infoROM is corrupted at gpu 0000:00:1E.0"


@pytest.mark.parametrize(
    ("more", "besides"),
    [
        (f"echo '{WARNING}'; exit 14", WARNING),
        (f"echo '{WARNING}'", WARNING),
        ("echo 'ERROR: ld.so: object x.so cannot be preloaded: ignored.' >&2", "ERROR: ld.so: object x.so"),
        ("exit 14", "status 14"),
    ],
)
async def test_a_warning_is_no_trouble(tools: Tools, more: str, besides: str) -> None:
    tools("nvidia-smi", f'case "$1" in --query-gpu=*) echo "0, Tesla T4, {BUS}, 0"; {more};; *) exit 14;; esac')
    facts = await probe_hardware(Facts("g4dn.xlarge"), "127.0.9.2", Programs(), soon())
    assert facts.smi == (Gpu(0, "Tesla T4", 0),)
    assert facts.smi_error.startswith(besides)
    assert facts.torch_gpus is not None, "it was not asked"
    assert judge(replace(facts, torch_gpus=1)) == ()


async def test_programs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe, "FI_INFO_FOLDER", str(tmp_path))
    pci = bus(tmp_path / "pci", ADAPTER)
    facts = await probe_hardware(Facts("g2-standard-8"), "10.0.0.2", Programs(), soon(), pci)
    assert (facts.smi_error, facts.fabric_error) == ("it is not installed", "it is not installed")


async def test_no_program_gets_more_time_than_is_left(tools: Tools) -> None:
    tools("slow", "exec sleep 60")
    programs, now = Programs(), asyncio.get_running_loop().time()
    output = await programs.run("slow", limit=60, until=now + 0.25)
    assert (output.status, output.problem.startswith("no answer within 0.")) == (-1, True)
    assert (await programs.run("slow", limit=60, until=now)).problem == "there was no time left to ask"


async def test_a_program_that_hangs_in_the_kernel_is_not_started_again(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools("hangs", f"echo >>{tmp_path / 'started'}; exec sleep 60")
    monkeypatch.setattr(probe, "KILLED", 0.1)
    programs = Programs()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.subprocess.Process, "kill", lambda _: None)  # as the kernel does with one in its hands
        assert (await programs.run("hangs", limit=0.5, until=soon())).problem == "no answer within 0.5 s"
    why = (await programs.run("hangs", limit=0.5, until=soon())).problem
    assert why.startswith("it hangs, and cannot be ended (process ")
    await await_for((tmp_path / "started").exists, what="the program's first line")
    assert (tmp_path / "started").read_text() == "\n"
    tools("other", "echo fine")
    assert (await programs.run("other", limit=60, until=soon())).out == "fine\n"  # others are asked all the same
    pid = int(why.removesuffix(")").rpartition(" ")[2])
    os.kill(pid, signal.SIGKILL)

    async def asked_again() -> bool:
        return "no answer" in (await programs.run("hangs", limit=0.5, until=soon())).problem

    await await_for(asked_again, what="another one, now that the first is gone")
    assert not Path(f"/proc/{pid}").exists()


async def test_a_program_ends_with_the_one_that_asks(tmp_path: Path, tools: Tools) -> None:
    tools("slow", f"echo $$ >{tmp_path / 'pid'}.part; mv {tmp_path / 'pid'}.part {tmp_path / 'pid'}; exec sleep 60")
    code = "import asyncio; from spotrun.node.health.probe import Programs;"
    code += "asyncio.run(Programs().run('slow', limit=60, until=10**9))"
    asking = subprocess.Popen([sys.executable, "-c", code])
    await await_for(lambda: (tmp_path / "pid").exists(), what="the program")
    pid = int((tmp_path / "pid").read_text())
    asking.kill()
    assert asking.wait() == -signal.SIGKILL
    await await_for(lambda: not Path(f"/proc/{pid}").exists(), what="its end")


async def test_a_scratch_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = await probe_disk(Facts(), tmp_path / "file" / "scratch", soon())
    assert "Not a directory" in facts.disk_error
    facts = await probe_disk(Facts(), tmp_path / "new", soon())
    assert (facts.disk_error, bool(facts.disk)) == ("", True)
    facts = await probe_disk(Facts(), tmp_path / "new", 0.0)
    assert facts.disk_error == f"{tmp_path / 'new'} does not answer"


def test_the_matrix_product() -> None:
    assert gpu_check.check(["cpu", "cpu"]) == {}
    wrong = torch.zeros(gpu_check.SIZE, gpu_check.SIZE)
    assert gpu_check.check(["cpu"], expected=wrong) == {0: "a matrix product is wrong"}
    almost = (grid := torch.arange(gpu_check.SIZE**2, dtype=torch.float32).reshape(gpu_check.SIZE, -1) % 7 - 3) @ grid.T
    assert gpu_check.check(["cpu"], expected=almost) == {}
    almost[3, 5] += 1
    assert gpu_check.check(["cpu"], expected=almost) == {0: "a matrix product is wrong"}
    failed = gpu_check.check(["cpu", "nothing"])
    assert list(failed) == [1]
    assert "nothing" in failed[1]


LIBRARY = Path(zstandard.backend_c.__file__)  # of those that any process can load


@pytest.mark.parametrize(
    ("there", "needs", "why"),
    [
        ((), False, "its plugin cannot be loaded: libfabric-for-it.so: "),
        (("libfabric-for-it.so",), False, ""),
        (("libfabric-for-it.so",), True, "libfabric-for-it.so cannot load what it needs: libcuda-for-it.so: "),
        (("libfabric-for-it.so", "libcuda-for-it.so"), True, ""),
    ],
)
def test_nccls_plugin(tmp_path: Path, there: tuple[str, ...], needs: bool, why: str) -> None:
    """Under other names: a computer with CUDA has the real ones."""
    for name in there:
        shutil.copy(LIBRARY, tmp_path / name)
    if needs:
        with (tmp_path / "libfabric-for-it.so").open("ab") as file:
            file.write(b"\0libcuda-for-it.so\0")  # as a string of the program; the loader minds no more bytes
    code = "from spotrun.node.health.nccl_check import check; print(check('libfabric-for-it.so', 'libcuda-for-it.so'))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(why)
    assert bool(done.stdout.strip()) == bool(why)


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
