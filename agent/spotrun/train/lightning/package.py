"""Lightning: the package that the script's Trainer comes from, `lightning` or `pytorch_lightning`.

Both have the same modules. `use` notes one as `pl`, and then imports the modules of spotrun that need it.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from spotrun.errors import MisuseError
from spotrun.train import frameworks

if TYPE_CHECKING:
    import pytorch_lightning as pl

__all__ = ["INSTEAD", "environments", "pl", "results", "use"]

INSTEAD = "write the loop with run.steps instead"  # says an error about what `run.fit` does not support

environments: Any  # modules of it
results: Any
_OLDEST = (2, 6)


def use(trainer: object) -> Any:
    """Note this Trainer's package, and return the module with `fit`. Raises `MisuseError` if it is not Lightning's."""
    name = frameworks.check_trainer(trainer, "run.fit").removesuffix(".trainer.trainer")
    package: Any = importlib.import_module(name)
    if tuple(map(int, re.findall(r"\d+", package.__version__)[:2])) < _OLDEST:
        raise MisuseError(f"run.fit needs {name} {_OLDEST[0]}.{_OLDEST[1]} or newer, not {package.__version__}")
    globals().update(
        pl=package,
        environments=importlib.import_module(f"{name}.plugins.environments"),
        results=importlib.import_module(f"{name}.trainer.connectors.logger_connector.result"),
    )
    return frameworks.load(trainer, "lightning.fit", "run.fit")
