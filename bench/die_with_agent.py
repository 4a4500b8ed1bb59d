"""Imported first by the scripts under torchrun and torchft: nothing of a killed node is left, as with a lost machine.

The kernel kills this process when its agent dies. This comes before the other imports, because they take longest. If
the agent died before this line, the whole benchmark did.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
if "SPOTRUN_CONTEXT" not in os.environ:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if not os.path.exists(f"/proc/{os.environ.get('BENCH_PID', os.getppid())}"):
        sys.exit("the benchmark is gone")
