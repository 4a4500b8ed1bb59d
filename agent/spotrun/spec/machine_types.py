"""The catalogue of machine types and their GPUs. Pure. Prices are in `cloud/prices.csv`.

AWS: EC2's DescribeInstanceTypes (`GpuInfo`, `NetworkInfo`), which the tests compare with these tables; for the sizes of
P3 that it no longer lists, https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-type-specifications.html.
Google Cloud: https://cloud.google.com/compute/docs/accelerator-optimized-machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Placement = Literal["compact", "workload"]


@dataclass(frozen=True)
class Gpu:
    """One GPU, by NVIDIA's data sheet."""

    tflops: float  # bf16 matrix products without sparsity; fp16 on the T4, which has no bf16
    memory: float  # bandwidth of the GPU's memory, in GB/s
    bus: float  # bandwidth to the host, in GB/s: 16 lanes of PCIe generation 3 (15.75), 4 (31.5) or 5 (63)


@dataclass(frozen=True)
class AwsType:
    """One machine type of AWS with NVIDIA GPUs."""

    gpus: int  # whole GPUs
    cards: int = 0
    """Network cards, if any of them can have an Elastic Fabric Adapter (EFA); otherwise 0.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-eni.html#network-cards"""
    first_efa: int = 0  # The first card that can have an EFA. All cards after it can have one too, at most one each.

    @property
    def efas(self) -> int:
        """The most EFAs that a machine can have."""
        return self.cards - self.first_efa


@dataclass(frozen=True)
class GoogleSeries:
    """Google's machine types with GPUs whose names differ only in the last word."""

    gpus: Mapping[str, int]
    """Whole GPUs by the last word of the name. GPUs attached to an N1 machine do not belong to its type."""
    vcpus_per_gpu: int = 0  # 0: the last word is the number of vCPUs, or the number is not known here
    quota: str = ""  # The metric that counts these GPUs. Empty: only the Cloud Quotas API has it.
    ssd_per_gpu: int = 0  # GB of Local SSD that come with the type. 0: none, or the number is not known here


GPUS_BY_NAME: dict[str, Gpu] = {
    "T4": Gpu(65, 320, 15.75),
    "A10G": Gpu(70, 600, 31.5),
    "L4": Gpu(121, 300, 31.5),
    "L40S": Gpu(362, 864, 31.5),
    "A100": Gpu(312, 1555, 31.5),
    "H100": Gpu(989, 3350, 63),
    "H200": Gpu(989, 4800, 63),
    "B200": Gpu(2250, 8000, 63),
}
# GPUs before Turing: neither NVIDIA's open kernel modules nor torch's packages for CUDA 13 support them.
# https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/kernel-modules.html
# Keys: families on AWS, accelerator types on Google Cloud (each also as a virtual workstation, -vws).
OLD_GPUS = {
    "p3": "V100",
    "p3dn": "V100",
    "nvidia-tesla-k80": "K80",
    "nvidia-tesla-p4": "P4",
    "nvidia-tesla-p100": "P100",
    "nvidia-tesla-v100": "V100",
}

