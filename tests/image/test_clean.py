"""The last provisioning script on a machine that runs: what it cannot remove while Packer's session lasts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.image import containers

UNIT = Path(__file__).parents[2] / "images/root/run/systemd/system/spotrun-forget.service"
AGENT = """[Service]
ExecStart=/bin/sleep infinity
ExecStop=/bin/sh -c 'ls /var/lib/amazon/ssm >/var/at-the-agents-end'
"""
PACKER = """[Unit]
After=amazon-ssm-agent.service
[Service]
Type=oneshot
ExecStart=/bin/mkdir -p /run/systemd/system
ExecStart=/bin/cp /srv/spotrun-forget.service /run/systemd/system
ExecStart=/bin/systemctl daemon-reload
ExecStart=/bin/systemctl start spotrun-forget.service
ExecStart=/bin/sh -c 'ls /var/lib/amazon/ssm >/var/after-the-script'
ExecStart=/bin/systemctl --no-block poweroff
"""
# In control groups of its own, as `containers` has it: two systemds in one would end each other's processes.
START = """
set -eu
for each in $CGROUP; do echo $$ >"$each/cgroup.procs"; done
exec systemd-nspawn "$@"
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd")
def test_the_ssm_agent_is_forgotten_at_the_shutdown_and_not_before(tmp_path: Path) -> None:
    """By a real systemd, in a container of this computer's own programs."""
    lacking = containers.missing()
    if lacking or not Path("/usr/lib/systemd/systemd").exists():
        pytest.skip(f"no system can be booted here without: {', '.join(lacking) or 'systemd'}")
    root = tmp_path / "root"
    _fill(root)
    groups = list(containers._cgroups(f"spotrun-clean-{os.getpid()}"))
    for each in groups:
        each.mkdir(exist_ok=True)
    words = [*containers._NSPAWN, "--bind-ro=/usr", f"--directory={root}"]
    command = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", START, "start", *words]
    environment = {
        **os.environ,
        "CGROUP": " ".join(map(str, groups)),
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
    }
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False
        )
    finally:
        containers._kill(tuple(groups))
    assert (root / "var/after-the-script").read_text() == "i-1\n", done.stdout[-4000:]
    assert (root / "var/at-the-agents-end").read_text() == "i-1\n"
    assert list((root / "var/lib/amazon/ssm").iterdir()) == []


def _fill(root: Path) -> None:
    """The smallest system that boots with this computer's /usr."""
    for folder in ("etc/systemd/system", "var/lib/amazon/ssm/i-1", "var/log/amazon", "usr", "srv", "tmp"):
        (root / folder).mkdir(parents=True)
    for folder in ("proc", "sys", "dev", "run"):
        (root / folder).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group"):
        shutil.copy(f"/etc/{name}", root / "etc")
    shutil.copy("/usr/lib/os-release", root / "etc")
    (root / "etc/machine-id").write_text("0123456789abcdef" * 2 + "\n")  # without one, systemd asks at a first boot
    shutil.copy(UNIT, root / "srv")
    units = root / "etc/systemd/system"
    (units / "amazon-ssm-agent.service").write_text(AGENT)
    (units / "packer.service").write_text(PACKER)
    target = "[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=amazon-ssm-agent.service packer.service\n"
    (units / "default.target").write_text(target)
