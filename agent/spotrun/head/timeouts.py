"""How long the head waits, in one place. All values are seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """The comment of each field says what the head waits for, and why that long."""

    # Agents.
    rejoin: float = 10.0  # for agents to find a new head, at most
    alone: float = 300.0  # before a silent machine is replaced while no node reports: the head may be cut off
    slow_step: float = 30.0  # without a step and a report, until a member counts as silent even if steps are slow
    failure: float = 1.2
    """To learn after a failed collective whether a node is gone: a little more than two reports. An agent that has not
    reported for so long was away."""
    survivors: float = 1.0  # after two steps, for survivors to notice that a peer is gone, and to wait for a regroup
    survivors_most: float = 10.0  # `survivors` and the two steps together, at most: after that, new workers are faster
    abort: float = 16.0  # more, on GPUs: 5 s each, at most, for abort, queued steps and the group's end, and 1 s
    regroup: float = 10.0  # for workers to join a generation without a restart, apart from the transfer of the state
    regroup_rate: float = 50e6  # bytes per second: the slowest that this transfer may be
    last_logs: float = 10.0  # for an agent to upload its last logs before its machine goes

    # Machines.
    boot: float = 900.0
    """From a machine's creation to its agent's verdict: as `--max-node-provision-time` of Kubernetes' autoscaler."""
    boot_metal: float = 1800.0
    """The same on bare metal, where 15 minutes are known to be too short
    (https://github.com/openshift/cluster-autoscaler-operator/commit/f8a7872c55cf)."""
    unfit: float = 45.0  # before an unfit machine is replaced: its agent checks again after 30 s (`health.gate.AGAIN`)
    unfit_holder: float = 600.0  # the same, while the agent of a machine that alone holds the newest state uploads it
    silent: float = 20.0
    """For a silent machine to come back, while others report. Another machine takes minutes to boot. Kubernetes, for
    example, waits 50 s until a silent node counts as unhealthy (`--node-monitor-grace-period`)."""
    last_holder: float = 3600.0  # for a machine that may alone hold the newest state, at most
    retry: float = 60.0  # before the cloud is asked again to replace a machine; each further wait is twice as long
    retry_most: float = 900.0  # the longest wait between two such requests
    replacement_window: float = 3600.0  # the time in which a pool's replacements are counted
    retirement_gap: float = 300.0  # between two machines that retire: a successor boots meanwhile
    # Jobs.
    gather: float = 10.0  # for more than `min` nodes, before the first generation
    drain: float = 60.0  # for a drain, if no member is under notice
    drain_margin: float = 3.0  # before the end of a machine, when its drain is given up
    probe: float = 120.0  # for machines, each time that a job asks again after it gave its machines back
    probe_pause: float = 60.0  # before it asks for the first time; doubled each time
    probe_pause_most: float = 1800.0  # the longest of these pauses
    budget_margin: float = 10.0  # for orders to arrive and machines to end, when a job stops to keep its budget
    regrouped: float = 600.0  # after a regroup, in which a failure of the script may come from the interruption
    setup_again: float = 60.0  # before a job goes back to a node on which it could not be set up

    # States.
    state_margin: float = 20.0
    """For the newest state, after the time that its steps took: agents find a new head in 10 s."""
    save: float = 1800.0  # for a checkpoint to get into the bucket: it may be large
    save_again: float = 5.0  # before a new checkpoint replaces one whose snapshot is gone
    save_elsewhere: float = 30.0  # how long a node's uploads fail before other nodes take over its part
    save_newer: float = 300.0  # before a failing checkpoint is given up for a newer one, which costs another copy

    # Silence of all members.
    tell_silence: float = 20.0  # before an event says so, and before a stop no longer waits for the nodes
    sign_write: float = 5.0  # for writing a sign of life
    sign_recent: float = 30.0  # after which an answer of the bucket is too old to use
    sign_pause: float = 20.0  # the longest between two signs, even if a node's sign names a longer one


TIMEOUTS = Timeouts()
