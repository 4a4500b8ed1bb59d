"""The head's start. The machine's metadata name the cluster, and the bucket describes it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os

from spotrun.cloud import connect
from spotrun.errors import ConflictError, SpotrunError
from spotrun.head.code_sweep import Sweeper
from spotrun.head.head import Head
from spotrun.head.identity import ClusterIdentity, check
from spotrun.head.lease import Holder, Lease, claim_epoch
from spotrun.head.server.ctl import control_path
from spotrun.head.server.serve import serve
from spotrun.machine import host_keys, metadata, private_paths
from spotrun.machine.systemd import Systemd
from spotrun.spec import described, digest, names
from spotrun.store import Store, cluster_key

log = logging.getLogger(__name__)

POLL = {"local": 1.0, "gcp": 5.0, "aws": 5.0}  # seconds between two polls of the cloud
# Calls of the bucket at the same time. By default, a machine with 2 cores makes 6. The lease's renewal would wait while
# the bucket is slow with the checkpoints of 6 jobs.
THREADS = 128
_LOOK = 5  # polls of the cloud for each poll of the cluster's description


async def run() -> None:
    """Run the head until SIGTERM, until another head takes over, or until the cluster's description changes.

    systemd starts it again. Raises `SpotrunError` if this machine is not the head of a cluster.
    """
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(THREADS))
    systemd = Systemd.from_env()
    watching = asyncio.create_task(systemd.watch())
    try:
        await _serve(systemd)
    finally:
        systemd.stopping()
        watching.cancel()


async def _serve(systemd: Systemd) -> None:
    systemd.status("asking the cloud's metadata server for this machine's identity")
    async with await metadata.detect() as machine:
        found = {key: await machine.attribute(key) or "" for key in (names.CLUSTER, names.BUCKET)}
        identity = await machine.identity()
        account = await machine.account()
    missing = [key for key, value in found.items() if not value]
    if missing:
        raise SpotrunError(f"this machine's metadata has no {' and no '.join(missing)}: it is not a cluster's head")
    name, bucket = found[names.CLUSTER], found[names.BUCKET]
    if bucket.startswith("s3://"):
        os.environ.setdefault("AWS_REGION", identity.region)
    store = await asyncio.to_thread(Store, bucket)
    own = ClusterIdentity(name, bucket, machine.PROVIDER, account, identity.region)
    systemd.status(f"waiting for the lease of the head of {name}")
    lease = Lease(store, name, Holder.of_this_process(identity.machine))
    await lease.take()
    keeping = asyncio.ensure_future(_keep(lease))
    try:
        # First, so that an operator can log in even if something below fails.
        await asyncio.to_thread(host_keys.publish, store, name, names.HEAD, identity)
        await _lead(systemd, store, own, identity, lease, keeping)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await lease.release()


async def _keep(lease: Lease) -> None:
    """Renew the lease until cancelled. Raises `SystemExit` when another head has it."""
    try:
        await lease.keep()
    except ConflictError as error:
        log.warning("%s; this head ends", error)
        raise SystemExit(0) from None


async def _lead(
    systemd: Systemd,
    store: Store,
    own: ClusterIdentity,
    identity: metadata.Identity,
    lease: Lease,
    keeping: asyncio.Future[None],
) -> None:
    """Run the head while this process has the lease."""
    document = await asyncio.to_thread(store.get, cluster_key(own.cluster))
    cluster = check(described(document), own)
    epoch = await asyncio.to_thread(claim_epoch, store, cluster.name)
    cloud = connect(cluster)
    control = control_path()
    private_paths.make_folder(control.parent)
    poll = POLL[cluster.cloud]
    try:
        head = Head(cluster, store, cloud, epoch, poll, digest(document), lease)
        await serve(
            head,
            identity.address,
            control,
            side_tasks=[until_changed(store, own, digest(document), poll * _LOOK), keeping, Sweeper(store).run()],
            on_serving=lambda where: systemd.ready(f"head {epoch} of {cluster.name} listens on {where}"),
        )
    finally:
        await cloud.close()


async def until_changed(store: Store, own: ClusterIdentity, known: str, every: float) -> None:
    """Return when the bucket has another valid description. A new head then reads it, while training continues.

    known: digest of the description that this head has read.
    """
    warned = ""
    while True:
        await asyncio.sleep(every)
        try:
            document = await asyncio.to_thread(store.find, cluster_key(own.cluster))
            changed = document is not None and digest(document) != known and bool(check(described(document), own))
        except SpotrunError as error:  # the bucket does not answer, or the description is not valid: nothing changes
            if str(error) != warned:
                log.warning("%s", error)
            warned = str(error)
            continue
        if changed:
            log.info("the cluster's description has changed: this head ends, and the next one reads it")
            return
