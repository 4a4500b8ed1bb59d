"""Workers that live through the generations of a job. The test is head and agent."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotrun.state import exit_note
from spotrun.state.control import EXIT_DRAINED, NONE, Context, Control, Invitation, worker_fifo
from spotrun.state.wakeup import wake
from tests.helpers import wait_for
from tests.train.forks import forked
from tests.train.generations import Cluster, Plan, train
from tests.train.meeting import meeting


@dataclass
class Member:
    """A worker's process, and what its agent knows."""

    process: Any
    control: Control
    context: Context
    gone: bool = False


def release(member: Member, generation: int) -> None:
    """What an agent does to have a worker leave its generation."""
    member.control.released = generation
    wake(str(worker_fifo(member.context.control)))


def undisturbed_final(path: Path, nodes: str, interval: int, plan: dict[str, Any]) -> Any:
    """Final state of a job with these nodes that nothing happens to. path: a new folder."""
    path.mkdir()
    whole = Regroups(path)
    try:
        whole.begin(nodes, interval, **dict.fromkeys(nodes, plan))
        assert whole.end() == [0] * len(nodes), whole.cluster.log()
        return whole.cluster.final()
    finally:
        whole.close()


class Regroups:
    """A job whose workers live through its generations. The test is head and agent."""

    def __init__(self, path: Path) -> None:
        self.cluster = Cluster(path, regroups=True)
        self.stack = ExitStack()
        self.members: list[Member] = []  # of the newest generation, in rank order
        self.all: list[Member] = []
        self.wakeup = path / "wakeup"  # the agent's FIFO
        os.mkfifo(self.wakeup)
        self.wakes = os.open(self.wakeup, os.O_RDWR | os.O_NONBLOCK)
        self.stack.callback(os.close, self.wakes)

    def begin(self, nodes: str, interval: int = 0, stop_at: int = NONE, **plans: dict[str, Any]) -> None:
        """The first generation: one worker a node. plans: by node."""
        self.cluster.generation += 1
        group = self.stack.enter_context(meeting(len(nodes)))
        contexts = [self.cluster.context(node, rank, interval) for rank, node in enumerate(nodes)]
        for rank, context in enumerate(contexts):
            self.cluster.controls[rank].stop_at = stop_at
            member = self._fork(context, group, rank, plans.get(context.node, {}))
            self.members.append(member)

    def warm_up(self, node: str, interval: int = 0, end: int = EXIT_DRAINED, **plan: Any) -> Member:
        """A worker that runs the script's set-up alone, and waits for a generation. end: with what it ends."""
        number, self.cluster.generation = self.cluster.generation, 1000 + len(self.all)
        context = replace(self.cluster.context(node, 0, interval), generation=0, warm_up=True)
        self.cluster.generation = number
        found = self._fork(context, {"WORLD_SIZE": "1"}, 0, plan)
        if end == EXIT_DRAINED:
            wait_for(lambda: found.control.left == end, 60)
        return found

    def regroup(
        self, members: list[Member], stop_at: int = NONE, missing: int = 0, store: bool = True, answers: bool = True
    ) -> None:
        """Have these workers join the next generation, once all of them wait.

        missing: members that never come. store: whether the generation's store is still there when they join.
        answers: whether the store answers.
        """
        wait_for(lambda: all(each.control.left != NONE for each in members), 60)
        self.cluster.generation += 1
        group = self.stack.enter_context(meeting(len(members) + missing))
        if not answers:
            silent = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            group = group | {"MASTER_PORT": str(silent.getsockname()[1])}
        if not store:
            self.close_groups()
        for rank, each in enumerate(members):
            each.context = replace(each.context, generation=self.cluster.generation, warm_up=False)
            exit_note.path_for(each.context.control).unlink(missing_ok=True)
            each.control.renew(self.cluster.generation)
            each.control.stop_at = stop_at
            environment = {**group, "RANK": str(rank), "GENERATION": str(self.cluster.generation)}
            log = str(self.cluster.path / "out" / "log.txt")
            Invitation({**environment, Context.VARIABLE: each.context.to_env()}, log).write(each.context.control)
            each.control.joins = self.cluster.generation
        self.members = members

    def lose_a_newcomer(self, survivors: list[Member], interval: int, **plan: Any) -> None:
        """A spare dies while the survivors join a generation with it."""
        spare = self.warm_up("d", interval, **plan)
        spare.process.kill()
        spare.process.join()
        self.regroup(survivors, missing=1)
        wait_for(lambda: all(each.control.entered > 0 for each in survivors), 60)
        self.close_groups()  # what the agents do: the store goes

    def survivors(self) -> list[Member]:
        """All members but the second one, once that one has died."""
        dead = self.members[1]
        dead.process.join(60)
        return [each for each in self.members if each is not dead]

    def end(self) -> list[int | None]:
        """Exit codes of the newest generation's workers."""
        for each in self.members:
            each.process.join(60)
        return [each.process.exitcode for each in self.members]

    def pids(self) -> list[int]:
        return [each.process.pid for each in self.members]

    def state_and_log(self) -> str:
        """What each worker has done, and what all have logged."""
        workers = [
            f"rank {c.rank} of generation {each.context.generation}: step {c.step}, left {c.left}, able {c.able}, "
            f"exit code {each.process.exitcode}"
            for each in self.all
            for c in [each.control]
        ]
        log = self.cluster.path / "out" / "log.txt"
        return "\n".join([*workers, log.read_text() if log.exists() else "(no log)"])

    def close_groups(self) -> None:
        """End the stores of all generations."""
        self.stack.close()

    def close(self) -> None:
        for each in self.all:
            each.process.kill()
            each.process.join()
        self.stack.close()

    def _fork(self, context: Context, group: dict[str, str], rank: int, plan: dict[str, Any]) -> Member:
        context = replace(context, wakeup=str(self.wakeup), exact=plan.get("exact", False))
        environment = {
            **group,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GENERATION": str(context.generation),
            Context.VARIABLE: context.to_env(),
        }
        process = forked.Process(
            target=train,
            args=(environment, Plan(str(self.cluster.path / "out"), **plan)),
            daemon=not plan.get("keeps_loaders"),  # a daemon may not start processes
        )
        process.start()
        self.all.append(Member(process, Control(Path(context.control)), context))
        return self.all[-1]
