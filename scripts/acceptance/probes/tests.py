"""The tests that need CUDA (`make test-gpu`), on a machine of the cluster and with its own spotrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from words import tell

MARKED = "pytest.mark.gpu"
# A worker's own variables: a test that starts processes must not take them for its own.
_OWN = ("SPOTRUN_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "RANK", "WORLD_SIZE", "LOCAL_")
_SHOWN = 20  # failed tests that are named


def main() -> None:
    root = Path(__file__).parent
    files = sorted(str(each) for each in root.glob("tests/**/test_*.py") if MARKED in each.read_text())
    files = [each for each in files if not each.endswith("test_gpu_marker.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    command = [sys.executable, "-m", "pytest", "--gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["it printed nothing"]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)[:_SHOWN]
    tell("tests", status=done.returncode, summary=lines[-1].strip("= "), failed=failed)


main()
