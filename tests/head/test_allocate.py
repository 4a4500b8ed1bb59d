"""Whose each device is: tables of what happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from spotrun.head.allocation.allocate import Claim, Host, allocate
from tests.head.claims import Holds, claim, machines

Case = tuple[list[Claim], list[Host], dict[str, str]]
WHOLE_MACHINES: dict[str, Case] = {
    "one job gets what it asks for": ([claim("a1", 2)], machines(3), {"a1": "m1 m2"}),
    "a job without its min gets nothing": ([claim("a1", 3)], machines(2), {}),
    "a paused job gets nothing": ([claim("a1", holds="m1", paused=True), claim("b2")], machines(1), {"b2": "m1"}),
    "every min comes before more": ([claim("a1", 1, 3), claim("b2", 2)], machines(3), {"a1": "m1", "b2": "m2 m3"}),
    "what is left is shared evenly": (
        [claim("a1", 1, 9), claim("b2", 1, 9), claim("c3", 1, 1)],
        machines(6),
        {"a1": "m1 m4 m6", "b2": "m2 m5", "c3": "m3"},
    ),
    "a job of higher priority comes first although it was submitted last": (
        [claim("a1"), claim("b2", priority=1)],
        machines(1),
        {"b2": "m1"},
    ),
    "a job of higher priority gets its max before lower ones get their min": (
        [claim("a1"), claim("b2", 1, 3, priority=1)],
        machines(3),
        {"b2": "m1 m2 m3"},
    ),
    "a high one that cannot be placed blocks no one": (
        [claim("a1", 1, 2), claim("b2", 3, priority=5)],
        machines(2),
        {"a1": "m1 m2"},
    ),
    "the urgent one takes what is over the min": (
        [claim("a1", 1, 3, "m1 m2 m3"), claim("b2", 2, holds="m4 m5"), claim("c3", priority=9)],
        machines(5),
        {"a1": "m2 m3", "b2": "m4 m5", "c3": "m1"},
    ),
    "the urgent one takes from the lowest priority": (
        [claim("a1", holds="m1", priority=1), claim("b2", holds="m2", priority=0), claim("c3", priority=9)],
        machines(2),
        {"a1": "m1", "c3": "m2"},
    ),
    "of equal ones, the last one submitted makes room": (
        [claim("a1", holds="m2"), claim("b2", holds="m1"), claim("c3", priority=9)],
        machines(2),
        {"a1": "m2", "c3": "m1"},
    ),
    "one job stops, not two, where one is enough": (
        [claim("a1", 2, holds="m1 m2"), claim("b2", 2, holds="m3 m4"), claim("c3", 2, priority=9)],
        machines(4),
        {"a1": "m1 m2", "c3": "m3 m4"},
    ),
    "a job that stops keeps the rest until its state is safe": (
        [claim("a1", 1, 4, "m1"), claim("b2", 3, holds="m2 m3 m4"), claim("c3", priority=9)],
        machines(4),
        {"a1": "m1", "c3": "m2"},
    ),
    "what a job has over its min is spared if a whole job makes room anyway": (
        [claim("a1", 4, 5, "m1 m2 m3 m4 m5"), claim("b2", 2, holds="m6 m7"), claim("c3", 2, priority=9)],
        machines(7),
        {"a1": "m1 m2 m3 m4 m5", "c3": "m6 m7"},
    ),
    "a free machine is taken before one that is in use": (
        [claim("a1", holds="m1"), claim("c3", priority=9)],
        machines(2),
        {"a1": "m1", "c3": "m2"},
    ),
    "a job that runs keeps its min from one submitted before it": (
        [claim("a1", 2), claim("b2", 2, 3, "m1 m2 m3")],
        machines(3),
        {"b2": "m1 m2 m3"},
    ),
    "a job that runs gives what is over its min to a later one": (
        [claim("a1", 1, 3, "m1 m2 m3"), claim("b2", 2)],
        machines(3),
        {"a1": "m3", "b2": "m1 m2"},
    ),
    "a standby node goes first": (
        [claim("a1", 1, 2, "m1 m2", standby=frozenset({"m1"})), claim("b2")],
        machines(2),
        {"a1": "m2", "b2": "m1"},
    ),
    "a difference of one stays with the job that has it": (
        [claim("a1", 1, 9, "m1 m2"), claim("b2", 1, 9, "m3 m4 m5")],
        machines(5),
        {"a1": "m1 m2", "b2": "m3 m4 m5"},
    ),
    "a difference of two is evened out": (
        [claim("a1", 1, 9, "m1"), claim("b2", 1, 9, "m2 m3 m4")],
        machines(4),
        {"a1": "m1 m2", "b2": "m3 m4"},
    ),
    "a later job does not start on what the first in the queue could use": (
        [claim("a1", holds="m1"), claim("b2", 2), claim("c3")],
        machines(2),
        {"a1": "m1"},
    ),
    "a later job may start on what the first in the queue does not need": (
        [claim("a1", holds="m1"), claim("b2", 2, pools="m"), claim("c3")],
        [*machines(2), *machines(1, pool="n")],
        {"a1": "m1", "c3": "n1"},
    ),
    "a job that runs grows beside a queue": (
        [claim("a1", 1, 2, "m1"), claim("b2", 3)],
        [*machines(2), *machines(1, pool="n")],
        {"a1": "m1 m2"},
    ),
    "a lower one starts on what the first in the queue could use": (
        [claim("a1", holds="m1", priority=1), claim("b2", 2, priority=1), claim("c3")],
        machines(2),
        {"a1": "m1", "c3": "m2"},
    ),
    "a job that cannot run on these machines at all reserves none": (
        [claim("a1", 3), claim("b2")],
        machines(2),
        {"b2": "m1"},
    ),
    "a job that lost a node gets a free one before the queue": (
        [claim("a1"), claim("b2", 2, holds="m1 gone")],
        machines(2),
        {"b2": "m1 m2"},
    ),
    "a job that lost a node takes one that is over another's min": (
        [claim("a1", 1, 2, "m2 m3"), claim("b2", 2, holds="m1 gone")],
        machines(3),
        {"a1": "m3", "b2": "m1 m2"},
    ),
    "two jobs that lost nodes: the first one gets those of the second": (
        [claim("a1", 2, holds="m1 gone"), claim("b2", 2, holds="m2 gone")],
        machines(2),
        {"a1": "m1 m2"},
    ),
    "a job does not grow on what another one keeps": (
        [claim("a1", 1, 2, "m1"), claim("b2", 2, holds="m2 gone")],
        machines(2),
        {"a1": "m1"},
    ),
    "a job goes back to where its state is": (
        [claim("a1", keeps=frozenset({"m3"}))],
        machines(3),
        {"a1": "m3"},
    ),
    "a job stays in the pool where it is": (
        [claim("a1", 2, holds="n1")],
        [*machines(2), *machines(2, pool="n")],
        {"a1": "n1 n2"},
    ),
    "a job that may be anywhere leaves the pool that another one needs": (
        [claim("a1"), claim("b2", pools="m")],
        [*machines(1), *machines(1, pool="n")],
        {"a1": "n1", "b2": "m1"},
    ),
    "a job gets no machine that it avoids in exchange for another": (
        [claim("a1", holds="m1"), claim("b2", priority=9, avoids=frozenset({"m2"}))],
        machines(2),
        {"a1": "m2", "b2": "m1"},
    ),
    "a job without pools in common disturbs nobody": (
        [claim("a1", holds="m1", pools="m"), claim("b2", pools="n", priority=9)],
        machines(1),
        {"a1": "m1"},
    ),
    "spares come after everyone's max": (
        [claim("a1", 1, 1, spares=2, priority=5), claim("b2", 1, 2)],
        machines(4),
        {"a1": "m1 m4", "b2": "m2 m3"},
    ),
    "a spare goes to a lower job that has too few": (
        [claim("a1", 1, 1, "m1 m2", spares=1, priority=5, standby=frozenset({"m1"})), claim("b2")],
        machines(2),
        {"a1": "m2", "b2": "m1"},
    ),
    "a smaller max lets go of nodes": (
        [claim("a1", 1, 1, "m1 m2 m3", standby=frozenset({"m1"}))],
        machines(3),
        {"a1": "m2"},
    ),
}
DEVICES: dict[str, Case] = {
    "jobs of one device share a machine": (
        [claim("a1", devices=1), claim("b2", devices=1)],
        machines(2, 4),
        {"a1": "m1:0", "b2": "m1:1"},
    ),
    "each node of a job is another machine": ([claim("a1", 2, devices=1)], machines(2, 4), {"a1": "m1:0 m2:0"}),
    "a job of the whole machine shares it with nobody": (
        [claim("a1"), claim("b2", devices=1)],
        machines(1, 4),
        {"a1": "m1:0123"},
    ),
    "a job takes the machine with the least room for it": (
        [claim("a1", holds={"m2": (3,)}, devices=1), claim("b2", devices=3)],
        machines(2, 4),
        {"a1": "m2:3", "b2": "m2:012"},
    ),
    "a machine that is too small is not used": ([claim("a1", devices=4)], machines(1, 2), {}),
    "devices stay what they are": (
        [claim("a1", holds={"m1": (2,)}, devices=1), claim("b2", devices=1)],
        machines(1, 4),
        {"a1": "m1:2", "b2": "m1:0"},
    ),
    "the urgent one takes the machine where it disturbs fewest": (
        [
            claim("a1", holds={"m1": (0,)}, devices=1),
            claim("b2", holds={"m1": (1,)}, devices=1),
            claim("c3", holds={"m2": (0,)}, devices=1),
            claim("d4", priority=9),
        ],
        machines(2, 2),
        {"a1": "m1:0", "b2": "m1:1", "d4": "m2:01"},
    ),
    "the urgent one takes one device, not the machine": (
        [
            claim("a1", holds={"m1": (0,)}, devices=1),
            claim("b2", holds={"m1": (1,)}, devices=1),
            claim("c3", devices=1, priority=9),
        ],
        machines(1, 2),
        {"a1": "m1:0", "c3": "m1:1"},
    ),
    "a job that makes room moves to where there is room": (
        [claim("a1", holds={"m1": (0,)}, devices=1, pools="m n"), claim("b2", pools="m", priority=9)],
        [*machines(1, 2), *machines(1, 2, "n")],
        {"a1": "n1:0", "b2": "m1:01"},
    ),
    "a machine that the urgent one does not need in the end goes back to all its jobs": (
        [
            claim("a1", 2, holds={"m1": (0, 1, 2, 3), "m2": (0, 1, 2, 3)}, devices=4),
            claim("b2", 2, devices=2, pools="m"),
            claim("c3", holds={"m3": (0,)}, devices=1),
            claim("d4", holds={"m3": (2, 3)}, devices=2),
            claim("e5", 1, 2, priority=2, pools="m"),
        ],
        [*machines(3, 4), *machines(1, 2, "n")],
        {"c3": "m3:0", "d4": "m3:23", "e5": "m1:0123 m2:0123"},
    ),
    "jobs of equal priority are not moved to make a machine whole": (
        [
            claim("a1", holds={"m1": (0,)}, devices=1),
            claim("b2", holds={"m2": (0,)}, devices=1),
            claim("c3"),
        ],
        machines(2, 2),
        {"a1": "m1:0", "b2": "m2:0"},
    ),
    "the queue holds the machine that comes free first and later jobs use the other": (
        [
            claim("a1", holds={"m1": (0,)}, devices=1),
            claim("b2", holds={"m2": (0,)}, devices=1),
            claim("c3", holds={"m2": (1,)}, devices=1),
            claim("d4"),
            claim("e5", devices=1),
            claim("f6", devices=1),
            claim("g7", devices=1),
        ],
        machines(2, 4),
        {"a1": "m1:0", "b2": "m2:0", "c3": "m2:1", "e5": "m2:2", "f6": "m2:3"},
    ),
    "of two that hold the same device, the first one has it": (
        [claim("a1", holds={"m1": (0,)}, devices=1), claim("b2", holds={"m1": (0,)}, devices=1)],
        machines(1, 2),
        {"a1": "m1:0", "b2": "m1:1"},
    ),
    "indexes that the host does not have are not held": (
        [claim("a1", holds={"m1": (7,)}, devices=1)],
        machines(1, 2),
        {"a1": "m1:0"},
    ),
}


def written(found: Mapping[str, Holds], hosts: Iterable[Host]) -> dict[str, str]:
    """Nodes in the words of the tables."""
    plain = all(host.devices == 1 for host in hosts)
    return {
        job: " ".join(name if plain else f"{name}:{''.join(map(str, at))}" for name, at in nodes.items())
        for job, nodes in found.items()
    }


@pytest.mark.parametrize("case", [*WHOLE_MACHINES.values(), *DEVICES.values()], ids=[*WHOLE_MACHINES, *DEVICES])
def test_table(case: Case) -> None:
    claims, hosts, expected = case
    assert written(allocate(claims, hosts).nodes, hosts) == expected


def test_a_job_under_its_min_keeps_what_it_holds_from_later_and_lower_ones() -> None:
    claims = [claim("a1", 2, holds="m1 gone"), claim("b2"), claim("c3", priority=-1)]
    found = allocate(claims, machines(1))
    assert (found.nodes, found.kept) == ({}, {"a1": {"m1": (0,)}})
    assert allocate([replace(claims[0], holds={}), *claims[1:]], machines(1)).nodes == {"b2": {"m1": (0,)}}


REASONS: dict[str, tuple[list[Claim], list[Host], dict[str, str]]] = {
    "a job that has all says nothing": ([claim("a1")], machines(1), {}),
    "a paused job": ([claim("a1", paused=True)], machines(1), {"a1": "is paused"}),
    "machines must come first": (
        [claim("a1", 3, pools="m")],
        machines(2),
        {"a1": "waits for 3 nodes of pool m; 2 are there"},
    ),
    "a job waits behind those that have what it could use": (
        [claim("a1", holds="m1"), claim("b2", 2, pools="m n")],
        [*machines(1), *machines(1, pool="n")],
        {"b2": "waits for 2 nodes of pools m and n; 1 is free; behind a1 (priority 0)"},
    ),
    "a job waits behind those before it in the queue": (
        [claim("a1", 2, holds="m1 m2", priority=5), claim("b2", 2), claim("c3")],
        machines(2),
        {
            "b2": "waits for 2 nodes; 0 are free; behind a1 (priority 5)",
            "c3": "waits for 1 node; 0 are free; behind b2 (priority 0)",
        },
    ),
    "a job does not wait behind one that waits for other machines": (
        [claim("a1", 2, pools="n"), claim("b2", holds="m1"), claim("c3", pools="m")],
        machines(1),
        {
            "a1": "waits for 2 nodes of pool n; 0 are there",
            "c3": "waits for 1 node of pool m; 0 are free; behind b2 (priority 0)",
        },
    ),
    "a job that made room": (
        [claim("a1", 2, 3, "m1 m2 m3"), claim("b2", priority=10)],
        machines(3),
        {"a1": "shrunk to 2 nodes, its min, for b2 (priority 10)"},
    ),
    "a job that could grow": (
        [claim("a1", 1, 3), claim("b2")],
        machines(3),
        {"a1": "has 2 of 3 nodes; others are with b2 (priority 0)"},
    ),
    "a job that could grow if there were machines": (
        [claim("a1", 1, 3)],
        machines(2),
        {"a1": "has 2 of 3 nodes; there are no more machines"},
    ),
    "a job that lost a node": (
        [claim("a1", 2, holds="m1 gone", priority=1), claim("b2", holds="m2", priority=2)],
        machines(2),
        {"a1": "waits for 2 nodes, keeps 1; 0 are free; behind b2 (priority 2)"},
    ),
    "many are ahead": (
        [*(claim(f"a{n}", holds=f"m{n}", priority=n) for n in range(1, 5)), claim("b5", 4)],
        machines(4),
        {"b5": "waits for 4 nodes; 0 are free; behind a4 (priority 4), a3 (priority 3) and 2 others"},
    ),
}


@pytest.mark.parametrize("case", REASONS.values(), ids=REASONS)
def test_reasons(case: tuple[list[Claim], list[Host], dict[str, str]]) -> None:
    claims, hosts, expected = case
    assert allocate(claims, hosts).reasons == expected
