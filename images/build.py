"""`make image`: bake the image for a cluster's cloud.

    python -m images.build CLUSTER [PACKER'S OPTIONS…]

Builds spotrun's wheel of this checkout, then runs Packer. What the image holds is in build/image/image-<cloud>.json
afterwards, and the image's name on standard output.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from images.lint import SOURCES, packer_version
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build/image"
PACKER = (1, 9)  # images/plugins.pkr.hcl
INTERRUPTED = 130  # as a shell has it: 128 and SIGINT
NO_SUBNET = (
    "AWS's builder has no public address, so it needs a subnet with a way out (NAT). Name one in"
    ' images/mine.auto.pkrvars.hcl (aws_subnet = "subnet-…"), or with ARGS="-var aws_subnet=subnet-…"'
)


def main(argv: list[str]) -> int:
    if not argv:
        print("usage: python -m images.build CLUSTER [PACKER'S OPTIONS…]", file=sys.stderr)
        return 2
    try:
        print(build(load_cluster(argv[0]), argv[0], argv[1:]))
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spotrun: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def build(cluster: ClusterSpec, file: str, options: list[str]) -> str:
    """The new image's name. Raises `SpotrunError`; and `KeyboardInterrupt`, once nothing is left running."""
    if cluster.cloud not in SOURCES:
        raise SpotrunError(f"{file}: cloud {cluster.cloud} starts from no image; name a cluster file of gcp or aws")
    if cluster.cloud == "aws" and not names_subnet(options, os.environ, _settings(options)):
        raise SpotrunError(NO_SUBNET)
    packer = _packer()
    values = variables(cluster, _commit(), datetime.now(UTC))
    wheel(OUT / "wheel")
    words = [word for name, value in values.items() for word in ("-var", f"{name}={value}")]
    _run([packer, "init", "images"])
    _run([packer, "build", "-only", SOURCES[cluster.cloud], *words, *options, "images"])
    return f"spotrun-{values['built']}"


def variables(cluster: ClusterSpec, commit: str, now: datetime) -> dict[str, str]:
    """What the template is told."""
    found = {"commit": commit, "built": now.strftime("%Y%m%d-%H%M%S"), "wheel": "build/image/wheel"}
    if cluster.cloud == "gcp":
        return {**found, "gcp_project": cluster.project or "", "gcp_zone": cluster.head.zone}
    return {**found, "aws_region": cluster.region}


def names_subnet(options: list[str], environment: Mapping[str, str], settings: list[str]) -> bool:
    """Whether Packer is told a subnet to build in, in one of the ways that it knows. settings: what its files say.

    https://developer.hashicorp.com/packer/docs/templates/hcl_templates/variables
    """
    told = any(re.match(r"(-{1,2}var=)?aws_subnet=subnet-", option) for option in options)
    written = any(re.search(r'(^|[{,])\s*"?aws_subnet"?\s*[=:]\s*"subnet-', text, re.MULTILINE) for text in settings)
    return told or written or environment.get("PKR_VAR_aws_subnet", "").startswith("subnet-")


def _settings(options: list[str]) -> list[str]:
    """What the files say that Packer takes values from. Raises `SpotrunError`."""
    files = [*(ROOT / "images").glob("*.auto.pkrvars.hcl"), *(ROOT / "images").glob("*.auto.pkrvars.json")]
    for option, following in zip(options, [*options[1:], ""], strict=True):
        name, _, value = option.partition("=")
        if name in ("-var-file", "--var-file"):
            files.append(ROOT / (value or following))
    try:
        return [path.read_text() for path in files]
    except OSError as error:
        raise SpotrunError(f"cannot read {error.filename}: {error.strerror}") from None


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


def wheel(folder: Path) -> None:
    """Build spotrun's wheel of this checkout: the only file in the folder. Raises `SpotrunError`."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Of a copy: setuptools would put modules into the wheel that an earlier build here has left in build/.
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "agent", Path(scratch) / "agent", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, scratch)
        _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), scratch])


def _run(command: list[str]) -> None:
    """Its output goes to stderr: stdout is for the answer. Raises `SpotrunError` if it fails.

    Ctrl-C reaches the command as well, and Packer then takes away what it has made in the cloud: that is waited for.
    """
    interrupted = False

    def wait(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        print(f"spotrun: interrupted; {Path(command[0]).name} is cleaning up, wait for it", file=sys.stderr, flush=True)

    environment = {**os.environ, "CHECKPOINT_DISABLE": "1"}
    before = signal.signal(signal.SIGINT, wait)
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
    if done.returncode:
        raise SpotrunError(f"`{' '.join(map(str, command[:2]))}` failed with exit status {done.returncode}; see above")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
