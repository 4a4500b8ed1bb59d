"""The `spotrun` command: what a machine of the cluster runs (head, agent) and how operators ask the head (ctl)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from spotrun.errors import SpotrunError
from spotrun.head import ctl


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one line on stderr for whatever a user or operator can mend."""
    parser = argparse.ArgumentParser(prog="spotrun", description="torchrun for machines that vanish")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("head", help="run the head of a cluster (on its machine)").set_defaults(run=_head)
    commands.add_parser("agent", help="run the agent of a node (on its machine)").set_defaults(run=_agent)
    ctl.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _log_to_stderr() -> None:
    level = os.environ.get("SPOTRUN_LOG", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")


def _agent(_: argparse.Namespace) -> int:
    from spotrun.node import agent

    _log_to_stderr()
    asyncio.run(agent.run())
    return 0


def _head(_: argparse.Namespace) -> int:
    _log_to_stderr()
    return asyncio.run(_serve_head())


async def _serve_head() -> int:
    """Find out from the machine's metadata whose head this is, then serve."""
    from spotrun.cloud import connect
    from spotrun.head.head import Head
    from spotrun.head.server import claim_epoch, serve
    from spotrun.node import hosts, metadata
    from spotrun.spec import ClusterSpec
    from spotrun.store import Store

    async with await metadata.detect() as machine:
        found = {key: await machine.attribute(key) for key in ("spotrun-spec", "spotrun-bucket")}
        identity = await machine.identity()
    missing = [key for key, value in found.items() if not value]
    if missing:
        raise SpotrunError(f"this machine's metadata has no {' and no '.join(missing)}: it is not a cluster's head")
    cluster = ClusterSpec.model_validate_json(found["spotrun-spec"] or "")
    store = Store(found["spotrun-bucket"] or "")
    await asyncio.to_thread(hosts.publish, store, cluster.name, "head", identity.address)
    epoch = await asyncio.to_thread(claim_epoch, store, cluster.name)
    cloud = connect(cluster)
    control = ctl.control_path()
    control.parent.mkdir(parents=True, exist_ok=True)
    try:
        poll = 1.0 if cluster.cloud == "local" else 5.0
        await serve(Head(cluster, store, cloud, epoch, poll), identity.address, control)
    finally:
        await cloud.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
