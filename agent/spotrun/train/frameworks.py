"""What `run.train` and `run.fit` have in common: a framework's loop, which is left when the members change.

The worker joins the next generation, and enters the loop again, in the same process. So a newcomer calls the same
collectives as the others from there on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from spotrun.errors import MisuseError, SpotrunError
from spotrun.train.distributed import rank_and_world

if TYPE_CHECKING:
    from spotrun.train.run import Run


class _Call(NamedTuple):
    """A call that takes a Trainer."""

    text: str  # as a script writes it
    takes: str
    modules: tuple[str, ...]  # that have the Trainer's base class
    requirement: str


_CALLS = {
    "run.train": _Call("run.train(trainer)", "a transformers.Trainer", ("transformers.trainer",), "transformers>=5.24"),
    "run.fit": _Call(
        "run.fit(trainer, module, …)",
        "a Trainer of Lightning",
        ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        "lightning>=2.6",
    ),
}


class LeaveLoop(BaseException):
    """Leads out of a framework's loop: this worker must join another generation."""


def load(trainer: object, module: str, call: str) -> Any:
    """Import a module of `spotrun.train` that imports the framework, if the Trainer is of it. call: the script's."""
    check_trainer(trainer, call)
    try:
        return importlib.import_module(f"spotrun.train.{module}")
    except ImportError as error:  # unless the module is missing, a library of this machine may be why
        kind = MisuseError if isinstance(error, ModuleNotFoundError) else SpotrunError
        raise kind(f"{call}: name {_CALLS[call].requirement} in requirements ({error})") from error


def check_trainer(trainer: object, call: str) -> str:
    """Raise `MisuseError` unless the Trainer is of the framework of this call. Returns the module of its base class.

    Only the names of modules are compared: the framework may not be installed.
    """
    modules = [each.__module__ for each in type(trainer).__mro__]
    found = {each: module for each, kind in _CALLS.items() for module in kind.modules if module in modules}
    if call in found:
        return found[call]
    right, own = next(iter(found), call), type(trainer)
    raise MisuseError(
        f"{call} takes {_CALLS[call].takes}, not {own.__module__}.{own.__qualname__}: write {_CALLS[right].text}"
    )


def refuse_elastic(run: Run, call: str, instead: str = "") -> None:
    """Raise `MisuseError` if the number of workers may change. call: the script's. instead: what it can write."""
    if run._membership is not None and run._membership.context.elastic:
        raise MisuseError(
            f"{call}: a Trainer counts its steps by the number of workers, so this number must not change: {instead}"
            "give nodes one number in the job file, such as nodes: 2"
        )


def check_size(saved: int, before: int | None, now: int | None, call: str) -> None:
    """Raise `SpotrunError` if a Trainer with the saved state would count other steps.

    saved: the number of workers that the state is of. before, now: the `global_batch` of the state, and of the script.
    """
    if before != now:
        raise MisuseError(
            f"{call}: the saved state is of global_batch={before}, and this script has global_batch={now}: submit a "
            "changed script as a new job"
        )
    workers = rank_and_world()[1]
    if now is None and saved != workers:  # a machine with other GPUs may be why
        raise SpotrunError(
            f"{call}: the saved state is of {saved} workers, and there are {workers} now. A Trainer counts its steps "
            "by them: go on with as many, or submit a new job"
        )


def until_it_ends(run: Run, enter: Callable[[], None], join: Callable[[], None]) -> None:
    """Enter the loop until it ends. Between two times, join the next generation."""
    while True:
        try:
            return enter()
        except LeaveLoop:
            pass
        except Exception as error:
            if not run._boundary.void_if_a_peer_fails.handle(error):
                raise
        join()
