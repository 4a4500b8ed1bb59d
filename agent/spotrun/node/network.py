"""The network variables of workers, for NCCL, gloo and libfabric.

These libraries find out the rest themselves. NCCL's plugin for EFA selects that provider on every EC2 machine, and sets
what forks need (aws-ofi-nccl, platform-aws.cpp: FI_PROVIDER, FI_EFA_FORK_SAFE). libfabric uses direct GPU memory access
if the adapter supports it. FI_EFA_USE_DEVICE_RDMA would end the process on other adapters (fi_efa(7)).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from spotrun.machine.gpus import gpu_count

_SIOCGIFADDR = 0x8915  # netdevice(7)
DUMP = 250  # milliseconds, for TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC
VERBS, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


@dataclass(frozen=True)
class Facts:
    """What the variables depend on."""

    interface: str = ""  # the one that has the node's address; empty: none has it
    gpus: int = 0  # how many
    adapters: int = 0  # how many EFAs


def environment(facts: Facts) -> dict[str, str]:
    """The variables. The job file may set them to other values.

    GLOO_SOCKET_IFNAME: the default is the interface that the host's name resolves to. On Debian that is the loopback
    interface (https://docs.pytorch.org/docs/stable/distributed.html, "Choosing the network interface to use").
    NCCL_SOCKET_IFNAME: the default is the first interface that NCCL finds, and NCCL sends over up to 16 interfaces
    (bootstrap.cc, net_socket.cc). `=` means this exact name and not a prefix
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
    NCCL_NET: without it, NCCL silently sends over TCP if its plugin for EFA does not load. With it, NCCL fails (the
    same page, #nccl-net). A job that wants TCP sets `NCCL_NET: Socket`. Versions of the plugin up to 1.11 have only
    the name `AWS Libfabric` (aws-ofi-nccl, nccl_ofi_interface_nvidia.cpp).
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: when a collective has failed, torch waits for four times this before it ends
    the worker, so that a dump can be written. By default, it waits for a minute (ProcessGroupNCCL.cpp, `Watchdog`).
    FI_EFA_USE_HUGE_PAGE: a process with huge pages may be unable to fork, and a DataLoader with workers forks
    (https://github.com/aws-samples/awsome-distributed-training, efa-cheatsheet.md).
    """
    found = {}
    if facts.interface:
        found["GLOO_SOCKET_IFNAME"] = facts.interface
        if facts.gpus:
            found["NCCL_SOCKET_IFNAME"] = f"={facts.interface}"
    if facts.gpus:
        found["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = str(DUMP)
    if facts.adapters:
        found["FI_EFA_USE_HUGE_PAGE"] = "0"
        if facts.gpus:
            found["NCCL_NET"] = "AWS Libfabric"
    return found


def gather(address: str, verbs: Path = VERBS) -> Facts:
    """The facts about this machine. address: its own. Machines of a local cloud use no EFAs."""
    return Facts(find_interface(address), gpu_count(), 0 if is_loopback(address) else _count_adapters(verbs))


def find_interface(address: str) -> str:
    """The interface that has this IPv4 address. All of 127.0.0.0/8 belongs to the loopback interface."""
    if is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        # Not socket.if_nameindex: it needs a netlink socket, which a sandboxed service may not open.
        for name in sorted(os.listdir(NETWORK) if NETWORK.exists() else ()):
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address, as machines of a local cloud have."""
    return address.startswith("127.") or address == "::1"


def _count_adapters(verbs: Path) -> int:
    """The number of RDMA devices whose driver is `efa`."""
    try:
        devices = list(verbs.iterdir())
    except OSError:
        return 0
    return sum((device / "device" / "driver").resolve().name == "efa" for device in devices)