_ONE, _ONE_EFA, _FOUR_EFA, _EIGHT = AwsType(1), AwsType(1, 1), AwsType(4, 1), AwsType(8)
_ALL_BUT_LARGEST = {
    **{"xlarge": _ONE, "2xlarge": _ONE, "4xlarge": _ONE, "8xlarge": _ONE_EFA, "16xlarge": _ONE_EFA},
    "12xlarge": _FOUR_EFA,
}
_UP_TO_EIGHT = {**_ALL_BUT_LARGEST, "24xlarge": _FOUR_EFA, "48xlarge": AwsType(8, 1)}
_AWS: dict[str, dict[str, AwsType]] = {
    "p3": {"2xlarge": _ONE, "8xlarge": AwsType(4), "16xlarge": _EIGHT},
    "p3dn": {"24xlarge": AwsType(8, 1)},
    "p4d": {"24xlarge": AwsType(8, 4)},
    "p4de": {"24xlarge": AwsType(8, 4)},
    "p5": {"4xlarge": _ONE_EFA, "48xlarge": AwsType(8, 32)},
    "p5e": {"48xlarge": AwsType(8, 32)},
    "p5en": {"48xlarge": AwsType(8, 16)},
    "p6-b200": {"48xlarge": AwsType(8, 8)},
    "p6-b300": {"48xlarge": AwsType(8, 17, first_efa=1)},
    "g4dn": {**_ALL_BUT_LARGEST, "metal": AwsType(8, 1)},
    "g5": _UP_TO_EIGHT,
    "g5g": {
        **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge"), _ONE),
        **dict.fromkeys(("16xlarge", "metal"), AwsType(2)),
    },
    "g6": _UP_TO_EIGHT,
    "gr6": {"4xlarge": _ONE, "8xlarge": _ONE_EFA},
    "g6e": {**_ALL_BUT_LARGEST, "24xlarge": AwsType(4, 2), "48xlarge": AwsType(8, 4)},
    "g7": {
        **dict.fromkeys(("2xlarge", "4xlarge", "8xlarge"), _ONE),
        **{"12xlarge": AwsType(2), "24xlarge": AwsType(4), "48xlarge": _EIGHT},
    },
    "g7e": {
        **{"2xlarge": _ONE, "4xlarge": _ONE, "8xlarge": _ONE_EFA},
        **{"12xlarge": AwsType(2, 1), "24xlarge": AwsType(4, 2), "48xlarge": AwsType(8, 4)},
    },
}
_1_TO_8 = {"1g": 1, "2g": 2, "4g": 4, "8g": 8}
GOOGLE: dict[str, GoogleSeries] = {
    "a2-highgpu": GoogleSeries(_1_TO_8, 12, "NVIDIA_A100_GPUS"),
    "a2-megagpu": GoogleSeries({"16g": 16}, 6, "NVIDIA_A100_GPUS"),
    "a2-ultragpu": GoogleSeries(_1_TO_8, 12, "NVIDIA_A100_80GB_GPUS", 375),
    "a3-highgpu": GoogleSeries(_1_TO_8, 26, "NVIDIA_H100_GPUS", 750),
    "a3-edgegpu": GoogleSeries({"8g": 8}, 26, "NVIDIA_H100_GPUS", 750),
    "a3-megagpu": GoogleSeries({"8g": 8}, 26, "NVIDIA_H100_MEGA_GPUS", 750),
    "a3-ultragpu": GoogleSeries({"8g": 8}, 28, "NVIDIA_H200_GPUS", 1500),
    "a4-highgpu": GoogleSeries({"8g": 8}, 28, "NVIDIA_B200_GPUS"),
    "a4x-highgpu": GoogleSeries({"4g": 4}),
    "g2-standard": GoogleSeries(
        {"4": 1, "8": 1, "12": 1, "16": 1, "24": 2, "32": 1, "48": 4, "96": 8}, quota="NVIDIA_L4_GPUS"
    ),
    "g4-standard": GoogleSeries({"48": 1, "96": 2, "192": 4, "384": 8}),
}
# Types whose names do not have the number of vCPUs. https://cloud.google.com/compute/docs/general-purpose-machines
_SHARED_CORES = {"e2-micro": 2, "e2-small": 2, "e2-medium": 2, "f1-micro": 1, "g1-small": 1}
# Families without Persistent Disk. https://cloud.google.com/compute/docs/disks/hyperdisks#machine-type-support
_HYPERDISK = re.compile(r"(a3-ultragpu|a4|a4x|c4|c4a|c4d|g4|h4d|m4|n4|n4a|n4d|x4)-")
# Types that need a workload policy; A4X also needs a topology.
# https://cloud.google.com/compute/docs/instance-groups/about-workload-policies
_WORKLOAD = re.compile(r"(a3-(high|mega|ultra)gpu-8g|a4-.*|h4d-.*)")
# Those of them that can have one in market flex. Flex machines cannot have any other policy: Google does not combine
# placement policies with resize requests. https://cloud.google.com/ai-hypercomputer/docs/create/create-mig-with-g2 and
# https://cloud.google.com/ai-hypercomputer/docs/placement-policy-and-workload-policy
_FLEX_WORKLOAD = re.compile(r"(a3-ultragpu-8g|a4-.*)")
# Types that no policy can place close to each other: they are in none of the lists of
# https://cloud.google.com/compute/docs/instances/placement-policies-overview.
_GOOGLE_APART = re.compile(r"(e2|f1|g1|n1|t2a|t2d)-")
# ARM processors: AWS's Graviton (a g after the generation's digit) and NVIDIA's Grace (gb).
# https://docs.aws.amazon.com/ec2/latest/instancetypes/instance-type-names.html
_ARM = re.compile(r"(a1|[a-z]+\d+[a-z]*g[a-z]*|p\d+e?-gb\d+)\.")
# Types that cannot be in a cluster placement group:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-strategies.html#placement-groups-limitations-cluster
_AWS_APART = re.compile(r"(t\d[a-z]*|mac[a-z0-9-]+|vt1|[a-z]+\d+[a-z]*-flex|c1|m[1-3])\.")

