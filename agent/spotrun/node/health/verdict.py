"""Whether this machine is fit to train: `judge` turns facts into problems. Pure. `probe` finds the facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.spec.machine_types import EFAS, GPUS

DISK = 1 << 30  # the least free bytes for a job's code, packages, logs and parts of checkpoints
CLOCK = 2.0  # seconds; a notice's deadline is in this clock, and the head finishes three seconds before it


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it."""

    index: int
    name: str
    ecc_errors: int | None = None  # uncorrected since the driver was loaded; None: the GPU does not count errors
    remap_pending: bool | None = None  # memory rows wait for a reset to be remapped; None: the GPU remaps no rows
    remap_failed: bool | None = None


@dataclass(frozen=True)
class Facts:
    """What is known about this machine."""

    machine: str = ""  # machine type
    gpus: int = 0  # how many the metadata require; 0: the metadata do not say
    efas: int = 0  # how many the metadata require; 0: the metadata do not say
    on_bus: int = 0  # NVIDIA GPUs on the PCI bus
    nodes: int = 0  # device files of NVIDIA's driver
    smi: tuple[Gpu, ...] = ()  # what nvidia-smi lists
    smi_error: str = ""  # other output of nvidia-smi; an error only if GPUs are missing
    torch_gpus: int | None = None  # how many torch sees; None: torch was not asked
    products: Mapping[int, str] = field(default_factory=dict)  # GPU → what is wrong with its matrix product
    product_error: str = ""  # why there are no matrix products
    adapters: int = 0  # EFAs on the PCI bus
    fabric: int = 0  # EFAs that libfabric can use
    fabric_error: str = ""  # why libfabric lists none
    plugin_error: str = ""  # why NCCL cannot use the EFAs
    disk: int | None = None  # free bytes on the scratch disk
    disk_error: str = ""  # why the scratch folder cannot be used
    clock: float | None = None  # seconds that this machine's clock is ahead of the cloud's; None: not known


def judge(facts: Facts) -> tuple[str, ...]:
    """All known problems, one line each, the most serious first."""
    return (*_judge_gpus(facts), *_judge_fabric(facts), *_judge_rest(facts))


def remarks(facts: Facts) -> tuple[str, ...]:
    """What an operator may want to know although the machine is fit."""
    # Until the reset, the driver does not use those rows, and new work runs normally:
    # https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html
    pending = [gpu for gpu in facts.smi if gpu.remap_pending and not gpu.remap_failed]
    said = [f"{_name(gpu)} has rows of its memory to remap when it is reset next" for gpu in pending]
    if facts.smi_error and len(facts.smi) >= wanted_gpus(facts):
        said.append(f"nvidia-smi also said: {facts.smi_error}")
    return tuple(said)


def wanted_gpus(facts: Facts) -> int:
    """How many GPUs there must be: from the metadata, else from the machine type, else from the bus or the driver."""
    return facts.gpus or GPUS.get(facts.machine) or max(facts.on_bus, facts.nodes)


def wanted_efas(facts: Facts) -> int:
    """How many EFAs there must be: from the metadata; else, if there is any, as many as the machine type can have."""
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
    """The GPUs in nvidia-smi's CSV of `probe.QUERY`, and the other lines, such as warnings.

    rows: the CSV of `probe.REMAPPED`; empty for older GPUs and drivers. An unsupported value is `[N/A]` or similar.
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
    """The number of adapters that `fi_info -p efa` lists: each has a domain per endpoint type (x-rdm, x-dgrm)."""
    lines = [line.strip() for line in text.splitlines()]
    domains = [line.partition(":")[2].strip() for line in lines if line.startswith("domain:")]
    return len({domain.rpartition("-")[0] or domain for domain in domains})


def _whose(facts: Facts, required: int, table: Mapping[str, object]) -> str:
    if required:
        return "this machine should have"
    return f"{facts.machine} has" if facts.machine in table else "this machine has"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


def _yes(cell: str) -> bool | None:
    return {"yes": True, "1": True, "no": False, "0": False}.get(cell.lower())
