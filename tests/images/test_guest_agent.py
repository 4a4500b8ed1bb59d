"""Which unit of Google's guest agent an image starts, and what must come before it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[2] / "images"
OLD, NEW = "google-guest-agent.service", "google-guest-agent-manager.service"


@pytest.mark.parametrize(
    ("enabled", "expected"),
    [((), [OLD]), ((OLD,), []), ((NEW,), []), ((OLD, NEW), [])],
    ids=["none is enabled", "the old unit", "the manager", "both"],
)
def test_the_choice_of_the_base_image_stays(enabled: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "provision").mkdir()
    (tmp_path / "provision/lib.sh").write_text("install_packages() { :; }\nput() { :; }\n")
    systemctl = tmp_path / "systemctl"
    known = "|".join(enabled) or "nothing"
    systemctl.write_text(
        f"#!/bin/sh\n[ $1 = enable ] && echo $2 >>{tmp_path}/done && exit\ncase $3 in {known}) exit 0;; esac\nexit 1\n"
    )
    systemctl.chmod(0o755)
    said = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "IMAGE": str(tmp_path), "CLOUD": "gcp"}
    subprocess.run(["bash", IMAGES / "provision/40-gcp.sh"], env=said, check=True)
    done = tmp_path / "done"
    assert (done.read_text().split() if done.exists() else []) == expected


def test_the_host_key_comes_before_each_unit_of_the_agent() -> None:
    unit = (IMAGES / "root/etc/systemd/system/spotrun-host-key.service").read_text()
    before = {name for line in unit.splitlines() if line.startswith("Before=") for name in line[7:].split()}
    assert {OLD, NEW, "ssh.service", "spotrun-agent.service", "spotrun-head.service"} <= before
