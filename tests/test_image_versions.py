"""`make image-versions`: what is pinned, and what registries that are played here say of it."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from images import versions
from tests.answering import answering

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "images"


def test_versions_are_pinned_once() -> None:
    pinned = versions.read(IMAGES / "versions.env")
    for name, value in pinned.items():
        assert value, name
        if name.endswith("SHA256"):
            assert re.fullmatch("[0-9a-f]{64}", value), name
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned["TORCH"] == constraints["torch"]
    others = [
        path
        for path in IMAGES.rglob("*")
        if path.is_file() and path.name != "versions.env" and "__pycache__" not in str(path)
    ]
    for name in ("KERNEL", "NVIDIA_DRIVER", "EFA_INSTALLER", "EFA_INSTALLER_SHA256", "SSM_AGENT"):
        assert [path for path in others if pinned[name] in path.read_text()] == [], name


APT = """\
linux-image-6.1.0-56-cloud-amd64 |  6.1.192-2 | http://mirror bookworm-security/main amd64 Packages
python3.11 | 3.11.2-6+deb12u6 | http://mirror bookworm/main amd64 Packages
    chrony | 4.3-2+deb12u9 | http://mirror bookworm/main amd64 Packages
    chrony | 4.3-2+deb12u3 | http://mirror bookworm/main amd64 Packages
    chrony |     9.9 | http://mirror sid/main amd64 Packages
"""
PINNED = {
    "KERNEL_ABI": "6.1.0-56-cloud-amd64",
    "KERNEL": "6.1.192-2",
    "PYTHON": "3.11",
    "CHRONY": "4.3-2+deb12u3",
    "NODE_EXPORTER": "1.5.0-1+b6",
    "TORCH": "2.13.0",
    "NVIDIA_DRIVER": "580.1",
    "DCGM": "1:4.6.0-1",
    "DCGM_EXPORTER": "4.8.3-1",
    "EFA_INSTALLER": "1.50.0",
    "AWS_OFI_NCCL": "1.21.1",
    "EC2_INSTANCE_CONNECT": "0" * 40,
    "SSM_AGENT": "3.3.1.0",
}


def _ask(command: list[str]) -> str:
    if command[:2] == ["apt-cache", "madison"]:
        return APT
    if command[:2] == ["apt-cache", "depends"]:
        return "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-60-cloud-amd64\n"
    return "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.9.1\n"


def _get(url: str) -> bytes:
    if "efa-changelog" in url:
        return (
            b"| Version | Changes |\n| 1.51.0 | [Amazon OFI NCCL Plugin 1.22.0] |\n| 1.50.0 | OFI NCCL Plugin 1.21.1 |"
        )
    raise OSError("no way there")


def test_what_is_newest() -> None:
    rows = versions.compare(PINNED, {"NVIDIA_REPOSITORY": "https://example.com"}, versions.Registries(_ask, _get))
    found = {row.name: (row.newest, row.there) for row in rows}
    assert found["KERNEL"] == ("6.1.192-2", True)
    assert found["KERNEL_ABI"] == ("6.1.0-60-cloud-amd64", True)
    assert found["CHRONY"] == ("4.3-2+deb12u9", True)
    assert found["NODE_EXPORTER"] == ("", False)  # gone
    assert found["TORCH"] == ("2.15.0", True)
    assert found["NVIDIA_DRIVER"] == ("", None)
    assert found["EFA_INSTALLER"] == ("1.51.0", None)
    assert found["AWS_OFI_NCCL"] == ("1.22.0", None)
    assert {row.name for row in rows} >= set(PINNED)
    shown = versions.table(rows)
    assert "NVIDIA's registry was not reached: no way there" in shown
    assert re.search(r"NODE_EXPORTER .* not to be had any more", shown)


@pytest.mark.parametrize(
    "garbage",
    [gzip.compress(b"a")[:10] + b"\xff" * 40, gzip.compress(b"a")[:-9], b"<html>"],
    ids=["broken", "cut off", "a page"],
)
def test_a_registry_that_answers_nonsense_is_said_to_be_out_of_reach(garbage: bytes) -> None:
    ask = versions.Registries(_ask, lambda _: garbage)
    rows = versions.compare(PINNED, {"NVIDIA_REPOSITORY": "https://example.com"}, ask)
    (row,) = [row for row in rows if row.name == "NVIDIA_DRIVER"]
    assert row.note.startswith("NVIDIA's registry was not reached")


def test_an_answer_that_ends_early_is_no_answer() -> None:
    with (
        answering({"GET /": (None, 200, "half", ("Content-Length", "1000"))}) as host,
        pytest.raises(OSError, match="Incomplete"),
    ):
        versions.fetch(f"http://{host}/")
