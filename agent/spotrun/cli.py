"""The `spotrun` command: what a machine of the cluster runs (head, agent), and how operators ask it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from spotrun.errors import SpotrunError
from spotrun.head.server import ctl
from spotrun.node import profiles, stacks
from spotrun.text import clean


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one line on stderr for an error that a user or operator can fix."""
    parser = argparse.ArgumentParser(prog="spotrun", description="torchrun for machines that vanish")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("head", help="run the head of a cluster (on its machine)").set_defaults(run=_serve)
    commands.add_parser("agent", help="run the agent of a node (on its machine)").set_defaults(run=_serve)
    ctl.add_parser(commands)
    stacks.add_parser(commands)
    profiles.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except SpotrunError as error:
        print(f"spotrun: {clean(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(args: argparse.Namespace) -> int:
    level = os.environ.get("SPOTRUN_LOG", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if args.command == "head":
        from spotrun.head import boot as head

        asyncio.run(head.run())
    else:
        from spotrun.node import boot as agent

        asyncio.run(agent.run())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
