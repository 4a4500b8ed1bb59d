"""What ends a command from outside: Ctrl-C while its modules load, a cancelled CI job, a lost terminal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended, as in shells
_OTHERS = (signal.SIGTERM, signal.SIGHUP)  # what ends a command like Ctrl-C


def exit_quietly() -> None:
    """Until `raise_again`, Ctrl-C ends this process at once. No effect where SIGINT is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_again() -> None:
    """From now on, Ctrl-C raises `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def all_ends() -> Iterator[None]:
    """Treat SIGTERM (a cancelled CI job) and SIGHUP (a lost terminal) like Ctrl-C, for work that must not just stop."""
    before = {number: signal.getsignal(number) for number in _OTHERS}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_others() -> None:
    """After the first interrupt, until the end of `all_ends`, only Ctrl-C itself interrupts.

    A CI system sends several signals to all processes of a job, and make sends its own on. The later ones must not end
    what the first has begun, such as taking machines down.
    """
    for number in _OTHERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(*_: object) -> None:
    ignore_others()
    raise KeyboardInterrupt


def _exit(*_: object) -> None:
    os._exit(INTERRUPTED)
