"""Blocks of metrics as a node writes them."""

from __future__ import annotations

from collections.abc import Iterable

from spotrun.state import points
from spotrun.state.points import Block, Call, Header
from spotrun.store import Store, metrics_key


def block(generation: int, base: int, steps: Iterable[int], epoch: int = 0, base_epoch: int = 0) -> Block[Call]:
    """A block with a loss that says generation and step."""
    calls = [
        Call(step, time=1000.0 * generation + step, values={"loss": generation + step / 1000}, epoch=epoch)
        for step in steps
    ]
    return Block(Header("j", generation, 0, base, base_epoch), calls)


def put(store: Store, number: int, wanted: Block[Call]) -> None:
    """Write a block to the bucket."""
    text = points.line(wanted.header) + b"".join(map(points.line, wanted.calls))
    store.put(metrics_key(wanted.header.job, wanted.header.generation, number), points.compress(text))
