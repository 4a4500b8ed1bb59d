"""The benchmark of synthesis: what it counts and what it writes."""

from __future__ import annotations

import subprocess

import pytest

from bench.synth import Run, measure, render


def test_memory_of_python_and_of_its_child_are_counted_apart() -> None:
    """100 MB in one and 200 MB in the other, each let go of again."""
    child = "x = bytearray(200 << 20)"
    code = f"import subprocess, sys\nx = bytearray(100 << 20); del x\nsubprocess.run([sys.executable, '-c', {child!r}])"
    run = measure(code, "")
    assert 100 < run.python < 150
    assert 200 < run.node < 250
    assert 0 < run.seconds < 60


def test_a_run_that_fails_is_no_result() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        measure("raise SystemExit('broken')", "")
    assert "broken" in caught.value.stderr


def test_medians_are_shown() -> None:
    text = render({"this": [Run(1, 50, 300), Run(9, 70, 500), Run(2, 60, 400)]}, "a machine", "2026-11-21")
    assert "| this | 2.0 | 1.0 to 9.0 | 60 | 400 |" in text
    assert "2026-11-21, a machine. Medians of 3" in text
