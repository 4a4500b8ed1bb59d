"""What changes of machines cost in time, and how fast a job is on n nodes. The measured figures name their source."""

from __future__ import annotations

from dataclasses import dataclass

from spotrun.head.capacity.observe import SCALING


@dataclass(frozen=True)
class Costs:
    """Seconds. The defaults are those of a job whose state is 1.2 GB. The notes say where each figure is from."""

    boot: float = 180.0
    """From the creation of a machine until its agent is ready for the job: boot, driver, code, packages, import. An
    assumption: no cloud was used. bench/RESULTS.md has the agent's part, which is under 10 s."""
    restart: float = 12.0
    """From the order of a generation to its first step, if a survivor has the state. Measured with 100 M parameters:
    9.7 to 12.1 s; with 1.1 M parameters 0.2 s (the second figure: bench/RESULTS.md)."""
    restore: float = 30.0
    """The same if the state comes from the bucket. Restoring 1.2 GB takes 5.4 to 8.2 s of the above, measured with a
    folder. A bucket in a cloud is assumed to be slower."""
    notice: float = 30.0  # of Google's preemptions; EC2 gives 120 s
    again: float = 0.0  # from the end of a machine until its pool makes another one, if the zone has one
    snapshot: float = 10.0  # between two snapshots in memory: the most that an interruption without notice costs
    checkpoint: float = 300.0  # between two checkpoints in the bucket: the default of job files
    scaling: float = SCALING  # n nodes are as fast as n ** scaling

    def rate(self, nodes: float, speed: float = 1.0) -> float:
        """Seconds of work of one node that `nodes` nodes do in a second."""
        return float(speed * nodes**self.scaling) if nodes > 0 else 0.0
