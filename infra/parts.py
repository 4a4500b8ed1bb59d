"""What a machine's metadata say of its parts. Its agent compares them with what it finds."""

from __future__ import annotations

from spotrun.spec import PoolSpec, machine_types
from spotrun.spec.names import EFAS, GPUS


def parts(pool: PoolSpec, efas: int = 0) -> dict[str, str]:
    """How many GPUs and EFAs a machine of the pool has, as metadata. Unknown numbers are absent.

    efas: the number in its template; the machine type may have more.
    """
    attached = pool.accelerator.count if pool.accelerator else machine_types.GPUS.get(pool.machine)
    counts = {GPUS: attached, EFAS: efas}
    return {key: str(count) for key, count in counts.items() if count}
