"""Whose each device is: the rules, at every turn of random clusters that change one thing at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.allocation.allocate import Allocation, Claim, Host, allocate
from tests.head.claims import Holds, carried_out, claim, machines


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
        avoids=frozenset(() if equal else draw(st.sampled_from([(), (), (), ("h0",), ("h1", "h12")]))),
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
    assert all(sum(asked.may_use(host) for host in hosts) < asked.min for asked in left)


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
