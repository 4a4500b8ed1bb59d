"""Publish a machine's SSH host keys, and the hash of its agent's secret, in the bucket."""

from __future__ import annotations

import os
from pathlib import Path

from spotrun.machine.metadata import Identity
from spotrun.store import Store, host_key
from spotrun.wire import HostRecord, hash_of


def publish(store: Store, cluster: str, name: str, identity: Identity, secret: str = "") -> None:
    """Write clusters/<cluster>/hosts/<name>.json. Raises `StoreError`.

    secret: the node's agent shows it to the head; the record has only its hash. The variables SPOTRUN_SSH_KEYS (folder
    of the keys) and SPOTRUN_SSH_PORT describe this machine's SSH server.
    """
    folder = Path(os.environ.get("SPOTRUN_SSH_KEYS", "/etc/ssh"))
    keys = [" ".join(path.read_text().split()[:2]) for path in sorted(folder.glob("ssh_host_*_key.pub"))]
    port = int(os.environ.get("SPOTRUN_SSH_PORT", "22"))
    record = HostRecord(
        node=name,
        address=identity.address,
        port=port,
        keys=tuple(keys),
        machine=identity.machine,
        zone=identity.zone,
        token_sha256=hash_of(secret) if secret else "",
    )
    store.put(host_key(cluster, name), record.model_dump_json().encode())
