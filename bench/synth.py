"""The time and memory to write a cluster's stacks, and to import CDKTF's providers as their documentation does.

python -m bench.synth [--runs 3] [--out bench/RESULTS.md]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from bench.report import describe_machine, write_section

ROOT = Path(__file__).parent.parent
SYNTH = "from infra.__main__ import main\nassert main() == 0"
# What: the code that a fresh interpreter runs, and the cluster file.
CASES = {
    "plain import of the google provider": ("import cdktf_cdktf_provider_google", ""),
    "plain import of the aws provider": ("import cdktf_cdktf_provider_aws", ""),
    "both stacks of clusters/gcp-l4.yaml": (SYNTH, "clusters/gcp-l4.yaml"),
    "both stacks of clusters/aws-g5.yaml": (SYNTH, "clusters/aws-g5.yaml"),
}
# Registered first, so it runs last. By then jsii has waited for its Node.js, so that child is counted.
REPORT = """
import atexit, json, resource
# Not the process's own ru_maxrss: a process inherits that from its parent.
own = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
atexit.register(lambda: print(json.dumps([own(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss])))
"""


@dataclass(frozen=True)
class Run:
    """Seconds from start to exit; the most memory, in MB, of Python and of the Node.js that it starts."""

    seconds: float
    python: float
    node: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.synth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="fresh processes for each case; medians are shown")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    found = {}
    for what, (code, cluster) in CASES.items():
        try:
            found[what] = [measure(code, cluster) for _ in range(args.runs)]
        except subprocess.CalledProcessError as error:
            print(f"bench-synth: {what} failed:\n{error.stderr}", file=sys.stderr)
            return 1
    text = render(found, describe_machine(), f"{datetime.now(UTC).date()}")
    write_section(args.out, "synth", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(code: str, cluster: str) -> Run:
    """One run in a process of its own. Raises `CalledProcessError`."""
    with tempfile.TemporaryDirectory(prefix="spotrun-synth-") as folder:
        env = {**os.environ, "CLUSTER": cluster, "CDKTF_OUTDIR": f"{folder}/out", "SPOTRUN_HOME": folder}
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", f"{REPORT}\n{code}"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        seconds = time.monotonic() - begin
    own, child = (kilobytes / 1024 for kilobytes in json.loads(done.stdout.splitlines()[-1]))
    return Run(seconds, own, child)


def render(found: Mapping[str, Sequence[Run]], machine: str, day: str) -> str:
    """The section of the results."""
    runs = max(map(len, found.values()))
    lines = [
        "## What synthesis takes",
        "",
        f"{day}, {machine}. Medians of {runs} fresh processes, peak memory. Goals: both stacks of a cluster in under"
        " 10 s and under 150 MB of Python's memory. A plain import loads all modules of a provider. `infra/cdk.py`"
        " loads only those that a stack uses.",
        "",
        "| what | seconds | (range) | Python, MB | Node.js, MB |",
        "|---|---|---|---|---|",
    ]
    for what, each in found.items():
        times = [run.seconds for run in each]
        lines.append(
            f"| {what} | {median(times):.1f} | {min(times):.1f} to {max(times):.1f} |"
            f" {median(run.python for run in each):.0f} | {median(run.node for run in each):.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
