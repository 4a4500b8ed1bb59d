"""Find the facts about this machine, from programs, the PCI bus and the disk, by a deadline.

On a machine without GPUs and EFAs this costs almost nothing: it starts no program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from spotrun.machine.gpus import gpu_count
from spotrun.node.health.verdict import Facts, count_fabric, parse_smi, wanted_gpus
from spotrun.node.network import is_loopback

ANSWER = 30.0  # seconds for nvidia-smi and fi_info: a broken driver may never answer
PRODUCT = 180.0  # seconds for the matrix products: the first import of torch is slow on a disk made from an image
KILLED = 1.0  # seconds until a killed program counts as hung in the driver
PCI_VGA, PCI_3D = "0x0300", "0x0302"  # classes of display controllers (pci.ids); NVIDIA's switches have others
NVIDIA, AMAZON = "0x10de", "0x1d0f"
FI_INFO_FOLDER = "/opt/amazon/efa/bin"  # where Amazon's installer puts it
REMAPPED = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
QUERY = "index,name,gpu_bus_id,ecc.errors.uncorrected.volatile.total"
FORM = "--format=csv,noheader,nounits"
PCI = Path("/sys/bus/pci/devices")
# The kernel kills the program when the agent ends. The setting survives exec (prctl(2)).
_WRAPPER = (
    "import os, sys; from spotrun.machine.processes import die_with_parent; die_with_parent(int(sys.argv[1]));"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Output:
    """The output of a program."""

    status: int  # exit status; -1: the program was not started or did not end, and `err` says why
    out: str = ""
    err: str = ""

    @property
    def problem(self) -> str:
        return _first_line(self.err) or _first_line(self.out) or f"status {self.status}"


class Programs:
    """Runs programs that examine the hardware.

    A program that hangs in its driver cannot be killed. It is not started again while it exists: else each try would
    leave one more.
    """

    def __init__(self) -> None:
        self._hung: dict[str, asyncio.subprocess.Process] = {}

    async def run(self, program: str, *args: str, limit: float, until: float) -> Output:
        """Run a program for at most `limit` seconds, and not after `until`, a time of this event loop."""
        path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{FI_INFO_FOLDER}")
        if path is None:
            return Output(-1, err="it is not installed")
        return await self._run(program, [path, *args], limit, until)

    async def run_module(self, name: str, limit: float, until: float) -> Output:
        """Run `python -m name`. -P: no module of the working directory comes before the installed ones."""
        return await self._run(name, [sys.executable, "-P", "-m", name], limit, until)

    async def _run(self, name: str, command: list[str], limit: float, until: float) -> Output:
        hung = self._hung.get(name)
        if hung is not None and hung.returncode is None:
            return Output(-1, err=f"it hangs, and cannot be ended (process {hung.pid})")
        seconds = min(limit, until - asyncio.get_running_loop().time())
        if seconds <= 0:
            return Output(-1, err="there was no time left to ask")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _WRAPPER, str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            return Output(-1, err=f"it cannot be run: {error.strerror or error}")
        try:
            async with asyncio.timeout(seconds):
                out, err = await process.communicate()
        except TimeoutError:
            return Output(-1, err=f"no answer within {seconds:.3g} s")
        finally:
            if process.returncode is None:
                await self._kill(name, process)
        return Output(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))

    async def _kill(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._hung[name] = process
        with contextlib.suppress(OSError):  # TimeoutError and ProcessLookupError too
            process.kill()
            async with asyncio.timeout(KILLED):
                await process.communicate()


async def probe_hardware(facts: Facts, address: str, programs: Programs, until: float, pci: Path = PCI) -> Facts:
    """Add the facts about GPUs and EFAs. address: the machine's own. until: as in `Programs.run`.

    Machines of a local cloud have loopback addresses and share the computer's bus and GPUs. There, only required
    hardware is examined.
    """
    if not is_loopback(address):
        bus = await asyncio.to_thread(_read_bus, pci)
        on_bus = sum(vendor == NVIDIA and kind.startswith((PCI_VGA, PCI_3D)) for vendor, _, kind in bus)
        adapters = sum(vendor == AMAZON and device.startswith("0xefa") for vendor, device, _ in bus)
        facts = replace(facts, on_bus=on_bus, nodes=gpu_count(), adapters=adapters)
    if wanted_gpus(facts):
        facts = await _probe_gpus(facts, programs, until)
    if facts.adapters:
        facts = await _probe_fabric(facts, programs, until)
    return facts


async def probe_disk(facts: Facts, scratch: Path, until: float) -> Facts:
    """Add the free space of the scratch disk. until: as in `Programs.run`."""
    try:
        async with asyncio.timeout_at(until):
            disk, error = await asyncio.to_thread(_free, scratch)
    except TimeoutError:
        disk, error = None, f"{scratch} does not answer"
    return replace(facts, disk=disk, disk_error=error)


async def _probe_gpus(facts: Facts, programs: Programs, until: float) -> Facts:
    """Add what nvidia-smi and torch find. torch is asked only if nvidia-smi lists all GPUs."""
    output = await programs.run("nvidia-smi", f"--query-gpu={QUERY}", FORM, limit=ANSWER, until=until)
    rows = Output(-1)
    if parse_smi(output.out)[0]:
        rows = await programs.run("nvidia-smi", f"--query-remapped-rows={REMAPPED}", FORM, limit=ANSWER, until=until)
    smi, rest = parse_smi(output.out, rows.out)
    # A warning changes the status too: 14 is a damaged infoROM, and such a GPU still computes.
    status = f"status {output.status}" if output.status else ""
    facts = replace(facts, smi=smi, smi_error=_first_line("\n".join(rest)) or _first_line(output.err) or status)
    if len(smi) < wanted_gpus(facts):
        return facts
    output = await programs.run_module("spotrun.node.health.gpu_check", PRODUCT, until)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        if output.status == 0:
            answer = json.loads(output.out)
            products = {int(index): str(why) for index, why in answer["failures"].items()}
            return replace(facts, torch_gpus=int(answer["count"]), products=products)
    return replace(facts, product_error=_last_line(output.err) or f"the process ended with status {output.status}")


async def _probe_fabric(facts: Facts, programs: Programs, until: float) -> Facts:
    """Add what libfabric finds, and whether NCCL can use it."""
    output = await programs.run("fi_info", "-p", "efa", limit=ANSWER, until=until)
    if output.status != 0:
        return replace(facts, fabric_error=output.problem)
    facts = replace(facts, fabric=count_fabric(output.out))
    if wanted_gpus(facts):
        output = await programs.run_module("spotrun.node.health.nccl_check", ANSWER, until)
        if output.status != 0:
            # The last line of a traceback has the reason.
            facts = replace(facts, plugin_error=_last_line(output.err) or output.problem)
    return facts


def _read_bus(pci: Path) -> list[tuple[str, str, str]]:
    """(vendor, device, class) of each PCI device."""
    found = []
    with contextlib.suppress(OSError):
        for entry in pci.iterdir():
            with contextlib.suppress(OSError):
                found.append(tuple((entry / name).read_text().strip() for name in ("vendor", "device", "class")))
    return found  # type: ignore[return-value]


def _free(folder: Path) -> tuple[int | None, str]:
    """The bytes that this user may still write to the folder, or why this user cannot write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return None, f"{folder} is not writable"
        disk = os.statvfs(folder)
    except OSError as error:
        return None, str(error)
    return disk.f_bavail * disk.f_frsize, ""


def _first_line(text: str) -> str:
    return next(filter(None, map(str.strip, text.splitlines())), "")[:300]


def _last_line(text: str) -> str:
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "")[:300]
