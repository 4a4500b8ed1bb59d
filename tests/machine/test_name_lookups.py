"""torch asks DNS for names of addresses at each connection to a TCPStore. No worker should wait for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A network of its own, in which a DNS server never answers. glibc's defaults: it is asked twice, for 5 s each time.
SCRIPT = """
import fcntl, socket, struct, sys, time
control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dns.bind(("127.0.0.53", 53))
import torch.distributed as dist
from spotrun.machine import name_lookups
from spotrun.node.launch.server import Stores
from spotrun.train import distributed

if sys.argv[1] == "server":
    name_lookups.leave_out_dns()
    began = time.monotonic()
    Stores("127.0.9.9")
else:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.os.environ.update(MASTER_ADDR="127.0.9.9", MASTER_PORT=str(server.port), WORLD_SIZE="1")
    began = time.monotonic()
    distributed._agent_store()
print(time.monotonic() - began)
"""


@pytest.mark.parametrize("end", ["server", "client"])
def test_dns_that_does_not_answer_keeps_no_worker_waiting(tmp_path: Path, end: str) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    inside = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
    command = ["unshare", "-rmn", "sh", "-c", inside, "sh", sys.executable, "-c", SCRIPT, end]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "unshare:" in ran.stderr:
        pytest.skip(f"no namespaces here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 4.0
