"""How long the head waits, in one place. All values are seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """Each field says what is waited for, and why that long."""

    # Agents.
    rejoin: float = 10.0  # for agents to find a new head, at the most
    alone: float = 300.0
    """Before a silent machine is replaced while no node reports: the head may be the one that is cut off."""
    slow_step: float = 30.0  # without a step and without the member's report: that tells as much as three slow steps
    failure: float = 1.2  # for a node's fate to show after a collective failed: a little more than two reports
    last_logs: float = 10.0  # for an agent to upload its last logs before its machine goes

    # Machines.
    boot: float = 900.0
    """From a machine's creation to its agent's verdict: as `--max-node-provision-time` of Kubernetes' autoscaler."""
    boot_metal: float = 1800.0
    """The same on bare metal, where 15 minutes are known to be too short
    (https://github.com/openshift/cluster-autoscaler-operator/commit/f8a7872c55cf)."""
    unfit: float = 45.0
    """Of reporting unfit before a replacement: the agent checks again after 30 s (`AGAIN` in node.health.gate)."""
    unfit_holder: float = 600.0
    """The same, if the machine alone holds the newest state: its agent uploads that state meanwhile."""
    silent: float = 20.0
    """Before a silent machine is replaced that no job waits for, or that alone holds the newest state."""
    last_holder: float = 3600.0  # for a machine that may alone hold the newest state, at the most
    retry: float = 60.0
    """For the cloud to replace a machine before it is asked again. Each further wait is twice as long."""
    retry_most: float = 900.0  # the longest wait between two such requests
    replacement_window: float = 3600.0  # the time in which a pool's replacements are counted
    retirement_gap: float = 300.0  # between two machines that retire: a successor boots meanwhile


TIMEOUTS = Timeouts()
