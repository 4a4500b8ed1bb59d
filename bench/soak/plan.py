"""What a seed stands for: a job, and a sequence of faults. Pure: the same seed is the same scenario everywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass

EPOCHS = 2
BATCH = 4
STEPS = 90  # of an epoch, at the job's largest size
PAUSE = 0.05  # seconds added to each step
FAULTS = (
    "preempt",
    "kill",
    "double",
    "again",
    "joining",
    "newcomer",
    "blind",
    "freeze",
    "cut",
    "head",
    "relaunch",
    "dry",
    "bucket",
    "slow",
)
LASTING = ("freeze", "cut", "dry", "bucket", "slow")  # faults that are undone after a while
# Faults with a second part: between how many seconds later. That of "joining" counts from the next generation's begin.
TWOFOLD = {"again": (0.1, 2.0), "joining": (0.0, 0.3), "newcomer": (0.5, 8.0)}
NOTICES = (2.0, 5.0, 15.0, 30.0, 120.0)  # seconds


@dataclass(frozen=True)
class Shape:
    """A kind of job.

    name: as the job's script knows it. accumulate: batches of a step. loaders: processes that load data, for each rank.
    script: in the folder `job`. fixed: whether its number of nodes must not change.
    """

    name: str
    accumulate: int = 1
    loaders: int = 0
    script: str = "train.py"
    fixed: bool = False


SHAPES = (
    Shape("norm"),
    Shape("dropout"),
    Shape("accumulate", accumulate=3),
    Shape("loaders", loaders=2),
    Shape("pair"),
    Shape("scaler"),
    Shape("gan"),
    Shape("large"),
    Shape("phases"),
    Shape("trainer", accumulate=2, script="trainer.py", fixed=True),
    Shape("lightning", accumulate=2, script="lit.py", fixed=True),
)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    kind: one of FAULTS. double: two members are killed. again: a member is killed, and later another one, while the
    workers may regroup. joining: a member is killed, and then a member of the next generation, as soon as that begins:
    its workers join, or transfer the state. newcomer: a member is killed, and later the machines that are no members,
    while they may boot or warm up. blind: a member and the head are killed. at: the share of the job's steps that are
    done when the fault happens.
    rank: which member it hits; if there are fewer members, the count begins again. seconds: of the notice, or until the
    fault is undone, or until its second part.
    """

    kind: str
    at: float
    rank: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "" if self.kind in ("head", "relaunch", "dry", "bucket", "slow") else f" rank {self.rank}"
        time = f" {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind}{who}{time} at {self.at:.0%}"


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for.

    least, most: nodes; equal for a job of fixed size. spares: nodes that stand by. gpu: whether the workers act as on
    GPUs. exact: whether the job file says `exact: true`.
    """

    seed: int
    shape: Shape
    least: int
    most: int
    faults: tuple[Fault, ...]
    spares: int = 0
    gpu: bool = False
    exact: bool = False

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    @property
    def samples(self) -> int:
        """Samples of an epoch. Not a multiple of a step's samples, so the last step of an epoch is smaller.

        A Trainer would fill that step with samples that it has had.
        """
        whole = STEPS * BATCH * self.shape.accumulate * self.most
        return whole if self.shape.fixed else whole - 3

    @property
    def size(self) -> str:
        size = f"{self.most}" if self.fixed else f"{self.least}-{self.most}"
        return f"{size} + {self.spares}" if self.spares else size

    def arguments(self, out: str, pause: float = PAUSE) -> list[str]:
        """Arguments of the job's script."""
        shape = self.shape
        words = {"out": out, "shape": shape.name, "samples": self.samples, "batch": BATCH, "pause": pause}
        words |= {"accumulate": shape.accumulate, "loaders": shape.loaders}
        return [word for name, value in words.items() for word in (f"--{name}", str(value))] + ["--gpu"] * self.gpu


def scenario(seed: int) -> Scenario:
    """The scenario of a seed. It has one to four faults.

    Three of four jobs have a fixed size, one of three has a spare, and one of four acts as on GPUs. Half of those
    that act as on GPUs say `exact: true`.
    """
    dice = random.Random(f"soak {seed}")
    shape = SHAPES[seed % len(SHAPES)]
    most = dice.randint(1, 4)
    least = most if most == 1 or dice.random() < 2 / 3 else dice.randint(1, most - 1)
    least = most if shape.fixed else least
    times = sorted(dice.uniform(0.05, 0.85) for _ in range(dice.randint(1, 4)))
    faults = tuple(_fault(dice, at) for at in times)
    spares, gpu = dice.random() < 1 / 3, dice.random() < 1 / 4
    return Scenario(seed, shape, least, most, faults, int(spares), gpu, gpu and dice.random() < 1 / 2)


def _fault(dice: random.Random, at: float) -> Fault:
    kind = dice.choice(FAULTS)
    rank = dice.randrange(4)
    if kind == "preempt":
        return Fault(kind, at, rank, dice.choice(NOTICES))
    if kind in TWOFOLD:
        return Fault(kind, at, rank, round(dice.uniform(*TWOFOLD[kind]), 1))
    seconds = round(dice.uniform(1.0, 10.0), 1) if kind in LASTING else 0.0
    return Fault(kind, at, rank, seconds)
