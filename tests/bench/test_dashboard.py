"""The benchmark of the dashboard, with small runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_measures_a_real_server(tmp_path: Path) -> None:
    sizes = ["--runs", "2", "--points", "1000", "--large", "300000"]
    command = [sys.executable, "-m", "bench.dashboard", *sizes, "--out", str(tmp_path / "RESULTS.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "RESULTS.md").read_text()
    assert "2 runs with 1,000 points each, and one with 300,000, of 5 names" in text
    assert "| the list of runs |" in text
    assert "| the server, after the large run |" in text
    assert "| a head with these runs, after it has listed the newest |" in text