AWS: dict[str, AwsType] = {f"{family}.{size}": found for family, sizes in _AWS.items() for size, found in sizes.items()}
# The number of GPUs, by machine type of both clouds. Types without GPUs, and types not known here, are absent.
GPUS: dict[str, int] = {
    **{machine: found.gpus for machine, found in AWS.items()},
    **{f"{series}-{word}": count for series, found in GOOGLE.items() for word, count in found.gpus.items()},
}
# The most EFAs that a machine can have, by machine type. Types without EFAs are absent.
EFAS: dict[str, int] = {machine: found.efas for machine, found in AWS.items() if found.efas}

# How machine types begin whose GPUs need NVIDIA's subnet manager for NVLink 5, in addition to fabric manager. Without
# it, CUDA does not start. https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html
NVLINK_5 = ("p6-b200.", "p6-b300.", "p6e-", "a4-", "a4x-")
# Families that EFA connects with each other, and with no other family.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits
EFA_ISLAND = {"p4d", "p4de"}


def aws_architecture(machine: str) -> str:
    """The processor of an AWS machine type, in the words of machine images."""
    return "arm64" if _ARM.match(machine) else "x86_64"


def aws_can_be_placed(machine: str) -> bool:
    """Whether machines of this AWS type can be in a cluster placement group."""
    return _AWS_APART.match(machine) is None


def google_has_gpus(machine: str) -> bool:
    """Whether the machine type itself has GPUs, also in a size that is not in the catalogue."""
    return machine.startswith(tuple(series.partition("-")[0] + "-" for series in GOOGLE))


def google_vcpus(machine: str) -> int:
    """The vCPUs of a machine type; 0 if they are not known."""
    series, _, word = machine.rpartition("-")
    found = GOOGLE.get(series)
    if found and found.vcpus_per_gpu:
        return found.vcpus_per_gpu * found.gpus.get(word, 0)
    custom = re.search(r"custom-(\d+)-\d+", machine)
    named = custom or re.search(r"-(\d+)(-lssd|-metal)?$", machine)
    return int(named[1]) if named else _SHARED_CORES.get(machine, 0)


def google_gpu_quota(machine: str) -> tuple[str, int]:
    """The metric that counts the type's own GPUs, and how many they are; ("", 0) if Compute Engine shows none."""
    # A custom G2 machine has the GPUs of the predefined one with as many vCPUs.
    series, _, word = re.sub(r"^g2-custom-(\d+)-\d+$", r"g2-standard-\1", machine).rpartition("-")
    found = GOOGLE.get(series)
    count = found.gpus.get(word, 0) if found and found.quota else 0
    return (found.quota, count) if found and count else ("", 0)


def google_local_ssd(machine: str) -> int:
    """GB of Local SSD that come with the machine type; 0 if there are none, or if the number is not known."""
    series, _, word = machine.rpartition("-")
    found = GOOGLE.get(series)
    return found.ssd_per_gpu * found.gpus.get(word, 0) if found else 0


def google_has_persistent_disk(machine: str) -> bool:
    """Whether machines of this type take Persistent Disk; if not, they need Hyperdisk."""
    return _HYPERDISK.match(machine) is None


def google_placement(machine: str, flex: bool = False) -> Placement | None:
    """The kind of policy that places such machines close to each other; None if Google takes none for them.

    compact: a policy on each machine. workload: a policy on their group. flex: the machines come by resize requests.
    """
    if flex:
        return "workload" if _FLEX_WORKLOAD.fullmatch(machine) else None
    if _GOOGLE_APART.match(machine):
        return None
    return "workload" if _WORKLOAD.fullmatch(machine) else "compact"
