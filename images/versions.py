"""`make image-versions`: the pinned versions, and the newest ones in the registries that can be reached.

    python -m images.versions [--json]

Each package that an image pins has a row. Debian's packages are looked up with apt in lists that are fetched now, if
this machine's apt has Debian 12. Python's packages are looked up with pip, NVIDIA's in its own index, and Amazon's
files by their URLs. A row says so if its registry cannot be reached; nothing is guessed. Exit status 1 if a pinned
version is no longer in its registry, such as a kernel that Debian has replaced: its row names the line to write.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import string
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from images.debian import SUITE, fresh_lists

HERE = Path(__file__).parent
TIMEOUT = 20.0  # seconds for a registry to answer
NEWEST_KERNEL = "linux-image-cloud-amd64"  # it depends on the one that is newest
EFA_RELEASES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-changelog.md"
SSM_RELEASES = "https://s3.amazonaws.com/ec2-downloads-windows/SSMAgent/latest/VERSION"
EIC_RELEASES = "https://api.github.com/repos/aws/aws-ec2-instance-connect-config/commits/master"


@dataclass(frozen=True)
class Row:
    """One pinned version.

    newest: empty if the registry does not tell; `note` says why. there: whether the registry still has the pinned
    version; None: the registry does not tell.
    """

    name: str
    pinned: str
    newest: str
    there: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Registries:
    """How to ask the registries. Each function raises OSError if a registry is out of reach."""

    run: Callable[[list[str]], str]  # a command's output
    get: Callable[[str], bytes]  # what is at a URL
    there: Callable[[str], bool]  # whether anything is at a URL
    lists: Callable[[], AbstractContextManager[list[str]]] = fresh_lists  # options for fresh lists of apt


def main(argv: list[str]) -> int:
    rows = compare(read(HERE / "versions.env"), read(HERE / "sources.env"), Registries(run, fetch, exists))
    print(json.dumps([asdict(row) for row in rows], indent=1) if "--json" in argv else table(rows))
    return 1 if any(row.there is False for row in rows) else 0


def read(path: Path) -> dict[str, str]:
    """The values of versions.env or sources.env, as they are written."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def run(command: list[str]) -> str:
    """A command's output. Raises OSError if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise OSError(f"`{' '.join(command[:4])} …` failed") from error


def fetch(url: str) -> bytes:
    """What is at a URL. Raises OSError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            data: bytes = answer.read()
            return data
    except http.client.HTTPException as error:  # not an OSError; for example an answer that ends early
        raise OSError(f"no usable answer: {error!r}") from error


def exists(url: str) -> bool:
    """Whether a URL exists, without a download. Raises OSError."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT):
            return True
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            return False
        raise
    except http.client.HTTPException as error:
        raise OSError(f"no usable answer: {error!r}") from error


def compare(pinned: dict[str, str], sources: dict[str, str], ask: Registries) -> list[Row]:
    """A row for each pinned version."""
    efa, agent = (string.Template(sources[f"{name}_URL"]).substitute(pinned) for name in ("EFA_INSTALLER", "SSM_AGENT"))
    scripts = string.Template(sources["EC2_INSTANCE_CONNECT_URL"]).substitute(pinned) + "/eic_run_authorized_keys"
    return [
        *debian(pinned, ask),
        _torch(pinned["TORCH"], ask),
        *_nvidia(pinned, f"{sources['NVIDIA_REPOSITORY']}/Packages.gz", ask),
        _page("EFA_INSTALLER", pinned, EFA_RELEASES, r"\| (\d+\.\d+\.\d+) \|", efa, ask),
        _page("AWS_OFI_NCCL", pinned, EFA_RELEASES, r"OFI NCCL [Pp]lugin (\d+\.\d+\.\d+)", "", ask),
        _page("EC2_INSTANCE_CONNECT", pinned, EIC_RELEASES, r'"sha":\s*"([0-9a-f]{40})"', scripts, ask),
        _page("SSM_AGENT", pinned, SSM_RELEASES, r"(\d+(?:\.\d+){3})", agent, ask),
    ]


def replaced(rows: Iterable[Row]) -> dict[str, str]:
    """What to write into versions.env for pinned versions that are gone: name → newest version."""
    return {row.name: row.newest for row in rows if row.there is False and row.newest and row.name.isupper()}


def table(rows: list[Row]) -> str:
    """The table for operators."""
    lines = [f"{'':22}{'pinned':24}{'newest':24}"]
    for row in rows:
        gone = "not in its registry any more" if row.there is False else ""
        if row.name in replaced([row]):
            gone += f"; in images/versions.env write {row.name}={row.newest}"
        note = "; ".join(filter(None, [gone, row.note]))
        lines.append(f"{row.name:22}{row.pinned[:22]:24}{row.newest[:22] or '?':24}{note}".rstrip())
    return "\n".join(lines)


def order(version: str) -> tuple[tuple[int, str], ...]:
    """A sort key for versions of one package that differ only in their numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", version))


