"""Files, marks and ports of a local cluster, and its daemon's configuration."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from spotrun.cloud.base import Market
from spotrun.machine import private_paths
from spotrun.machine.processes import MARK
from spotrun.spec.names import HEAD

SSH_PORT = 2222
METADATA_PORT = 8169
HEAD_MACHINE = f"{HEAD}-0"
DAEMON, ZYGOTE_MARK = "@daemon", "@zygote"  # marks; no machine can have these names
# The variables that a machine inherits from the shell of `make up`. All others are dropped.
_INHERITED = ("HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "PIP_", "UV_", "SSL_CERT_")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True)
class Pool:
    """A pool, for the daemon."""

    name: str  # the pool's name
    zone: str  # its zone
    machine: str  # its machine type
    market: Market  # spot, flex or on-demand
    max: int  # the most machines
    max_run_duration: float = 0.0  # seconds after which the cloud ends a machine; 0: never
    devices: int = 0  # devices of each machine; 0: as many as a machine finds


@dataclass(frozen=True)
class Change:
    """A change of the market. None: no change."""

    where: str  # a pool or a zone
    after: float = 0.0  # seconds after the cloud's start
    price: float | None = None  # dollars an hour for a machine
    capacity: int | None = None  # the most machines. If there are more, the cloud takes spot machines.
    notice: float | None = None  # seconds of notice when the cloud takes machines because of `capacity`
    dry: bool | None = None  # whether it gives no machine. Its present machines stay.
    obtainability: float | None = None  # what the cloud says about the pool: see `spotrun.cloud.base.Advice`
    uptime: float | None = None  # the same
    preemptions: float | None = None  # the same


@dataclass(frozen=True)
class Config:
    """The daemon's configuration, which `up` sends."""

    cluster: str  # the cluster's name
    region: str  # the cluster's region
    bucket: str  # the bucket's URL
    head: Pool  # the head's machine, as a pool of one
    pools: tuple[Pool, ...]  # the cluster file's pools
    metadata: Literal["gce", "ec2"] = "gce"  # whose metadata server the machines see
    boot_delay: float = 0.2  # seconds until a new machine runs
    recreate_delay: float = 1.0  # seconds after a machine's end until its replacement begins
    queue_delay: float = 1.0  # seconds until a flex pool's request for machines has its turn
    capacity: Mapping[str, int] = field(default_factory=dict)  # the most machines by zone or pool; absent: no limit
    market: tuple[Change, ...] = ()  # how the market changes
    share_torch: bool = True  # whether the machines share one import of torch
    role: tuple[str, ...] = (sys.executable, "-m", "spotrun.cli", "{role}")
    """The command of a machine's role; `{role}` in it becomes `agent` or `head`."""

    @property
    def fixed(self) -> tuple[str | bool, ...]:
        """What the machines and the daemon learn when they start. So these values cannot change later."""
        return self.cluster, self.region, self.bucket, self.metadata, self.share_torch

    def to_json(self) -> dict[str, Any]:
        """Leaves out unused keys, which a daemon of an older version would not know."""
        values = asdict(self)
        for pool in (values["head"], *values["pools"]):
            for key in ("max_run_duration", "devices"):
                if not pool[key]:
                    del pool[key]
        for key in ("market", "queue_delay", "share_torch"):
            if values[key] == getattr(Config, key):
                del values[key]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        """The reverse of `to_json`. Raises TypeError, KeyError or ValueError if `values` is not a configuration."""
        found = dict(values)
        found["head"] = Pool(**found["head"])
        found["pools"] = tuple(Pool(**pool) for pool in found["pools"])
        found["role"] = tuple(str(part) for part in found["role"])
        found["capacity"] = {str(where): int(most) for where, most in found["capacity"].items()}
        found["market"] = tuple(Change(**change) for change in found.get("market", ()))
        return cls(**found)

    def pool(self, name: str) -> Pool | None:
        return next((pool for pool in (self.head, *self.pools) if pool.name == name), None)


