"""Whether this machine is fit to train: facts are gathered at the edge, and `judge` turns them into problems.

A machine without GPUs and without EFA pays next to nothing: no program is started there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spotrun.node.process import gpu_count, loopback
from spotrun.spec import efa, gpus

log = logging.getLogger(__name__)

DISK = 1 << 30  # bytes that a job's code, packages, logs and parts of checkpoints get at the least
CLOCK = 2.0  # seconds; a notice's deadline is in this clock, and the head leaves three for what must be done before
ANSWER = 30.0  # seconds for nvidia-smi and fi_info: a driver that is in trouble may never answer
PRODUCT = 180.0  # seconds for the matrix products: the first import of torch from a disk that fills from an image
PAUSES = (5.0, 10.0)  # seconds between tries before a problem counts: what starts beside the agent may need a moment
AGAIN = 30.0  # seconds between tries from then on
PCI_VGA, PCI_3D = "0x0300", "0x0302"  # classes of display controllers (pci.ids); NVIDIA's switches have others
NVIDIA, AMAZON = "0x10de", "0x1d0f"
FI_INFO_FOLDER = "/opt/amazon/efa/bin"  # where Amazon's installer puts it
REMAPPED = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
QUERY = "index,name,gpu_bus_id,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it; None: it does not count errors, or does not remap rows."""

    index: int
    name: str
    ecc_errors: int | None = None  # uncorrected ones since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None


@dataclass(frozen=True)
class Facts:
    """What was found. An `…_error` says why something could not be found out.

    on_bus, nodes: NVIDIA GPUs on the PCI bus, device files of the driver. adapters: EFAs on the PCI bus; fabric: those
    that libfabric can use. torch_gpus: that torch sees, None if it was not asked. disk: bytes free. clock: seconds that
    this machine is ahead of its cloud, None if the cloud does not say.
    """

    machine: str = ""
    on_bus: int = 0
    nodes: int = 0
    smi: tuple[Gpu, ...] = ()
    smi_error: str = ""
    torch_gpus: int | None = None
    products: Mapping[int, str] = field(default_factory=dict)  # what is wrong with which
    product_error: str = ""
    adapters: int = 0
    fabric: int = 0
    fabric_error: str = ""
    disk: int | None = None
    disk_error: str = ""
    clock: float | None = None


def judge(facts: Facts) -> tuple[str, ...]:
    """All that is wrong, a line each, the gravest first; nothing of what is not known."""
    return (*_judge_gpus(facts), *_judge_fabric(facts), *_judge_rest(facts))


async def check(look: Callable[[], Awaitable[Facts]], pauses: Sequence[float] = PAUSES) -> tuple[str, ...]:
    """What is wrong with this machine, and still is after a few tries."""
    problems = judge(await look())
    for pause in pauses:
        if not problems:
            break
        log.warning("not fit, looking again in %g s: %s", pause, "; ".join(problems))
        await asyncio.sleep(pause)
        problems = judge(await look())
    return problems


async def gather(
    machine: str, address: str, scratch: Path, clock: float | None, pci: Path = Path("/sys/bus/pci/devices")
) -> Facts:
    """Look at this machine. A local cloud's machines (their address is a loopback one) share the computer's bus."""
    buses = [] if loopback(address) else await asyncio.to_thread(_read_bus, pci)
    on_bus = sum(vendor == NVIDIA and kind.startswith((PCI_VGA, PCI_3D)) for vendor, _, kind in buses)
    adapters = sum(vendor == AMAZON and device.startswith("0xefa") for vendor, device, _ in buses)
    disk, disk_error = _free(scratch)
    facts = Facts(machine, on_bus, gpu_count(), adapters=adapters, disk=disk, disk_error=disk_error, clock=clock)
    if wanted_gpus(facts):
        facts = await _ask_gpus(facts)
    if adapters:
        facts = await _ask_fabric(facts)
    return facts


def wanted_gpus(facts: Facts) -> int:
    """GPUs that there should be: as the machine type says, else as the bus or the driver does."""
    return gpus.TABLE.get(facts.machine) or max(facts.on_bus, facts.nodes)


def _judge_gpus(facts: Facts) -> list[str]:
    wanted = wanted_gpus(facts)
    if not wanted:
        return []
    whose = facts.machine if facts.machine in gpus.TABLE else "this machine"
    if facts.smi_error:
        return [f"{whose} has {wanted} GPUs, but nvidia-smi does not list them: {facts.smi_error}"]
    if len(facts.smi) < wanted:
        return [f"{whose} has {wanted} GPUs, but nvidia-smi lists {len(facts.smi)}"]
    problems = []
    for gpu in facts.smi:
        if gpu.ecc_errors:
            problems.append(f"GPU {gpu.index} ({gpu.name}) has {gpu.ecc_errors} uncorrected memory errors")
        if gpu.remap_failed:
            problems.append(f"GPU {gpu.index} ({gpu.name}) could not remap rows of its memory")
        elif gpu.remap_pending:
            problems.append(f"GPU {gpu.index} ({gpu.name}) has rows of its memory to remap, and must be reset")
    if facts.product_error:
        problems.append(f"no matrix product on the GPUs: {facts.product_error}")
    elif facts.torch_gpus is not None and facts.torch_gpus < wanted:
        problems.append(f"{whose} has {wanted} GPUs, but torch sees {facts.torch_gpus}")
    return problems + [f"GPU {index}: {why}" for index, why in sorted(facts.products.items())]


