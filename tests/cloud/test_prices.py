"""The shipped price table: what it says, what it does not, and that it is shipped."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spotrun.cloud import prices

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "agent" / "spotrun" / "cloud" / "prices.csv"

# cloud, place, machine, accelerator, count: on-demand, spot
CASES: dict[str, tuple[tuple[str, str, str, str, int], float | None, object]] = {
    "a region of AWS: the middle of its zones": (("aws", "us-east-1", "g5.xlarge", "", 0), 1.006, 0.436),
    "a zone of AWS by its letter: its region's": (("aws", "us-east-1a", "g5.xlarge", "", 0), 1.006, 0.436),
    "a zone of AWS by its id": (("aws", "use1-az1", "g5.xlarge", "", 0), 1.006, 0.4507),
    "zones without a spot price do not count": (("aws", "us-east-1", "p3.2xlarge", "", 0), 3.06, pytest.approx(0.3941)),
    "a zone of Google Cloud": (("gcp", "us-central1-a", "g2-standard-8", "", 0), 0.85362, 0.34057),
    "a zone that the table does not know": (("gcp", "us-central1-z", "g2-standard-8", "", 0), 0.85362, 0.34057),
    "only spot is known": (("gcp", "us-central1", "a3-highgpu-8g", "", 0), None, 26.83013),
    "neither is known": (("gcp", "us-central1-a", "e2-small", "", 0), None, None),
    "N1 with GPUs": (("gcp", "us-central1-a", "n1-standard-8", "nvidia-tesla-t4", 1), 0.73, 0.27946),
    "N1 with more GPUs": (("gcp", "us-central1-a", "n1-standard-8", "nvidia-tesla-t4", 4), 1.78, 0.80446),
    "N1 with a number of GPUs that is not listed": (
        ("gcp", "us-central1-a", "n1-standard-8", "nvidia-tesla-t4", 3),
        None,
        None,
    ),
    "N1 without GPUs is not listed": (("gcp", "us-central1-a", "n1-standard-8", "", 0), None, None),
    "another cloud's region": (("gcp", "us-east-1", "g5.xlarge", "", 0), None, None),
    "a region that the table does not know": (("aws", "sa-east-1", "g5.xlarge", "", 0), None, None),
    "a machine type that the table does not know": (("aws", "us-east-1", "g9.xlarge", "", 0), None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_price(name: str) -> None:
    asked, on_demand, spot = CASES[name]
    assert prices.on_demand(*asked) == on_demand
    assert prices.spot(*asked) == spot


def test_every_row_is_found_and_is_a_price() -> None:
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    assert len(rows) > 600
    for row in rows:
        count = int(row["accelerator_count"])
        attached = (row["accelerator"], count) if row["instance_type"].startswith("n1-") else ("", 0)
        asked = (row["cloud"], row["zone"], row["instance_type"], *attached)
        cells = (row["on_demand_usd_per_hour"], row["spot_usd_per_hour"])
        assert (prices.on_demand(*asked), prices.spot(*asked)) == tuple(float(cell) if cell else None for cell in cells)
        assert all(float(cell) > 0 for cell in cells if cell)


def test_the_table_and_its_source_are_in_the_wheel(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "agent" / "spotrun", tmp_path / "agent" / "spotrun")
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    [wheel] = tmp_path.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("spotrun/cloud/prices.csv") == TABLE.read_bytes()
        assert b"skypilot-catalog" in archive.read("spotrun/cloud/prices.SOURCE.md")
