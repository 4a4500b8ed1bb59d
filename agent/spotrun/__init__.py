"""spotrun: `torchrun` for machines that vanish.

A training script uses three names: `spotrun.init`, `spotrun.ElasticSampler` and, for annotations, `spotrun.Run`. They
are imported when first used, so that the head and the agent, which import this package too, stay free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotrun.train.run import Run, init
    from spotrun.train.sampler import ElasticSampler

__version__ = "0.1.0"
__all__ = ["ElasticSampler", "Run", "__version__", "init"]

_HOME = {"Run": "spotrun.train.run", "init": "spotrun.train.run", "ElasticSampler": "spotrun.train.sampler"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spotrun' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
