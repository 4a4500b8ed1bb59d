"""The board: whose each device is while an allocation is decided, and what it costs to give a node to a job.

It starts with what the jobs hold. Nodes then change hands one at a time. So a node that nobody needs stays where it is.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from typing import Literal, NamedTuple

from spotrun.head.allocation.claims import Claim, Host

Step = Literal["rejoin", "start", "grow", "level", "spare"]
"""What a node is for. rejoin: the `min` of a job that still has nodes. start: the `min` of a job. grow: more, up to
`max`. level: more, from a job of the same priority that has at least two nodes more. spare: a spare."""
Cost = tuple[int, ...]  # compared item by item; the smaller one is cheaper
Undo = Callable[[], None]


class Job:
    """A claim and what it has at the moment."""

    def __init__(self, claim: Claim, rank: int) -> None:
        self.claim = claim
        self.rank = rank  # by priority, then by submission
        self.id, self.priority, self.min, self.most = claim.job, claim.priority, claim.min, claim.most
        self.nodes: dict[str, tuple[int, ...]] = {}
        self.held: dict[str, tuple[int, ...]] = {}  # the devices by node that it had at first
        self.inside: Counter[str] = Counter()  # how many of its nodes each pool has
        self.reserves = False  # whether it keeps what it has although it cannot start

    @property
    def count(self) -> int:
        return len(self.nodes)

    @property
    def runs(self) -> bool:
        return self.count >= self.min

    def effect(self) -> int:
        """What happens if a node is taken from it.

        0: nothing, it cannot train anyway. 1: it shrinks. 2: it stops. 3: it has one spare fewer.
        """
        if self.count > self.most:
            return 3
        return 0 if self.count < self.min else 1 if self.count > self.min else 2


class Place:
    """A host, and the job that has each of its devices."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.owners: list[Job | None] = [None] * host.devices
        self.free = host.devices

    def needed(self, job: Job) -> int:
        """How many devices the job takes here."""
        return job.claim.devices or self.host.devices

    def jobs(self) -> list[Job]:
        """The jobs that have devices here."""
        return list(dict.fromkeys(owner for owner in self.owners if owner)) if self.free < self.host.devices else []


Wanted = tuple[int, frozenset[str], frozenset[str]]  # devices of each node, pools, nodes to avoid


class Move(NamedTuple):
    """A node that a job gets, and the jobs that leave this node."""

    place: Place
    leave: list[Job]


