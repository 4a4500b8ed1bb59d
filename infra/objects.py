"""What a node may do with the objects of its cluster's bucket, in a form that both clouds' stacks translate. Pure.

A job's code runs on nodes, so a node has no more rights than a job needs. The keys are those of `spotrun.store`;
tests/infra/test_rights.py runs real agents under these rights.
"""

from __future__ import annotations

from dataclasses import dataclass

CODE, DATA = "code/", "data/"  # bundles; what operators put there for jobs to read
JOBS = "jobs/"
CHECKPOINTS = "checkpoints"
GROWING = ("logs", "metrics", "system")  # of a job: objects that are replaced by longer versions
RECORDS = ("hosts", "unfit", "alive")  # of a cluster: an object for each machine, which the machine itself replaces
FORGOTTEN = ("unfit", "alive")  # records that a machine also removes


@dataclass(frozen=True)
class Cluster:
    """The keys of one cluster. machine: how the names of all nodes begin; the head's does not."""

    name: str
    machine: str

    @property
    def head(self) -> str:
        """Where nodes find the head."""
        return f"clusters/{self.name}/head.json"

    def records(self, kind: str) -> str:
        """How the keys of the nodes' records begin. The head's record has another key."""
        return f"clusters/{self.name}/{kind}/{self.machine}"
