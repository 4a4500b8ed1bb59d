"""Whether this machine is fit to train: `judge` turns facts into problems. Pure; `inventory` gathers the facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.spec.machine_types import EFAS, GPUS

DISK = 1 << 30  # bytes that a job's code, packages, logs and parts of checkpoints get at the least
CLOCK = 2.0  # seconds; a notice's deadline is in this clock, and the head leaves three for what must be done before


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

    gpus, efas: how many the metadata say that there must be, 0 if they do not say. on_bus, nodes: NVIDIA GPUs on the
    PCI bus, device files of the driver. smi_error: what nvidia-smi said besides its rows, which is an error only if
    some are missing. torch_gpus: that torch sees, None if it was not asked. adapters: EFAs on the PCI bus; fabric:
    those that libfabric can use; plugin_error: why NCCL could not use them. disk: bytes free. clock: seconds that this
    machine is ahead of its cloud, None if the cloud does not say.
    """

    machine: str = ""
    gpus: int = 0
    efas: int = 0
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
    plugin_error: str = ""
    disk: int | None = None
    disk_error: str = ""
    clock: float | None = None


def judge(facts: Facts) -> tuple[str, ...]:
    """All that is wrong, a line each, the gravest first; nothing of what is not known."""
    return (*_judge_gpus(facts), *_judge_fabric(facts), *_judge_rest(facts))


def remarks(facts: Facts) -> tuple[str, ...]:
    """What an operator may want to know, though the machine is no less fit for it."""
    # Until then the driver keeps what is at those rows out of use, and new work runs as ever:
    # https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html
    pending = [gpu for gpu in facts.smi if gpu.remap_pending and not gpu.remap_failed]
    said = [f"{_name(gpu)} has rows of its memory to remap when it is reset next" for gpu in pending]
    if facts.smi_error and len(facts.smi) >= wanted_gpus(facts):
        said.append(f"nvidia-smi said besides: {facts.smi_error}")
    return tuple(said)


def wanted_gpus(facts: Facts) -> int:
    """GPUs that there must be: as the metadata say, else as the machine type, else as the bus or the driver does."""
    return facts.gpus or GPUS.get(facts.machine) or max(facts.on_bus, facts.nodes)


def wanted_efas(facts: Facts) -> int:
    """EFAs that there must be: as the metadata say; else, if there is one, as many as the machine type can have."""
    return facts.efas or (EFAS.get(facts.machine, facts.adapters) if facts.adapters else 0)


def _judge_gpus(facts: Facts) -> list[str]:
    wanted = wanted_gpus(facts)
    if not wanted:
        return []
    has = f"{_whose(facts, facts.gpus, GPUS)} {wanted} GPUs"
    if not facts.smi and facts.smi_error:
        return [f"{has}, but nvidia-smi does not list them: {facts.smi_error}"]
    if len(facts.smi) < wanted:
        return [": ".join(filter(None, [f"{has}, but nvidia-smi lists {len(facts.smi)}", facts.smi_error]))]
    problems = []
    for gpu in facts.smi:
        if gpu.ecc_errors:
            problems.append(f"{_name(gpu)} has {gpu.ecc_errors} uncorrected memory errors")
        if gpu.remap_failed:
            problems.append(f"{_name(gpu)} could not remap rows of its memory")
    if facts.product_error:
        problems.append(f"no matrix product on the GPUs: {facts.product_error}")
    elif facts.torch_gpus is not None and facts.torch_gpus < wanted:
        problems.append(f"{has}, but torch sees {facts.torch_gpus}")
    return problems + [f"GPU {index}: {why}" for index, why in sorted(facts.products.items())]


def _judge_fabric(facts: Facts) -> list[str]:
    wanted = wanted_efas(facts)
    if not wanted:
        return []
    if facts.adapters < wanted:
        return [f"{_whose(facts, facts.efas, EFAS)} {wanted} EFAs, but {facts.adapters} are on the bus"]
    if facts.fabric_error:
        return [f"fi_info finds no EFA: {facts.fabric_error}"]
    if facts.fabric < facts.adapters:
        return [f"{facts.adapters} EFAs are on the bus, but fi_info lists {facts.fabric}"]
    return [f"NCCL cannot use the EFAs: {facts.plugin_error}"] if facts.plugin_error else []


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


def parse_smi(text: str, rows: str = "") -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs from nvidia-smi's CSV of `inventory.QUERY`, and the lines that are none: it warns in between.

    rows: its CSV of `inventory.REMAPPED`, which older GPUs and drivers do not have. What is not supported is `[N/A]` or
    the like.
    """
    remapped = {}
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            remapped[cells[0]] = (_yes(cells[1]), _yes(cells[2]))
    found, rest = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[0].isdecimal():
            rest.append(line)
            continue
        errors = int(cells[3]) if cells[3].isdecimal() else None
        found.append(Gpu(int(cells[0]), cells[1], errors, *remapped.get(cells[2], (None, None))))
    return tuple(found), tuple(rest)


def count_fabric(text: str) -> int:
    """Adapters in what `fi_info -p efa` prints: each has a domain for every kind of endpoint (x-rdm, x-dgrm)."""
    lines = [line.strip() for line in text.splitlines()]
    domains = [line.partition(":")[2].strip() for line in lines if line.startswith("domain:")]
    return len({domain.rpartition("-")[0] or domain for domain in domains})


def _whose(facts: Facts, said: int, table: Mapping[str, object]) -> str:
    if said:
        return "this machine is to have"
    return f"{facts.machine} has" if facts.machine in table else "this machine has"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


def _yes(cell: str) -> bool | None:
    return {"yes": True, "1": True, "no": False, "0": False}.get(cell.lower())
