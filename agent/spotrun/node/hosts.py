"""How operators will know this machine over SSH: its host keys, put into the bucket by the machine itself."""

from __future__ import annotations

import os
from pathlib import Path

from spotrun.node.metadata import Identity
from spotrun.store import Store, host_key
from spotrun.wire import HostRecord


def publish(store: Store, cluster: str, name: str, identity: Identity) -> None:
    """Write clusters/<cluster>/hosts/<name>.json. Raises `StoreError`.

    SPOTRUN_SSH_KEYS and SPOTRUN_SSH_PORT say where this machine's SSH server has its keys and listens.
    """
    folder = Path(os.environ.get("SPOTRUN_SSH_KEYS", "/etc/ssh"))
    keys = [" ".join(path.read_text().split()[:2]) for path in sorted(folder.glob("ssh_host_*_key.pub"))]
    port = int(os.environ.get("SPOTRUN_SSH_PORT", "22"))
    record = HostRecord(
        node=name, address=identity.address, port=port, keys=tuple(keys), machine=identity.machine, zone=identity.zone
    )
    store.put(host_key(cluster, name), record.model_dump_json().encode())
