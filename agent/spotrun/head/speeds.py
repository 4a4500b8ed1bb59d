"""How fast a job was on the machines of each pool, measured by generation, for `make advise`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spotrun.document import Document

if TYPE_CHECKING:
    from spotrun.head.view import Node

LEAST = 5  # steps of a generation that is measured: the first ones are slow, and would count too much among fewer


class Speed(Document):
    """A measurement. For each pool, number of nodes and number of devices, a job keeps the one with most steps."""

    pool: str  # the pool of all nodes
    nodes: int  # how many trained together
    devices: int  # of each node
    samples_per_second: float  # of all nodes
    samples: float  # of one step of all nodes
    steps: int  # that were measured
    at: float  # when the last one was completed, epoch seconds


class Slow(Document):
    """A worker that is slower than the others; see `stragglers`."""

    node: str
    process: int  # the worker's number on the node
    rank: int  # in the present generation
    device: str = ""  # such as `GPU 1`; empty: none, or not known
    factor: float = 0.0  # its own time divided by that of the others, when it was told
    at: float  # when it was told, epoch seconds


def noted(
    speeds: Sequence[Speed], members: Sequence[Node], per_second: float, pace: float, steps: int, at: float
) -> tuple[Speed, ...]:
    """The speeds, with that of the present generation.

    members: its nodes. per_second: its samples per second. pace: seconds a step. steps: how many it has completed. at:
    when it completed the newest one, epoch seconds.
    """
    pools = {node.report.pool for node in members}
    if steps < LEAST or per_second <= 0 or len(pools) != 1:
        return tuple(speeds)
    devices = {len(node.devices) or node.report.devices for node in members}
    found = Speed(
        pool=pools.pop(),
        nodes=len(members),
        devices=min(devices),
        samples_per_second=per_second,
        samples=per_second * pace,
        steps=steps,
        at=at,
    )
    key = (found.pool, found.nodes, found.devices)
    before = next((each for each in speeds if (each.pool, each.nodes, each.devices) == key), None)
    if before is not None and before.steps > steps:
        return tuple(speeds)
    return (*(each for each in speeds if each is not before), found)
