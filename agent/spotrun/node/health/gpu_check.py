"""Compute a short matrix product on each GPU: `python -m spotrun.node.health.gpu_check`.

It prints a JSON object: how many GPUs torch sees, and the failures. The numbers are small and whole, so the result is
exact in every precision that a GPU may choose, and one wrong bit shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

SIZE = 1024  # rows and columns


def check(devices: Sequence[str], expected: torch.Tensor | None = None) -> dict[int, str]:
    """What is wrong with each device, by its index in `devices`. expected: the product; default: the processor's."""
    grid = torch.arange(SIZE * SIZE, dtype=torch.float32).reshape(SIZE, SIZE) % 7 - 3
    if expected is None:
        expected = grid @ grid.T
    failures = {}
    for index, device in enumerate(devices):
        try:
            here = grid.to(device)
            if not torch.equal((here @ here.T).cpu(), expected):
                failures[index] = "a matrix product is wrong"
        except RuntimeError as error:
            failures[index] = str(error).partition("\n")[0]
    return failures


if __name__ == "__main__":
    count = torch.cuda.device_count()
    print(json.dumps({"count": count, "failures": check([f"cuda:{index}" for index in range(count)])}))