class Board:
    """All hosts, all jobs that ask for something, and whose each device is."""

    def __init__(self, claims: Iterable[Claim], hosts: Iterable[Host]) -> None:
        self.places = {host.name: Place(host) for host in sorted(hosts, key=lambda host: host.name)}
        asking = sorted((c for c in claims if not c.paused), key=lambda c: (-c.priority, c.order, c.job))
        self.jobs = [Job(claim, rank) for rank, claim in enumerate(asking)]
        self.named = Counter(pool for claim in asking for pool in claim.pools)
        # Names of hosts: by whether they are there and pool, then by devices and free devices. Old entries are skipped.
        self._free: dict[tuple[bool, str], dict[tuple[int, int], list[str]]] = defaultdict(dict)
        self._pools = {place.host.pool for place in self.places.values()}
        self._usable: dict[Wanted, list[Place]] = {}
        self._soonest: dict[Wanted, Iterator[str]] = {}
        self._takeable: dict[tuple[Step, int, int, str], list[tuple[Cost, str]]] = {}
        for job in self.jobs:
            self._seed(job)
        for place in self.places.values():
            self._note_free(place)

    def _seed(self, job: Job) -> None:
        """Put on the board what a job holds. Leaves out what is impossible, and what an earlier job of `jobs` has."""
        for name in sorted(job.claim.holds, key=lambda name: (name in job.claim.standby, name)):
            place = self.places.get(name)
            if place is None or job.count == job.most + job.claim.spares or not job.claim.may_use(place.host):
                continue
            indexes = (
                tuple(sorted(set(job.claim.holds[name]))) if job.claim.devices else tuple(range(len(place.owners)))
            )
            fine = len(indexes) == place.needed(job) and indexes[0] >= 0 and indexes[-1] < len(place.owners)
            if fine and not any(place.owners[index] for index in indexes):
                job.held[name] = indexes
                self._set(place, indexes, job)

    # Changes.

    def state(self) -> list[dict[str, tuple[int, ...]]]:
        """What each job has."""
        return [dict(job.nodes) for job in self.jobs]

    def give(self, place: Place, job: Job) -> None:
        """Give a job its devices on a host: those that it had there before, if they are free."""
        before = job.held.get(place.host.name, ())
        if not before or any(place.owners[index] for index in before):
            free = [index for index, owner in enumerate(place.owners) if owner is None]
            before = tuple(free[: place.needed(job)])
        self._change(place, before, job, job)

    def take(self, place: Place, job: Job) -> None:
        """Take a host's devices from a job."""
        self._change(place, job.nodes[place.host.name], None, job)

    def put(self, place: Place, indexes: tuple[int, ...], job: Job) -> None:
        """Give a job exactly these free devices."""
        self._change(place, indexes, job, job)

    def _set(self, place: Place, indexes: tuple[int, ...], owner: Job | None) -> None:
        name = place.host.name
        for index in indexes:
            previous = place.owners[index]
            if owner is None and previous is not None and previous.nodes.pop(name, ()):
                previous.inside[place.host.pool] -= 1
            place.owners[index] = owner
        place.free += -len(indexes) if owner else len(indexes)
        if owner:
            owner.nodes[name] = indexes
            owner.inside[place.host.pool] += 1

    def _change(self, place: Place, indexes: tuple[int, ...], owner: Job | None, job: Job) -> None:
        before = job.effect()
        self._set(place, indexes, owner)
        self._note_free(place)
        if self._takeable:
            # The cost of the job's other nodes changes only with `effect`.
            for name in list(job.nodes) if job.effect() != before else []:
                self._note_takeable(self.places[name])
            self._note_takeable(place)

    def make(self, move: Move, job: Job) -> list[Undo]:
        """Carry out a move. Returns the functions that undo it: call the last one first."""
        done = [self._leave(move.place, other) for other in move.leave]
        self.give(move.place, job)
        return [*done, lambda: self.take(move.place, job)]

    def _leave(self, place: Place, job: Job) -> Undo:
        indexes = job.nodes[place.host.name]
        self.take(place, job)
        return lambda: self.put(place, indexes, job)

    # Choices.

    def best(self, job: Job, step: Step) -> Move | None:
        """The node that disturbs other jobs least. A free one comes first."""
        name = self._best_free(job)
        if name is not None:
            return Move(self.places[name], [])
        return None if step == "spare" else self._best_taken(job, step)

    def _best_free(self, job: Job) -> str | None:
        liked = sorted(name for name in {*job.held, *job.claim.keeps} if name in self.places and name not in job.nodes)
        for name in liked:
            place = self.places[name]
            if job.claim.may_use(place.host) and place.free >= place.needed(job):
                return name
        for there, pool in product((True, False), self._pools_of(job)):
            found = self._free[there, pool]
            fitting = [key for key in found if key[1] >= (job.claim.devices or key[0])]
            for key in sorted(fitting, key=lambda key: (key[1] - (job.claim.devices or key[0]), key[0])):
                first = self._first(found[key], key, job)
                if first is not None:
                    return first
        return None

    def _pools_of(self, job: Job) -> list[str]:
        """Pools that the job may use: those where it is, then those it prefers, then those that fewest claims name."""
        names = job.claim.pools & self._pools if job.claim.pools else self._pools
        rank = {pool: index for index, pool in enumerate(job.claim.prefers)}
        return sorted(names, key=lambda pool: (-job.inside[pool], rank.get(pool, len(rank)), self.named[pool], pool))

    def _first(self, heap: list[str], key: tuple[int, int], job: Job) -> str | None:
        """The first host whose entry is still true, that is not the job's own, and that the job does not avoid."""
        own: list[str] = []
        found = None
        while heap and found is None:
            place = self.places[heap[0]]
            if place.free != key[1] or heap[0] in own:
                heapq.heappop(heap)
            elif heap[0] in job.nodes or heap[0] in job.claim.avoids:
                own.append(heapq.heappop(heap))
            else:
                found = heap[0]
        for name in own:
            heapq.heappush(heap, name)
        return found

    def _best_taken(self, job: Job, step: Step) -> Move | None:
        found = [
            (cheapest[0], rank, cheapest[1])
            for rank, pool in enumerate(self._pools_of(job))
            if (cheapest := self._cheapest(job, step, pool))
        ]
        return self._move(self.places[min(found)[2]], job, step) if found else None

    def best_of_equals(self, job: Job, level: Iterable[Job]) -> Move | None:
        """A node of a job of the same priority with at least two nodes more. The job with most nodes comes first."""
        equals = [other for other in level if other.count >= job.count + 2 and other.count > other.min]
        for other in sorted(equals, key=lambda other: (-other.count, -other.rank)):
            found: list[tuple[Cost, str]] = []
            for name in other.nodes:
                place = self.places[name]
                if name in job.nodes or not job.claim.may_use(place.host):
                    continue
                cost = self.cost(place, job, "level")
                if cost is not None:
                    found.append((cost[0], name))
                    if cost[1] == [other] and not other.claim.standby:
                        break  # none is cheaper
            if found:
                return self._move(self.places[min(found)[1]], job, "level")
        return None

    def _move(self, place: Place, job: Job, step: Step) -> Move:
        cost = self.cost(place, job, step)
        assert cost is not None
        return Move(place, cost[1])

    def _cheapest(self, job: Job, step: Step, pool: str) -> tuple[Cost, str] | None:
        """The host of a pool that is cheapest to take."""
        heap = self._heap(job, step, pool)
        own: list[tuple[Cost, str]] = []
        found = None
        while heap and found is None:
            cost, name = heap[0]
            if name in job.nodes or name in job.claim.avoids:
                own.append(heapq.heappop(heap))
                continue
            now = self.cost(self.places[name], job, step)
            if now is None:
                heapq.heappop(heap)
            elif now[0] != cost:
                heapq.heapreplace(heap, (now[0], name))
            else:
                found = heap[0]
        for entry in own:
            heapq.heappush(heap, entry)
        return found

    def cost(self, place: Place, job: Job, step: Step) -> tuple[Cost, list[Job]] | None:
        """What it costs to give a job this host, and which jobs leave the host. None: the job cannot have it."""
        missing = place.needed(job) - place.free
        ranked = []
        for other in place.jobs():
            cost = _cost(other, job, step, place.host.name)
            if cost is not None:
                ranked.append((cost, other))
        ranked.sort(key=lambda entry: entry[0])
        leave: list[tuple[Cost, Job]] = []
        for entry in ranked:
            if missing <= 0:
                break
            leave.append(entry)
            missing -= len(entry[1].nodes[place.host.name])
        if missing > 0:
            return None
        for entry in list(leave):  # the last job may have made earlier ones unnecessary
            size = len(entry[1].nodes[place.host.name])
            if missing + size <= 0:
                leave.remove(entry)
                missing += size
        worst = leave[-1][0] if leave else ()
        return (*worst, len(leave)), [other for _, other in leave]

    # What keeps the choices fast.

    def forget(self) -> None:
        """Another step begins: costs are counted from the start."""
        self._takeable.clear()
        self._soonest.clear()

    def _heap(self, job: Job, step: Step, pool: str) -> list[tuple[Cost, str]]:
        key = (step, job.priority, job.claim.devices, pool)
        if key not in self._takeable:
            heap = []
            for name in {name for other in self.jobs if _gives(other, job, step) for name in other.nodes}:
                place = self.places[name]
                if place.host.pool == pool and place.host.devices >= job.claim.devices:
                    cost = self.cost(place, job, step)
                    if cost is not None:
                        heap.append((cost[0], name))
            heapq.heapify(heap)
            self._takeable[key] = heap
        return self._takeable[key]

    def _note_free(self, place: Place) -> None:
        key = (place.host.devices, place.free)
        heapq.heappush(self._free[place.host.there, place.host.pool].setdefault(key, []), place.host.name)

    def _note_takeable(self, place: Place) -> None:
        """Have the cost of this host computed again. An entry that is too cheap is corrected when it comes up."""
        for key, heap in self._takeable.items():
            if key[3] == place.host.pool:
                heapq.heappush(heap, ((-1,), place.host.name))

    # Waiting.

    def usable(self, job: Job) -> list[Place]:
        """Hosts that could be the job's if it were alone."""
        key = (job.claim.devices, job.claim.pools, job.claim.avoids)
        if key not in self._usable:
            self._usable[key] = [place for place in self.places.values() if job.claim.may_use(place.host)]
        return self._usable[key]

    def reserve(self, job: Job) -> list[Undo]:
        """Reserve for a job that cannot start the hosts that become free soonest, as far as the job could use them."""
        key = (job.claim.devices, job.claim.pools, job.claim.avoids)
        if key not in self._soonest:
            soonest = sorted((self._blockers(place, job), place.host.name) for place in self.usable(job))
            self._soonest[key] = iter([name for _, name in soonest])
        done: list[Undo] = []
        others = (name for name in self._soonest[key] if name not in job.nodes)
        for name in islice(others, job.min - job.count):
            place = self.places[name]
            indexes = [index for index, owner in enumerate(place.owners) if owner is None][: place.needed(job)]
            for other in sorted(place.jobs(), key=lambda other: -other.rank):
                if len(indexes) < place.needed(job) and _cost(other, job, "start", name) is not None:
                    indexes += other.nodes[name]  # all of them: no other job may get one first
                    done.append(self._leave(place, other))
            if indexes:
                self.put(place, tuple(indexes), job)
                done.append(lambda place=place: self.take(place, job))  # type: ignore[misc]
        return done

    def _blockers(self, place: Place, job: Job) -> tuple[int, int]:
        """How many jobs must end before the job could have this host, and how many devices they have."""
        missing, blockers = place.needed(job) - place.free, []
        for other in place.jobs():
            size = sum(owner is other for owner in place.owners)
            if _cost(other, job, "start", place.host.name) is None:
                blockers.append(size)
            else:
                missing -= size
        devices, jobs = missing, 0
        for size in sorted(blockers, reverse=True):
            if missing > 0:
                jobs, missing = jobs + 1, missing - size
        return jobs, devices


def _gives(other: Job, job: Job, step: Step) -> bool:
    """Whether the other job gives nodes to this one."""
    if other is job or other.reserves:
        return False
    if other.count > other.most or other.priority < job.priority:
        return True
    if other.priority > job.priority or step == "grow":
        return False
    if step == "level":
        return other.count > other.min and other.count >= job.count + 2
    return other.count > other.min or (step == "start" and other.count < other.min)


def _cost(other: Job, job: Job, step: Step, name: str) -> Cost | None:
    """What it costs to take a node from another job. None: the node is not taken."""
    if not _gives(other, job, step):
        return None
    works = int(name not in other.claim.standby)
    if other.count > other.most:
        return 0, 0, 0, works, -other.rank
    if other.priority < job.priority:
        # First the rest of a job that cannot train any more, then what is over the min, then whole jobs.
        return 1, other.priority, other.effect(), -other.rank, works
    return 2, -other.count if step == "level" else 0, int(other.count < other.min), -other.rank, works
