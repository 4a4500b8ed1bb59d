"""Whose each device is: tables of what happens, and properties of clusters that change one thing at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.allocate import Allocation, Claim, Host, allocate, fits

Holds = Mapping[str, tuple[int, ...]]


def claim(job: str, min: int = 1, max: int = 0, holds: str | Holds = "", pools: str = "", **more: Any) -> Claim:
    """A claim whose number is its place in the order of submission: a1 before b2. holds: hosts that it has alone."""
    held = dict.fromkeys(holds.split(), (0,)) if isinstance(holds, str) else holds
    order = (int("".join(c for c in job if c.isdigit())),)
    return Claim(job, order, min=min, max=max or min, holds=held, pools=frozenset(pools.split()), **more)


def machines(count: int, devices: int = 1, pool: str = "m") -> list[Host]:
    return [Host(f"{pool}{number}", pool, devices) for number in range(1, count + 1)]


def carried_out(claims: Iterable[Claim], found: Allocation) -> list[Claim]:
    """The claims when the jobs hold what they were given or may keep."""
    return [replace(c, holds=found.nodes.get(c.job) or found.kept.get(c.job) or {}) for c in claims]


# Tables: claims, hosts, and the nodes of each job (`m1` or, with indexes, `m1:0`).

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
        {"a1": "has 2 of 3 nodes; no more machines are there"},
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


FITS = {
    "enough machines": (claim("a1", 2), machines(2), ""),
    "enough in its pools": (claim("a1", 2, pools="m"), machines(2), ""),
    "too few machines": (claim("a1", 3), machines(2), "needs 3 nodes; all pools have at most 2 machines"),
    "too few in its pools": (
        claim("a1", 4, pools="m n", devices=8),
        [*machines(2, 8), *machines(9, 4, "n")],
        "needs 4 nodes with 8 devices; pools m and n have at most 2 such machines",
    ),
    "a pool that is not there": (claim("a1", pools="x"), machines(2), "needs 1 node; pool x has at most 0 machines"),
    "machines that are too small": (
        claim("a1", devices=8),
        machines(2, 4),
        "needs 1 node with 8 devices; all pools have at most 0 such machines, and no machine with more than 4 devices",
    ),
}


@pytest.mark.parametrize("case", FITS.values(), ids=FITS)
def test_what_could_never_run(case: tuple[Claim, list[Host], str]) -> None:
    asked, hosts, expected = case
    assert fits(asked, hosts) == expected


# Properties: a cluster on which one thing changes at a time.


@st.composite
def a_claim(draw: st.DrawFn, number: int, equal: bool = False) -> Claim:
    least = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return Claim(
        f"j{number}",
        (number,),
        priority=draw(st.sampled_from([0, 0, 0, 1, 2])),
        min=least,
        max=least + draw(st.sampled_from([0, 0, 1, 2, 5])),
        spares=draw(st.sampled_from([0, 0, 0, 1])),
        devices=0 if equal else draw(st.sampled_from([0, 0, 1, 1, 2, 3])),
        pools=frozenset(() if equal else draw(st.sampled_from(["", "", "a", "b", "ab"]))),
    )


@st.composite
def a_host(draw: st.DrawFn, number: int, equal: bool = False) -> Host:
    if equal:
        return Host(f"h{number}", "a")
    return Host(f"h{number}", draw(st.sampled_from("ab")), draw(st.sampled_from([1, 1, 2, 4])))


@st.composite
def a_history(draw: st.DrawFn, equal: bool = False) -> list[tuple[list[Claim], list[Host]]]:
    """A cluster after each of some changes: a job arrives, ends, is paused, changes; a host comes, goes."""
    hosts = [draw(a_host(number, equal)) for number in range(draw(st.integers(1, 8)))]
    claims = [draw(a_claim(number, equal)) for number in range(draw(st.integers(0, 7)))]
    steps = [(list(claims), list(hosts))]
    for number in range(10, 10 + draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["arrive", "arrive", "end", "pause", "change", "come", "go", "go"]))
        if kind == "arrive":
            claims.append(draw(a_claim(number, equal)))
        elif kind == "come":
            hosts.append(draw(a_host(number, equal)))
        elif kind == "go" and hosts:
            hosts.pop(draw(st.integers(0, len(hosts) - 1)))
        elif claims:
            old = claims.pop(draw(st.integers(0, len(claims) - 1)))
            if kind == "pause":
                claims.append(replace(old, paused=not old.paused))
            elif kind == "change":
                new = draw(a_claim(number, equal))
                claims.append(replace(old, priority=new.priority, min=new.min, max=new.max))
        steps.append((list(claims), list(hosts)))
    return steps


class Turn:
    """One step of a history: the claims with what they hold, the hosts, and the allocation."""

    def __init__(self, claims: list[Claim], hosts: list[Host], found: Allocation) -> None:
        self.claims, self.hosts, self.found = claims, {host.name: host for host in hosts}, found
        self.asking = sorted((c for c in claims if not c.paused), key=lambda c: (-c.priority, c.order))
        self.owner: dict[tuple[str, int], Claim] = {}
        for asked in self.asking:
            for name, at in self.has(asked).items():
                self.owner.update({(name, index): asked for index in at})

    def has(self, asked: Claim) -> Holds:
        return self.found.nodes.get(asked.job) or self.found.kept.get(asked.job) or {}

    def count(self, asked: Claim) -> int:
        return len(self.found.nodes.get(asked.job, ()))

    def held(self, asked: Claim) -> Holds:
        """What it held before, of what is still there."""
        return {name: at for name, at in asked.holds.items() if name in self.hosts}

    def could_have(self, asked: Claim, host: Host, takes: Callable[[Claim], bool]) -> bool:
        """Whether the job could have this host with what is free, its own, or taken from some others."""
        owners = [self.owner.get((host.name, index)) for index in range(host.devices)]
        gettable = sum(owner is None or owner is asked or takes(owner) for owner in owners)
        return asked.may_use(host) and gettable >= (asked.devices or host.devices)


def played(history: list[tuple[list[Claim], list[Host]]]) -> Iterator[Turn]:
    found = Allocation({})
    for claims, hosts in history:
        now = carried_out(claims, found)
        found = allocate(now, hosts)
        yield Turn(now, hosts, found)


def assert_no_device_is_given_twice_and_whole_machines_are_alone(turn: Turn) -> None:
    given_away = 0
    for asked in turn.asking:
        for name, at in turn.has(asked).items():
            assert asked.may_use(turn.hosts[name])
            assert set(at) <= set(range(turn.hosts[name].devices))
            assert len(set(at)) == len(at) == (asked.devices or turn.hosts[name].devices)
            given_away += len(at)
    assert given_away == len(turn.owner)


def assert_a_job_has_nothing_or_at_least_its_min_and_says_why_it_has_less_than_its_max(turn: Turn) -> None:
    assert not turn.found.nodes.keys() & turn.found.kept.keys()
    assert turn.found.nodes.keys() | turn.found.kept.keys() <= {c.job for c in turn.asking}
    for asked in turn.claims:
        count = turn.count(asked)
        assert count == 0 or asked.min <= count <= asked.most + asked.spares
        assert asked.job not in turn.found.kept or 0 < len(turn.found.kept[asked.job]) < asked.min
        assert (asked.job in turn.found.reasons) == (count < asked.most)


def assert_what_comes_out_changes_nothing_when_it_goes_in_again(turn: Turn) -> None:
    again = allocate(carried_out(turn.claims, turn.found), turn.hosts.values())
    assert (again.nodes, again.kept) == (turn.found.nodes, turn.found.kept)


def assert_the_order_of_claims_and_hosts_does_not_matter(turn: Turn) -> None:
    assert allocate(reversed(turn.claims), reversed(turn.hosts.values())) == turn.found


def assert_no_lower_priority_is_served_before_a_higher_min(turn: Turn) -> None:
    """The first job of its priority that waits could not run even with all that lower priorities have, and with what
    later jobs of its own keep without running."""
    seen = set()
    for asked in turn.asking:
        if turn.count(asked) or asked.priority in seen:
            continue
        seen.add(asked.priority)

        def takes(owner: Claim, asked: Claim = asked) -> bool:
            equal = owner.priority == asked.priority
            # One node that is over a min can be taken, whichever it is. Of several, it depends on which.
            over = equal and asked.min == 1 and turn.count(owner) > owner.min
            return owner.priority < asked.priority or over or (equal and not turn.count(owner))

        assert sum(turn.could_have(asked, host, takes) for host in turn.hosts.values()) < asked.min


def assert_what_is_over_the_min_is_shared_evenly(turn: Turn) -> None:
    """A job with less than its `max` could not have one more node: of what is free, of what lower priorities or spares
    have, of what jobs of its priority have that have two nodes more."""
    for asked in turn.asking:
        count = turn.count(asked)

        def takes(owner: Claim, asked: Claim = asked, count: int = count) -> bool:
            more = turn.count(owner) > owner.min and turn.count(owner) >= count + 2
            spare = turn.count(owner) > owner.most
            return spare or owner.priority < asked.priority or (owner.priority == asked.priority and more)

        if 0 < count < asked.most:
            others = (host for host in turn.hosts.values() if host.name not in turn.has(asked))
            assert not any(turn.could_have(asked, host, takes) for host in others)


def assert_what_a_job_loses_goes_to_another_one(turn: Turn) -> None:
    """The bound on moves. A node that a job lost though it goes on is, in the same allocation, another job's, at least
    one of its devices. So there are at most as many moves as nodes that jobs gain. A job with more nodes than it may
    have loses the surplus. Where a job stays, its devices stay, or another job has one of them."""
    for asked in turn.asking:
        if not turn.count(asked) or len(turn.held(asked)) > asked.most + asked.spares:
            continue
        for name, at in turn.held(asked).items():
            if turn.has(asked).get(name) != at:
                assert any(turn.owner.get((name, index), asked) is not asked for index in at)


@settings(max_examples=1000, deadline=None)
@given(a_history())
def test_the_rules_hold_at_every_turn_of_a_random_history(history: Any) -> None:
    for turn in played(history):
        assert_no_device_is_given_twice_and_whole_machines_are_alone(turn)
        assert_a_job_has_nothing_or_at_least_its_min_and_says_why_it_has_less_than_its_max(turn)
        assert_what_comes_out_changes_nothing_when_it_goes_in_again(turn)
        assert_the_order_of_claims_and_hosts_does_not_matter(turn)
        assert_no_lower_priority_is_served_before_a_higher_min(turn)
        assert_what_is_over_the_min_is_shared_evenly(turn)
        assert_what_a_job_loses_goes_to_another_one(turn)


@settings(max_examples=500, deadline=None)
@given(a_history(equal=True))
def test_on_equal_machines_nobody_both_loses_and_gains(history: Any) -> None:
    """The bound on equal machines: a job that goes on keeps as many of its nodes as its new number allows. If no job
    starts or asks for more and no host goes, a job that goes on loses nothing."""
    running: set[str] = set()
    asked_before: dict[str, Claim] = {}
    hosts_before: set[str] = set()
    for turn in played(history):
        asking = {c.job: replace(c, holds={}) for c in turn.asking}
        new = any(asked_before.get(job) != asked for job, asked in asking.items())
        starting = new or turn.found.nodes.keys() - running
        for asked in turn.asking:
            held, has = turn.held(asked), turn.found.nodes.get(asked.job, {})
            lost = held.keys() - has.keys()
            assert not has or len(lost) == max(0, len(held) - len(has))
            assert not (has and lost) or starting or hosts_before - turn.hosts.keys()
        running, asked_before, hosts_before = set(turn.found.nodes), asking, set(turn.hosts)


@settings(max_examples=300, deadline=None)
@given(a_history(), st.randoms(use_true_random=False))
def test_every_job_whose_min_fits_alone_runs_in_the_end(history: Any, dice: random.Random) -> None:
    claims, hosts = history[-1]
    left = [replace(asked, paused=False) for asked in claims]
    found = allocate(left, hosts)
    while found.nodes:
        ended = dice.choice(sorted(found.nodes))
        # The state of those that keep nodes without running is in the bucket by now.
        left = [replace(c, holds=found.nodes.get(c.job, {})) for c in left if c.job != ended]
        found = allocate(left, hosts)
    assert all(fits(asked, hosts) for asked in left)


@pytest.mark.parametrize("devices", [0, 3], ids=["a whole machine", "three devices"])
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
@pytest.mark.parametrize("most", [1, 3], ids=["fixed size", "elastic"])
@pytest.mark.parametrize("seed", range(5))
def test_a_stream_of_small_jobs_does_not_starve_a_large_one(devices: int, nodes: int, most: int, seed: int) -> None:
    dice = random.Random(seed)
    hosts = machines(3, 4)
    claims = [claim(f"a{number}", 1, most, devices=1) for number in range(12)]
    ends = {asked.job: dice.randint(1, 9) for asked in claims}
    claims = carried_out(claims, allocate(claims, hosts))
    claims.append(claim("large12", nodes, devices=devices))
    time, found = 0, allocate(claims, hosts)
    while time < 100 and "large12" not in found.nodes:
        time += 1
        claims += [claim(f"b{13 + 2 * time + more}", 1, most, devices=1) for more in range(2)]
        claims = [asked for asked in claims if ends.get(asked.job) != time]
        found = allocate(claims, hosts)
        claims = carried_out(claims, found)
        ends |= {job: time + dice.randint(1, 9) for job in found.nodes.keys() - ends.keys()}
    assert "large12" in found.nodes
