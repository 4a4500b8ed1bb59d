"""What this machine has: asked of programs, the PCI bus and the disk, within a time.

A machine without GPUs and without EFA pays next to nothing: no program is started there.
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

ANSWER = 30.0  # seconds for nvidia-smi and fi_info: a driver that is in trouble may never answer
PRODUCT = 180.0  # seconds for the matrix products: the first import of torch from a disk that fills from an image
KILLED = 1.0  # seconds for a killed program to be gone, unless it hangs in the driver
PCI_VGA, PCI_3D = "0x0300", "0x0302"  # classes of display controllers (pci.ids); NVIDIA's switches have others
NVIDIA, AMAZON = "0x10de", "0x1d0f"
FI_INFO_FOLDER = "/opt/amazon/efa/bin"  # where Amazon's installer puts it
REMAPPED = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
QUERY = "index,name,gpu_bus_id,ecc.errors.uncorrected.volatile.total"
FORM = "--format=csv,noheader,nounits"
PCI = Path("/sys/bus/pci/devices")
# An asked program ends with the agent, whatever ends that. (The kernel keeps the wish across exec: prctl(2).)
_WRAPPER = (
    "import os, sys; from spotrun.machine.processes import die_with_parent; die_with_parent(int(sys.argv[1]));"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Said:
    """What a program printed. status: its exit status, -1 if it did not end by itself; `err` then says why."""

    status: int
    out: str = ""
    err: str = ""

    @property
    def why(self) -> str:
        """Why it failed, in one line; empty if it did not."""
        return "" if self.status == 0 else _first_line(self.err) or _first_line(self.out) or f"status {self.status}"


class Programs:
    """Programs that are asked about the hardware.

    One that hangs in its driver cannot even be killed. It is not started again while it is there: there would be
    another after each try.
    """

    def __init__(self) -> None:
        self._hung: dict[str, asyncio.subprocess.Process] = {}

    async def ask(self, program: str, *args: str, limit: float, until: float) -> Said:
        """What a program says within `limit` seconds, but not after `until`, a time of this event loop."""
        path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{FI_INFO_FOLDER}")
        if path is None:
            return Said(-1, err="it is not installed")
        return await self._run(program, [path, *args], limit, until)

    async def ask_module(self, name: str, limit: float, until: float) -> Said:
        """The same of `python -m name`; no module of the working directory comes before the installed ones (-P)."""
        return await self._run(name, [sys.executable, "-P", "-m", name], limit, until)

    async def _run(self, name: str, command: list[str], limit: float, until: float) -> Said:
        hung = self._hung.get(name)
        if hung is not None and hung.returncode is None:
            return Said(-1, err=f"it hangs, and cannot be ended (process {hung.pid})")
        seconds = min(limit, until - asyncio.get_running_loop().time())
        if seconds <= 0:
            return Said(-1, err="there was no time left to ask")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _WRAPPER, str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            return Said(-1, err=f"it cannot be run: {error.strerror or error}")
        try:
            async with asyncio.timeout(seconds):
                out, err = await process.communicate()
        except TimeoutError:
            return Said(-1, err=f"no answer within {seconds:.3g} s")
        finally:
            if process.returncode is None:
                await self._kill(name, process)
        return Said(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))

    async def _kill(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._hung[name] = process
        with contextlib.suppress(OSError):  # among them that it has gone, or does not go
            process.kill()
            async with asyncio.timeout(KILLED):
                await process.communicate()


async def ask_hardware(facts: Facts, address: str, programs: Programs, until: float, pci: Path = PCI) -> Facts:
    """With what there is of GPUs and EFAs, and how they fare. address: the machine's own; until: as for `ask`.

    A local cloud's machines (their address is a loopback one) share the computer's bus and GPUs: there it is only
    looked for what there must be.
    """
    if not is_loopback(address):
        bus = await asyncio.to_thread(_read_bus, pci)
        on_bus = sum(vendor == NVIDIA and kind.startswith((PCI_VGA, PCI_3D)) for vendor, _, kind in bus)
        adapters = sum(vendor == AMAZON and device.startswith("0xefa") for vendor, device, _ in bus)
        facts = replace(facts, on_bus=on_bus, nodes=gpu_count(), adapters=adapters)
    if wanted_gpus(facts):
        facts = await _ask_gpus(facts, programs, until)
    if facts.adapters:
        facts = await _ask_fabric(facts, programs, until)
    return facts


async def ask_disk(facts: Facts, scratch: Path, until: float) -> Facts:
    """With what is free where the scratch folder is. until: as for `ask`."""
    try:
        async with asyncio.timeout_at(until):
            disk, error = await asyncio.to_thread(_free, scratch)
    except TimeoutError:
        disk, error = None, f"{scratch} does not answer"
    return replace(facts, disk=disk, disk_error=error)


async def _ask_gpus(facts: Facts, programs: Programs, until: float) -> Facts:
    """With what nvidia-smi and torch say; torch only if the driver lists all GPUs."""
    said = await programs.ask("nvidia-smi", f"--query-gpu={QUERY}", FORM, limit=ANSWER, until=until)
    rows = Said(-1)
    if parse_smi(said.out)[0]:
        rows = await programs.ask("nvidia-smi", f"--query-remapped-rows={REMAPPED}", FORM, limit=ANSWER, until=until)
    # Its status is that of a mere warning, too: 14 for a damaged infoROM, with which a GPU computes all the same.
    smi, rest = parse_smi(said.out, rows.out)
    besides = _first_line("\n".join(rest)) or _first_line(said.err) or (f"status {said.status}" if said.status else "")
    facts = replace(facts, smi=smi, smi_error=besides)
    if len(smi) < wanted_gpus(facts):
        return facts
    said = await programs.ask_module("spotrun.node.health.gpu_check", PRODUCT, until)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        if said.status == 0:
            answer = json.loads(said.out)
            products = {int(index): str(why) for index, why in answer["failures"].items()}
            return replace(facts, torch_gpus=int(answer["count"]), products=products)
    return replace(facts, product_error=_last_line(said.err) or f"the process ended with status {said.status}")


async def _ask_fabric(facts: Facts, programs: Programs, until: float) -> Facts:
    """With what libfabric says, and whether NCCL could make use of it."""
    said = await programs.ask("fi_info", "-p", "efa", limit=ANSWER, until=until)
    if said.status != 0:
        return replace(facts, fabric_error=said.why)
    facts = replace(facts, fabric=count_fabric(said.out))
    if wanted_gpus(facts):
        said = await programs.ask_module("spotrun.node.health.nccl_check", ANSWER, until)
        # A traceback has its reason in the last line.
        facts = replace(facts, plugin_error="" if said.status == 0 else _last_line(said.err) or said.why)
    return facts


def _read_bus(pci: Path) -> list[tuple[str, str, str]]:
    """(vendor, device, class) of all that is on the PCI bus."""
    found = []
    with contextlib.suppress(OSError):
        for entry in pci.iterdir():
            with contextlib.suppress(OSError):
                found.append(tuple((entry / name).read_text().strip() for name in ("vendor", "device", "class")))
    return found  # type: ignore[return-value]


def _free(folder: Path) -> tuple[int | None, str]:
    """Bytes that are free for this user where the folder is, or why it cannot be written to."""
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
