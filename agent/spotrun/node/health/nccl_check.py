"""Check whether NCCL can use EFA: `python -m spotrun.node.health.nccl_check`. Its last line of output says why not.

NCCL loads its plugin for EFA (aws-ofi-nccl) by the name `libnccl-net.so`. If that fails, NCCL silently sends over TCP.
The plugin and libfabric may load CUDA's runtime later, by the name `libcudart.so` (aws-ofi-nccl, nccl_ofi_cuda.cpp).
torch has the runtime under another name.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

PLUGIN, RUNTIME = "libnccl-net.so", "libcudart.so"


def check(plugin: str = PLUGIN, runtime: str = RUNTIME) -> str:
    """Why the plugin, or the runtime that it loads later, cannot be loaded; empty: both can."""
    before = _mapped()
    try:
        ctypes.CDLL(plugin)
    except OSError as error:
        return f"its plugin cannot be loaded: {error}"
    name = runtime.encode() + b"\0"
    users = [path.name for path in sorted(_mapped() - before) if name in path.read_bytes()]
    if users:
        try:
            ctypes.CDLL(runtime)
        except OSError as error:
            return f"{', '.join(users)} cannot load what it needs: {error}"
    return ""


def _mapped() -> set[Path]:
    """The files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    cells = [line.split(maxsplit=5) for line in lines]
    return {path for path in (Path(each[5]) for each in cells if len(each) == 6) if path.is_file()}


if __name__ == "__main__":
    sys.exit(check() or 0)
