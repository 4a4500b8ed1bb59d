"""`make image`: bake the image for a cluster's cloud.

    python -m images.build CLUSTER [PACKER'S OPTIONS…]

Builds spotrun's wheel of this checkout, then runs Packer. What the image holds is in build/image/image-<cloud>.json
afterwards, and the image's name on standard output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from images.lint import packer_version
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build/image"
PACKER = (1, 9)  # images/plugins.pkr.hcl
SOURCES = {"gcp": "googlecompute.gcp", "aws": "amazon-ebs.aws"}


def main(argv: list[str]) -> int:
    try:
        print(build(load_cluster(argv[0]), argv[0], argv[1:]))
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    return 0


def build(cluster: ClusterSpec, file: str, options: list[str]) -> str:
    """The new image's name. Raises `SpotrunError`."""
    if cluster.cloud not in SOURCES:
        raise SpotrunError(f"{file}: cloud {cluster.cloud} starts from no image; name a cluster file of gcp or aws")
    packer = _packer()
    values = variables(cluster, _commit(), datetime.now(UTC))
    _wheel(OUT / "wheel")
    words = [word for name, value in values.items() for word in ("-var", f"{name}={value}")]
    _run([packer, "init", "images"])
    _run([packer, "build", "-only", f"*.{SOURCES[cluster.cloud]}", *words, *options, "images"])
    return f"spotrun-{values['built']}"


def variables(cluster: ClusterSpec, commit: str, now: datetime) -> dict[str, str]:
    """What the template is told."""
    found = {"commit": commit, "built": now.strftime("%Y%m%d-%H%M%S"), "wheel": "build/image/wheel"}
    if cluster.cloud == "gcp":
        return {**found, "gcp_project": cluster.project or "", "gcp_zone": cluster.head.zone}
    return {**found, "aws_region": cluster.region}


def _packer() -> str:
    program = shutil.which("packer")
    wanted = ".".join(map(str, PACKER))
    if program is None:
        raise SpotrunError(
            f"there is no `packer` on this machine: install {wanted} or newer (developer.hashicorp.com/packer)"
        )
    version = packer_version(program)
    if version < PACKER:
        said = ".".join(map(str, version))
        raise SpotrunError(f"{program} is version {said}, and images need {wanted} or newer; Debian's own is too old")
    return program


def _commit() -> str:
    def git(*words: str) -> str:
        try:
            command = ["git", "-C", str(ROOT), *words]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            raise SpotrunError(f"{ROOT} is no git checkout, and an image says of which commit it is") from None

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")


def _wheel(folder: Path) -> None:
    """The only file in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])


def _run(command: list[str]) -> None:
    """Its output goes to stderr: stdout is for the answer. Raises `SpotrunError` if it fails."""
    environment = {**os.environ, "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SpotrunError(f"`{' '.join(map(str, command[:2]))}` failed with exit status {done.returncode}; see above")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