class Layout:
    """The files of one cluster: below `state`, except those in memory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        # A short name for this cluster in this home, unique on this computer.
        self.unique = hashlib.sha256(str(state).encode()).hexdigest()[:12]
        self.key = state / "id_ed25519"  # the operator's SSH key, which every machine accepts
        self.record = state / "cloud.json"  # the running daemon's pid, endpoint and token
        self.config = state / "config.json"  # the configuration that `up` sent last
        self.log = state / "daemon.log"
        self.ledger = state / "ledger.jsonl"  # what machines existed when, at which price: see `ledger.py`
        self.bucket = state / "bucket"

    @classmethod
    def of(cls, home: Path, cluster: str) -> Layout:
        return cls(home.absolute().resolve() / "local" / cluster)

    @property
    def tmpfs(self) -> Path:
        """The folder in memory, with a folder for each machine."""
        root = Path("/dev/shm")
        if not (root.is_dir() and os.access(root, os.W_OK)):
            root = Path(tempfile.gettempdir())
        return root / f"spotrun-{os.getuid()}-{self.unique}"

    def make(self) -> None:
        """Make the folders, private to this user. Raises `NotOursError` if one belongs to another user."""
        home = self.state.parent.parent
        if home.is_dir():
            private_paths.check_folder(home)  # it may be any folder of the user, so its mode stays
        for path in (self.state.parent, self.state, self.bucket):
            private_paths.make_folder(path)

    def mark(self, machine: str) -> str:
        return f"{self.unique}/{machine}"

    def folder(self, name: str) -> Path:
        return self.state / "nodes" / name


def write_json(path: Path, values: object) -> None:
    """Write a file completely or not at all, readable only by its owner."""
    partial = path.with_suffix(".part")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(values, file)
    partial.replace(path)


def ensure_key(path: Path) -> str:
    """Make an SSH key pair at `path` and `path.pub` unless it exists. Returns the public line.

    Several processes may do this at once, and each may be interrupted: the pair is still one.
    """
    public = path.with_name(path.name + ".pub")
    if not path.exists():
        key = Ed25519PrivateKey.generate()
        part = _part(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(part, path)
        part.unlink()
    if not public.exists() or not public.read_text().strip():
        known = load_ssh_private_key(path.read_bytes(), None).public_key()
        _part(public, known.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n").replace(public)
    return public.read_text().strip()


def _part(path: Path, data: bytes) -> Path:
    """A file beside `path` with this content, readable only by its owner."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return part


def base_environment(mark: str) -> dict[str, str]:
    """A clean environment for the daemon. Its machines inherit it."""
    names = {name for name in os.environ if name in _INHERITED or name.lower() in _PROXIES}
    names |= {name for name in os.environ if name.startswith(_INHERITED_PREFIXES)}
    kept = {name: os.environ[name] for name in names}
    if "PYTHONPATH" in kept:  # machines run in folders of their own
        parts = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts if part)
    programs = os.path.dirname(sys.executable)
    kept["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    kept[MARK] = mark
    return kept


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, if it exists."""
    shutil.rmtree(path, ignore_errors=True)


def prepare(folder: Path, memory: Path, keep_keys: bool) -> None:
    """Make the disk and memory of a new machine: empty, with new host keys. The head keeps its host keys."""
    for path in (folder / "scratch", memory, *(() if keep_keys else (folder / "ssh",))):
        remove_tree(path)
        path.mkdir(parents=True, mode=0o700)
    (memory / "tmp").mkdir(mode=0o700)
    (folder / "ssh").mkdir(exist_ok=True, mode=0o700)
    ensure_key(folder / "ssh" / "ssh_host_ed25519_key")


def new_id(flavour: str) -> str:
    """The id of a new machine, in the form of that cloud. flavour: gce or ec2."""
    return str(secrets.randbelow(9 * 10**18) + 10**18) if flavour == "gce" else f"i-{secrets.token_hex(9)[:17]}"