def _judge_fabric(facts: Facts) -> list[str]:
    cards = efa.TABLE.get(facts.machine)
    if not facts.adapters:
        return []  # the cluster file says whether a machine gets them; the machine cannot know
    if cards and facts.adapters < cards.efas:
        return [f"{facts.machine} has {cards.efas} EFAs, but {facts.adapters} are on the bus"]
    if facts.fabric_error:
        return [f"fi_info finds no EFA: {facts.fabric_error}"]
    if facts.fabric < facts.adapters:
        return [f"{facts.adapters} EFAs are on the bus, but fi_info lists {facts.fabric}"]
    return []


def _judge_rest(facts: Facts) -> list[str]:
    problems = []
    if facts.disk_error:
        problems.append(f"the scratch folder cannot be used: {facts.disk_error}")
    elif facts.disk is not None and facts.disk < DISK:
        problems.append(f"{facts.disk / (1 << 20):.0f} MiB are free on the scratch disk, {DISK >> 20} are needed")
    if facts.clock is not None and abs(facts.clock) > CLOCK:
        way = "ahead of" if facts.clock > 0 else "behind"
        problems.append(f"the clock is {abs(facts.clock):.0f} s {way} the cloud's")
    return problems


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


async def _ask_gpus(facts: Facts) -> Facts:
    """With what nvidia-smi and torch say; torch only of GPUs that the driver lists."""
    form = "--format=csv,noheader,nounits"
    code, text = await _output("nvidia-smi", f"--query-gpu={QUERY}", form, timeout=ANSWER)
    if code != 0:
        return replace(facts, smi_error=_first_line(text) or f"status {code}")
    _, rows = await _output("nvidia-smi", f"--query-remapped-rows={REMAPPED}", form, timeout=ANSWER)
    try:
        facts = replace(facts, smi=parse_smi(text, rows))
    except ValueError as error:
        return replace(facts, smi_error=str(error))
    # -P: no module of the working directory comes before the installed ones.
    code, text = await _output(sys.executable, "-P", "-m", "spotrun.node.product", timeout=PRODUCT, errors=False)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        if code == 0:
            said = json.loads(text)
            products = {int(index): str(why) for index, why in said["failures"].items()}
            return replace(facts, torch_gpus=int(said["count"]), products=products)
    return replace(facts, product_error=_last_line(text) or f"the process ended with status {code}")


async def _ask_fabric(facts: Facts) -> Facts:
    places = f"{os.environ.get('PATH', os.defpath)}:{FI_INFO_FOLDER}"
    program = shutil.which("fi_info", path=places)
    if program is None:
        return replace(facts, fabric_error="it is not installed")
    code, text = await _output(program, "-p", "efa", timeout=ANSWER)
    if code != 0:
        return replace(facts, fabric_error=_first_line(text) or f"status {code}")
    return replace(facts, fabric=count_fabric(text))


def parse_smi(text: str, rows: str = "") -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's CSV of `QUERY`, and of `REMAPPED`, which older GPUs and drivers do not have.

    Raises ValueError for anything else. What is not supported is `[N/A]` or the like.
    """
    remapped = {}
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            remapped[cells[0]] = (_yes(cells[1]), _yes(cells[2]))
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[0].isdecimal():
            raise ValueError(f"nvidia-smi said {line[:200]!r}")
        errors = int(cells[3]) if cells[3].isdecimal() else None
        found.append(Gpu(int(cells[0]), cells[1], errors, *remapped.get(cells[2], (None, None))))
    return tuple(found)


def count_fabric(text: str) -> int:
    """Adapters in what `fi_info -p efa` prints: each has a domain for every kind of endpoint (x-rdm, x-dgrm)."""
    lines = [line.strip() for line in text.splitlines()]
    domains = [line.partition(":")[2].strip() for line in lines if line.startswith("domain:")]
    return len({domain.rpartition("-")[0] or domain for domain in domains})


async def _output(program: str, *args: str, timeout: float, errors: bool = True) -> tuple[int, str]:
    """(exit status, what it printed) of a program that gets `timeout` seconds. errors: with its standard error."""
    try:
        process = await asyncio.create_subprocess_exec(
            program, *args, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if errors else asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        return -1, f"it cannot be run: {error.strerror or error}"
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    except TimeoutError:
        return -1, f"no answer within {timeout:g} s"
    finally:
        if process.returncode is None:
            await _kill(process)
    return process.returncode or 0, (out if errors or process.returncode == 0 else err).decode(errors="replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """One that hangs in the driver ends when that lets it: not waited for."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.kill()
        async with asyncio.timeout(1.0):
            await process.communicate()


def _yes(cell: str) -> bool | None:
    return {"yes": True, "1": True, "no": False, "0": False}.get(cell.lower())


def _first_line(text: str) -> str:
    return next(filter(None, map(str.strip, text.splitlines())), "")[:300]


def _last_line(text: str) -> str:
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "")[:300]
