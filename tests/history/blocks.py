"""Blocks of metrics as a node writes them."""

from __future__ import annotations

from collections.abc import Iterable

from spotrun.state import points
from spotrun.state.points import Block, Call, Header
from spotrun.store import Store, metrics_key, substitute_key


def block(
    generation: int, base: int, steps: Iterable[int], epoch: int = 0, base_epoch: int = 0, rank: int = 0
) -> Block[Call]:
    """A block with a loss that says generation and step, and rank if it is not 0."""
    calls = [
        Call(step, time=1000.0 * generation + step, values={"loss": generation + step / 1000 + 100 * rank}, epoch=epoch)
        for step in steps
    ]
    return Block(Header("j", generation, rank, base, base_epoch), calls)


def put(store: Store, number: int, wanted: Block[Call]) -> None:
    """Write a block to the bucket."""
    text = points.line(wanted.header) + b"".join(map(points.line, wanted.calls))
    of = wanted.header
    key = metrics_key(of.job, of.generation, number)
    if of.rank:
        key = substitute_key(of.job, of.generation, points.rank_folder(of.rank), number)
    store.put(key, points.compress(text))
