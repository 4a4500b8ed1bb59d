"""Real Terraform on the synthesized stacks, where it and an aws provider are installed; elsewhere tests are skipped.

Nothing is downloaded. A provider is looked for in a mirror that TF_PLUGIN_MIRROR names, in those of the CLI
configuration, in the folders that Terraform itself searches, and in the folders of /opt. It may be of another version
than the stacks ask for, as only the installed one can be used; then a copy of the stacks asks for that one.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = "registry.terraform.io/hashicorp/aws"
_PLATFORM = f"{platform.system().lower()}_{ {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(platform.machine(), '') }"
_CLI = ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG")
# What every emulator of AWS needs of the provider, and no account does.
_EMULATED = {
    "skip_credentials_validation": True,
    "skip_metadata_api_check": "true",
    "skip_region_validation": True,
    "s3_use_path_style": True,
}


@dataclass(frozen=True)
class Tools:
    """mirror: the folder with <host>/<namespace>/<type>. version: of the provider in it."""

    terraform: str
    mirror: Path
    version: str


@dataclass(frozen=True)
class Stack:
    """A copy of a synthesized stack, with the provider that there is."""

    folder: Path
    tools: Tools
    environment: Mapping[str, str]

    def run(self, *words: str, good: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """`terraform <words>`; an AssertionError with what it said if it fails."""
        done = subprocess.run(
            [self.tools.terraform, *words, "-no-color"],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode in good, f"terraform {' '.join(words)} in {self.folder.name}:\n{done.stdout}"
        return done

    def show(self) -> dict[str, Any]:
        """Terraform's state, as JSON."""
        found: dict[str, Any] = json.loads(self.run("show", "-json").stdout)
        return found


def require() -> Tools:
    """What there is; the test is skipped if something is missing."""
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("no terraform on this machine")
    found = _provider()
    if found is None:
        pytest.skip(f"no {SOURCE} for {_PLATFORM} on this machine: set TF_PLUGIN_MIRROR to a folder that has it")
    return Tools(terraform, *found)


def copy(stack: Path, into: Path, tools: Tools, environment: Mapping[str, str] | None = None) -> Stack:
    """A copy of the stack in folder `stack`, initialized. environment: of an emulator of AWS, to run there."""
    folder = into / stack.name
    folder.mkdir(parents=True)
    shutil.copy(stack / "cdk.tf.json", folder)
    adapt(folder, tools.version, emulated=environment is not None)
    config = configure(into, tools)
    made = Stack(folder, tools, {"TF_CLI_CONFIG_FILE": str(config), "TF_IN_AUTOMATION": "1", **(environment or {})})
    made.run("init", "-input=false")
    return made


def adapt(folder: Path, version: str, emulated: bool) -> None:
    """Have the stack in a folder ask for the provider's version that there is, and stand an emulator of AWS."""
    path = folder / "cdk.tf.json"
    document = json.loads(path.read_text())
    # The pin is for users; a mirror has one version, and not that one. What is proved here, real Terraform and a real
    # provider taking the stacks, holds for the arguments that both versions have.
    document["terraform"]["required_providers"]["aws"]["version"] = version
    if emulated:
        document["provider"]["aws"][0] |= _EMULATED
    path.write_text(json.dumps(document, indent=2))


def configure(folder: Path, tools: Tools) -> Path:
    """A CLI configuration with the mirror as the only place to get providers from."""
    config = folder / "terraform.rc"
    config.write_text(
        f'provider_installation {{\n  filesystem_mirror {{\n    path = "{tools.mirror}"\n  }}\n}}\n'
        "disable_checkpoint = true\n"
    )
    return config


@functools.cache
def _provider() -> tuple[Path, str] | None:
    """The mirror with the newest aws provider for this machine, and its version."""
    found: list[tuple[tuple[int, ...], Path, str]] = []
    for mirror in _mirrors():
        for version in _versions(mirror / SOURCE):
            found.append((tuple(map(int, version.split("."))), mirror, version))
    if not found:
        return None
    _, mirror, version = max(found)
    return mirror, version


def _versions(folder: Path) -> Iterator[str]:
    """Unpacked, <version>/<platform>/, or packed, terraform-provider-aws_<version>_<platform>.zip."""
    for path in folder.glob(f"*/{_PLATFORM}"):
        yield path.parent.name
    for path in folder.glob(f"terraform-provider-aws_*_{_PLATFORM}.zip"):
        yield path.name.split("_")[1]


def _mirrors() -> Iterator[Path]:
    """https://developer.hashicorp.com/terraform/cli/config/config-file#implied-local-mirror-directories, and more."""
    if named := os.environ.get("TF_PLUGIN_MIRROR"):
        yield Path(named)
    home = Path.home()
    for config in (*(os.environ.get(name) for name in _CLI), str(home / ".terraformrc")):
        if config and Path(config).is_file():
            text = Path(config).read_text(errors="replace")
            for block in re.findall(r"filesystem_mirror\s*\{([^}]*)\}", text):
                yield from (Path(each) for each in re.findall(r'path\s*=\s*"([^"]+)"', block))
    yield home / ".terraform.d/plugins"
    data = [os.environ.get("XDG_DATA_HOME") or str(home / ".local/share")]
    data += (os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":")
    yield from (Path(folder, "terraform/plugins") for folder in data)
    yield from (Path(folder).parents[2] for folder in sorted(glob.glob(f"/opt/*/{SOURCE}")))
