"""What workers are told of this machine's network: NCCL's, gloo's and libfabric's variables, from what the machine has.

Nothing is set that these find out by themselves. NCCL's plugin for EFA selects that provider on every EC2 machine, and
sets what forks need (aws-ofi-nccl, platform-aws.cpp: FI_PROVIDER, FI_EFA_FORK_SAFE); libfabric uses direct GPU memory
access wherever the adapter can, and ends the process if it is told to where it cannot (fi_efa(7),
FI_EFA_USE_DEVICE_RDMA).
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
DUMP = 250  # milliseconds
VERBS, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


@dataclass(frozen=True)
class Facts:
    """interface: what holds the node's address, empty if none does. gpus, adapters: how many; adapters are EFAs."""

    interface: str = ""
    gpus: int = 0
    adapters: int = 0


def environment(facts: Facts) -> dict[str, str]:
    """The variables; the job file's own come before them.

    GLOO_SOCKET_IFNAME: gloo else takes the interface of whatever the host's name resolves to, which on Debian is a
    loopback address (https://docs.pytorch.org/docs/stable/distributed.html, "Choosing the network interface to use").
    NCCL_SOCKET_IFNAME: NCCL else meets its peers on the first interface that it finds, whichever that is, and
    sends over up to 16 of them (bootstrap.cc, net_socket.cc); here that is the one that the head gives others as the
    node's address. `=` is for that name and not for all that begin so
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
    NCCL_NET: NCCL else sends over TCP, without a word, when its plugin for EFA does not come up. It fails instead (the
    same page, #nccl-net); a job that wants TCP says `NCCL_NET: Socket`. Every version of the plugin knows this name of
    itself, those up to 1.11 no other (aws-ofi-nccl, nccl_ofi_interface_nvidia.cpp).
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: torch ends a worker whose collective has failed (a peer is gone, say) after
    four times as long, so that a dump can be written: by default after a minute (ProcessGroupNCCL.cpp, `Watchdog`).
    FI_EFA_USE_HUGE_PAGE: a process that holds huge pages may not be able to fork, as each DataLoader with workers does
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
    """Look at this machine, whose own address this is. No EFA joins those of a local cloud."""
    return Facts(find_interface(address), gpu_count(), 0 if is_loopback(address) else _count_adapters(verbs))


def find_interface(address: str) -> str:
    """The interface that has this IPv4 address; every one of 127.0.0.0/8 is that of the loopback interface."""
    if is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        # Not by socket.if_nameindex: that takes a netlink socket, which a sandboxed service may not have.
        for name in sorted(os.listdir(NETWORK) if NETWORK.exists() else ()):
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def is_loopback(address: str) -> bool:
    """Whether an address belongs to this machine alone."""
    return address.startswith("127.") or address == "::1"


def _count_adapters(verbs: Path) -> int:
    """RDMA devices whose driver is `efa` (mlx5 and others have their own)."""
    try:
        devices = list(verbs.iterdir())
    except OSError:
        return 0
    return sum((device / "device" / "driver").resolve().name == "efa" for device in devices)
