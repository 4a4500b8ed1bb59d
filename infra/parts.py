"""What a machine is told about itself, so that its agent can tell whether anything of it is missing."""

from __future__ import annotations

from spotrun.spec import PoolSpec, machine_types
from spotrun.spec.names import EFAS, GPUS


def parts(pool: PoolSpec, efas: int = 0) -> dict[str, str]:
    """How many GPUs and EFAs a machine of the pool is made with; nothing of what nobody can say.

    efas: those in its template; a machine type may have more.
    """
    attached = pool.accelerator.count if pool.accelerator else machine_types.GPUS.get(pool.machine)
    counts = {GPUS: attached, EFAS: efas}
    return {key: str(count) for key, count in counts.items() if count}
