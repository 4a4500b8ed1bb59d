"""What programs, a PCI bus and metadata tell about a machine's hardware, all of them made up for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import zstandard.backend_c  # type: ignore[import-not-found]

from spotrun.machine.metadata import detect
from spotrun.node.health import gpu_check, probe
from spotrun.node.health.probe import Output, Programs, probe_disk, probe_hardware
from spotrun.node.health.verdict import Facts, Gpu, judge
from spotrun.spec.machine_types import GPUS
from tests.fakes.head import FakeMetadata
from tests.helpers import await_for

BUS = "00000000:00:03.0"
FI_INFO = "".join(f"provider: efa\n    domain: {domain}\n" for domain in ("rdmap79s0-rdm", "rdmap80s0-rdm"))
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


class TorchOnce(Programs):
    """Programs of which torch's, which take seconds, are run once for all tests."""

    _answers: ClassVar[dict[str, Output]] = {}

    async def run_module(self, name: str, limit: float, until: float) -> Output:
        if name not in self._answers:
            self._answers[name] = await super().run_module(name, limit, until)
        return self._answers[name]


async def test_a_machine_with_everything(tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl-net.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    tools("nvidia-smi", SMI)
    tools("fi_info", f'test "$*" = "-p efa" || exit 1\ncat <<END\n{FI_INFO}END')
    pci = bus(tmp_path / "pci", GPU, SWITCH, ADAPTER, ADAPTER, DISK)
    facts = await probe_hardware(Facts("unheard.of"), "10.0.0.2", TorchOnce(), soon(), pci)
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
    facts = await probe_hardware(Facts("g4dn.xlarge"), "127.0.9.2", TorchOnce(), soon())
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
