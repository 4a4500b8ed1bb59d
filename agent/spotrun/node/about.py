"""What this node has: its machine, its image, and the packages of a job's workers. Written down once for each job."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spotrun.errors import SpotrunError
from spotrun.history.provenance import NodeRecord
from spotrun.machine.metadata import Identity
from spotrun.state.control import NONE
from spotrun.store import Store, about_key

log = logging.getLogger(__name__)

MANIFEST = Path("/etc/spotrun/image.json")  # images/provision/90-manifest.sh writes it
_GPUS, _DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")
_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)\.dist-info")


def write(store: Store, job: str, identity: Identity, boot: str, devices: int, path: str, seed: int = NONE) -> None:
    """Write this node's record into the bucket. path: the workers' PYTHONPATH. seed: `NONE`: it is not known.

    Failures are only logged.
    """
    record = NodeRecord(
        node=identity.name,
        boot=boot,
        at=time.time(),
        zone=identity.zone,
        type=identity.type,
        devices=devices,
        cpus=os.cpu_count() or 0,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus(_GPUS),
        driver=driver(_DRIVER),
        kernel=platform.release(),
        python=platform.python_version(),
        image=image(MANIFEST),
        seed=None if seed == NONE else seed,
        packages=packages([*path.split(os.pathsep), *sys.path]),
    )
    try:
        store.put(about_key(job, identity.name, boot), record.model_dump_json().encode())
    except SpotrunError as error:
        log.warning("job %s: the record of this node was not written into the bucket: %s", job, error)


def packages(places: Iterable[str]) -> dict[str, str]:
    """Versions by name. The names of folders are enough: reading the metadata would take a tenth of a second."""
    found: dict[str, str] = {}
    for place in dict.fromkeys(filter(None, places)):
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for match in filter(None, map(_PACKAGE.fullmatch, names)):
            found.setdefault(match["name"].lower().replace("_", "-"), match["version"])
    return dict(sorted(found.items()))


def image(path: Path) -> dict[str, Any]:
    """What the image's manifest says about the image as a whole; empty if there is none."""
    try:
        found = json.loads(path.read_text())
        return {key: found[key] for key in ("cloud", "commit", "built", "base", "versions") if key in found}
    except (OSError, ValueError, TypeError):
        return {}


def gpus(folder: Path) -> tuple[str, ...]:
    """The models of the machine's GPUs, as the driver names them."""
    found = []
    for path in sorted(folder.glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        found.append(match[1] if match else "unknown")
    return tuple(found)


def driver(path: Path) -> str:
    """The version of NVIDIA's driver; empty if there is none."""
    try:
        match = re.search(r"\b([0-9]+(\.[0-9]+)+)\b", path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""
