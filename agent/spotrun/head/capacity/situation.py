"""What the policies see and say: offers of pools, demands of jobs, placements. Frozen data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spotrun.cloud.base import Advice, Market
from spotrun.head.capacity.sizes import Need, Pool

NO_ADVICE = Advice()
PRIOR = 4.0  # hours that are assumed before anything is known: between minutes and days, and the same for up and down


@dataclass(frozen=True)
class History:
    """What happened in one pool, as `history.learn` has counted it. Old events count less."""

    hours: float = 0.0  # machine-hours
    interruptions: float = 0.0  # machines that the cloud took
    up: float = 0.0  # hours in which the pool had the machines that it was asked for
    down: float = 0.0  # hours in which it was asked for machines and had fewer
    lost: float = 0.0  # how often it changed from up to down
    found: float = 0.0  # how often it changed from down to up
    short_at: float = 0.0  # epoch seconds when it last had fewer machines than it was asked for; 0: never
    short_with: int = 0  # how many it had then
    refusals: int = 0  # how often it fell short since it last had what it was asked for

    @property
    def lifetime(self) -> float:
        """Seconds until the cloud takes a machine, on average. Ten hours are assumed before anything is known.

        That is between the rates that AWS publishes (https://aws.amazon.com/ec2/spot/instance-advisor/: up to a fifth
        a month) and the worst zones of published traces (an hour or two).
        """
        return 3600 * (self.hours + 10.0) / (self.interruptions + 1.0)

    @property
    def mean_up(self) -> float:
        """Seconds until the pool falls short. An assumed time of four hours counts like each time that was seen."""
        return 3600 * (self.up + PRIOR) / (self.lost + 1.0)

    @property
    def mean_down(self) -> float:
        """Seconds until a pool that is short has its machines. An assumed time of four hours counts too."""
        return 3600 * (self.down + PRIOR) / (self.found + 1.0)


@dataclass(frozen=True)
class Offer:
    """One pool as a policy sees it."""

    pool: Pool  # what it has now, as `sizes` sees it
    zone: str
    market: Market = "spot"
    machine: str = ""  # the machine type
    devices: int = 1  # of each machine
    price: float | None = None  # USD an hour for one machine; None: not known
    speed: float = 1.0  # samples per second of one machine, relative to the other machine types
    history: History = History()
    advice: Advice = NO_ADVICE  # what the cloud itself says
    life: float | None = None  # seconds after which the cloud ends a machine; None: never
    usable: int = 0  # machines that are ready to train
    kept: float = 0.0  # machines that failed and parked jobs keep
    others: float = 0.0  # machines that this job cannot count on, because of other jobs (`place` sets it for each job)
    firm: float = 0.0  # those of them that other jobs keep while this job waits (`place` sets it for each job)

    @property
    def name(self) -> str:
        """The name of the pool."""
        return self.pool.name


@dataclass(frozen=True)
class Demand:
    """One job as a policy sees it."""

    job: str  # its id
    pools: frozenset[str]  # pools that it may use, and whose machines suit it
    order: int = 0  # its place in the queue
    priority: int = 0  # higher ones are served first
    submitted: float = 0.0  # epoch seconds
    wants: bool = True  # whether it should train; if not, it only keeps what its generation has
    min: int = 1  # the fewest nodes on which it trains
    max: int = 1  # the most nodes on which it trains
    spares: int = 0  # nodes beyond `max` that stand by
    devices: int | None = None  # of each node; None: whole machines
    cheapest: bool = False  # whether the cost counts more than the time
    across: bool = False  # whether one generation may use machines of several zones
    members: Mapping[str, int] = field(default_factory=dict)  # nodes of the current generation by pool
    leaving: Mapping[str, int] = field(default_factory=dict)  # those of them that are under notice
    holds: bool = False  # whether it has nodes, also if it does not train: `allocate` serves it before other jobs
    done: float = 0.0  # work done, in the unit of `left`
    left: float | None = None  # work left in seconds on one machine of speed 1; None: not known
    scaling: float = 1.0  # samples per second on n nodes are those on one node times n ** scaling
    deadline: float | None = None  # epoch seconds
    budget: float | None = None  # USD that are left
    leave: int = 0  # on-demand machines that jobs served later are promised (`place` sets it)
    restart: float = 60.0  # seconds from the beginning of a generation on new machines to its first step
    move: float = 30.0  # seconds without training if the job moves while its old machines are there
    checkpoint: float = 0.0  # the most seconds of training that the bucket may lack, with intervals and uploads as now
    unsaved: float = 0.0  # seconds of training that the bucket lacks now

    def share(self, offer: Offer) -> float:
        """The part of a machine's devices that each node of the job has there."""
        return min(1.0, (self.devices or offer.devices) / offer.devices)


@dataclass(frozen=True)
class Situation:
    """All that decisions about capacity rest on."""

    now: float  # epoch seconds
    offers: tuple[Offer, ...] = ()  # in the order of the cluster file
    demands: tuple[Demand, ...] = ()  # in the order of the queue


@dataclass(frozen=True)
class Placement:
    """Where a job may train now, which machines are asked for, and why."""

    use: frozenset[str]  # pools whose machines it may be given now
    needs: tuple[Need, ...]  # machines to ask the pools for, in nodes of this job
    min: int = 1  # the fewest nodes on which it trains now
    max: int = 1  # the most nodes on which it trains now
    spares: int = 0  # nodes beyond `max` that stand by
    reason: str = ""  # one line for operators
    hourly: float = 0.0  # USD an hour for its devices of all machines that are asked for, as far as prices are known
    reserve: Mapping[str, int] = field(default_factory=dict)  # machines by pool that are kept free for its deadline
    thrifty: bool = False  # whether it is smaller than the job's policy wants, because little of the budget is left
    wake: float | None = None  # when the policy wants to be asked again although nothing changes, epoch seconds
    rest_until: float | None = None  # until when the job may rest, without machines, epoch seconds; None: no limit


def nothing(job: Demand, reason: str) -> Placement:
    """The placement of a job that gets no machines."""
    return Placement(frozenset(), (), job.min, job.max, job.spares, reason)


Policy = Callable[[Situation, Demand, Placement | None], Placement]
"""The last argument is the placement that the policy gave before, if any. A policy keeps it unless it has a reason to
change it."""