def debian(pinned: dict[str, str], ask: Registries) -> list[Row]:
    """The rows of Debian's packages. The kernel has two rows: KERNEL_ABI is part of its package's name."""
    packages = {
        "PYTHON": f"python{pinned['PYTHON']}",
        "CHRONY": "chrony",
        "NODE_EXPORTER": "prometheus-node-exporter",
    }
    names = ["KERNEL_ABI", "KERNEL", *packages]
    try:
        with ask.lists() as apt:
            depends = ask.run(["apt-cache", *apt, "depends", NEWEST_KERNEL])
            abis = re.findall(r"Depends: linux-image-(\S+)", depends)
            kernels = [f"linux-image-{abi}" for abi in dict.fromkeys([pinned["KERNEL_ABI"], *abis])]
            listed = ask.run(["apt-cache", *apt, "madison", *kernels, *packages.values()])
    except OSError as error:
        return [Row(name, pinned[name], "", note=f"apt was not asked: {error}") for name in names]
    found = {name: _listed(listed, package) for name, package in packages.items()}
    found["PYTHON"] = [".".join(each.split(".")[:2]) for each in found["PYTHON"]]
    newest = max(abis, key=order, default="")
    kept = _listed(listed, f"linux-image-{pinned['KERNEL_ABI']}")
    # A kernel that is not the newest may still have a package.
    rows = [Row("KERNEL_ABI", pinned["KERNEL_ABI"], newest, bool(kept))]
    found = {"KERNEL": kept or _listed(listed, f"linux-image-{newest}")} | found
    for name, versions in found.items():
        rows.append(Row(name, pinned[name], max(versions, key=order, default=""), pinned[name] in versions))
    return rows


def _listed(madison: str, package: str) -> list[str]:
    """The package's versions in Debian 12, as `apt-cache madison` lists them."""
    return re.findall(rf"^ *{re.escape(package)} \| +(\S+) \| .*{SUITE}", madison, re.MULTILINE)


def _torch(pinned: str, ask: Registries) -> Row:
    try:
        said = ask.run([sys.executable, "-m", "pip", "index", "versions", "torch"])
    except OSError as error:
        return Row("TORCH", pinned, "", note=f"pip was not asked: {error}")
    found = [each.partition("+")[0] for each in re.findall(r"(?<=[ ,(])\d+(?:\.\d+)+(?:\+\w+)?", said)]
    return Row("TORCH", pinned, max(found, key=order, default=""), pinned in found)


def _nvidia(pinned: dict[str, str], url: str, ask: Registries) -> list[Row]:
    """A row for each package that 30-nvidia.sh to 32-dcgm.sh install from NVIDIA's registry."""
    driver = f"{pinned['NVIDIA_DRIVER']}-1"
    wanted = {
        "NVIDIA_DRIVER": ("nvidia-driver-cuda", driver),
        "driver pinning": (f"nvidia-driver-pinning-{pinned['NVIDIA_DRIVER']}", driver),
        "kernel modules": ("nvidia-kernel-open-dkms", driver),
        "firmware": ("firmware-nvidia-gsp", driver),
        "persistenced": ("nvidia-persistenced", driver),
        "modprobe": ("nvidia-modprobe", driver),
        "libnvidia-cfg1": ("libnvidia-cfg1", driver),
        "fabric manager": ("nvidia-fabricmanager", driver),
        "libnvidia-nscq": ("libnvidia-nscq", driver),
        "DCGM": ("datacenter-gpu-manager-4-core", pinned["DCGM"]),
        "DCGM, proprietary": ("datacenter-gpu-manager-4-proprietary", pinned["DCGM"]),
        "DCGM, CUDA 13": ("datacenter-gpu-manager-4-cuda13", pinned["DCGM"]),
        "DCGM_EXPORTER": ("datacenter-gpu-manager-exporter", pinned["DCGM_EXPORTER"]),
    }
    try:
        index = gzip.decompress(ask.get(url)).decode()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        note = f"NVIDIA's registry was not reached: {_reason(error)}"
        return [Row(name, version, "", note=note) for name, (_, version) in wanted.items()]
    found = _packages(index)
    rows = []
    for name, (package, version) in wanted.items():
        versions = found.get(package, [])
        # The pinning package has the driver's version in its name, so any version of the package is right.
        there = bool(versions) if name == "driver pinning" else version in versions
        newest, note = max(versions, key=order, default=""), "" if versions else f"no {package}"
        if name == "NVIDIA_DRIVER":  # versions.env has it without Debian's revision
            version, newest = version.removesuffix("-1"), newest.removesuffix("-1")
        rows.append(Row(name, version, newest, there, note))
    return rows


def _packages(index: str) -> dict[str, list[str]]:
    """Versions by package, of an apt repository's index."""
    found: dict[str, list[str]] = {}
    for entry in index.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.+)$", entry, re.MULTILINE))
        if len(fields) == 2:
            found.setdefault(fields["Package"], []).append(fields["Version"])
    return found


def _page(name: str, pinned: dict[str, str], url: str, form: str, file: str, ask: Registries) -> Row:
    """The newest version is the first on a page. file: the URL of the pinned version; empty: there is none."""
    there, newest, notes = None, "", []
    try:
        there = ask.there(file) if file else None
    except OSError as error:
        notes.append(f"{file.split('/')[2]} was not reached: {_reason(error)}")
    host = url.split("/")[2]
    try:
        found = re.search(form, ask.get(url).decode(errors="replace"))
        newest = found[1] if found else ""
        notes += [] if found else [f"{host} names no version where it used to"]
    except OSError as error:
        notes.append(f"{host} was not reached: {_reason(error)}")
    return Row(name, pinned[name], newest, there, "; ".join(dict.fromkeys(notes)))


def _reason(error: Exception) -> str:
    return f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else str(getattr(error, "reason", error))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
