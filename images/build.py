"""`make image`: bake the image for a cluster's cloud.

    python -m images.build CLUSTER [--public] [--prune N] [PACKER'S OPTIONS…]

--public: on AWS, build in the region's default network with a public address, to which nothing can connect.
--prune: afterwards remove all images but the newest N and those that a cluster uses (`images.kept`).

Builds spotrun's wheel from this checkout, then runs Packer. Afterwards, build/image/image-<cloud>.json lists what the
image has. The image's name is printed on standard output.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from images import kept
from images.lint import SOURCES, packer_version
from scripts import programs
from scripts.make_command import make_command
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build/image"
PACKER = (1, 9)  # images/plugins.pkr.hcl
INTERRUPTED = 130  # as in a shell: 128 + SIGINT
PUBLIC, PRUNE = "--public", "--prune"
NO_SUBNET = (
    "The builder on AWS needs a way to the internet. `{public}` builds in the default network with a public address,"
    " and opens no port."
    ' Or name a private subnet behind a NAT gateway in images/mine.auto.pkrvars.hcl (aws_subnet = "subnet-…"), or with'
    ' ARGS="-var aws_subnet=subnet-…"'
)


def main(argv: list[str]) -> int:
    if not argv:
        print(f"usage: python -m images.build CLUSTER [{PUBLIC}] [{PRUNE} N] [PACKER'S OPTIONS…]", file=sys.stderr)
        return 2
    try:
        cluster, own, options = load_cluster(argv[0]), *_own(argv[1:])
        keep = kept.number(own[PRUNE]) if PRUNE in own else None
        print(build(cluster, argv[0], PUBLIC in own, options), flush=True)
        if keep is not None:
            kept.prune(cluster, argv[0], keep, kept.baked(cluster, argv[0]))
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spotrun: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _own(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the options: this program's own, which come first, by name; and Packer's."""
    own: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0] in (PUBLIC, PRUNE):
        name = rest.pop(0)
        own[name] = rest.pop(0) if name == PRUNE and rest else ""
    return own, rest


def build(cluster: ClusterSpec, file: str, public: bool, options: list[str]) -> str:
    """Build an image and return its name. Raises `SpotrunError`; after Ctrl-C, `KeyboardInterrupt` at Packer's end."""
    if cluster.cloud not in SOURCES:
        raise SpotrunError(f"{file}: cloud {cluster.cloud} has no images; name a cluster file of gcp or aws")
    if public and cluster.cloud != "aws":
        raise SpotrunError(f"{file}: PUBLIC=1 is for AWS; on Google Cloud the builder uses Cloud NAT")
    if cluster.cloud == "aws":
        _check_way_out(cluster, file, public, options)
    packer = _packer()
    values = variables(cluster, _commit(), datetime.now(UTC), public)
    wheel(OUT / "wheel")
    words = [word for name, value in values.items() for word in ("-var", f"{name}={value}")]
    _run([packer, "init", "images"])
    _run([packer, "build", "-only", SOURCES[cluster.cloud], *words, *options, "images"])
    return f"spotrun-{values['built']}"


def variables(cluster: ClusterSpec, commit: str, now: datetime, public: bool = False) -> dict[str, str]:
    """The template's variables."""
    found = {"commit": commit, "built": now.strftime("%Y%m%d-%H%M%S"), "wheel": "build/image/wheel"}
    if cluster.cloud == "gcp":
        return {**found, "gcp_project": cluster.project or "", "gcp_zone": cluster.head.zone}
    return {**found, "aws_region": cluster.region, **({"aws_public": "true"} if public else {})}


def _check_way_out(cluster: ClusterSpec, file: str, public: bool, options: list[str]) -> None:
    """Raise `SpotrunError` unless the builder on AWS has a way to the internet."""
    from spotrun.cloud.aws import images

    settings = _settings(options)
    public = public or told("aws_public", "true", options, os.environ, settings)
    if names_subnet(options, os.environ, settings):
        return
    if not public:
        raise SpotrunError(NO_SUBNET.format(public=make_command(file, "image", "PUBLIC=1")))
    if not images.has_default_network(cluster.region):
        raise SpotrunError(
            f"{cluster.region} of this account has no default VPC with subnets: `aws ec2 create-default-vpc --region"
            f" {cluster.region}` makes one, at no cost; or name a subnet of another VPC that leads out by public"
            ' addresses, with ARGS="-var aws_subnet=subnet-…"'
        )


def names_subnet(options: list[str], environment: Mapping[str, str], settings: list[str]) -> bool:
    """Whether Packer gets a subnet to build in. settings: the content of its files."""
    return told("aws_subnet", '"?subnet-', options, environment, settings)


def told(variable: str, form: str, options: list[str], environment: Mapping[str, str], settings: list[str]) -> bool:
    """Whether Packer gets a value for the variable, from any source, that begins with `form`, a regular expression.

    https://developer.hashicorp.com/packer/docs/templates/hcl_templates/variables
    """
    option = any(re.match(rf"(-{{1,2}}var=)?{variable}={form}", each) for each in options)
    line = rf'(^|[{{,])\s*"?{variable}"?\s*[=:]\s*{form}'
    written = any(re.search(line, text, re.MULTILINE) for text in settings)
    return option or written or re.match(form, environment.get(f"PKR_VAR_{variable}", "")) is not None


def _settings(options: list[str]) -> list[str]:
    """The content of Packer's files of variables. Raises `SpotrunError`."""
    files = [*(ROOT / "images").glob("*.auto.pkrvars.hcl"), *(ROOT / "images").glob("*.auto.pkrvars.json")]
    for option, following in itertools.pairwise([*options, ""]):
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
            raise SpotrunError(f"{ROOT} is not a git checkout, and an image must name its commit") from None

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")


def wheel(folder: Path) -> None:
    """Build spotrun's wheel from this checkout, as the only file in the folder. Raises `SpotrunError`."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        # From a copy: otherwise setuptools would add old modules that an earlier build left in build/.
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "agent", Path(scratch) / "agent", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, scratch)
        options = ("--quiet", "--disable-pip-version-check", "--no-deps")
        _run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), scratch])


def _run(command: list[str]) -> None:
    """Run a command with its output on stderr: stdout is for the answer. Raises `SpotrunError` if it fails.

    Packer removes what it has made in the cloud when it is interrupted, and this function waits for that.
    """
    name = Path(command[0]).name
    stopping = (
        f"spotrun: interrupted; {name} is cleaning up, wait for it; another Ctrl-C kills it, and what it made stays"
    )
    code, _ = programs.run(command, ROOT, {**os.environ, "CHECKPOINT_DISABLE": "1"}, stopping)
    if code:
        raise SpotrunError(f"`{' '.join(map(str, command[:2]))}` failed with exit status {code}; see above")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
